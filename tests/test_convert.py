"""The conversion example: an ordinary training, and the same with one process per GPU.

Both are run as a reader would run them, on a small folder of pictures. The number of pictures for
validation is a multiple of neither 2 nor 3, and the network has BatchNorm, whose statistics differ
by rank: what the ranks report must nevertheless be the loss and accuracy of the saved network.
"""

import difflib
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, by_hand, launch_command, run, start
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision import datasets, models, transforms

FOLDER = ROOT / "convert"
TRAIN_COUNT, VAL_COUNT, CLASSES, EPOCHS = 24, 13, 3, 2
LINE = re.compile(
    r"epoch (\d+)/\d+: train loss (\d+\.\d{4}), val loss (\d+\.\d{4}), accuracy (\d+\.\d\d)%"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with train/ and val/, whose classes are brighter in red, green or blue."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.RandomState(0)
    for half, count in (("train", TRAIN_COUNT), ("val", VAL_COUNT)):
        for number in range(count):
            label = number % CLASSES
            pixels = rng.randint(0, 120, (32, 32, 3))
            pixels[..., label] += 60
            path = folder / half / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return folder


def train(script, pictures, folder, *options, processes=None, module=None):
    """Run a script of the example; return the lines that it printed."""
    words = ["--data-dir", pictures, "--output-dir", folder, "--image-size", "32"]
    words += ["--batch-size", "4", "--epochs", EPOCHS, *options]
    if module:
        launcher = launch_command(processes, module=module)
        return run(*launcher, FOLDER / script, *words, timeout=240).stdout.splitlines()
    ranks = [words] * (processes or 1)
    outputs, codes = by_hand(ranks, FOLDER / script, 240, ddp=bool(processes))
    assert not any(codes), outputs
    return [line for out, _ in outputs for line in out.splitlines()]


def curves(folder):
    """The curves of a run, {name: [value of each epoch]}; the run wrote them once."""
    assert len(list(folder.glob("events.*"))) == 1, "one process alone writes the curves"
    events = EventAccumulator(str(folder)).Reload()
    result = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        assert [point.step for point in points] == list(range(1, EPOCHS + 1))
        result[name] = [point.value for point in points]
    return result


def evaluate(weights, pictures):
    """Mean loss and accuracy of the saved network, in one process and one batch."""
    net = models.resnet18(num_classes=CLASSES)
    net.load_state_dict(weights)
    net.eval()
    val_set = datasets.ImageFolder(str(pictures / "val"), transforms.ToTensor())
    assert len(val_set) == VAL_COUNT
    images, labels = zip(*val_set)
    labels = torch.tensor(labels)
    with torch.no_grad():
        logits = net(torch.stack(images))
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).double().mean().item()


def check(folder, lines, pictures):
    """A run's lines, curves and saved network belong together; return the network's weights."""
    matches = [LINE.fullmatch(line) for line in lines]
    assert len(lines) == EPOCHS and all(matches), lines  # only rank 0 prints
    assert [int(match[1]) for match in matches] == list(range(1, EPOCHS + 1))
    values = curves(folder)
    for match, *row in zip(matches, *(values[name] for name in ("loss/train", "loss/val"))):
        assert [float(match[2]), float(match[3])] == pytest.approx(row, abs=1e-4)

    assert sorted(path.suffix for path in folder.iterdir() if "events" not in path.name) == [".pth"]
    weights = torch.load(str(folder / "best.pth"), weights_only=True)
    assert not any(name.startswith("module.") for name in weights)
    assert all(value.device.type == "cpu" and value.is_contiguous() for value in weights.values())
    loss, accuracy = evaluate(weights, pictures)
    best = values["accuracy/val"].index(max(values["accuracy/val"]))
    assert values["loss/val"][best] == pytest.approx(loss, rel=1e-5)
    assert values["accuracy/val"][best] == pytest.approx(accuracy, rel=1e-6)
    return weights


def check_alone(pictures, folder, *options):
    """Without a launcher the converted script gives what the ordinary one gives."""
    runs = []
    for script in ("train.py", "train_ddp.py"):
        output = folder / script
        lines = train(script, pictures, output, *options)
        runs.append((lines, curves(output), check(output, lines, pictures)))
    (lines, values, weights), (ddp_lines, ddp_values, ddp_weights) = runs
    assert ddp_lines == lines
    assert ddp_values == values
    assert list(ddp_weights) == list(weights)
    assert all(torch.equal(ddp_weights[name], weights[name]) for name in weights)


def test_few_lines_are_added():
    ordinary, converted = (
        re.sub(r'\A""".*?"""\n', "", (FOLDER / script).read_text(encoding="utf-8"), flags=re.S)
        for script in ("train.py", "train_ddp.py")
    )
    lines = difflib.ndiff(ordinary.splitlines(), converted.splitlines())
    added = [line for line in lines if line.startswith("+ ")]
    assert 20 < len(added) <= 34, "\n".join(added)
    # Readers copy the files: nothing of the repository may be needed.
    for name in ("model", "data", "harness", "synthetic_digits"):
        assert not re.search(rf"^\s*(import|from) {name}\b", ordinary + converted, flags=re.M)


def test_one_process_gives_what_the_ordinary_script_gives(pictures, tmp_path):
    check_alone(pictures, tmp_path, "--workers", "0")


def test_two_processes_report_what_the_saved_network_gives(pictures, tmp_path):
    launcher = {"processes": 2, "module": "torch.distributed.launch"}
    lines = train("train_ddp.py", pictures, tmp_path, "--workers", "0", **launcher)
    check(tmp_path, lines, pictures)


@pytest.mark.slow
def test_three_processes_with_workers(pictures, tmp_path):
    launcher = {"processes": 3, "module": "torch.distributed.run"}
    lines = train("train_ddp.py", pictures, tmp_path, "--workers", "1", **launcher)
    check(tmp_path, lines, pictures)


@pytest.mark.slow
def test_one_process_with_workers(pictures, tmp_path):
    """Those of the converted script start from a clean process; they draw the same numbers."""
    check_alone(pictures, tmp_path, "--workers", "2", "--seed", "7", "--lr", "0.003")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_worker_is_left_when_the_training_is_killed(pictures, tmp_path):
    words = ["--data-dir", pictures, "--output-dir", tmp_path, "--image-size", "32"]
    words += ["--batch-size", "2", "--epochs", "99", "--workers", "2"]
    mark = f"THIS_TEST={tmp_path}".encode()

    def running():
        """The names of the processes, also of those that the killed one has left behind."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                found += [(path.parent / "comm").read_text()] if mark in path.read_bytes() else []
        return found

    def wait(condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, running()
            time.sleep(0.1)

    job = start([sys.executable, FOLDER / "train_ddp.py", *words], THIS_TEST=str(tmp_path))
    wait(lambda: running().count("pt_data_worker\n") == 2, 60)
    time.sleep(0.5)  # a worker asks whether its parent lives when it has started
    job.kill()
    job.communicate(timeout=30)  # which waits for the workers, as they have the pipes
    wait(lambda: not running(), 20)
