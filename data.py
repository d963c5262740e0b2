"""MNIST, or digits drawn here, as data sets that hand out whole batches.

    from data import train_dataset, test_dataset

Importing this module touches neither disk nor network: the data is fetched and read at first use.
"""
import itertools
import os
import shutil
import socket
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from model import first_problem, stop

MEAN, STD = 0.1307, 0.3081  # of all pixels of MNIST's 60,000 training images, as a share of 255
FILES = {"train-images-idx3-ubyte": 3, "train-labels-idx1-ubyte": 1,  # name: dimensions
         "t10k-images-idx3-ubyte": 3, "t10k-labels-idx1-ubyte": 1}


class Digits(Dataset):
    """The training or the test images, kept as bytes and turned into floats batch by batch.

    An int as index gives (float image (1, 28, 28), int label); a list of B indices gives a whole
    batch at once: (float images (B, 1, 28, 28), int64 labels (B,)). The floats have mean 0 and
    standard deviation 1 over MNIST. `dataset` is "mnist", "synthetic" or "auto" (MNIST if it is
    there or can be fetched). It is read at the first use, and fetched before that unless `ready`;
    see load_datasets for what that can end in.
    """

    def __init__(self, train, dataset="auto", data_dir="data", ready=False):
        self.train, self.dataset, self.data_dir, self.ready = train, dataset, str(data_dir), ready

    @cached_property
    def tensors(self):
        """(uint8 images (N, 1, 28, 28), int64 labels (N,)), read when first asked for."""
        if not self.ready:
            self.dataset = choose_with_fetch(self.dataset, self.data_dir)
        images, labels = read_dataset(self.dataset, self.data_dir)[0 if self.train else 1]
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()

    def __len__(self):
        return len(self.tensors[1])

    def __getitem__(self, index):
        images, labels = (tensor[index] for tensor in self.tensors)
        return (images / 255 - MEAN) / STD, labels if labels.dim() else int(labels)

    def __getitems__(self, indices):
        """What DataLoader(batch_size=B) asks for in PyTorch 2: B samples, here from one fetch."""
        images, labels = self[indices]
        return list(zip(images, labels.tolist()))


train_dataset = Digits(train=True)
test_dataset = Digits(train=False)


def load_datasets(dataset, data_dir, problem=None):
    """The training and the test set as Digits, read into memory.

    dataset: "auto", "mnist" or "synthetic"; problem: what fetch(dataset, data_dir) returned, None
    to call it here. "auto" with a problem gives the synthetic digits and prints a warning; "mnist"
    with a problem stop()s. In a process group a problem of one rank is a problem of all.
    """
    problem = fetch(dataset, data_dir) if problem is None else problem
    dataset = choose(dataset, first_problem(problem))
    pair = tuple(Digits(train, dataset, data_dir, ready=True) for train in (True, False))
    for digits in pair:
        len(digits)  # reads the files now, not in the first step
    return pair


def make_loader(digits, batch_size, sampler, device):
    """A DataLoader over `digits` in the sampler's order that fetches each batch by one index.

    For a GPU the batches lie in pinned memory, so that .to(device, non_blocking=True) can overlap.
    """
    batches = BatchSampler(sampler, batch_size, drop_last=False)
    return DataLoader(digits, batch_size=None, sampler=batches, pin_memory=device.type == "cuda")


def choose(dataset, problem):
    """The name of the data set to use, "mnist" or "synthetic"; see load_datasets."""
    if problem and dataset == "mnist":
        stop(f"no MNIST: {problem}, or use --dataset synthetic")
    if problem:
        print(f"warning: no MNIST ({problem}): using the synthetic digits instead", flush=True)
    return "synthetic" if problem or dataset == "synthetic" else "mnist"


@lru_cache(maxsize=None)
def choose_with_fetch(dataset, data_dir):
    """choose(), once for the two halves of a data set."""
    return choose(dataset, fetch(dataset, data_dir))


def fetch(dataset, data_dir, download=True):
    """Make sure that MNIST lies whole below data_dir (torchvision's layout), downloading it if not.

    Returns "" when it does, and for "synthetic"; otherwise one line that says why not. It never
    raises. download=False only looks. Processes that fetch into the same folder take turns.
    """
    folder = Path(data_dir, "MNIST", "raw")
    problem = "" if dataset == "synthetic" else what_is_wrong(folder)
    if problem and download:
        try:
            with locked(data_dir):
                problem = what_is_wrong(folder)  # another process may have fetched it meanwhile
                if problem:
                    download_mnist(folder)
                    problem = what_is_wrong(folder)
        except Exception as error:  # whatever a network, a mirror or a disk can do
            reason = str(error).split("\n")[0] or type(error).__name__
            problem += f"; fetching it failed: {reason}; copy the four files there by hand"
    return problem


def download_mnist(folder):
    """Download MNIST through torchvision and move it to `folder` when it is there as a whole.

    The mirrors are tried in turn; each answer may take 10 s. Raises what the last mirror raised.
    """
    from torchvision.datasets import MNIST  # a slow import: only the process that downloads pays
    from torchvision.datasets.utils import download_and_extract_archive
    part = folder / "part"
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        for mirror in MNIST.mirrors:
            shutil.rmtree(part, ignore_errors=True)  # what an interrupted download left
            try:
                for name, md5 in MNIST.resources:
                    download_and_extract_archive(mirror + name, str(part), md5=md5)
                break
            except Exception as error:
                failure = error
        else:
            raise failure
        read_folder(part)
        for name in FILES:
            os.replace(part / name, folder / name)
    finally:
        socket.setdefaulttimeout(timeout)
        shutil.rmtree(part, ignore_errors=True)


def what_is_wrong(folder):
    """"" when the four files in `folder` are whole and fit together, else one line about it."""
    try:
        read_folder(folder)
        return ""
    except (OSError, ValueError) as error:
        return str(error)


@contextmanager
def locked(folder):
    """Only one process of this machine at a time; if it dies, the system opens the lock."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, ".lock"), "w") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # Windows and some network disks have no such lock: the last writer wins there
        yield


@lru_cache(maxsize=None)
def read_dataset(dataset, data_dir):
    """((training images, labels), (test images, labels)) of "mnist" or "synthetic", as uint8."""
    if dataset == "mnist":
        return read_folder(Path(data_dir, "MNIST", "raw"))
    folder = Path(data_dir, "synthetic")
    try:
        with locked(data_dir):
            if what_is_wrong(folder):
                folder.mkdir(exist_ok=True)
                for half, (count, seed) in zip(("train", "t10k"), ((60000, 0), (10000, 1))):
                    images, labels = draw_digits(count, seed)
                    write_idx(folder / f"{half}-images-idx3-ubyte", images)
                    write_idx(folder / f"{half}-labels-idx1-ubyte", labels)
        return read_folder(folder)
    except OSError as error:
        print(f"warning: the synthetic digits are not kept ({error})", flush=True)
        return draw_digits(60000, 0), draw_digits(10000, 1)


@lru_cache(maxsize=None)
def read_folder(folder):
    """The four IDX files as ((training images, labels), (test images, labels)), all uint8.

    Raises OSError or ValueError, which name what is missing, not whole or does not fit.
    """
    arrays = [read_idx(Path(folder, name), dims) for name, dims in FILES.items()]
    halves = tuple(zip(arrays[::2], arrays[1::2]))
    for images, labels in halves:
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise ValueError(f"{folder}: {images.shape} images do not fit {len(labels)} labels")
    if (len(arrays[0]), len(arrays[2])) == (10000, 60000):
        raise ValueError(f"{folder}: the training and the test files are swapped")
    return halves


def read_idx(path, dims):
    """A file of bytes in IDX format as a uint8 array of so many dimensions.

    The format, from the page of MNIST's authors: the bytes 0, 0, 8 (unsigned byte) and the number
    of dimensions; the size of each as big-endian int32; the data. Raises OSError or ValueError.
    The file is mapped, not copied: all processes of a node share the memory of its pages.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    raw = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    start = 4 + 4 * dims
    shape = raw[4:start].view(">i4").tolist() if len(raw) >= start else [-1]
    if raw[:4].tolist() != [0, 0, 8, dims] or len(raw) != start + np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is cut off or not the IDX file that its name says")
    return raw[start:].reshape(shape)


def write_idx(path, array):
    """Write a uint8 array as an IDX file, whole or not at all."""
    part = Path(f"{path}.part")
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    part.write_bytes(head + array.tobytes())
    os.replace(part, path)



# Three ways to write each digit, parted by "|"; "/" lifts the pen. "62" is the point x = 6, y = 2
# of a field 6 wide and 9 high, y downwards. The pen rounds the corners off the path.
STROKES = (
    "40 20 02 07 29 49 67 62 40 20|51 30 11 03 07 29 49 66 63 40 11|20 11 04 08 29 59 66 62 40 10",
    "30 33 36 39|30 33 36 39|12 30 30 33 36 39",
    "02 10 50 63 46 09 09 39 69|02 20 50 63 46 19 08 06 27 48 69|02 10 60 62 37 09 07 37 59 69",
    "01 20 50 62 44 24 54 67 49 19 07|02 10 40 63 34 34 66 59 29 08|00 60 60 34 34 65 68 39 08",
    "10 05 05 35 65/50 53 56 59|00 05 35 54/60 54 49|40 05 05 65/40 43 46 49",
    "10 14 14 43 66 59 29 08/10 30 60|60 10 10 04 33 65 67 49 08|60 30 11 13 45 57 49 19 08",
    "50 20 04 08 29 59 66 45 15 07|30 12 05 08 29 59 57 35 16 08|10 04 07 19 49 67 55 36 19",
    "01 00 60 60 33 29|00 60 60 44 29/15 35 55|03 10 30 61 60 44 39",
    "61 40 10 02 34 66 59 29 07 25 53 61 50|30 10 02 33 56 68 39 19 07 35 52 50 30"
    "|34 03 10 40 63 34 07 09 39 58 56 34",
    "61 40 10 03 15 45 61 61 65 59|51 30 02 04 25 53 51 51 55 49|61 30 02 05 45 62 61 65 49 19",
)


def draw_digits(count, seed):
    """Draw digits: images uint8 (count, 28, 28), 0 paper to 255 ink, and labels uint8 (count,).

    The labels 0..9 are balanced and shuffled. The same count and seed give the same digits.
    """
    rng = np.random.RandomState(seed)  # gives the same numbers in every numpy version
    labels = rng.permutation(np.arange(count) % 10).astype(np.uint8)
    images = np.empty((count, 28, 28), np.uint8)
    # A quadratic B-spline: 8 dots per point, each a weighted mean of it and its two neighbours.
    t = (np.arange(8)[:, None] + 0.5) / 8
    place = np.hstack(((1 - t) ** 2, 1 + 2 * t * (1 - t), t ** 2)) / 2
    slope = np.hstack((t - 1, 1 - 2 * t, t)) / 8  # the step from one dot to the next
    # About 250 images at a time, all of one digit written one way, to bound the memory.
    for start, digit, way in itertools.product(range(0, count, 7500), range(10), range(3)):
        part = start + np.flatnonzero(labels[start:start + 7500] == digit)[way::3]
        n = len(part)
        triples = []
        for stroke in STROKES[digit].split("|")[way].split("/"):
            path = np.array([[int(x) - 3, int(y) - 4.5] for x, y in stroke.split()]) / 4.5
            path = path + rng.uniform(-0.18, 0.18, (n,) + path.shape)  # no two alike
            path = np.pad(path, ((0, 0), (1, 1), (0, 0)), "edge")
            triples.append(np.stack((path[:, :-2], path[:, 1:-1], path[:, 2:]), 2))
        # Every image's width, slant, tilt and bends: new x, y from u, v, u*u, u*v and v*v.
        u, v = np.moveaxis(np.concatenate(triples, 1), -1, 0)
        warp = rng.uniform(-0.25, 0.25, (n, 1, 5, 2)) * [[1], [1.6], [1], [1], [1]]
        warp[:, :, :2] += [[0.9, 0], [-0.2, 1]]  # on average a little narrow, leaning right
        triples = np.stack((u, v, u * u, u * v, v * v), -1) @ warp
        dots = (place @ triples).reshape(n, 8 * u.shape[1], 2)
        ink = np.linalg.norm(slope @ triples, axis=-1).reshape(dots.shape[:2] + (1,))
        # As in MNIST: fit into 20 x 20 pixels, then the centre of mass goes to the middle.
        pen = rng.uniform(0.6, 1.3, (n, 1, 1))  # about a third of the line's width, in pixels
        scale = (20 - 3.3 * pen) / np.ptp(dots, axis=1).max(1)[:, None, None]
        dots -= (dots * ink).sum(1, keepdims=True) / ink.sum(1, keepdims=True)
        dots = dots * scale + 13.5 + pen * rng.normal(0, 0.35, dots.shape)  # rough edges
        # A dot is a round Gaussian blot, its row times its column profile; @ adds up the blots.
        blots = np.exp(-((dots[..., None] - np.arange(28)) / pen[..., None]) ** 2 / 2)
        sums = (blots[:, :, 1] * ink * scale / pen).transpose(0, 2, 1) @ blots[:, :, 0]
        images[part] = 255 * np.clip(sums - 0.3, 0, 1)
    return images, labels
