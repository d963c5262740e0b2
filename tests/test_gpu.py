"""The CUDA paths: they need one GPU, or two, and are skipped, with the reason, elsewhere."""

import importlib

import pytest
import torch
from conftest import EPOCH_LINE, SCRIPTS, distance, run, run_ddp, weights, write_mnist

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")
TRAINING = ("--epochs", 2, "--lr", 0.02, "--log-interval", 5)


@one_gpu
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_on_a_gpu_trains_as_on_the_cpu(script, mnist, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    for device in ("cuda", "cpu"):
        done = run(script, "--data-dir", mnist, *TRAINING, "--batch-size", 48, "--device", device,
                   "--output-dir", tmp_path / device, **visible)  # fmt: skip
        assert f"device {device}" in done.stdout
    assert all(value.device.type == "cpu" for value in weights(tmp_path / "cuda").values())
    assert distance(weights(tmp_path / "cuda"), weights(tmp_path / "cpu")) < 1e-2


@one_gpu
def test_a_checkpoint_goes_from_the_gpu_to_the_cpu_and_back(run_here, mnist, tmp_path):
    for epochs, device in enumerate(("cuda", "cpu", "cuda"), 1):
        out = run_here("single_gpu_train.py", "--data-dir", mnist, "--device", device, "--epochs",
                       epochs, "--output-dir", tmp_path, "--resume")  # fmt: skip
        assert [line[0] for line in EPOCH_LINE.findall(out)] == [str(epochs)]


@one_gpu
def test_more_processes_than_gpus_stops_with_both_numbers(mnist, tmp_path):
    done = run_ddp(GPUS + 1, "--data-dir", mnist, "--device", "cuda", code=None, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{GPUS + 1} processes on this node but {GPUS} GPUs" in done.stderr


@two_gpus
@pytest.mark.parametrize("images", [1001, 49])
def test_the_real_data_parallel_on_uneven_batches(images, tmp_path):
    data_dir = write_mnist(tmp_path / "data", images, 7)
    for script, gpus in (("single_gpu_train.py", "0"), ("data_parallel_train.py", "0,1")):
        options = ("--data-dir", data_dir, *TRAINING, "--batch-size", 47, "--device", "cuda")
        output = ("--output-dir", tmp_path / script)
        done = run(script, *options, *output, CUDA_VISIBLE_DEVICES=gpus)
        assert "gather" not in done.stderr
    one, two = (weights(tmp_path / script) for script in SCRIPTS[:2])
    assert distance(one, two) < 1e-3


@two_gpus
def test_nccl_gives_what_gloo_gives(mnist, tmp_path):
    for device, backend in (("cuda", "nccl"), ("cpu", "gloo")):
        done = run_ddp(2, "--data-dir", mnist, *TRAINING, "--batch-size", 24, "--device", device,
                       "--output-dir", tmp_path / device)  # fmt: skip
        assert f"backend {backend}" in done.stdout
    assert distance(weights(tmp_path / "cuda"), weights(tmp_path / "cpu")) < 1e-2


@one_gpu
def test_the_loader_pins_memory_for_a_gpu(mnist):
    data = importlib.import_module("data")
    train_set, _ = data.load_datasets("mnist", mnist)
    images, labels = next(iter(data.make_loader(train_set, 8, range(8), torch.device("cuda"))))
    assert images.is_pinned() and labels.is_pinned()
