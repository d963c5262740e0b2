"""The CUDA paths: they need one GPU, or two, and are skipped, with the reason, elsewhere."""

import pytest
import torch
from conftest import (
    STRATEGIES,
    checkpoint,
    distance,
    epochs_of,
    error_of,
    train,
    weights,
    write_mnist,
)

import data

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")
TRAINING = {"epochs": 2, "lr": 0.02, "log_interval": 5}


@one_gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_script_on_a_gpu_trains_as_on_the_cpu(strategy, mnist, tmp_path):
    for device in ("cuda", "cpu"):
        options = {**TRAINING, "batch_size": 48, "device": device}
        env = {"CUDA_VISIBLE_DEVICES": "0"}
        done = train(strategy, mnist, tmp_path / device, env=env, **options)
        assert f"device {device}" in done.stdout
    assert all(value.device.type == "cpu" for value in weights(tmp_path / "cuda").values())
    moments = checkpoint(tmp_path / "cuda")["optimizer"]["state"].values()
    assert all(moment["momentum_buffer"].device.type == "cpu" for moment in moments)
    assert distance(weights(tmp_path / "cuda"), weights(tmp_path / "cpu")) < 1e-2


@one_gpu
def test_a_checkpoint_goes_from_the_gpu_to_the_cpu_and_back(train_here, mnist, tmp_path):
    for epochs, device in enumerate(("cuda", "cpu", "cuda"), 1):
        out = train_here("single", mnist, tmp_path, device=device, epochs=epochs, resume=True)
        assert [line[0] for line in epochs_of(out)] == [str(epochs)]


@one_gpu
def test_more_processes_than_gpus_stops_with_both_numbers(mnist, tmp_path):
    done = train("ddp", mnist, tmp_path / "out", 1, processes=GPUS + 1, device="cuda")
    assert f"{GPUS + 1} processes on this node but {GPUS} GPUs" in error_of(done)


@two_gpus
@pytest.mark.parametrize("images", [1001, 49])
def test_the_real_data_parallel_on_uneven_batches(images, tmp_path):
    data_dir = write_mnist(tmp_path / "data", images, 7)
    for strategy, gpus in (("single", "0"), ("data_parallel", "0,1")):
        options = {**TRAINING, "batch_size": 47, "device": "cuda"}
        env = {"CUDA_VISIBLE_DEVICES": gpus}
        done = train(strategy, data_dir, tmp_path / strategy, env=env, **options)
        assert "gather" not in done.stderr
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "data_parallel")) < 1e-3


@two_gpus
def test_nccl_gives_what_gloo_gives(mnist, tmp_path):
    for device, backend in (("cuda", "nccl"), ("cpu", "gloo")):
        options = {**TRAINING, "batch_size": 24, "device": device, "processes": 2}
        done = train("ddp", mnist, tmp_path / device, **options)
        assert f"backend {backend}" in done.stdout
    assert distance(weights(tmp_path / "cuda"), weights(tmp_path / "cpu")) < 1e-2


@one_gpu
def test_the_loader_pins_memory_for_a_gpu(mnist):
    train_set, _ = data.load_datasets("mnist", mnist)
    loader = torch.utils.data.DataLoader(train_set, 8, pin_memory=True, collate_fn=data.as_batch)
    assert all(part.is_pinned() for part in next(iter(loader)))
