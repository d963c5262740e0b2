"""The parts of harness.py by themselves: devices, files, what a call gives back."""

import builtins
import importlib
import os
import signal
import sys

import pytest
import torch
from conftest import STRATEGIES, checkpoint, options_of, weights

import harness

QUICK = {"epochs": 1, "batch_size": 500, "log_interval": 1}

# Devices


@pytest.fixture
def gpus(monkeypatch):
    """Let PyTorch see so many GPUs, and note the one that is chosen."""
    chosen = []
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def set_count(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return chosen

    return set_count


def test_a_gpu_that_is_not_there(gpus, monkeypatch):
    gpus(0)
    for local_rank in (None, 0):
        with pytest.raises(harness.Problem, match="--device cuda: PyTorch sees no GPU here, "):
            harness.pick_device("cuda", local_rank)
        assert harness.pick_device("auto", local_rank) == torch.device("cpu")


def test_the_local_rank_is_the_number_of_the_gpu(gpus, monkeypatch):
    chosen = gpus(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert harness.pick_device("auto", 1) == torch.device("cuda", 1) and chosen == [1]
    assert harness.pick_device("auto") == torch.device("cuda", 0)


def test_more_processes_than_gpus(gpus, monkeypatch, capsys):
    """Both numbers and the way out are named; auto takes the CPU, cuda does not."""
    gpus(3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert harness.pick_device("auto", 0) == torch.device("cpu")
    warning = capsys.readouterr().out
    assert "4 processes" in warning and "3 GPUs" in warning
    with pytest.raises(harness.Problem, match="4 processes.*3 GPUs.*--device cpu"):
        harness.pick_device("cuda", 0)


def test_mps_is_for_one_process_on_a_mac(monkeypatch):
    for there, local_rank, reason in ((False, None, "sees none"), (True, 0, "DDP has no backend")):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        with pytest.raises(harness.Problem, match=f"--device mps: .*{reason}"):
            harness.pick_device("mps", local_rank)
    assert harness.pick_device("mps") == torch.device("mps")
    assert harness.pick_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize("processes", [None, "2"])
def test_a_scheduler_that_shows_each_process_its_own_gpu(gpus, monkeypatch, processes):
    chosen = gpus(1)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert harness.pick_device("auto", 1) == torch.device("cuda", 0) and chosen == [0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # a launcher shows all the same GPUs
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert harness.pick_device("auto", 1) == torch.device("cpu")


def test_glibc_is_told_only_what_it_takes(monkeypatch):
    """Where it refuses the threshold, nothing else is changed: that would be worse than before."""
    calls = []

    class Library:
        def __init__(self, name):
            pass

        def mallopt(self, option, value):
            calls.append((option, value))
            return 0

    monkeypatch.setattr(harness.ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    harness.pick_device("cpu")
    assert calls == [(-3, 2**25)]  # above 4 MiB x sizeof(long) glibc refuses it
    assert 2**25 <= 4 * 2**20 * 8


# Files


def test_the_optimizer_is_saved_on_the_cpu(tmp_path):
    """A tensor that is on no CPU stands for one on a GPU."""

    class OnGPU(torch.Tensor):
        def cpu(self):
            return torch.ones(2)

    class Optimizer:
        def state_dict(self):
            return {"state": {0: {"moment": torch.zeros(2).as_subclass(OnGPU), "step": 3}}}

    harness.save(tmp_path, {}, Optimizer(), 1, 2, {})
    saved = checkpoint(tmp_path)["optimizer"]["state"][0]
    assert torch.equal(saved["moment"], torch.ones(2)) and saved["step"] == 3


# Called from Python, as in a notebook


def state_of_the_process():
    return signal.getsignal(signal.SIGINT), torch.distributed.is_initialized()


def test_main_gives_everything_back(mnist, tmp_path, monkeypatch, capsys):
    """A second run resumes the first one's folder, although sys.argv is the kernel's."""
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "connection.json"])
    before = state_of_the_process()
    for epochs, strategy in enumerate(("ddp", "single", "ddp"), 1):
        module = importlib.import_module(STRATEGIES[strategy][:-3])
        words = {**QUICK, "epochs": epochs, "resume": True}
        module.main(options_of(mnist, tmp_path, words))
        assert state_of_the_process() == before
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert "ddp_train.py: device" in capsys.readouterr().out
    assert checkpoint(tmp_path)["epoch"] == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, harness.Problem])
def test_main_gives_everything_back_after_a_failure(error, mnist, tmp_path, monkeypatch):
    before, module = state_of_the_process(), importlib.import_module("ddp_train")
    for _ in range(2):  # the second would find the folder locked

        def fail(*args):
            raise error("now")

        with monkeypatch.context() as patch:
            patch.setattr(module, "evaluate", fail)
            with pytest.raises(error, match="now"):
                module.main(options_of(mnist, tmp_path, {**QUICK, "resume": True}))
        assert state_of_the_process() == before
    module.main(options_of(mnist, tmp_path, {**QUICK, "resume": True}))


def test_the_kernel_of_a_notebook_lives_on(mnist, tmp_path, monkeypatch):
    """%run calls start(main) in the kernel; its stop button raises KeyboardInterrupt."""
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    before = state_of_the_process()

    def main():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.start(main)
    module = importlib.import_module("ddp_train")
    harness.start(lambda: module.main(options_of(mnist, tmp_path, QUICK)))
    assert state_of_the_process() == before and weights(tmp_path)
