"""The recipes of docs/: every diff applies to today's scripts, and the changed scripts run.

When the scripts have moved on, `python tests/test_recipes.py` writes the line numbers and the
context of the diffs again; where a changed line itself is another now, it names the recipe.
"""

import difflib
import io
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, checkpoint, copy_scripts, distance, double_precision, epochs_of, error_of, launch_command,
    options_of, run, scalars, start, weights, write_mnist,
)  # fmt: skip
from conftest import train as train_plain
from markdown import blocks, marked, read
from PIL import Image

import data
import model

DOCS = ["docs/recipes.md", "docs/zh-CN/recipes.md"]
OTHERS = ["docs/benchmarks.md", "docs/zh-CN/benchmarks.md"]  # where the hook is
RECIPES = {
    name: block.body
    for document in (DOCS[0], OTHERS[0])
    for name, block in marked(read(document), "recipe").items()
}
SCRIPT = {"fp16_dp": "data_parallel_train.py"}  # all others are for ddp_train.py
SINCE = {"fp16": (2, 3), "compile": (2, 1), "all": (2, 1), "fsdp": (2, 6), "ema": (2, 1)}
TRAINING = {"epochs": 2, "lr": 0.01, "batch_size": 24, "log_interval": 7}
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_x86 = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs Linux on x86"
)


def changed(name, folder):
    """The path of the script that the recipe makes; it and its modules lie in the folder then."""
    if VERSION < SINCE.get(name, (0,)):
        pytest.skip("needs PyTorch " + ".".join(map(str, SINCE[name])))
    patch(name, copy_scripts(folder))
    return folder / SCRIPT.get(name, "ddp_train.py")


def patch(name, folder, fuzz=0):
    if not shutil.which("patch"):
        pytest.skip("the program patch is not here")
    (folder / "recipe.diff").write_text(RECIPES[name], "utf-8")
    words = [f"--fuzz={fuzz}", "--no-backup-if-mismatch", "--force", "--input=recipe.diff"]
    done = run("patch", "-p1", *words, code=None, cwd=folder)
    assert done.returncode == 0, f"recipe {name}:\n{done.stdout}{done.stderr}"


def train(script, data_dir, out, code=0, **options):
    """Run a changed script, a DDP one on 2 processes."""
    own = {"processes": None if script.name in SCRIPT.values() else 2, **options}
    return train_plain("", data_dir, out, code, 200, script.parent, script=script, **own)


def is_learning(done, share=0.3):
    correct, count = map(int, epochs_of(done.stdout)[-1][4:])
    return correct > share * count


@pytest.fixture(scope="module")
def plain(mnist, tmp_path_factory):
    """What the unchanged training ends with; test_equal shows that DDP ends with the same."""
    folder = tmp_path_factory.mktemp("plain")
    train_plain("single", mnist, folder, **{**TRAINING, "batch_size": 48})
    return folder


# The text


def test_the_two_languages_correspond():
    texts = [read(name) for name in DOCS]
    for what in (r"^#+ ", r"^<!-- .* -->$", r"^\|"):
        one, other = ([m[0] for m in re.finditer(what, text, re.M)] for text in texts)
        assert one == other
    one, other = ([re.sub(r"# .*", "", block.body) for block in blocks(text)] for text in texts)
    assert one == other
    assert len(RECIPES) == 1 + len(blocks(texts[0], "diff")) == 19


MOST = {"fsdp": 60, "shared": 45}  # added lines, else 25


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name):
    added = re.findall(r"^\+(?!\+\+ )", RECIPES[name], re.M)
    assert len(added) <= MOST.get(name, 25)


@pytest.mark.parametrize("name", DOCS)
def test_every_recipe_is_a_paragraph_and_code(name):
    for section in re.split(r"^## ", read(name), flags=re.M)[1:]:
        title, text, *_ = section.split("\n\n")
        assert len(text) > 150, title
        assert len(blocks(section)) == 1, title


# The diffs


@pytest.mark.parametrize("name", RECIPES)
def test_a_diff_applies(name, tmp_path):
    folder = copy_scripts(tmp_path / "patched")
    patch(name, folder)
    files = re.findall(r"^\+\+\+ b/(.*)$", RECIPES[name], re.M)
    assert max(map(len, re.findall(r"^\+(.*)$", RECIPES[name], re.M))) <= 100
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert (text != (ROOT / path.name).read_text()) == (path.name in files)
        compile(text, str(path), "exec", dont_inherit=True)
    stripped = [re.sub(r"^@@.*$", "@@", text, flags=re.M) for text in (fresh(name), RECIPES[name])]
    assert stripped[0] == stripped[1], "run: python tests/test_recipes.py"
    if shutil.which("git"):
        run("git", "init", "-q", copy_scripts(tmp_path / "git"))
        run("git", "apply", folder / "recipe.diff", cwd=tmp_path / "git")
        for file in files:
            assert (tmp_path / "git" / file).read_text() == (folder / file).read_text()


def fresh(name):
    """The diff of a recipe with the line numbers and the context of today's scripts."""
    text = ""
    with tempfile.TemporaryDirectory() as folder:
        patch(name, copy_scripts(Path(folder)), fuzz=2)
        for file in re.findall(r"^\+\+\+ b/(.*)$", RECIPES[name], re.M):
            pair = [Path(base, file).read_text().splitlines(True) for base in (ROOT, folder)]
            text += "".join(difflib.unified_diff(*pair, f"a/{file}", f"b/{file}", n=1))
    return text


# Recipes that must not change results


@pytest.fixture(scope="module")
def exact(mnist, tmp_path_factory):
    """The same in double precision."""
    folder = tmp_path_factory.mktemp("exact")
    with double_precision():
        train_plain("ddp", mnist, folder, processes=2, **TRAINING)
    return folder


def doubled(script):
    """The script with float64 where it names float32."""
    script.write_text(script.read_text().replace("torch.float32", "torch.float64"))
    return script


def same_but_for_rounding(name, mnist, tmp_path, **options):
    """Double precision leaves nothing of it."""
    script = doubled(changed(name, tmp_path / "patched"))
    with double_precision():
        train_plain("single", mnist, tmp_path / "plain", epochs=1, batch_size=48)
        train(script, mnist, tmp_path / "out", epochs=1, batch_size=24, **options)
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "out")) < 1e-9


def test_accumulation_gives_the_weights_of_the_plain_run(mnist, tmp_path):
    """A batch of 24 is 4 pieces of 5 and one of 4."""
    same_but_for_rounding("accumulate", mnist, tmp_path, micro_batch=5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 12, 100])
def test_accumulation_with_other_pieces(mnist, tmp_path, micro_batch):
    same_but_for_rounding("accumulate", mnist, tmp_path, micro_batch=micro_batch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"micro_batch": 5}])
def test_fully_shard_gives_the_weights_of_the_plain_run(options, mnist, tmp_path):
    may_run_on_the_cpu("fsdp")
    same_but_for_rounding("fsdp", mnist, tmp_path, **options)


@pytest.mark.slow
def test_fully_shard_copies_no_weights(tmp_path):
    """What the recipe says: with unequal seeds each rank keeps its own share of its own network."""
    may_run_on_the_cpu("fsdp")
    path = tmp_path / "patchwork.py"
    path.write_text("""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
networks = []
for seed in range(2):
    torch.manual_seed(seed)
    networks.append(torch.nn.Linear(3, 2, bias=False))
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
own = fully_shard(networks[dist.get_rank()], mesh=mesh).weight.full_tensor()
for seed in range(2):
    torch.manual_seed(seed)
    assert own[seed].equal(torch.nn.Linear(3, 2, bias=False).weight[seed])
print("a patchwork")
dist.destroy_process_group()
""")
    assert run(*launch_command(2, "--use_env"), path).stdout.count("a patchwork") == 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_stream_gives_each_sample_once(processes, mnist, double, tmp_path):
    """The shares of 1,001 images end at different moments; the batches are those of one process."""
    script = changed("stream", tmp_path / "patched")
    text = script.read_text()
    copied = "            images = images.to("
    assert text.count(copied) == 1
    lines = ("print('seen', len(labels))", "images = images.double()")  # workers know no double
    more = "".join(f"{' ' * 12}{line}\n" for line in lines)
    script.write_text(text.replace(copied, more + copied))
    options = {"epochs": 2, "log_interval": 100}
    for count in {1, processes}:
        own = {"processes": count, "batch_size": 48 // count, **options}
        done = train(script, mnist, tmp_path / str(count), **own)
        assert sum(map(int, re.findall(r"seen (\d+)", done.stdout))) == 2 * 1001
    assert distance(weights(tmp_path / "1"), weights(tmp_path / str(processes))) < 1e-9


@pytest.mark.slow
def test_all_together_without_bf16_and_clipping_is_the_plain_run(mnist, tmp_path):
    may_run_on_the_cpu("compile")
    script = changed("all", tmp_path / "patched")
    text = script.read_text()
    assert text.count("torch.bfloat16)") == 1
    script.write_text(text.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)"))
    same_but_for_rounding("all", mnist, tmp_path, micro_batch=8, clip=1e9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "clip", "early", "sigterm", "wrong", "compile"])
def test_the_weights_are_those_of_the_plain_run(name, mnist, exact, double, tmp_path):
    may_run_on_the_cpu(name)
    options = {"clip": 1e9} if name == "clip" else {}
    script = changed(name, tmp_path / name)
    train(script, mnist, tmp_path / "out", **TRAINING, **options)
    assert distance(weights(exact), weights(tmp_path / "out")) < 1e-9


def may_run_on_the_cpu(name):
    if name in ("compile", "all") and not shutil.which("g++"):
        pytest.skip("torch.compile needs g++ on the CPU")
    if name == "fsdp" and VERSION < (2, 14):
        pytest.skip("gloo of older PyTorch adds gradients up where fully_shard asks for the mean")


@pytest.mark.slow
def test_fully_shard_resumes_with_another_number_of_processes(mnist, double, tmp_path):
    may_run_on_the_cpu("fsdp")
    script = doubled(changed("fsdp", tmp_path / "patched"))
    for epochs, processes in ((1, 2), (2, 3), (3, 1)):
        own = {"epochs": epochs, "resume": True}
        train_plain("single", mnist, tmp_path / "plain", batch_size=48, **own)
        own.update(processes=processes, batch_size=48 // processes)
        done = train(script, mnist, tmp_path / "out", **own)
        assert [line[0] for line in epochs_of(done.stdout)] == [str(epochs)]
        assert [path.name for path in (tmp_path / "out").glob("shards-*")] == [f"shards-{epochs}"]
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "out")) < 1e-9
    shard = next((tmp_path / "out" / "shards-3").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    done = train(script, mnist, tmp_path / "out", code=1, **{**own, "epochs": 4, "processes": 2})
    assert error_of(done) == f"error: {tmp_path / 'out'}: no complete shards of epoch 3"


@pytest.mark.slow
@needs_x86
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_gradients_in_shared_memory(processes, double, tmp_path):
    data_dir = write_mnist(tmp_path / "data", 61, 11)
    options = {"epochs": 2}
    train_plain("single", data_dir, tmp_path / "plain", batch_size=12, **options)
    script = changed("shared", tmp_path / "patched")
    own = {"batch_size": 12 // processes, "processes": processes, "script": script}
    train_plain("ddp", data_dir, tmp_path / "out", cwd=script.parent, **own, **options)
    limit = 1e-6  # as it averages in float32
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "out")) < limit
    end = time.monotonic() + 20  # another test may have one for a moment
    while list(Path("/dev/shm").glob("gradients-*")):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@needs_x86
def test_gradients_in_shared_memory_end_with_the_launcher(tmp_path):
    """Killed, it cannot end the rank that waits for a dead one any more."""
    data_dir = write_mnist(tmp_path / "data", 2001, 11)
    script = changed("shared", tmp_path / "patched")
    options = {"epochs": 100000, "batch_size": 2, "log_interval": 10}
    words = options_of(data_dir, tmp_path / "out", options)
    job = start([*launch_command(2), script, *words], cwd=script.parent)
    watchdog = threading.Timer(60, job.kill)  # where no line comes
    watchdog.start()
    ranks = next(children(job.pid) for line in job.stdout if " step 50/" in line)
    watchdog.cancel()
    os.kill(job.pid, signal.SIGKILL)
    os.kill(ranks[1], signal.SIGKILL)
    try:
        errors = job.communicate(timeout=30)[1]  # which waits for rank 0, as it has the pipes
    finally:
        if Path(f"/proc/{ranks[0]}").exists():
            os.kill(ranks[0], signal.SIGKILL)
    assert "the launcher is gone" in errors


@pytest.mark.slow
def test_gradients_in_shared_memory_refuse_what_they_cannot_do(mnist, tmp_path):
    script = changed("shared", tmp_path / "patched")
    options = {"script": script, "cwd": script.parent}
    done = train_plain("ddp", mnist, tmp_path / "out", 1, **options)
    assert "one Linux machine" in error_of(done)


# Recipes that change something


@pytest.mark.slow
@pytest.mark.parametrize("name, options, most", [
    ("bf16", {"bf16": True}, 0.1), ("fsdp", {"bf16": True}, 0.1), ("clip", {}, 2),
    ("all", {"micro_batch": 8, "clip": 1e9}, 0.1), ("fp16", {}, 0.05),
])  # fmt: skip
def test_what_is_switched_on_makes_a_difference(name, options, most, mnist, plain, tmp_path):
    may_run_on_the_cpu(name)
    script = changed(name, tmp_path / name)
    done = train(script, mnist, tmp_path / "out", **TRAINING, **options)
    assert 1e-5 < distance(weights(plain), weights(tmp_path / "out")) < most
    assert is_learning(done)


@pytest.mark.slow
def test_adamw_warms_up_and_resumes(mnist, tmp_path):
    script, out = changed("adamw", tmp_path / "patched"), tmp_path / "out"
    train(script, mnist, out, epochs=2, batch_size=16, log_interval=1)
    assert is_learning(train(script, mnist, out, epochs=3, batch_size=16, resume=True))
    rates = [rate for _, rate in scalars(out)["train/lr"]]
    top = rates.index(max(rates))
    assert 3 < top < 12 and rates[:top] == sorted(rates[:top])  # of 62 steps
    assert max(rates) == pytest.approx(0.001 * 32 / 64, rel=0.05)


@pytest.mark.slow
def test_the_average_of_the_weights_is_saved_and_resumed(mnist, tmp_path):
    script, out = changed("ema", tmp_path / "patched"), tmp_path / "out"
    for epochs in (1, 2):
        train(script, mnist, out, epochs=epochs, batch_size=50, lr=0.01, resume=True)
        saved, net = checkpoint(out), weights(out)
        assert saved["average"]["n_averaged"] == 10 * epochs  # 1,001 images in steps of 100
        assert all(net[name].equal(saved["average"][f"module.{name}"]) for name in net)
        assert 1e-5 < distance(saved["model"], net) < 1


@pytest.mark.slow
def test_autocast_in_forward_under_data_parallel(mnist, tmp_path):
    script = changed("fp16_dp", tmp_path / "patched")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":  # there the recipe's autocast only warns
        model = script.with_name("model.py")
        model.write_text(model.read_text().replace('autocast("cuda"', 'autocast("cpu"'))
    done = train(script, mnist, tmp_path / "out", device=device, **TRAINING)
    assert is_learning(done)
    train_plain("single", mnist, tmp_path / "plain", **TRAINING)
    assert 1e-5 < distance(weights(tmp_path / "plain"), weights(tmp_path / "out")) < 0.1


def test_threads_do_not_inherit_the_type_of_autocast():
    """Why autocast belongs inside forward under DataParallel, which calls it in threads."""
    product = []

    def multiply():
        product.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    with torch.autocast("cpu", torch.bfloat16):
        multiply()
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join(20)
    assert product == [torch.bfloat16, torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["syncbn", "own_model"])
def test_models_with_batch_norm(name, tmp_path):
    """The saved model predicts by itself what the ranks counted together."""
    data_dir = write_mnist(tmp_path / "data", 301, 51)
    script, out = changed(name, tmp_path / "patched"), tmp_path / "out"
    done = train(script, data_dir, out, epochs=3, batch_size=20)
    state = weights(out)
    if name == "own_model":
        from torchvision.models import resnet18

        resnet18(num_classes=10).load_state_dict(state)
    assert [key for key in state if key.endswith("running_mean")]
    net = "ResNet18" if name == "own_model" else "Net"
    code = f"""
import sys, torch
sys.path.insert(0, {str(script.parent)!r})
from data import load_datasets
from model import {net}
net = {net}()
net.load_state_dict(torch.load({str(out / "model.pth")!r}))
images, labels = load_datasets("mnist", {str(data_dir)!r})[1][list(range(51))]
print(int((net.eval()(images).argmax(1) == labels).sum()))
"""
    correct = int(run(sys.executable, "-c", code).stdout)
    counted, count = map(int, epochs_of(done.stdout)[-1][4:])
    assert count == 51 and correct == counted > 10


@pytest.mark.slow
def test_early_stopping_stops_all_ranks(mnist, tmp_path):
    script = changed("early", tmp_path / "patched")
    out = train(script, mnist, tmp_path / "out", epochs=40, batch_size=50).stdout
    correct = [int(line[4]) for line in epochs_of(out)]
    assert 4 <= len(correct) < 40
    assert max(correct[:-3]) == correct[-4] >= max(correct[-3:])
    last = f"no better for 3 epochs: the best had {max(correct)} correct predictions\n"
    assert out.endswith(last)


def children(pid):
    """{rank: pid} of the processes that a launcher has started."""
    ranks = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            found = re.search(r"\0RANK=(\d+)\0", "\0" + (path / "environ").read_text() + "\0")
        except (OSError, UnicodeDecodeError):
            continue
        if parent == pid and found:
            ranks[int(found[1])] = int(path.name)
    return ranks


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
@pytest.mark.parametrize("who, when", [("launcher", 2), ("rank 1", 2), ("rank 1", 1)])
def test_sigterm_saves_on_all_ranks_and_resume_is_exact(who, when, tmp_path):
    data_dir = write_mnist(tmp_path / "data", 2001, 11)
    options = {"epochs": 3, "lr": 0.001, "log_interval": 10, "batch_size": 2}
    train_plain("ddp", data_dir, tmp_path / "plain", processes=2, **options)
    script = changed("sigterm", tmp_path / "patched")
    words = options_of(data_dir, tmp_path / "out", options)
    job = start([*launch_command(2), script, *words], cwd=script.parent)
    try:
        for line in job.stdout:
            if line.startswith(f"epoch {when}/3 step 50/"):
                break
        os.kill(job.pid if who == "launcher" else children(job.pid)[1], signal.SIGTERM)
        out, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert errors.count("error: SIGTERM: resume with --resume") == 1 and "epoch 3/3" not in out
    assert job.returncode != 0
    saved = checkpoint(tmp_path / "out")
    assert saved["epoch"] == when - 1 and 50 <= saved["skip"] < 500
    train(script, data_dir, tmp_path / "out", resume=True, **options)
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "out")) < 1e-5
    assert checkpoint(tmp_path / "out")["epoch"] == 3


def write_folder(data_dir, target):
    """The images of a data set of write_mnist as PNG files, one folder per class."""
    halves = data.read_folder(Path(data_dir, "MNIST", "raw"))
    for half, (images, labels) in zip(("train", "test"), halves):
        for number, (image, label) in enumerate(zip(images, labels)):
            folder = target / half / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    return target


@pytest.mark.slow
def test_an_image_folder(tmp_path):
    data_dir = write_mnist(tmp_path / "data", 301, 51)
    images = write_folder(data_dir, tmp_path / "images")
    script = changed("folder", tmp_path / "patched")
    options = {"epochs": 3, "batch_size": 20}
    done = train(script, images, tmp_path / "out", dataset="folder", **options)
    assert "folder (301 + 51 images)" in done.stdout and is_learning(done)
    assert [line[1] for line in epochs_of(done.stdout)] == ["folder"] * 3
    assert epochs_of(done.stdout)[0][5] == "51"
    assert sorted(path.name for path in images.iterdir()) == ["test", "train"]
    # The workers must also carry the data set of the plain script.
    train(script, data_dir, tmp_path / "workers", **options)
    train_plain("ddp", data_dir, tmp_path / "a", processes=2, **options)
    assert distance(weights(tmp_path / "a"), weights(tmp_path / "workers")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("images", [513, 1])
def test_fully_shard_evaluates_every_image_once(images, tmp_path):
    """257 and 256 images: rank 0 has a third batch, and the forward passes must match; 1 and 0."""
    may_run_on_the_cpu("fsdp")
    data_dir = write_mnist(tmp_path / "data", 150, images)
    script = changed("fsdp", tmp_path / "patched")
    done = train(script, data_dir, tmp_path / "out", epochs=2, batch_size=50)
    assert [line[5] for line in epochs_of(done.stdout)] == [str(images)] * 2


def predictions(folder, data_dir, which):
    """(labels, shares of the ten digits) that the saved model of a run gives for test images."""
    net = model.Net()
    net.load_state_dict(weights(folder))
    images, labels = data.load_datasets("mnist", data_dir)[1][list(which)]
    with torch.no_grad():
        return labels, net.eval()(images).softmax(1)


def images_of(folder):
    """{tag: the last image of that name in TensorBoard's file, as a uint8 array}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    found = {tag: events.Images(tag)[-1].encoded_image_string for tag in events.Tags()["images"]}
    return {tag: np.array(Image.open(io.BytesIO(png))) for tag, png in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_confusion_matrix_counts_all_ranks(processes, mnist, tmp_path):
    """Of 201 images one rank has one more than the others."""
    script, out = changed("confusion", tmp_path / "patched"), tmp_path / "out"
    options = {"epochs": 1, "batch_size": 100, "processes": processes}
    done = train(script, mnist, out, **options)
    labels, shares = predictions(out, mnist, range(201))
    matrix = torch.zeros(10, 10)
    matrix.index_put_((labels, shares.argmax(1)), torch.ones(201), accumulate=True)
    assert int(matrix.trace()) == int(epochs_of(done.stdout)[0][4]) > 20
    picture = torch.from_numpy(images_of(out)["test/confusion"]).reshape(200, 200, -1)
    picture = picture[10::20, 10::20, 0]
    assert (picture - 255 * matrix / matrix.sum(1, keepdim=True)).abs().max() <= 1


@pytest.mark.slow
def test_a_confusion_matrix_of_which_a_rank_has_nothing(tmp_path):
    data_dir = write_mnist(tmp_path / "data", 100, 1)
    script = changed("confusion", tmp_path / "patched")
    train(script, data_dir, tmp_path / "out", epochs=1, batch_size=50)
    picture = images_of(tmp_path / "out")["test/confusion"].reshape(200, 200, -1)[..., 0]
    assert (picture > 0).sum() == 20 * 20


@pytest.mark.slow
def test_wrong_images_are_shown(mnist, tmp_path):
    script = changed("wrong", tmp_path / "patched")
    train(script, mnist, tmp_path / "out", epochs=1, batch_size=250, lr=0.01)
    tags = images_of(tmp_path / "out")
    labels, shares = predictions(tmp_path / "out", mnist, range(0, 201, 2))  # those of rank 0
    wrong = [(int(a), int(b)) for a, b in zip(labels, shares.argmax(1)) if a != b][:100]
    expected = {f"wrong/{number}_{label}_as_{guess}" for number, (label, guess) in enumerate(wrong)}
    assert wrong and set(tags) == expected


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """In a real kernel, whose directory is empty before."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    (block,) = blocks(read(DOCS[0]), "jupyter")
    cells = re.split(r"^# In \[\d\]:\n", block.body, flags=re.M)[1:]
    torchrun = [cell for cell in cells if cell.startswith("!torchrun")]
    assert len(cells) == 3 and torchrun == [cells[1]]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def execute(cells):
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=90, resources=resources).execute()
        return [str(cell.outputs) for cell in notebook.cells]

    _, printed, value = execute(cells)
    assert "2 processes, loss 0.00" in printed
    assert re.search(r"tensor\(\[\[(1\.0|0\.99)", value)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="the training failed"):
        execute([cells[0] + "\n1 / 0", cells[1]])


def test_inference_from_model_pth(mnist, plain, tmp_path):
    (code,) = blocks(read(DOCS[0]), "python")
    (tmp_path / "predict.py").write_text(code.body, "utf-8")
    folder = write_folder(mnist, tmp_path / "images") / "test"
    labels, shares = predictions(plain, mnist, range(30))
    files = [folder / str(int(label)) / f"{number}.png" for number, label in enumerate(labels)]
    command = (sys.executable, tmp_path / "predict.py", plain / "model.pth", *files)
    lines = run(*command, PYTHONPATH=str(ROOT)).stdout.splitlines()
    found = [re.fullmatch(r"(.*): (\d) \((\d+\.\d) %\)", line).groups() for line in lines]
    shares, guesses = shares.max(1)
    assert [name for name, _, _ in found] == [str(file) for file in files]
    assert [int(guess) for _, guess, _ in found] == guesses.tolist()
    percents = [float(share) for _, _, share in found]
    assert percents == pytest.approx((100 * shares).tolist(), abs=0.06)
    assert (guesses == labels).sum() > 15


# On gpus


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "shared"])
def test_a_recipe_runs_on_two_gpus(name, mnist, tmp_path):
    script = changed(name, tmp_path / "patched")
    data_dir, options = mnist, {"bf16": {"bf16": True}, "folder": {"dataset": "folder"}}
    if name == "folder":
        data_dir = write_folder(mnist, tmp_path / "images")
    own = {**TRAINING, **options.get(name, {})}
    done = train(script, data_dir, tmp_path / "out", device="cuda", **own)
    assert is_learning(done) and epochs_of(done.stdout)[0][5] == "201"


def main():
    """Write the diffs of both languages again, for today's scripts."""
    for name in (*DOCS, *OTHERS):
        text = read(name)
        for recipe, block in marked(text, "recipe").items():
            text = text.replace(block.body, fresh(recipe))
        (ROOT / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
