"""What the tests share: small data sets in MNIST's format, and ways to run the scripts."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import FILES, write_idx

SCRIPTS = ("single_gpu_train.py", "data_parallel_train.py", "ddp_train.py")
EPOCH_LINE = re.compile(
    r"^epoch (\d+)/\d+ (\w+): test loss (\S+)  accuracy (\S+) % "
    r"\((\d+)/(\d+)\)$",
    re.M,
)

# Where two runs sum in another order, the last bit of a weight differs, and that can tip a ReLU or
# the choice of a max-pool. At larger rates one training in six then ends further apart than 1e-5.
SMALL_LR = 0.0003

# One thread a process; and no network beyond this machine, by a proxy where nobody listens.
os.environ.update(
    OMP_NUM_THREADS="1",
    http_proxy="http://127.0.0.1:9",
    no_proxy="127.0.0.1",
    https_proxy="http://127.0.0.1:9",
)
torch.set_num_threads(1)


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
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return Path(data_dir)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A data dir with 1,001 training and 201 test images: neither divides by 2, 3 or 4 evenly."""
    return write_mnist(tmp_path_factory.mktemp("mnist"), 1001, 201)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_command(processes, *options):
    return [
        sys.executable,
        "-m",
        "torch.distributed.launch",
        f"--nproc_per_node={processes}",
        f"--master_port={free_port()}",
        *options,
    ]


def run(*command, code=0, timeout=120, cwd=None, **env):
    """Run a command with a time limit; the first part is a script of ours, or a whole command."""
    command = [str(part) for part in command]
    if command[0] in SCRIPTS:
        command = [sys.executable, str(ROOT / command[0]), *command[1:]]
    job = start(command, cwd=cwd, **env)
    out, errors = finish(job, timeout)
    assert code in (None, job.returncode), f"{command}\n{out}\n{errors}"
    return subprocess.CompletedProcess(command, job.returncode, out, errors)


def start(command, cwd=None, **env):
    """The process of a command, in a group of its own, with its output in pipes."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd or ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job, timeout=60):
    """(output, errors) of a process when it has ended, without what gloo of PyTorch 2.8 prints."""
    try:
        out, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # a launcher leaves its workers behind
        raise
    if "[Gloo]" in out:  # the ranks write it piece by piece, so that their pieces can mix
        pieces = r"\[Gloo\] Rank |\d* is connected to |\d* peer ranks\. |Expected .* is : "
        out = re.sub(r"^\d*\n", "", re.sub(pieces, "", out), flags=re.M)
    return out, errors


def run_ddp(processes, *options, **kwargs):
    return run(*launch_command(processes), ROOT / "ddp_train.py", *options, **kwargs)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run the main() of a script in this process; returns what it printed."""

    def run_main(script, *options):
        monkeypatch.setattr(sys, "argv", [script, *(str(option) for option in options)])
        capsys.readouterr()
        try:
            importlib.import_module(Path(script).stem).main()
        finally:  # the folders are locked until the end of a process, which this is not
            locked = importlib.import_module("model").LOCKED
            for folder in list(locked):
                os.close(locked.pop(folder))
        return capsys.readouterr().out

    return run_main


def weights(folder):
    return torch.load(Path(folder, "model.pth"))


def distance(one, other):
    """The largest difference of two state dicts, as a share of the largest weight."""
    assert one.keys() == other.keys()
    largest = max(value.abs().max().item() for value in one.values())
    return max((one[name] - other[name]).abs().max().item() for name in one) / largest


def scalars(folder):
    """{tag: [(step, value), ...]} of the events in a folder, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
