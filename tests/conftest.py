"""What the tests share: a small MNIST, one way to train, and what a training leaves behind."""

import contextlib
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCRIPTS = ("single_gpu_train.py", "data_parallel_train.py", "ddp_train.py")
STRATEGIES = {"single": SCRIPTS[0], "data_parallel": SCRIPTS[1], "ddp": SCRIPTS[2]}
FAULTY = Path(__file__).parent / "faulty.py"
EPOCH_LINE = re.compile(
    r"^epoch (\d+)/\d+ (\w+): test loss (\S+)  accuracy (\S+) % \((\d+)/(\d+)\)$", re.M
)

# Where two runs sum in another order, the last bit of a weight differs, and that can tip a ReLU or
# the choice of a max-pool. In float32 one training in six then ends further apart than 1e-5, and
# which one differs from processor to processor; at this small rate hardly any does.
SMALL_LR = 0.0003

# Makes synthetic digits a hundredth as many, to save time.
FEW_DIGITS = """
import synthetic_digits
draw = synthetic_digits.draw_digits
synthetic_digits.draw_digits = lambda count, seed: draw(count // 100, seed)
"""

# One thread a process; and no network beyond this machine, by a proxy where nobody listens.
os.environ.update(
    OMP_NUM_THREADS="1",
    http_proxy="http://127.0.0.1:9",
    no_proxy="127.0.0.1",
    https_proxy="http://127.0.0.1:9",
)
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def slow(*values):
    """A set of parameters that takes long."""
    return pytest.param(*values, marks=pytest.mark.slow)


def write_idx(path, array):
    """Write a uint8 array as MNIST's files are: data.read_idx reads it."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(head + array.tobytes())


def write_mnist(data_dir, train, test):
    """A learnable data set of so many images in the four files of MNIST below data_dir."""
    rng = np.random.RandomState(0)
    patterns = np.zeros((10, 28, 28), int)
    for digit in range(10):
        patterns[digit, 2 * digit : 2 * digit + 9, digit % 2 * 14 :][:, :14] = 255
    folder = Path(data_dir, "MNIST", "raw")
    folder.mkdir(parents=True)
    for half, count in (("train", train), ("t10k", test)):
        labels = rng.randint(0, 10, count).astype(np.uint8)
        noise = rng.randint(0, 256, (count, 28, 28))
        images = ((3 * patterns[labels] + noise) // 4).astype(np.uint8)
        write_idx(folder / f"{half}-images-idx3-ubyte", images)
        write_idx(folder / f"{half}-labels-idx1-ubyte", labels)
    return Path(data_dir)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A data dir with 1,001 training and 201 test images: neither divides by 2, 3 or 4 evenly."""
    return write_mnist(tmp_path_factory.mktemp("mnist"), 1001, 201)


@pytest.fixture(scope="session")
def finished(mnist, tmp_path_factory):
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train("single", mnist, folder, epochs=1, batch_size=500)
    return folder


@contextlib.contextmanager
def double_precision():
    """In it trainings compute in float64, here and in forked processes: there nothing tips."""
    os.environ["DOUBLE"] = "1"
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        del os.environ["DOUBLE"]


@pytest.fixture
def double():
    """A test in which trainings compute in double precision."""
    with double_precision():
        yield


@pytest.fixture(autouse=True)
def without_gpus(request, monkeypatch):
    """What is tested on the CPU is so on a machine with GPUs too."""
    if request.module.__name__ not in ("test_gpu", "test_recipes"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_command(processes, *options, module="torch.distributed.launch"):
    port = f"--master_port={free_port()}"
    return [sys.executable, "-m", module, f"--nproc_per_node={processes}", port, *options]


def start(command, cwd=None, **env):
    """The process of a command, in a group of its own, with its output in pipes."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd or ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(job, timeout=60):
    """(output, errors) of a process when it has ended."""
    try:
        out, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # a launcher leaves its workers behind
        raise
    return without_gloo(out), errors


def without_gloo(text):
    """Without what gloo of PyTorch 2.8 prints; the ranks write it piece by piece, so they mix."""
    if "[Gloo]" not in text:
        return text
    pieces = r"\[Gloo\] Rank |\d* is connected to |\d* peer ranks\. |Expected .* is : "
    return re.sub(r"^\d*\n", "", re.sub(pieces, "", text), flags=re.M)


def run(*command, code=0, timeout=120, cwd=None, **env):
    """Run a command with a time limit; the first part is a script of ours, or a whole command."""
    command = [str(part) for part in command]
    if command[0] in SCRIPTS:
        command = [sys.executable, str(ROOT / command[0]), *command[1:]]
    job = start(command, cwd=cwd, **env)
    out, errors = finish(job, timeout)
    assert code in (None, job.returncode), f"{command}\n{out}\n{errors}"
    return subprocess.CompletedProcess(command, job.returncode, out, errors)


def options_of(data_dir, out, options):
    """batch_size=2, resume=True as options: --batch-size 2 --resume; on the CPU unless said."""
    words = ["--data-dir", str(data_dir), "--output-dir", str(out)]
    for name, value in {"device": "cpu", **options}.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


def train_command(strategy, data_dir, out, processes=None, script=None, fault=None, **options):
    """The command that trains; with `processes` by a launcher, and with a fault in it."""
    command = launch_command(processes) if processes else [sys.executable]
    command += [FAULTY] if fault else []
    script = script or ROOT / STRATEGIES[strategy]
    return [*command, script, *options_of(data_dir, out, options)]


def train(
    strategy, data_dir, out, code=0, timeout=120, cwd=ROOT, env=None, fault=None, fresh=False,
    processes=None, script=None, **options
):  # fmt: skip
    """Train in processes of their own, ranks that get to know each other by the environment.

    fresh: by new interpreters, and DDP by the launcher, which ends the others where one fails; so
    it is with an exit code, and with a fault in it: "RANK PLACE KIND" of faulty.py.
    """
    env = {**(env or {}), **({"FAULT": fault} if fault else {})}
    if fresh or fault or (processes and code):
        command = train_command(strategy, data_dir, out, processes, script, fault, **options)
        return run(*command, code=code, timeout=timeout, cwd=cwd, **env)
    script, words = script or ROOT / STRATEGIES[strategy], options_of(data_dir, out, options)
    outputs, codes = by_hand([words] * (processes or 1), script, timeout, cwd, env, bool(processes))
    out, errors = map("".join, zip(*outputs))
    returned = max(codes, key=abs)
    assert code in (None, returned), f"{script} {words}\n{codes}\n{out}\n{errors}"
    return subprocess.CompletedProcess([script, *words], returned, out, errors)


def by_hand(options, script=ROOT / "ddp_train.py", timeout=60, cwd=ROOT, env=None, ddp=True):
    """Run a script in a forked process for each list of options, with ddp as ranks of one world.

    Returns [(output, errors), ...] and the exit codes.
    """
    size = str(len(options))
    where = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    where["MASTER_PORT"] = str(free_port())
    ranks = []
    for rank, words in enumerate(options):
        world = {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ddp else {}
        ranks.append((words, {**os.environ, **world, **(env or {})}))
    outputs, codes = forked.run(script, ranks, cwd, timeout)
    return [(without_gloo(out), errors) for out, errors in outputs], codes


@pytest.fixture
def train_here(capsys):
    """Train by the main() of a script, in this process; returns what it printed."""

    def train_in_process(strategy, data_dir, out, **options):
        capsys.readouterr()
        module = importlib.import_module(STRATEGIES[strategy][:-3])
        module.main(options_of(data_dir, out, options))
        return capsys.readouterr().out

    return train_in_process


def epochs_of(text):
    """[(epoch, data set, loss, accuracy, correct, count), ...] of the lines at the epochs' ends."""
    return EPOCH_LINE.findall(text)


def errors_of(outputs):
    """The lines of all ranks that say what is wrong."""
    return [line for _, text in outputs for line in text.splitlines() if "error: " in line]


def error_of(done):
    """The one line that says what is wrong (a launcher adds its own report below)."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and done.returncode != 0, done.stderr
    return lines[0]


def weights(folder):
    return torch.load(str(Path(folder, "model.pth")), weights_only=True)


def checkpoint(folder):
    return torch.load(str(Path(folder, "checkpoint.pth")), weights_only=True)


def distance(one, other):
    """The largest difference of two state dicts, as a share of the largest weight."""
    assert one.keys() == other.keys()
    largest = max(value.abs().max().item() for value in one.values())
    return max((one[name] - other[name]).abs().max().item() for name in one) / largest


def equal(one, other):
    """Whether two state dicts are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def scalars(folder):
    """{tag: [(step, value), ...]} of the events in a folder, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def copy_scripts(folder):
    """A copy of our scripts and modules, to be changed; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    return folder


def files_of(folder):
    """{path: content} of all files in a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def probe(path, code, script="ddp_train.py"):
    """A file that changes something by `code`, in which ROOT is importable, and runs a script."""
    path.write_text(f"""
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = {str(ROOT / script)!r}
{code}
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    return path


def finish_all(jobs, timeout):
    """The [(output, errors), ...] and exit codes of processes, of which none is left over."""
    try:
        return [finish(job, timeout) for job in jobs], [job.returncode for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def two_nodes(
    folders, mnist, processes, hosts=("127.0.0.1", None), prefix=((), ()),
    script=ROOT / "ddp_train.py", **options
):  # fmt: skip
    """Train by a launcher on each of two nodes; returns their (output, errors) and exit codes."""
    port, jobs = free_port(), []
    for node, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.launch", "--nnodes=2"]
        command += [f"--nproc_per_node={processes}", f"--node_rank={node}"]
        command += [f"--master_addr={hosts[0]}", f"--master_port={port}", script]
        jobs.append(start([*prefix[node], *command, *options_of(mnist, folder / "out", options)]))
    return finish_all(jobs, 90)


def assert_gone(text, seconds=5):
    """No process is left whose command line has this text (an output folder is of one test)."""
    end = time.monotonic() + seconds
    while True:
        found = subprocess.run(["pgrep", "-f", "--", text], stdout=subprocess.PIPE, text=True)
        if not [pid for pid in found.stdout.split() if int(pid) != os.getpid()]:
            return
        assert time.monotonic() < end, "processes are left over"
        time.sleep(0.1)
