"""The data sets: lazy, whole batches, fetched with care, and the digits drawn here."""

import gzip
import hashlib
import http.server
import importlib
import pickle
import socket
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import EPOCH_LINE, ROOT, launch_command, run, run_ddp, write_mnist
from torch.utils.data import DataLoader

import data

QUICK = ("--epochs", 1, "--batch-size", 500, "--log-interval", 1000)


@pytest.fixture
def in_mnist_folder(tmp_path, monkeypatch):
    """The working directory, with a small MNIST below ./data; train_dataset as freshly imported."""
    write_mnist(tmp_path / "data", 100, 20)
    monkeypatch.chdir(tmp_path)
    for function in (data.choose_with_fetch, data.read_dataset, data.read_folder):
        function.cache_clear()
    return importlib.reload(data)


def test_importing_reads_and_writes_nothing(tmp_path):
    probe = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append((event, str(args[0]))) if event in
                 ("open", "socket.connect", "os.mkdir") else None)
import torch, numpy, torch.utils.data, torch.distributed
opened.clear()
import data, model
opened = [what for what in opened if not what[1].endswith((".py", ".pyc", "__pycache__"))
          and "__pycache__" not in what[1]]
assert not opened, opened
from data import train_dataset, test_dataset
assert not opened, opened
"""
    run(sys.executable, "-c", probe, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert not list(tmp_path.iterdir())


def test_items_and_batches(in_mnist_folder):
    train_dataset, test_dataset = in_mnist_folder.train_dataset, in_mnist_folder.test_dataset
    assert (len(train_dataset), len(test_dataset)) == (100, 20)
    image, label = train_dataset[3]
    assert image.shape == (1, 28, 28) and image.dtype == torch.float32 and type(label) is int
    images, labels = train_dataset[[3, 5]]
    assert images.shape == (2, 1, 28, 28) and labels.dtype == torch.int64
    assert torch.equal(images[0], image) and labels[0] == label
    assert train_dataset.tensors[0].dtype == torch.uint8
    expected = (train_dataset.tensors[0][3].double() / 255 - 0.1307) / 0.3081
    assert torch.allclose(image.double(), expected, atol=1e-6)
    with pytest.raises(IndexError):
        train_dataset[100]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader(in_mnist_folder, workers):
    images, labels = next(
        iter(DataLoader(in_mnist_folder.train_dataset, batch_size=64, num_workers=workers))
    )
    assert images.shape == (64, 1, 28, 28) and labels.shape == (64,)
    assert torch.equal(images[7], in_mnist_folder.train_dataset[7][0])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_anew(tmp_path, method):
    write_mnist(tmp_path / "data", 100, 20)
    script = tmp_path / "copied.py"
    script.write_text(f"""
from torch.utils.data import DataLoader
from data import train_dataset
if __name__ == "__main__":
    for used in (False, True):
        loader = DataLoader(train_dataset, batch_size=64, num_workers=1,
                            multiprocessing_context={method!r})
        print([len(labels) for images, labels in loader])
""")
    done = run(sys.executable, script, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.splitlines()[-2:] == ["[64, 36]"] * 2


def test_our_loader_fetches_a_batch_by_one_index(in_mnist_folder, monkeypatch):
    calls = []
    real = in_mnist_folder.Digits.__getitem__
    monkeypatch.setattr(
        in_mnist_folder.Digits,
        "__getitem__",
        lambda self, index: calls.append(index) or real(self, index),
    )
    loader = in_mnist_folder.make_loader(
        in_mnist_folder.train_dataset, 64, range(100), torch.device("cpu")
    )
    assert len(loader) == 2 and [len(labels) for _, labels in loader] == [64, 36]
    assert calls == [list(range(64)), list(range(64, 100))]


def test_pickled_before_use_it_carries_no_data():
    assert len(pickle.dumps(data.Digits(train=True))) < 1000


@pytest.mark.parametrize(
    "shape", [(28, 28), (1, 28, 28), (2, 28, 28), (4, 1, 28, 27), (2, 3, 28, 28), (1, 784)]
)
def test_inputs_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(N, 1, 28, 28\)"):
        importlib.import_module("model").Net()(torch.zeros(shape))


def test_logits_and_loss():
    net = importlib.import_module("model").Net()
    inputs, labels = torch.randn(5, 1, 28, 28), torch.tensor([1, 2, 3, 4, 5])
    logits, loss = net(inputs), net(inputs, labels)
    assert logits.shape == (5, 10) and logits.min() < 0 and loss.dim() == 0
    expected = -torch.log_softmax(logits, 1)[range(5), labels].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_synthetic_digits_are_the_same_everywhere():
    images, labels = data.draw_digits(200, 5)
    assert images.shape == (200, 28, 28) and images.dtype == labels.dtype == np.uint8
    assert np.bincount(labels).tolist() == [20] * 10
    assert (
        hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:16] == "3ba0d9980a11508d"
    )
    assert not np.array_equal(images, data.draw_digits(200, 6)[0])


def test_auto_without_mnist_and_network_takes_the_synthetic_digits(tmp_path):
    """With a hundredth of the digits, to save time."""
    probe = tmp_path / "probe.py"
    probe.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import data
draw = data.draw_digits
data.draw_digits = lambda count, seed: draw(count // 100, seed)
script = sys.argv.pop(-1)
runpy.run_path(script, run_name="__main__")
""")
    options = ("--data-dir", tmp_path / "data", *QUICK)
    single, ddp = (ROOT / name for name in ("single_gpu_train.py", "ddp_train.py"))
    first = run(sys.executable, probe, *options, "--output-dir", tmp_path / "1", single)
    lines = first.stdout.splitlines()
    assert lines[0].startswith("warning: no MNIST") and "synthetic" in lines[0]
    assert ", synthetic (600 + 100 images)," in lines[1]
    assert EPOCH_LINE.findall(first.stdout)[0][1] == "synthetic"
    checkpoint = torch.load(tmp_path / "1" / "checkpoint.pth", weights_only=True)
    assert checkpoint["options"]["dataset"] == "synthetic"
    drawn = {path: path.stat().st_mtime_ns for path in (tmp_path / "data" / "synthetic").iterdir()}
    assert len(drawn) == 4
    second = run(*launch_command(2), probe, *options, "--output-dir", tmp_path / "2", ddp)
    assert second.stdout.count("warning: no MNIST") == 1
    assert EPOCH_LINE.findall(second.stdout)[0][1] == "synthetic"
    assert drawn == {path: path.stat().st_mtime_ns for path in drawn}  # drawn only once


@pytest.mark.parametrize("processes", [1, 2])
def test_mnist_insists(tmp_path, processes):
    options = (
        "--data-dir",
        tmp_path / "data",
        "--dataset",
        "mnist",
        "--output-dir",
        tmp_path / "out",
    )
    done = (
        run("single_gpu_train.py", *options, code=1)
        if processes == 1
        else run_ddp(processes, *options, code=1)
    )
    (error,) = (line for line in done.stderr.splitlines() if "error: " in line and "MNIST" in line)
    assert "train-images-idx3-ubyte is missing" in error and "--dataset synthetic" in error
    assert not (tmp_path / "out").exists() and not done.stdout


DAMAGES = {
    "missing": (lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(), "t10k-labels-idx1-ubyte"),
    "empty": (lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(b""), "train-images-idx3"),
    "truncated": (
        lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(
            (raw / "train-images-idx3-ubyte").read_bytes()[:-1]
        ),
        "train-images-idx3-ubyte",
    ),
    "longer": (
        lambda raw: (raw / "train-labels-idx1-ubyte").write_bytes(
            (raw / "train-labels-idx1-ubyte").read_bytes() + b"0"
        ),
        "train-labels-idx1-ubyte",
    ),
    "labels for images": (
        lambda raw: swap(raw / "train-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"),
        "train-images-idx3-ubyte",
    ),
    "train for test": (
        lambda raw: swap(raw / "train-images-idx3-ubyte", raw / "t10k-images-idx3-ubyte"),
        "do not fit",
    ),
    "a folder": (
        lambda raw: (
            (raw / "train-images-idx3-ubyte").unlink(),
            (raw / "train-images-idx3-ubyte").mkdir(),
        ),
        "train-images-idx3-ubyte",
    ),
}


def swap(one, other):
    one.rename(one.with_suffix(".swap"))
    other.rename(one)
    one.with_suffix(".swap").rename(other)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(tmp_path, damage):
    raw = write_mnist(tmp_path, 30, 10) / "MNIST" / "raw"
    assert data.fetch("mnist", tmp_path) == ""
    data.read_folder.cache_clear()
    damage_it, name = DAMAGES[damage]
    damage_it(raw)
    problem = data.fetch("mnist", tmp_path)
    assert name in problem and "\n" not in problem and "fetching it failed" in problem
    data.read_folder.cache_clear()


class Mirror(http.server.ThreadingHTTPServer):
    """An HTTP server on loopback in the role of MNIST's mirrors; `behaviour` says how it fails."""

    daemon_threads = True

    def __init__(self, files, behaviour="good"):
        self.files, self.behaviour, self.requests = files, behaviour, []
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/"


class MirrorHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, name = self.server, self.path.strip("/")
        server.requests.append(name)
        if server.behaviour == "refuses":
            return self.send_error(403)
        if server.behaviour == "silent":
            threading.Event().wait(30)
            return None
        content = server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(
            content[: len(content) // 2] if server.behaviour == "breaks off" else content
        )
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def mirrors(tmp_path, monkeypatch):
    """Make mirrors of a small MNIST that torchvision downloads from; the time limit is 1 s here."""
    datasets = pytest.importorskip("torchvision.datasets")
    raw = write_mnist(tmp_path / "origin", 30, 10) / "MNIST" / "raw"
    files = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in sorted(raw.iterdir())}
    monkeypatch.setattr(
        datasets.MNIST,
        "resources",
        [(name, hashlib.md5(content).hexdigest()) for name, content in files.items()],
    )
    real = socket.setdefaulttimeout
    monkeypatch.setattr(socket, "setdefaulttimeout", lambda limit: real(limit and 1))
    servers = []

    def start(*behaviours):
        servers.extend(Mirror(files, behaviour) for behaviour in behaviours)
        monkeypatch.setattr(datasets.MNIST, "mirrors", [server.url for server in servers])
        return servers

    yield start
    for server in servers:
        server.shutdown()


@pytest.mark.parametrize("behaviour", ["refuses", "silent", "breaks off"])
def test_the_next_mirror_is_tried(mirrors, tmp_path, behaviour):
    bad, good = mirrors(behaviour, "good")
    assert data.fetch("mnist", tmp_path / "new") == ""
    assert set(good.requests) == set(good.files)
    assert len(data.load_datasets("mnist", tmp_path / "new")[0]) == 30
    assert sorted(path.name for path in (tmp_path / "new" / "MNIST" / "raw").iterdir()) == sorted(
        data.FILES
    )  # nothing is left over


@pytest.mark.parametrize("behaviour", ["refuses", "silent", "breaks off"])
def test_without_a_good_mirror_the_reason_is_told(mirrors, tmp_path, behaviour):
    mirrors(behaviour)
    problem = data.fetch("auto", tmp_path / "new")
    assert "fetching it failed" in problem and "\n" not in problem
    assert not list((tmp_path / "new" / "MNIST" / "raw").iterdir())
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_repaired_from_the_network(mirrors, tmp_path, damage):
    mirrors("good")
    raw = write_mnist(tmp_path / "data", 30, 10) / "MNIST" / "raw"
    DAMAGES[damage][0](raw)
    if damage == "a folder":
        assert "Is a directory" in data.fetch("mnist", tmp_path / "data")  # not ours to remove
    else:
        assert data.fetch("mnist", tmp_path / "data") == ""


def test_an_interrupted_download_is_not_built_upon(mirrors, tmp_path):
    mirrors("good")
    part = tmp_path / "data" / "MNIST" / "raw" / "part"
    part.mkdir(parents=True)
    (part / "train-images-idx3-ubyte.gz").write_bytes(b"half")
    (part / "train-images-idx3-ubyte").write_bytes(b"half")
    assert data.fetch("mnist", tmp_path / "data") == ""
    assert not part.exists()


def test_several_jobs_that_fetch_into_one_folder_take_turns(mirrors, tmp_path):
    (server,) = mirrors("good")
    threads = [
        threading.Thread(target=data.fetch, args=("mnist", tmp_path / "data")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    once = [server.requests.count(name) for name in server.files]
    assert len(set(once)) == 1 and once[0] <= 2  # torchvision asks for redirects first
    assert data.what_is_wrong(tmp_path / "data" / "MNIST" / "raw") == ""


def test_each_file_is_fetched_once_per_node(mirrors, tmp_path):
    """Three processes of one node need the data: local rank 0 fetches, the others wait."""
    (server,) = mirrors("good")
    from torchvision.datasets import MNIST

    probe = tmp_path / "probe.py"
    probe.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from torchvision.datasets import MNIST
MNIST.mirrors, MNIST.resources = {[server.url]!r}, {MNIST.resources!r}
runpy.run_path({str(ROOT / "ddp_train.py")!r}, run_name="__main__")
""")
    command = (*launch_command(3), probe, "--data-dir", tmp_path / "new", *QUICK)
    done = run(*command, "--output-dir", tmp_path / "out")
    assert "mnist (30 + 10 images)" in done.stdout
    once = [server.requests.count(name) for name in server.files]
    assert len(set(once)) == 1 and once[0] <= 2  # torchvision asks for redirects first


def test_a_data_dir_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    problem = data.fetch("auto", tmp_path / "file")
    assert "\n" not in problem and str(tmp_path / "file") in problem
    train_set, _ = data.load_datasets("auto", tmp_path / "file", problem)
    assert len(train_set) == 60000
    assert "not kept" in capsys.readouterr().out
