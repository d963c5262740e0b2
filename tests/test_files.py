"""The folder of a run and its surroundings: nothing is lost, odd machines are met with sense."""

import resource
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import (
    ROOT, STRATEGIES, checkpoint, copy_scripts, epochs_of, error_of, files_of, finish,
    launch_command, options_of, probe, run, slow, start, train, train_command, weights,
)  # fmt: skip

import harness

QUICK = {"epochs": 1, "batch_size": 500, "log_interval": 1}
TRAINING = {"epochs": 60, "batch_size": 100}


@pytest.mark.parametrize("strategy", ["single", "data_parallel"])
def test_checkpoints_are_not_overwritten(train_here, strategy, mnist, finished):
    before = files_of(finished)
    with pytest.raises(harness.Problem, match="checkpoint.pth exists: continue it with --resume"):
        train_here(strategy, mnist, finished, **QUICK)
    assert before == files_of(finished)


def test_ddp_refuses_once_for_all_ranks(mnist, finished):
    before = files_of(finished)
    done = train("ddp", mnist, finished, 1, fresh=True, processes=3, **{**QUICK, "batch_size": 200})
    assert "checkpoint.pth exists" in error_of(done) and done.stderr.count("Traceback") == 1
    assert before == files_of(finished)


def test_a_model_without_its_checkpoint_is_not_overwritten(train_here, mnist, tmp_path):
    (tmp_path / "model.pth").write_text("precious")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(harness.Problem, match="model.pth exists"):
        train_here("single", mnist, tmp_path, **QUICK)
    assert (tmp_path / "model.pth").read_text() == "precious"
    train_here("single", mnist, tmp_path, resume=True, **QUICK)
    assert weights(tmp_path) and (tmp_path / "model.pth.old").read_text() == "precious"
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("below", ["", "below"])
def test_output_that_cannot_be_written(mnist, tmp_path, below):
    (tmp_path / "file").touch()
    done = train("single", mnist, tmp_path / "file" / below, 1, **QUICK)
    assert str(tmp_path / "file") in error_of(done) and "Traceback" not in done.stderr


def test_saving_changes_nothing_in_the_live_model(monkeypatch, train_here, mnist, tmp_path):
    """The state dict is read; the model stays on its device and keeps its layout."""
    nets = []
    monkeypatch.setattr(harness, "load", lambda checkpoint, net, optimizer: nets.append(net) or 0)
    train_here("single", mnist, tmp_path, **QUICK)
    assert nets[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert nets[0].conv2.weight.requires_grad and nets[0].training


def test_a_second_run_in_the_same_folder_is_refused(mnist, tmp_path):
    """The first is asleep in its second epoch; killed, it frees the folder."""
    options = {"epochs": 2, "batch_size": 100, "resume": True}
    command = train_command("single", mnist, tmp_path, fault="any step sleep", **options)
    first = start(command, FAULT="any step sleep")
    while "sleeping" not in first.stderr.readline():
        assert first.poll() is None
    before = files_of(tmp_path)
    second = train("single", mnist, tmp_path, 1, **options)
    assert error_of(second).startswith("error: another run is writing to")
    assert files_of(tmp_path) == before
    first.kill()
    first.communicate(timeout=10)
    assert len(epochs_of(train("single", mnist, tmp_path, **options).stdout)) == 1


@pytest.mark.parametrize("processes", [None, slow(2)])
def test_disk_full_while_saving(mnist, tmp_path, processes):
    """A limit on the size of files stands for the full disk: writing fails half-way."""
    strategy = "ddp" if processes else "single"
    options = {"batch_size": 100, "processes": processes}
    train(strategy, mnist, tmp_path, epochs=1, **options)
    before = {path: text for path, text in files_of(tmp_path).items() if path.suffix == ".pth"}
    command = train_command(strategy, mnist, tmp_path, epochs=2, resume=True, **options)
    done = subprocess.run(
        [str(part) for part in command],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        timeout=60,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 1
    assert f"error: cannot save {tmp_path / 'model.pth'}" in error_of(done)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.pth*")}


def test_disk_full_between_two_log_lines(mnist, tmp_path):
    """It is TensorBoard that notices first."""
    code = """
from tensorboard.summary.writer import record_writer
write, count = record_writer.RecordWriter.write, []
def full(*args):
    count.append(1)
    if len(count) > 20:
        raise OSError(28, "No space left on device")
    return write(*args)
record_writer.RecordWriter.write = full
"""
    script = probe(tmp_path / "probe.py", code, "single_gpu_train.py")
    out = tmp_path / "out"
    done = train("single", mnist, out, 1, script=script, epochs=9, batch_size=100, log_interval=5)
    assert "No space left" in error_of(done) and "Traceback" not in done.stderr
    assert checkpoint(out)["epoch"] >= 1 and weights(out)


@pytest.mark.parametrize("what", ["broken tensorflow", "no tensorboard"])
def test_training_without_curves(what, mnist, tmp_path):
    module = what.split()[1]
    (tmp_path / module).mkdir()
    error = "AttributeError('broken')" if what.startswith("broken") else "ImportError('missing')"
    (tmp_path / module / "__init__.py").write_text(f"raise {error}")
    out, env = tmp_path / "out", {"PYTHONPATH": str(tmp_path)}
    done = train("single", mnist, out, env=env, fresh=True, **QUICK)
    assert len(epochs_of(done.stdout)) == 1 and not done.stderr
    assert (out / "checkpoint.pth").exists() and weights(out)
    if module == "tensorboard":
        assert "warning: no curves, as TensorBoard cannot be used: ImportError" in done.stdout


def test_paths_that_the_encoding_cannot_print(mnist, tmp_path):
    out = tmp_path / "运行 héllo"
    done = train("single", mnist, out, env={"PYTHONIOENCODING": "cp1252"}, fresh=True, **QUICK)
    assert weights(out) and r"\u8fd0" in done.stdout


@pytest.mark.parametrize("strategy, processes", [("single", None), ("ddp", 2)])
def test_another_folder_with_spaces_and_letters_of_all_kinds(mnist, tmp_path, strategy, processes):
    home = copy_scripts(tmp_path / "héllo wörld 数据")
    shutil.copytree(mnist, home / "my data")
    script = home / STRATEGIES[strategy]
    options = {**QUICK, "processes": processes, "script": script, "cwd": home}
    train(strategy, "my data", "out put 结果", **options)
    assert weights(home / "out put 结果")


@pytest.mark.parametrize("processes", [None, slow(2)])
def test_a_closed_pipe_ends_quietly(mnist, tmp_path, processes):
    strategy = "ddp" if processes else "single"
    options = {"epochs": 200, "batch_size": 100, "log_interval": 1, "processes": processes}
    command = train_command(strategy, mnist, tmp_path / "out", **options)
    job = start(command)
    assert job.stdout.readline()
    job.stdout.close()
    errors = job.stderr.read()
    assert job.wait(timeout=60) != 0
    assert "BrokenPipe" not in errors and (processes or not errors)


def test_read_only_data_and_checkout(mnist, tmp_path):
    """A mount that cannot be written: nothing is needed there, once the data is there."""
    script = f"""
    mount --bind {ROOT} {ROOT} && mount -o remount,ro,bind {ROOT} &&
    mount --bind {mnist} {mnist} && mount -o remount,ro,bind {mnist} || exit 99
    touch {ROOT}/x {mnist}/x 2>/dev/null && exit 98
    cd {tmp_path} && exec {sys.executable} {ROOT}/single_gpu_train.py --data-dir {mnist} --epochs 1
    """
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare is missing")
    done = run("unshare", "--mount", "sh", "-c", script, code=None)
    if done.returncode in (1, 99) and "unshare" in done.stderr + done.stdout:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
    assert len(epochs_of(done.stdout)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch.distributed.launch", "torch.distributed.run"])
def test_two_jobs_on_one_machine(module, mnist, tmp_path):
    """The first is unharmed. With one port the second ends soon and says why; without, new
    launchers choose two, and older ones stop the second job."""
    launcher = launch_command(2, module=module)
    if module.endswith("run"):
        launcher = [word for word in launcher if "port" not in word]
    words = [options_of(mnist, tmp_path / name, TRAINING) for name in ("first", "second")]
    first = start([*launcher, ROOT / "ddp_train.py", *words[0]])
    assert first.stdout.readline().startswith("ddp_train.py")
    second = run(*launcher, ROOT / "ddp_train.py", *words[1], code=None, timeout=60)
    out, errors = finish(first, 90)
    assert first.returncode == 0 and len(epochs_of(out)) == 60, errors
    if second.returncode or module.endswith("launch"):
        assert second.returncode and "address already in use" in second.stderr.lower()
