"""The data sets: lazy, complete batches, fetched with care, and the digits drawn here."""

import gzip
import hashlib
import http.server
import importlib
import os
import pickle
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    FEW_DIGITS, ROOT, epochs_of, error_of, probe, run, slow, train, write_mnist,
)  # fmt: skip
from torch.utils.data import DataLoader

import data
import synthetic_digits

QUICK = {"epochs": 1, "batch_size": 30, "log_interval": 1000}


@pytest.fixture
def in_mnist_folder(tmp_path, monkeypatch):
    """The working directory, with a small MNIST below ./data; data as freshly imported."""
    write_mnist(tmp_path / "data", 100, 20)
    monkeypatch.chdir(tmp_path)
    return importlib.reload(data)


def problem_with(data_dir):
    """Why there is no MNIST in data_dir, in one line; "" if there is."""
    try:
        data.load_datasets("mnist", data_dir)
        return ""
    except FileNotFoundError as error:
        assert "\n" not in str(error)
        return str(error)


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
    loader = DataLoader(in_mnist_folder.train_dataset, batch_size=64, num_workers=workers)
    images, labels = next(iter(loader))
    assert images.shape == (64, 1, 28, 28) and labels.shape == (64,)
    assert torch.equal(images[7], in_mnist_folder.train_dataset[7][0])


@pytest.mark.parametrize("method", ["spawn", slow("forkserver")])
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


def test_our_loader_takes_a_batch_by_one_index(in_mnist_folder, monkeypatch):
    calls, digits, real = [], in_mnist_folder.train_dataset, in_mnist_folder.Digits.__getitem__

    def noted(self, index):
        calls.append(index)
        return real(self, index)

    monkeypatch.setattr(in_mnist_folder.Digits, "__getitem__", noted)
    loader = DataLoader(digits, 64, collate_fn=in_mnist_folder.as_batch)
    assert len(loader) == 2 and [len(labels) for _, labels in loader] == [64, 36]
    assert calls == [list(range(64)), list(range(64, 100))]
    plain = next(iter(DataLoader(digits, 64)))
    assert all(torch.equal(*pair) for pair in zip(plain, next(iter(loader))))


def test_pickled_before_use_it_carries_no_data():
    assert len(pickle.dumps(data.Digits(train=True))) < 1000


def test_the_run_has_its_own_copy(tmp_path):
    """Another job may rewrite or truncate the files meanwhile."""
    raw = write_mnist(tmp_path, 30, 10) / "MNIST" / "raw"
    train_set, test_set = data.load_datasets("mnist", tmp_path)
    before = [part.clone() for part in train_set[list(range(30))]]
    for path in raw.iterdir():
        with open(path, "r+b") as file:
            file.write(bytes(2000))
            file.truncate(100)
    assert all(torch.equal(*pair) for pair in zip(before, train_set[list(range(30))]))
    assert len(test_set[list(range(10))][1]) == 10


def test_packed_files_are_used(tmp_path):
    raw = write_mnist(tmp_path, 30, 10) / "MNIST" / "raw"
    for path in list(raw.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert len(data.load_datasets("mnist", tmp_path)[0]) == 30
    (path,) = raw.glob("train-images*")
    path.write_bytes(path.read_bytes()[:-9])
    assert "train-images-idx3-ubyte.gz is cut off" in problem_with(tmp_path)
    path.write_bytes(b"no gzip")
    assert "not a gzip" in problem_with(tmp_path).lower()


def test_nothing_is_opened_for_writing_where_the_data_is_there(tmp_path, monkeypatch):
    """A folder that two users share, or a disk that cannot be written."""
    write_mnist(tmp_path, 30, 10)
    monkeypatch.setattr(data, "TemporaryDirectory", None)
    before = sorted(tmp_path.rglob("*"))
    data.load_datasets("auto", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_synthetic_digits_are_the_same_everywhere():
    images, labels = synthetic_digits.draw_digits(200, 5)
    assert images.shape == (200, 28, 28) and images.dtype == labels.dtype == np.uint8
    assert np.bincount(labels).tolist() == [20] * 10
    found = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert found.startswith("3ba0d9980a11508d")
    assert not np.array_equal(images, synthetic_digits.draw_digits(200, 6)[0])


@pytest.fixture
def few_digits(monkeypatch):
    """A hundredth of the synthetic digits, to save time; returns the list of the drawings."""
    draw, drawn = synthetic_digits.draw_digits, []

    def draw_few(count, seed):
        drawn.append(count)
        return draw(count // 100, seed)

    monkeypatch.setattr(synthetic_digits, "draw_digits", draw_few)
    return drawn


def test_synthetic_digits_are_drawn_once_and_again_when_damaged(few_digits, tmp_path):
    first = data.load_datasets("synthetic", tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    again = data.load_datasets("synthetic", tmp_path / "new")
    assert few_digits == [60000, 10000] and len(first[0]) == 600
    assert all(torch.equal(*pair) for pair in zip(first[1].tensors, again[1].tensors))
    file.write_bytes(file.read_bytes()[:1000])
    data.load_datasets("synthetic", tmp_path / "new")
    data.load_datasets("synthetic", tmp_path / "new")
    assert len(few_digits) == 4


def test_a_data_dir_that_cannot_be_written(few_digits, tmp_path, capsys):
    (tmp_path / "file").touch()
    train_set, _ = data.load_datasets("auto", tmp_path / "file")
    assert len(train_set) == 600 and train_set.name == "synthetic"
    warning = capsys.readouterr().out
    assert warning.startswith("warning: no MNIST") and str(tmp_path / "file") in warning


def test_auto_without_mnist_and_network_takes_the_synthetic_digits(tmp_path):
    script = probe(tmp_path / "probe.py", FEW_DIGITS)
    done = train("ddp", tmp_path / "data", tmp_path / "out", 0, script=script, processes=2, **QUICK)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("warning: no MNIST") and "synthetic" in lines[0]
    assert done.stdout.count("warning: no MNIST") == 1
    assert ", synthetic (600 + 100 images)," in lines[1]
    assert epochs_of(done.stdout)[0][1] == "synthetic"


def test_mnist_insists(tmp_path):
    done = train("ddp", tmp_path / "data", tmp_path / "out", 1, processes=2, dataset="mnist")
    error = error_of(done)
    assert "train-images-idx3-ubyte is missing" in error and "--dataset synthetic" in error
    assert not (tmp_path / "out").exists() and not done.stdout


DAMAGES = ["missing", "empty", "truncated", "longer", "labels for images", "train for test"]
DAMAGES += ["a folder"]


def damage_a_file(kind, raw):
    """Damage the images for training; returns what the complaint about it names."""
    path = raw / "train-images-idx3-ubyte"
    content = path.read_bytes()
    if " for " in kind:  # two files have changed places
        other = raw / ("train-labels-idx1-ubyte" if "labels" in kind else "t10k-images-idx3-ubyte")
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return "do not fit" if "test" in kind else path.name
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"empty": b"", "truncated": content[:-1], "longer": content + b"0"}[kind])
    return path.name


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(tmp_path, damage):
    raw = write_mnist(tmp_path, 30, 10) / "MNIST" / "raw"
    assert problem_with(tmp_path) == ""
    name, problem = damage_a_file(damage, raw), problem_with(tmp_path)
    assert name in problem and "downloading it failed" in problem and "--dataset syn" in problem


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
            return threading.Event().wait(30)
        content = server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        sent = len(content) // 2 if server.behaviour == "breaks off" else len(content)
        return self.wfile.write(content[:sent])

    def log_message(self, *args):
        pass


@pytest.fixture
def mirrors(tmp_path, monkeypatch):
    """Make mirrors of a small MNIST that torchvision downloads from; the time limit is 1 s here."""
    datasets = pytest.importorskip("torchvision.datasets")
    raw = write_mnist(tmp_path / "origin", 30, 10) / "MNIST" / "raw"
    files = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in sorted(raw.iterdir())}
    resources = [(name, hashlib.md5(content).hexdigest()) for name, content in files.items()]
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
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
    assert len(data.load_datasets("mnist", tmp_path / "new")[0]) == 30
    assert set(good.requests) == set(good.files)
    raw = tmp_path / "new" / "MNIST" / "raw"
    assert sorted(path.name for path in raw.iterdir()) == sorted(data.FILES)  # and nothing else
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("behaviour", ["refuses", "silent", "breaks off"])
def test_without_a_good_mirror_the_reason_is_told(mirrors, tmp_path, behaviour):
    mirrors(behaviour)
    assert "downloading it failed" in problem_with(tmp_path / "new")
    assert not list((tmp_path / "new" / "MNIST" / "raw").iterdir())
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_repaired_from_the_network(mirrors, tmp_path, damage):
    mirrors("good")
    damage_a_file(damage, write_mnist(tmp_path / "data", 30, 10) / "MNIST" / "raw")
    problem = problem_with(tmp_path / "data")
    assert problem == "" or damage == "a folder"  # which is not ours to remove


def test_files_are_moved_when_nobody_has_them_open(mirrors, tmp_path, monkeypatch):
    """Windows refuses to rename a file that is open or mapped."""
    mirrors("good")
    real = data.os.replace

    def replace(old, new):
        if sys.platform == "linux":
            assert str(old) not in Path("/proc/self/maps").read_text()
            held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
            assert str(old) not in held
        real(old, new)

    monkeypatch.setattr(data.os, "replace", replace)
    assert problem_with(tmp_path / "data") == ""


def test_several_jobs_that_fetch_into_one_folder(mirrors, tmp_path):
    mirrors("good")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(problem_with, [tmp_path / "data"] * 4, timeout=60)) == [""] * 4


def test_each_file_is_fetched_once_per_node(mirrors, tmp_path):
    """Three processes of one node need the data: local rank 0 fetches, the others wait."""
    (server,) = mirrors("good")
    from torchvision.datasets import MNIST

    code = f"""
from torchvision.datasets import MNIST
MNIST.mirrors, MNIST.resources = {[server.url]!r}, {MNIST.resources!r}
"""
    script = probe(tmp_path / "probe.py", code)
    quick = {**QUICK, "batch_size": 5}
    done = train("ddp", tmp_path / "new", tmp_path / "out", processes=3, script=script, **quick)
    assert "mnist (30 + 10 images)" in done.stdout
    once = [server.requests.count(name) for name in server.files]
    assert len(set(once)) == 1 and once[0] <= 2  # torchvision asks for redirects first


def test_a_world_of_one_counts_as_local_rank_0(mirrors, tmp_path, train_here, monkeypatch):
    mirrors("good")
    monkeypatch.setenv("LOCAL_RANK", "1")
    quick = {**QUICK, "batch_size": 5}
    assert "mnist (30 + 10" in train_here("ddp", tmp_path / "new", tmp_path / "out", **quick)
