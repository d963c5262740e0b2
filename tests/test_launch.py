"""How the scripts are started: options, launchers, printed lines, devices, process groups."""

import importlib
import re
import signal
import sys
import time

import pytest
import torch
from conftest import (
    FEW_DIGITS, ROOT, SCRIPTS, STRATEGIES, by_hand, epochs_of, error_of, errors_of, finish,
    free_port, launch_command, options_of, probe, run, scalars, slow, start, train, weights,
)  # fmt: skip

import harness

# PyTorch before 2.1 warns about its own import of TensorBoard and its own loading of tensors.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 1)
QUICK = {"epochs": 1, "batch_size": 500, "log_interval": 1}


def help_of(script, monkeypatch, capsys):
    """{option: help} and what stands above the options."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        importlib.import_module(script[:-3]).parse_args(["--help"])
    text = capsys.readouterr().out
    options = dict(re.findall(r"^  (--?[\w-]+(?:, --[\w-]+)?).*?(?: |\n)  +(.*)$", text, re.M))
    return options, text.split("options:")[0].split("optional arguments:")[0]


def test_help_describes_and_differs_only_where_the_scripts_do(monkeypatch, capsys):
    found = [help_of(script, monkeypatch, capsys) for script in SCRIPTS]
    (single, above), (parallel, _), (ddp, _) = found
    assert "Train the CNN" in above and "python single_gpu_train.py --output-dir" in above
    assert len(single) == 11 and single == parallel
    assert len(ddp) == 12 and ddp.keys() > single.keys()
    differing = [name for name in single if ddp[name] != single[name]]
    assert differing == ["--batch-size"] and "per step and process" in ddp["--batch-size"]
    assert not [text for text in single.values() if "None" in text or "False" in text]


def test_defaults():
    for script in SCRIPTS:
        args = vars(importlib.import_module(script[:-3]).parse_args([]))
        assert args.pop("local_rank", 0) == 0
        expected = {"epochs": 3, "batch_size": 64, "lr": 0.05, "seed": 42, "log_interval": 50}
        expected.update(dataset="auto", data_dir="data", device="auto")
        assert args == {**expected, "output_dir": None, "resume": False}


BAD_OPTIONS = [
    "--epochs 0", "--epochs 1e3", "--batch-size -3", "--lr nan", "--lr inf", "--lr 0", "--seed -1",
    "--log-interval 0", "--device tpu", "--dataset cifar", "--resume", "--nproc_per_node 2",
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_are_a_problem(options, mnist):
    for script in SCRIPTS:
        module = importlib.import_module(script[:-3])
        with pytest.raises(harness.Problem, match=options.split()[0]) as problem:
            module.main(["--data-dir", str(mnist), *options.split()])
        assert "\n" not in str(problem.value)
    assert not torch.distributed.is_initialized()


def test_bad_options_are_said_once_not_once_a_rank(tmp_path):
    done = run(*launch_command(3), ROOT / "ddp_train.py", "--epochs", "0", code=1, cwd=tmp_path)
    assert error_of(done) == "error: argument --epochs: must be above 0 (see --help)"
    assert "usage" not in done.stderr and not list(tmp_path.iterdir())


def test_the_home_folder_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for script in SCRIPTS:
        module = importlib.import_module(script[:-3])
        args = module.parse_args(["--data-dir=~/data", "--output-dir=~/out"])
        assert (args.data_dir, args.output_dir) == ("/home/me/data", "/home/me/out")


LAUNCHERS = {
    "launch": lambda: launch_command(2),
    "launch --use_env": lambda: launch_command(2, "--use_env"),
    "torchrun": lambda: [*launch_command(2, module="torch.distributed.run")[:4], "--standalone"],
    "plain": lambda: [sys.executable],
}


@pytest.mark.parametrize(
    "launcher", ["launch", "torchrun", slow("launch --use_env"), slow("plain")]
)
def test_launchers(launcher, mnist, tmp_path):
    words = options_of(mnist, tmp_path, QUICK)
    done = run(*LAUNCHERS[launcher](), ROOT / "ddp_train.py", *words, LOCAL_RANK="")
    size = 1 if launcher == "plain" else 2
    assert done.stdout.startswith(
        f"ddp_train.py: device cpu, backend gloo, world size {size}, mnist (1001 + 201 images), "
        f"lr 0.05, global batch {500 * size} = 500 x {size}\nthe results go to {tmp_path}\n"
    )
    assert len(epochs_of(done.stdout)) == 1  # only rank 0 prints
    assert done.stdout.endswith(f"the model is in {tmp_path / 'model.pth'}\n")


@pytest.mark.parametrize("words", [["--local_rank=1"], ["--local-rank=1"], ["--local-rank", "1"]])
def test_both_spellings_of_the_local_rank_and_the_environment_wins(monkeypatch, words):
    module, seen = importlib.import_module("ddp_train"), []

    def pick_device(name, local_rank):
        seen.append(local_rank)
        raise ZeroDivisionError

    monkeypatch.setattr(harness, "pick_device", pick_device)
    for environment in (None, "", "3"):
        if environment is not None:
            monkeypatch.setenv("LOCAL_RANK", environment)
        with pytest.raises(ZeroDivisionError):
            module.main(words)
    assert seen == [1, 1, 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_run_prints_and_leaves(strategy, mnist, tmp_path):
    script = STRATEGIES[strategy]
    words = ["--data-dir", mnist, "--epochs", 2, "--batch-size", 100, "--log-interval", 4]
    words += ["--device", "cpu"]
    if strategy == "single":  # also what importing prints and warns of
        warnings = "default" if OLD else "error"
        done = run(script, *words, cwd=tmp_path, PYTHONWARNINGS=warnings)
        out, errors = done.stdout, done.stderr
    else:
        ((out, errors),), codes = by_hand([words], ROOT / script, cwd=tmp_path, ddp=False)
        assert codes == [0]
    lines = out.splitlines()
    assert re.fullmatch(
        rf"{script}: device cpu, backend (none|gloo), world size 1, "
        r"mnist \(1001 \+ 201 images\), lr 0.05, global batch 100 = 100 x 1",
        lines[0],
    )
    pattern = r"epoch (\d)/2 step (\d+)/10 loss \d\.\d{4} \d+ images/s \d+ s left"
    steps = [re.fullmatch(pattern, line).groups() for line in lines[2:5]]
    assert steps == [("1", "4"), ("1", "8"), ("1", "10")]
    assert [line[:2] for line in epochs_of(out)] == [("1", "mnist"), ("2", "mnist")]
    assert OLD or not errors

    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d{6}_" + script[:-3], folder.name)
    assert lines[1] == f"the results go to runs/{folder.name}"
    assert lines[-1] == f"the model is in runs/{folder.name}/model.pth"
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "checkpoint.pth" and names[2] == "model.pth" and len(names) == 3
    assert names[1].startswith("events.out.tfevents")
    importlib.import_module("model").Net().load_state_dict(weights(folder))
    curves = scalars(folder)
    assert [step for step, _ in curves["test/accuracy"]] == [1001, 2002]
    assert [step for step, _ in curves["train/lr"]] == [400, 800, 1000, 1401, 1801, 2001]


def test_two_runs_started_in_the_same_second_do_not_share_a_folder(mnist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data-dir", str(mnist), "--epochs=1", "--batch-size=500"]
    for _ in range(3):
        importlib.import_module("single_gpu_train").main(words)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_fewer_images_than_a_global_batch(mnist, tmp_path, train_here):
    for strategy in ("single", "data_parallel"):
        with pytest.raises(harness.Problem, match="1001 training images .* global batch of 1002: "):
            train_here(strategy, mnist, tmp_path / "out", batch_size=1002)
    done = train("ddp", mnist, tmp_path / "out", 1, processes=2, batch_size=501)
    assert "1001 training images are less than one global batch of 1002" in error_of(done)
    assert not (tmp_path / "out").exists()


def test_without_a_launcher_the_reason_is_told_once(mnist, tmp_path):
    """Rank 0 has the store: when it has gone first, the others point at it."""
    code = """
import harness
tell = harness.tell
harness.tell = lambda *args: (time.sleep(2 * (os.environ["RANK"] == "1")), tell(*args))
"""
    script = probe(tmp_path / "probe.py", code)
    words = options_of(mnist, tmp_path / "out", {"batch_size": 501})
    outputs, codes = by_hand([words, words], script)
    assert codes == [1, 1] and "error: 1001 training images are less" in outputs[0][1]
    assert "error: " not in outputs[1][1] and "Traceback" not in outputs[1][1]
    assert "rank 1 ends because rank 0 has ended: see what that one said\n" in outputs[1][1]


def test_an_old_pytorch_with_a_new_numpy(mnist, tmp_path):
    code = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.0.1')"
    code += "; import numpy; numpy.__version__ = '2.1.0'; import harness"
    script = probe(tmp_path / "probe.py", code, "single_gpu_train.py")
    done = train("single", mnist, tmp_path / "out", 1, script=script)
    assert error_of(done) == "error: PyTorch 2.0.1 is for numpy 1: pip install 'numpy<2'"


def test_data_parallel_wraps_only_for_the_device_that_was_chosen(train_here, mnist, tmp_path):
    """Also where PyTorch has an accelerator of another kind, which DataParallel would take."""
    wrapped = torch.nn.DataParallel
    try:
        torch.nn.DataParallel = None
        train_here("data_parallel", mnist, tmp_path, device="cpu", **QUICK)
    finally:
        torch.nn.DataParallel = wrapped


# Process groups


def test_ranks_with_different_backends_end_with_both_names(mnist, tmp_path):
    code = """
import harness
join = harness.join_group
harness.join_group = lambda backend: join("nccl" if os.environ["RANK"] == "1" else backend)
"""
    script = probe(tmp_path / "probe.py", code)
    words = options_of(mnist, tmp_path / "out", {})
    began = time.monotonic()
    outputs, codes = by_hand([words, words], script)
    assert codes == [1, 1] and time.monotonic() - began < 45
    (error,) = errors_of(outputs)
    assert "nccl" in error and "gloo" in error


@pytest.mark.parametrize("variables", [
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "PMI_RANK=0 PMI_SIZE=2", "PMIX_RANK=1",
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2",
])  # fmt: skip
def test_tasks_that_do_not_know_of_each_other(variables, mnist, tmp_path, monkeypatch, train_here):
    rank, *size = [variable.split("=") for variable in variables.split()]
    for name, value in (rank, *size):
        monkeypatch.setenv(name, value)
    with pytest.raises(harness.Problem, match="^2 tasks were started, but RANK is not set: "):
        train_here("ddp", mnist, tmp_path / "out", **QUICK)
    monkeypatch.setenv(rank[0], "0")  # as in a job of one task, or in the batch script of several
    for name, _ in size:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert "world size 1" in train_here("ddp", mnist, tmp_path / "out", **QUICK)


def test_the_environment_of_a_scheduler_is_enough(mnist, tmp_path):
    """Started without a launcher, but with the variables set: two processes by hand."""
    words = options_of(mnist, tmp_path, QUICK)
    outputs, codes = by_hand([words, words], env={"LOCAL_WORLD_SIZE": ""})
    assert codes == [0, 0] and not outputs[1][0]
    assert outputs[0][1].startswith("waiting for the other ranks at 127.0.0.1 ")
    assert len(epochs_of(outputs[0][0])) == 1


@pytest.mark.parametrize("rank, size, named", [
    ("0", "", "WORLD_SIZE expected, but not set"),
    ("0", "1", "MASTER_ADDR expected, but not set"),
    ("x", "1", "'x'"),
])  # fmt: skip
def test_an_incomplete_environment_is_one_line(rank, size, named, mnist, tmp_path):
    env = {"RANK": rank, **({"WORLD_SIZE": size} if size else {})}
    done = train("ddp", mnist, tmp_path / "out", 1, env=env)
    assert named in error_of(done) and "Traceback" not in done.stderr


def test_a_host_that_has_no_address_yet_is_waited_for(mnist, tmp_path):
    """As for a pod that starts before its master; Ctrl-C ends the waiting."""
    job = start(
        [sys.executable, ROOT / "ddp_train.py", *options_of(mnist, tmp_path / "out", {})],
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="name.not.there.yet.invalid",
        MASTER_PORT=str(free_port()),
    )  # fmt: skip
    assert job.stderr.readline().startswith("waiting for the other ranks at name.not.there.yet")
    time.sleep(2)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    finish(job, 10)
    assert job.returncode == -signal.SIGINT


@pytest.mark.parametrize("option, value", [("--lr", "0.01"), ("--epochs", "2")])
def test_ranks_with_other_options_stop_all(mnist, tmp_path, option, value):
    words = options_of(mnist, tmp_path / "out", {})
    outputs, codes = by_hand([words, [*words, option, value]])
    assert codes == [1, 1] and not (tmp_path / "out").exists()
    (error,) = errors_of(outputs)
    assert error.startswith(f"error: {option[2:]} is {value} on rank 1, but ")


def test_ranks_with_other_data_stop_all(mnist, tmp_path):
    """One node has MNIST, another has not."""
    script = probe(tmp_path / "probe.py", FEW_DIGITS)
    words = [options_of(folder, tmp_path / "out", QUICK) for folder in (mnist, tmp_path / "none")]
    outputs, codes = by_hand(words, script)
    assert codes == [1, 1] and not (tmp_path / "out").exists()
    assert errors_of(outputs) == ["error: dataset is synthetic on rank 1, but mnist on rank 0"]


@pytest.mark.slow
def test_a_download_may_take_longer_than_the_time_limit_of_a_group(mnist, tmp_path):
    """The ranks that wait have an hour, and PyTorch's own limits are not in force."""
    code = """
import datetime, data
import torch.distributed as dist
load = data.load_datasets
dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=4)
data.load_datasets = lambda *args: (time.sleep(9 * (os.environ["RANK"] == "0")), load(*args))[1]
import harness
assert harness.LONGEST_WAIT >= datetime.timedelta(hours=1)
"""
    script = probe(tmp_path / "probe.py", code)
    train("ddp", mnist, tmp_path / "out", processes=2, script=script, **QUICK)


@pytest.mark.slow
def test_with_warnings_as_errors_and_without_libuv(mnist, tmp_path):
    for number, env in enumerate(({"PYTHONWARNINGS": "error"}, {"USE_LIBUV": "0"})):
        command = launch_command(2, module="torch.distributed.run")
        words = options_of(mnist, tmp_path / str(number), QUICK)
        run(*command, ROOT / "ddp_train.py", *words, **env)
