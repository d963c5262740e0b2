"""One training, three strategies: the same weights, counts and curves, whatever the processes."""

import importlib
import sys

import pytest
import torch
from conftest import (
    SMALL_LR, STRATEGIES, distance, double_precision, epochs_of, equal, probe, run, scalars, slow,
    train, weights, write_mnist,
)  # fmt: skip

TRAINING = {"epochs": 2, "lr": 0.02, "log_interval": 7}
TAGS = {"train/loss", "train/lr", "train/images_per_second", "test/loss", "test/accuracy"}
# Networks that behave differently in training and in evaluation, in place of ours.
DROPOUT = """
import torch, model
class Net(model.Net):
    def forward(self, inputs, labels=None, reduction="mean"):
        inputs = torch.nn.functional.dropout(inputs, 0.4, self.training)
        return super().forward(inputs, labels, reduction)
model.Net = Net
"""
BATCH_NORM = """
import torch, model
class Net(model.Net):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Sequential(self.conv1, torch.nn.BatchNorm2d(16, momentum=0.9))
model.Net = Net
"""


class ChunkedDataParallel(torch.nn.Module):
    """nn.DataParallel without GPUs: splits, applies and gathers as it does on `parts` GPUs.

    Like it, it hands what is no tensor to every GPU, and calls only as many as got a part.
    """

    parts = 2

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        tensors = [value.chunk(self.parts) for value in inputs if isinstance(value, torch.Tensor)]
        others = [value for value in inputs if not isinstance(value, torch.Tensor)]
        outputs = [self.module(*chunk, *others) for chunk in zip(*tensors)]
        if len(outputs) == 1:
            return outputs[0]  # it calls the module itself then
        return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)


@pytest.fixture
def chunked(monkeypatch):
    """Let data_parallel_train.py wrap as if there were so many GPUs, while it uses the CPU."""

    class GPU(str):
        type = "cuda"

    def use(parts):
        module = importlib.import_module("data_parallel_train")
        monkeypatch.setattr(torch.nn, "DataParallel", ChunkedDataParallel)
        monkeypatch.setattr(ChunkedDataParallel, "parts", parts)
        loader = module.DataLoader
        unpinned = {"pin_memory": False}
        monkeypatch.setattr(module, "DataLoader", lambda *a, **b: loader(*a, **{**b, **unpinned}))
        monkeypatch.setattr(module.harness, "pick_device", lambda name: GPU("cpu"))

    return use


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mnist):
    """{processes: (folder, output)} of the same training: 1 is single_gpu_train.py, else DDP."""
    with double_precision():
        return train_all(mnist, tmp_path_factory.mktemp("runs"), **TRAINING)


def train_all(mnist, root, **options):
    results = {}
    for processes in (1, 2, 3, 4):
        strategy, own = ("ddp", {"processes": processes}) if processes > 1 else ("single", {})
        own["batch_size"] = 48 // processes
        done = train(strategy, mnist, root / str(processes), **own, **options)
        results[processes] = root / str(processes), done.stdout
    return results


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_ddp_ends_with_the_weights_of_one_gpu(runs, processes):
    assert distance(weights(runs[1][0]), weights(runs[processes][0])) < 1e-9


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_data_parallel_ends_with_the_weights_of_one_gpu(
    runs, train_here, chunked, double, mnist, tmp_path, parts
):
    chunked(parts)
    train_here("data_parallel", mnist, tmp_path, **TRAINING, batch_size=48)
    assert distance(weights(runs[1][0]), weights(tmp_path)) < 1e-9


def test_the_training_did_something(runs):
    correct, count = map(int, epochs_of(runs[1][1])[-1][4:])
    assert correct > 0.3 * count


@pytest.mark.slow
def test_in_single_precision_at_a_small_rate_they_agree_to_1e_5(mnist, tmp_path):
    """But for a seed at which the rounding of this processor tips something."""
    close = 0
    for seed in range(3):
        runs = train_all(mnist, tmp_path / str(seed), epochs=2, lr=SMALL_LR, seed=seed)
        one, *others = (weights(folder) for folder, _ in runs.values())
        close += max(distance(one, other) for other in others) < 1e-5
    assert close >= 2


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_evaluation_counts_every_image_once(runs, processes):
    lines = [epochs_of(runs[count][1]) for count in (1, processes)]
    assert [line[4:] for line in lines[0]] == [line[4:] for line in lines[1]]
    assert lines[0][0][5] == "201"


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_logged_curves_are_the_global_ones(runs, processes):
    single, ddp = (scalars(runs[count][0]) for count in (1, processes))
    assert single.keys() == ddp.keys() == TAGS
    for tag in TAGS - {"train/images_per_second"}:
        assert [step for step, _ in single[tag]] == [step for step, _ in ddp[tag]]
        assert [value for _, value in single[tag]] == pytest.approx(
            [value for _, value in ddp[tag]], rel=1e-4, abs=1e-5
        ), tag
    seen = [336, 672, 960]  # images, of which the last 41 of 1,001 are left out
    assert [step for step, _ in single["train/loss"]] == [*seen, *(1001 + step for step in seen)]


@pytest.mark.parametrize("images, parts", [(5, 4), (2, 4), (7, 3), (9, 4), (1, 4)])
def test_uneven_parts_give_the_loss_and_gradient_of_the_batch(
    monkeypatch, train_here, chunked, double, tmp_path, images, parts
):
    data_dir = write_mnist(tmp_path / "data", images, 3)
    gradients, losses = [], []

    def step(optimizer, closure=None):
        gradients.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]))

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    for strategy in ("single", "data_parallel"):
        train_here(strategy, data_dir, tmp_path / strategy, epochs=1, batch_size=images)
        losses.append(scalars(tmp_path / strategy)["train/loss"][0][1])
        chunked(parts)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-12 * gradients[0].abs().max()


def test_the_order_is_that_of_the_distributed_sampler(train_here, monkeypatch, tmp_path):
    """Two ranks' samplers together deal out what the single-GPU script trains on."""
    data_dir = write_mnist(tmp_path / "data", 10, 1)
    script = importlib.import_module("single_gpu_train")
    loaders, loader = [], script.DataLoader

    def noted(*args, **options):
        loaders.append(loader(*args, **options))
        return loaders[-1]

    monkeypatch.setattr(script, "DataLoader", noted)
    train_here("single", data_dir, tmp_path / "out", epochs=2, seed=7, batch_size=4)
    deals = []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(range(10), 2, rank, seed=7)
        sampler.set_epoch(1)
        deals.append(list(sampler))
    assert [index for pair in zip(*deals) for index in pair] == list(loaders[0].sampler)


def test_a_test_image_for_one_rank_alone(tmp_path, train_here, double):
    data_dir = write_mnist(tmp_path / "data", 12, 1)
    options = {"epochs": 2, "log_interval": 1}
    alone = train_here("single", data_dir, tmp_path / "single", batch_size=6, **options)
    done = train("ddp", data_dir, tmp_path / "ddp", processes=3, batch_size=2, **options)
    assert [line[4:] for line in epochs_of(done.stdout)] == [line[4:] for line in epochs_of(alone)]
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "ddp")) < 1e-9


def evaluated(code, folder, data_dir, tmp_path):
    """(loss, correct) of the saved model of the network that `code` makes, in evaluation mode."""
    text = f"""
import data, model, torch
net = model.Net()
net.load_state_dict(torch.load({str(folder / "model.pth")!r}))
net.eval()
images, labels = data.load_datasets("mnist", {str(data_dir)!r})[1][list(range(201))]
print(net(images, labels).item(), (net(images).argmax(1) == labels).sum().item())
sys.exit()
"""
    done = run(sys.executable, probe(tmp_path / "evaluate.py", code + text))
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    "strategy, processes, code",
    [
        ("single", None, DROPOUT), slow("data_parallel", None, DROPOUT), ("ddp", 2, DROPOUT),
        slow("single", None, BATCH_NORM), slow("ddp", 2, BATCH_NORM), ("ddp", 3, BATCH_NORM),
    ],
)  # fmt: skip
def test_what_is_reported_is_what_the_saved_model_gives(strategy, processes, code, mnist, tmp_path):
    script = probe(tmp_path / "probe.py", code, STRATEGIES[strategy])
    out, options = tmp_path / "out", {"epochs": 1, "lr": 0.003, "batch_size": 8}
    done = train(strategy, mnist, out, script=script, processes=processes, **options)
    loss, correct = evaluated(code, out, mnist, tmp_path)
    last = epochs_of(done.stdout)[-1]
    assert float(last[2]) == pytest.approx(loss, abs=1e-4) and int(last[4]) == correct


@pytest.mark.parametrize(
    "strategy, processes", [("single", None), ("ddp", 2), slow("data_parallel", None)]
)
def test_dropout_is_drawn_alike_after_resume(strategy, processes, mnist, tmp_path):
    """One epoch and one more end bit for bit as two do."""
    # The second run breaks off after the first epoch, as far as the files are concerned.
    stop = """
import harness
save = harness.save
def save_and_stop(folder, weights, optimizer, epoch, *rest):
    save(folder, weights, optimizer, epoch, *rest)
    if epoch == 1 and os.environ.get("STOP"):
        os._exit(0)
harness.save = save_and_stop
"""
    script = probe(tmp_path / "probe.py", DROPOUT + stop, STRATEGIES[strategy])
    options = {"epochs": 2, "batch_size": 48, "processes": processes, "script": script}
    train(strategy, mnist, tmp_path / "two", **options)
    train(strategy, mnist, tmp_path / "parts", code=None, env={"STOP": "1"}, **options)
    done = train(strategy, mnist, tmp_path / "parts", resume=True, **options)
    assert [line[0] for line in epochs_of(done.stdout)] == ["2"]
    assert equal(weights(tmp_path / "two"), weights(tmp_path / "parts"))


def test_ranks_share_the_weights_but_not_the_random_stream(mnist, tmp_path):
    code = f"""
import data, harness, torch
load, as_batch, seen = harness.load, data.as_batch, []
def noted_load(checkpoint, net, optimizer):
    seen.append(sum(parameter.double().sum().item() for parameter in net.parameters()))
    return load(checkpoint, net, optimizer)
def noted_batch(samples):
    seen.append(torch.initial_seed())
    with open(os.path.join({str(tmp_path)!r}, "rank" + os.environ["RANK"]), "w") as file:
        print(*seen[:2], file=file)
    return as_batch(samples)
harness.load, data.as_batch = noted_load, noted_batch
"""
    script = probe(tmp_path / "probe.py", code)
    train("ddp", mnist, tmp_path / "out", processes=2, script=script, epochs=1, seed=7)
    files = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)]
    assert files[0][0] == files[1][0]
    assert [file[1] for file in files] == ["7", "8"]


def test_seeds():
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


def test_losses_are_fetched_only_for_the_log_lines(monkeypatch, train_here, mnist, tmp_path):
    """20 steps and an evaluation, but 2 log lines: no .item() or .tolist() per step."""
    calls = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy"):

        def count(tensor, *args, real=getattr(torch.Tensor, name), name=name):
            calls.append((name, tensor.dtype))
            return real(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, count)
    train_here("single", mnist, tmp_path, epochs=1, batch_size=48, log_interval=10)
    floats = [name for name, dtype in calls if dtype == torch.float32 and name != "cpu"]
    assert floats == ["item", "item", "tolist"]


@pytest.mark.slow
def test_short_trainings_do_not_collapse(train_here, tmp_path):
    """Eight of eight seeds learn 1,000 easy images in 84 steps."""
    data_dir = write_mnist(tmp_path / "data", 1000, 200)
    for seed in range(8):
        options = {"epochs": 12, "batch_size": 128, "seed": seed}
        last = epochs_of(train_here("single", data_dir, tmp_path / str(seed), **options))[-1]
        assert int(last[4]) > 190, seed
