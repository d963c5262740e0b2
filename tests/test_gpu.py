"""The CUDA paths: they need one GPU, or two, and are skipped, with the reason, elsewhere."""

import importlib.util

import pytest
import torch
from conftest import (
    ROOT, SMALL_LR, STRATEGIES, checkpoint, copy_scripts, distance, epochs_of, error_of,
    options_of, train, weights, write_mnist,
)  # fmt: skip

import data

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=one_gpu)])
# What waits for the GPU, as the profiler names it; on the CPU the first two appear too.
SYNCHRONISING = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaMemcpy"}
SYNCHRONISING |= {"cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize"}
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


@one_gpu
def test_ddp_over_nccl_in_one_process_gives_what_the_single_script_gives(mnist, tmp_path):
    options = {**TRAINING, "batch_size": 48, "device": "cuda"}
    train("single", mnist, tmp_path / "single", env={"CUDA_VISIBLE_DEVICES": "0"}, **options)
    done = train("ddp", mnist, tmp_path / "ddp", processes=1, **options)
    assert "backend nccl, world size 1" in done.stdout
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "ddp")) < 1e-3


@on_each_device
def test_ddp_over_gloo_in_two_processes_on_one_device(device, mnist, tmp_path):
    """NCCL wants a GPU for each process; in a copy of the script gloo shares one."""
    script = copy_scripts(tmp_path) / "ddp_train.py"
    text = script.read_text("utf-8")
    shared = f'torch.device("{device}", 0)'
    for ours, changed in (
        ("harness.pick_device(args.device, local_rank)", shared),
        ('"nccl" if device.type == "cuda" else "gloo"', '"gloo"'),
    ):
        assert text.count(ours) == 1
        text = text.replace(ours, changed)
    script.write_text(text, "utf-8")
    options = {**TRAINING, "lr": SMALL_LR}
    train("single", mnist, tmp_path / "single", batch_size=48, device=device, **options)
    options.update(script=script, processes=2, batch_size=24)
    done = train("ddp", mnist, tmp_path / "ddp", **options)
    assert f"device {device}:0, backend gloo, world size 2" in done.stdout
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "ddp")) < 1e-3


def synchronisations(main, options, interval, device):
    """[(step, name)] of what waits for the GPU after a step that no log line follows."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        main(options)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    steps = sum(event.name.startswith("Optimizer.step#") for event in events)
    assert steps > 2 * interval
    step, found = 0, []
    for event in events:
        step += event.name.startswith("Optimizer.step#")
        if event.name in SYNCHRONISING and step % interval and step < steps:
            found.append((step, event.name))
    return found


@on_each_device
def test_nothing_waits_for_the_gpu_between_log_lines(device, mnist, tmp_path):
    text = (ROOT / "single_gpu_train.py").read_text("utf-8")
    kept = "losses.append(loss.detach())"
    assert text.count(kept) == 1
    for name, line in (("right", kept), ("wrong", f"{kept}; loss.item()")):
        script = tmp_path / f"{name}.py"
        script.write_text(text.replace(kept, line), "utf-8")
        spec = importlib.util.spec_from_file_location(name, script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        options = {"epochs": 1, "batch_size": 24, "log_interval": 10, "device": device}
        words = options_of(mnist, tmp_path / name, options)
        found = synchronisations(module.main, words, 10, device)
        if name == "right":
            assert not found
        else:  # 41 steps, of which each tenth and the last may wait
            assert {step for step, _ in found} == {step for step in range(41) if step % 10}
