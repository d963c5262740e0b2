"""A run that was stopped continues as if it had not been, also with another script or size."""

import importlib
import shutil
import time
import zipfile

import pytest
import torch
from conftest import (
    SMALL_LR, STRATEGIES, checkpoint, copy_scripts, distance, epochs_of, equal, files_of,
    scalars, train, two_nodes, weights,
)  # fmt: skip

import harness

QUICK = {"epochs": 1, "batch_size": 500, "log_interval": 1}


class Stop(Exception):
    """The end of a run in the middle, as far as the files are concerned."""


@pytest.fixture
def stopped(monkeypatch, train_here):
    """Train, but break off after the checkpoint of this epoch."""

    def train_until(epoch, strategy, data_dir, out, **options):
        save = harness.save

        def save_and_stop(folder, weights, optimizer, done, *rest):
            save(folder, weights, optimizer, done, *rest)
            if done == epoch:
                raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(harness, "save", save_and_stop)
            with pytest.raises(Stop):
                train_here(strategy, data_dir, out, **options)
        time.sleep(1.1)  # event files sort by start time, in seconds

    return train_until


@pytest.mark.parametrize("strategy", ["single", "data_parallel", "ddp"])
def test_resume_is_exact(stopped, train_here, mnist, tmp_path, strategy):
    options = {"epochs": 3, "log_interval": 5}
    train_here(strategy, mnist, tmp_path / "straight", **options)
    stopped(2, strategy, mnist, tmp_path / "parts", **options)
    out = train_here(strategy, mnist, tmp_path / "parts", resume=True, **options)
    assert [line[0] for line in epochs_of(out)] == ["3"]
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "parts"))
    straight, parts = scalars(tmp_path / "straight"), scalars(tmp_path / "parts")
    for tag in straight.keys() - {"train/images_per_second"}:
        assert straight[tag] == parts[tag], tag


def test_checkpoints_go_from_script_to_script_and_between_world_sizes(
    stopped, train_here, double, mnist, tmp_path
):
    """Epoch 1 by the single-GPU script, epoch 2 by DDP, and it is as one run."""
    options = {"epochs": 2, "lr": 0.02}
    train_here("single", mnist, tmp_path / "one", batch_size=48, **options)
    stopped(1, "single", mnist, tmp_path / "two", batch_size=48, **options)
    train("ddp", mnist, tmp_path / "two", processes=2, batch_size=24, resume=True, **options)
    assert distance(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-9


def test_the_schedule_continues_at_the_share_that_is_done(stopped, train_here, mnist, tmp_path):
    """With another global batch the number of steps differs, but not the rate after each epoch."""
    train_here("single", mnist, tmp_path / "straight", epochs=4, batch_size=50)
    stopped(2, "data_parallel", mnist, tmp_path / "parts", epochs=4, batch_size=25)
    train_here("single", mnist, tmp_path / "parts", epochs=4, batch_size=50, resume=True)
    one, other = (dict(scalars(tmp_path / name)["train/lr"]) for name in ("straight", "parts"))
    for seen in (3 * 1001 + 1000, 2 * 1001 + 1000):
        assert one[seen] == pytest.approx(other[seen])


def test_a_run_killed_within_an_epoch_leaves_no_fold_in_the_curves(
    monkeypatch, train_here, mnist, tmp_path
):
    module = importlib.import_module("single_gpu_train")
    calls, real = [], module.evaluate

    def evaluate(*args):
        calls.append(1)
        if len(calls) == 2:  # the end of the second epoch, whose curves are written already
            raise Stop
        return real(*args)

    options = {"epochs": 2, "log_interval": 5}
    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate", evaluate)
        with pytest.raises(Stop):
            train_here("single", mnist, tmp_path, **options)
    time.sleep(1.1)
    train_here("single", mnist, tmp_path, resume=True, **options)
    steps = [step for step, _ in scalars(tmp_path)["train/loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == 1001 + 960


def test_a_clock_that_was_ahead_hides_no_curve(stopped, train_here, mnist, tmp_path):
    """TensorBoard reads the files by their time: a fresh run must not purge what it reads later."""
    stopped(1, "single", mnist, tmp_path, **{**QUICK, "epochs": 2})
    (events,) = tmp_path.glob("events.*")
    words = events.name.split(".")
    words[3] = str(int(words[3]) + 10**6)
    events.rename(events.with_name(".".join(words)))
    train_here("single", mnist, tmp_path, resume=True, **{**QUICK, "epochs": 2})
    assert sorted(step for step, _ in scalars(tmp_path)["test/accuracy"]) == [1001, 2002]


def test_more_epochs_say_what_happens_to_the_learning_rate(train_here, mnist, tmp_path):
    train_here("single", mnist, tmp_path, **QUICK)
    out = train_here("single", mnist, tmp_path, resume=True, **{**QUICK, "epochs": 3})
    (line,) = [line for line in out.splitlines() if "learning rate" in line]
    assert line.startswith("--epochs was 1 and is 3: the learning rate continues where")
    assert [line[0] for line in epochs_of(out)] == ["2", "3"]


def test_a_finished_run_is_left_alone(train_here, mnist, tmp_path):
    train_here("single", mnist, tmp_path, **QUICK)
    before = files_of(tmp_path)
    for strategy in STRATEGIES:
        out = train_here(strategy, mnist, tmp_path, resume=True, **QUICK)
        assert out == f"{tmp_path} is finished: 1 of 1 epochs are done\n"
        assert not torch.distributed.is_initialized()
    done = train("ddp", mnist, tmp_path, processes=2, resume=True, **QUICK)
    assert done.stdout == out and before == files_of(tmp_path)


def test_resume_starts_where_there_is_nothing(train_here, mnist, tmp_path):
    out = train_here("single", mnist, tmp_path / "new", resume=True, **QUICK)
    assert len(epochs_of(out)) == 1


def test_both_files_hold_plain_tensors(train_here, mnist, tmp_path):
    """On the CPU and contiguous, so that any program on any machine can read and convert them."""
    train_here("single", mnist, tmp_path, **QUICK)
    state = checkpoint(tmp_path)
    assert state.keys() == {"model", "optimizer", "epoch", "epochs", "options"}
    assert state["options"] == {"dataset": "mnist", "images": 1001, "lr": 0.05, "seed": 42}
    tensors = [*weights(tmp_path).values(), *state["model"].values()]
    assert all(tensor.is_contiguous() for tensor in tensors)
    tensors += [moment["momentum_buffer"] for moment in state["optimizer"]["state"].values()]
    assert len(tensors) == 24 and all(tensor.device.type == "cpu" for tensor in tensors)


def test_any_optimizer_and_schedule_resume(mnist, tmp_path):
    """A user's own copy: AdamW with a cosine schedule."""
    script = copy_scripts(tmp_path) / "single_gpu_train.py"
    text = script.read_text()
    for old, new in (
        ("SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)",
         "AdamW(net.parameters(), lr=args.lr)"),
        ("import OneCycleLR", "import CosineAnnealingLR"),
        ("OneCycleLR(optimizer, args.lr, ", "CosineAnnealingLR(optimizer, "),
        ("last_epoch=start * steps - 1)", "last_epoch=start * steps - 1)\n"
         "    assert start == 0 or scheduler.get_last_lr()[0] < args.lr"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    options = {"script": script, "lr": 0.001, "batch_size": 100}
    train("single", mnist, tmp_path / "out", epochs=2, **options)
    done = train("single", mnist, tmp_path / "out", epochs=3, resume=True, **options)
    assert [line[0] for line in epochs_of(done.stdout)] == ["3"]


DAMAGES = {
    "cut": "cannot read",
    "damaged": "cannot read",
    "no epoch": "cannot read",
    "no optimizer": "of another network or optimizer",
    "empty": "cannot read",
    "text": "cannot read",
    "model.pth": "cannot read",
    "other model": "of another network or optimizer",
    "other optimizer": "of another network or optimizer",
    "other dataset": "dataset synthetic",
    "other seed": "seed 7",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_named(train_here, mnist, finished, tmp_path, what):
    path, original = tmp_path / "checkpoint.pth", finished / "checkpoint.pth"
    content, state = original.read_bytes(), checkpoint(finished)
    if what.startswith(("other", "no ")):
        if what == "other model":
            state["model"]["fc2.weight"] = torch.zeros(10, 3)
        elif what == "other optimizer":
            del state["optimizer"]["param_groups"][0]["params"][0]
        elif what.startswith("no "):
            del state[what[3:]]
        else:
            changed = {"other dataset": {"dataset": "synthetic"}, "other seed": {"seed": 7}}
            state["options"].update(changed[what])
        torch.save(state, path)
    elif what == "damaged":  # in the middle of the largest tensor, which torch.load does not notice
        with zipfile.ZipFile(original) as file:
            place = max(file.infolist(), key=lambda info: info.file_size).header_offset + 5000
        path.write_bytes(content[:place] + bytes(4096) + content[place + 4096 :])
    elif what == "model.pth":
        shutil.copy(finished / "model.pth", path)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"hi"}[what])
    before = files_of(tmp_path)
    with pytest.raises(harness.Problem, match=DAMAGES[what]) as problem:
        train_here("single", mnist, tmp_path, resume=True, **{**QUICK, "epochs": 5})
    assert "\n" not in str(problem.value) and "move" not in str(problem.value)
    assert files_of(tmp_path) == before


@pytest.mark.slow
def test_two_nodes_one_of_which_has_the_checkpoint(mnist, tmp_path):
    """Rank 0 decides: with a checkpoint on node 0 alone all resume it; with one on node 1, none."""
    options = {"epochs": 2, "lr": SMALL_LR}
    folders = [tmp_path / "node0", tmp_path / "node1"]
    train("single", mnist, folders[0] / "out", **{**options, "epochs": 1})
    outputs, codes = two_nodes(folders, mnist, 1, resume=True, **options)
    assert codes == [0, 0] and [line[0] for line in epochs_of(outputs[0][0])] == ["2"]
    shutil.rmtree(folders[1])
    folders[0].rename(folders[1])
    outputs, codes = two_nodes(folders, mnist, 1, resume=True, **options)
    assert codes == [0, 0] and len(epochs_of(outputs[0][0])) == 2
    assert "warning: rank 0 lacks" in outputs[1][0] and str(folders[1]) in outputs[1][0]
