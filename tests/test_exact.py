"""One training, three strategies: the same weights, counts and curves, whatever the processes."""

import importlib
import sys
import time

import pytest
import torch
from conftest import (
    EPOCH_LINE,
    ROOT,
    SMALL_LR,
    distance,
    launch_command,
    run,
    run_ddp,
    scalars,
    weights,
    write_mnist,
)

TRAINING = ("--epochs", 2, "--lr", SMALL_LR, "--log-interval", 7)


class ChunkedDataParallel(torch.nn.Module):
    """nn.DataParallel without GPUs: splits, applies and gathers as it does on `parts` GPUs."""

    parts = 2

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        chunks = zip(*(tensor.chunk(self.parts) for tensor in inputs))
        outputs = [self.module(*chunk) for chunk in chunks]
        if len(outputs) == 1:
            return outputs[0]  # it calls the module itself then
        return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)


@pytest.fixture
def chunked(monkeypatch):
    def use(parts):
        monkeypatch.setattr(torch.nn, "DataParallel", ChunkedDataParallel)
        monkeypatch.setattr(ChunkedDataParallel, "parts", parts)

    return use


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mnist):
    """{processes: (folder, output)} of the same training: 1 is single_gpu_train.py, else DDP."""
    root = tmp_path_factory.mktemp("runs")
    results = {}
    for processes, batch in ((1, 48), (2, 24), (3, 16), (4, 12)):
        options = (
            "--data-dir",
            mnist,
            *TRAINING,
            "--batch-size",
            batch,
            "--output-dir",
            root / str(processes),
        )
        done = (
            run("single_gpu_train.py", *options) if processes == 1 else run_ddp(processes, *options)
        )
        results[processes] = root / str(processes), done.stdout
    return results


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_ddp_ends_with_the_weights_of_one_gpu(runs, processes):
    assert distance(weights(runs[1][0]), weights(runs[processes][0])) < 1e-5


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_data_parallel_ends_with_the_weights_of_one_gpu(
    runs, run_here, chunked, mnist, tmp_path, parts
):
    if parts > 1:
        chunked(parts)
    run_here(
        "data_parallel_train.py",
        "--data-dir",
        mnist,
        *TRAINING,
        "--batch-size",
        48,
        "--output-dir",
        tmp_path,
    )
    assert distance(weights(runs[1][0]), weights(tmp_path)) < 1e-5


def test_the_training_did_something(runs):
    first, last = (float(line[2]) for line in EPOCH_LINE.findall(runs[1][1]))
    assert last < first - 0.01
    torch.manual_seed(42)
    start = importlib.import_module("model").Net().state_dict()
    assert distance(start, weights(runs[1][0])) > 0.001


@pytest.mark.slow
def test_in_double_precision_all_end_with_the_same_weights(mnist, tmp_path):
    """There a larger rate does no harm, and what were wrong by little would show."""
    double = tmp_path / "double.py"
    double.write_text("""
import runpy, sys, torch
from pathlib import Path
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    options = ("--data-dir", mnist, *TRAINING, "--lr", 0.02, "--device", "cpu")
    for processes in (1, 2, 3, 4):
        script = ROOT / ("ddp_train.py" if processes > 1 else "single_gpu_train.py")
        launcher = launch_command(processes, "--use_env") if processes > 1 else [sys.executable]
        out = ("--output-dir", tmp_path / str(processes), "--batch-size", 48 // processes)
        done = run(*launcher, double, script, *options, *out)
        assert distance(weights(tmp_path / "1"), weights(tmp_path / str(processes))) < 1e-9
    right, count = map(int, EPOCH_LINE.findall(done.stdout)[-1][4:])
    assert right > 0.3 * count


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_evaluation_counts_every_image_once(runs, processes):
    assert [line[4:] for line in EPOCH_LINE.findall(runs[processes][1])] == [
        line[4:] for line in EPOCH_LINE.findall(runs[1][1])
    ]
    assert EPOCH_LINE.findall(runs[1][1])[0][5] == "201"


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_logged_curves_are_the_global_ones(runs, processes):
    single, ddp = (scalars(runs[count][0]) for count in (1, processes))
    assert (
        single.keys()
        == ddp.keys()
        == {"train/loss", "train/lr", "train/images_per_second", "test/loss", "test/accuracy"}
    )
    for tag in single.keys() - {"train/images_per_second"}:
        assert [step for step, _ in single[tag]] == [step for step, _ in ddp[tag]]
        assert [value for _, value in single[tag]] == pytest.approx(
            [value for _, value in ddp[tag]], rel=1e-4, abs=1e-5
        ), tag
    assert [step for step, _ in single["train/loss"]] == [
        336,
        672,
        1001,
        1001 + 336,
        1001 + 672,
        2002,
    ]  # images seen


@pytest.mark.parametrize(
    "train, processes",
    [(5, 2), *(pytest.param(*few, marks=pytest.mark.slow) for few in ((5, 1), (1, 2), (2, 3)))]
    + [pytest.param(5, 4, marks=pytest.mark.slow)],
)
def test_one_test_image_and_few_training_images(tmp_path, run_here, train, processes):
    data_dir = write_mnist(tmp_path / "data", train, 1)
    options = ("--data-dir", data_dir, "--epochs", 2, "--lr", SMALL_LR, "--log-interval", 1)
    alone = run_here(
        "single_gpu_train.py",
        *options,
        "--batch-size",
        processes,
        "--output-dir",
        tmp_path / "single",
    )
    ddp = run_ddp(processes, *options, "--batch-size", 1, "--output-dir", tmp_path / "ddp").stdout
    assert [line[5] for line in EPOCH_LINE.findall(ddp)] == ["1", "1"]
    assert [line[4:] for line in EPOCH_LINE.findall(ddp)] == [
        line[4:] for line in EPOCH_LINE.findall(alone)
    ]
    steps = -(-train // processes)
    assert f"step {steps}/{steps}" in ddp
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "ddp")) < 1e-5


@pytest.mark.parametrize("images, parts", [(5, 4), (2, 4), (7, 3), (9, 4), (1, 4)])
def test_uneven_chunks_give_the_loss_and_gradient_of_the_batch(
    monkeypatch, run_here, chunked, tmp_path, images, parts, recwarn
):
    data_dir = write_mnist(tmp_path / "data", images, 3)
    gradients, losses = [], []

    def step(optimizer, closure=None):
        gradients.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]))

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    chunked(parts)
    for script in ("single_gpu_train.py", "data_parallel_train.py"):
        output = tmp_path / script
        run_here(script, "--data-dir", data_dir, "--epochs", 1, "--output-dir", output)
        losses.append(scalars(output)["train/loss"][0][1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6 * gradients[0].abs().max()
    assert not [warning for warning in recwarn if "gather" in str(warning.message)]


def test_the_gather_warning_is_silenced(run_here, mnist, tmp_path, recwarn, monkeypatch):
    """The real DataParallel warns when it gathers one number a GPU; that is what we want of it."""
    import warnings

    class Warning(ChunkedDataParallel):
        def forward(self, *inputs):
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were "
                "scalars; will instead unsqueeze and return a vector."
            )
            return super().forward(*inputs)

    monkeypatch.setattr(torch.nn, "DataParallel", Warning)
    run_here(
        "data_parallel_train.py",
        "--data-dir",
        mnist,
        "--epochs",
        1,
        "--batch-size",
        500,
        "--output-dir",
        tmp_path,
    )
    assert not [warning for warning in recwarn if "gather" in str(warning.message)]


def test_the_order_is_that_of_the_distributed_sampler(run_here, monkeypatch, tmp_path):
    """Two ranks' samplers together deal out what the single-GPU script trains on."""
    data_dir = write_mnist(tmp_path / "data", 10, 1)
    script = importlib.import_module("single_gpu_train")
    orders = []

    def make_loader(digits, batch_size, sampler, device):
        loader = real_loader(digits, batch_size, sampler, device)
        if len(digits) == 10:
            orders.append(loader)
        return loader

    real_loader = script.make_loader
    monkeypatch.setattr(script, "make_loader", make_loader)
    run_here(
        "single_gpu_train.py",
        "--data-dir",
        data_dir,
        "--epochs",
        2,
        "--seed",
        7,
        "--batch-size",
        4,
        "--output-dir",
        tmp_path / "out",
    )
    batches = list(orders[0].sampler)
    deals = []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(range(10), 2, rank, seed=7)
        sampler.set_epoch(1)
        deals.append(list(sampler))
    assert [index for pair in zip(*deals) for index in pair] == sum(batches, [])


class Stop(Exception):
    """The end of a run in the middle, as far as the files are concerned."""


def train_in_two_parts(monkeypatch, run_here, script, options, epochs):
    """Train, break off after the checkpoint of epoch `epochs`, and resume."""
    module = importlib.import_module(script[:-3])
    real_save = module.save

    def save_and_stop(state, path):
        real_save(state, path)
        if state.get("epoch") == epochs:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "save", save_and_stop)
        with pytest.raises(Stop):
            run_here(script, *options)
    time.sleep(1.1)  # event files sort by start time, in seconds
    return run_here(script, *options, "--resume")


@pytest.mark.parametrize("script", ["single_gpu_train.py", "data_parallel_train.py"])
def test_resume_is_exact(monkeypatch, run_here, mnist, tmp_path, script):
    options = ("--data-dir", mnist, "--epochs", 4, "--log-interval", 5)
    run_here(script, *options, "--output-dir", tmp_path / "straight")
    out = train_in_two_parts(
        monkeypatch, run_here, script, (*options, "--output-dir", tmp_path / "parts"), 2
    )
    assert [line[0] for line in EPOCH_LINE.findall(out)] == ["3", "4"]
    one, other = weights(tmp_path / "straight"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    straight, parts = scalars(tmp_path / "straight"), scalars(tmp_path / "parts")
    for tag in straight.keys() - {"train/images_per_second"}:
        assert straight[tag] == parts[tag], tag


def test_a_run_killed_within_an_epoch_leaves_no_fold_in_the_curves(
    monkeypatch, run_here, mnist, tmp_path
):
    module = importlib.import_module("single_gpu_train")
    options = ("--data-dir", mnist, "--epochs", 2, "--log-interval", 5, "--output-dir", tmp_path)

    def evaluate(*args):
        calls.append(1)
        if len(calls) == 2:  # the end of the second epoch, whose curves are written already
            raise Stop
        return real(*args)

    calls, real = [], module.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate", evaluate)
        with pytest.raises(Stop):
            run_here("single_gpu_train.py", *options)
    run_here("single_gpu_train.py", *options, "--resume")
    steps = [step for step, _ in scalars(tmp_path)["train/loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == 2002


def test_checkpoints_go_from_script_to_script_and_between_world_sizes(
    monkeypatch, run_here, runs, mnist, tmp_path
):
    """Epoch 1 by the single-GPU script, epoch 2 by DDP, and it is as one run."""
    module = importlib.import_module("single_gpu_train")
    options = ("--data-dir", mnist, *TRAINING, "--output-dir", tmp_path)
    real_save = module.save

    def save_and_stop(state, path):
        real_save(state, path)
        if "epoch" in state:
            raise Stop

    monkeypatch.setattr(module, "save", save_and_stop)
    with pytest.raises(Stop):
        run_here("single_gpu_train.py", *options, "--batch-size", 48)
    run_ddp(2, *options, "--batch-size", 24, "--resume")
    assert distance(weights(runs[1][0]), weights(tmp_path)) < 1e-5


def test_the_schedule_goes_on_at_the_share_that_is_done(monkeypatch, run_here, mnist, tmp_path):
    """With another global batch the number of steps differs, but not the rate after each epoch."""
    rates = {}
    for batch, name in ((48, "straight"), (48, "parts")):
        options = ("--data-dir", mnist, "--epochs", 4, "--output-dir", tmp_path / name)
        if name == "straight":
            run_here("single_gpu_train.py", *options, "--batch-size", batch)
        else:
            module = importlib.import_module("data_parallel_train")
            real_save = module.save

            def save_and_stop(state, path):
                real_save(state, path)
                if state.get("epoch") == 2:
                    raise Stop

            with monkeypatch.context() as patch:
                patch.setattr(module, "save", save_and_stop)
                with pytest.raises(Stop):
                    run_here("data_parallel_train.py", *options, "--batch-size", 16)
            run_here("single_gpu_train.py", *options, "--batch-size", batch, "--resume")
        rates[name] = dict(scalars(tmp_path / name)["train/lr"])
    assert rates["straight"][4004] == pytest.approx(rates["parts"][4004])
    assert rates["straight"][3003] == pytest.approx(rates["parts"][3003])


def test_seeds(run_here):
    """set_seed makes all three generators repeat themselves."""
    import random

    import numpy as np

    for script in ("single_gpu_train", "data_parallel_train", "ddp_train"):
        set_seed = importlib.import_module(script).set_seed
        drawn = []
        for _ in range(2):
            set_seed(3)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]


def test_ranks_share_the_weights_but_not_the_random_stream(mnist, tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(f"""
import os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
import ddp_train
def load(checkpoint, net, optimizer):
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).double().sum().item()
    with open(os.path.join({str(tmp_path)!r}, "rank" + os.environ["RANK"]), "w") as file:
        print(weights, torch.rand(1).item(), file=file)
    return 99
ddp_train.load = load
ddp_train.main()
""")
    from conftest import launch_command

    run(*launch_command(2), probe, "--data-dir", mnist, "--output-dir", tmp_path / "out")
    (weights0, random0), (weights1, random1) = (
        (tmp_path / f"rank{rank}").read_text().split() for rank in range(2)
    )
    assert weights0 == weights1
    assert random0 != random1


def test_losses_are_fetched_only_for_the_log_lines(monkeypatch, run_here, mnist, tmp_path):
    """21 steps and an evaluation, but 3 log lines: no .item() or .tolist() per step."""
    calls = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy"):

        def count(tensor, *args, real=getattr(torch.Tensor, name), name=name):
            calls.append((name, tensor.dtype))
            return real(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, count)
    run_here(
        "single_gpu_train.py",
        "--data-dir",
        mnist,
        "--epochs",
        1,
        "--batch-size",
        48,
        "--log-interval",
        10,
        "--output-dir",
        tmp_path,
    )
    floats = [name for name, dtype in calls if dtype == torch.float32 and name != "cpu"]
    assert floats == ["tolist"] * 4  # three log lines and one evaluation
