"""MNIST, or synthetic digits where it cannot be had. Importing it touches neither disk nor network.

from data import train_dataset, test_dataset  # fetched and read at first use
"""

import gzip
import os
import socket
import zlib
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from synthetic_digits import load_digits

MEAN, STD = 0.1307, 0.3081  # of all pixels of MNIST's 60,000 training images, as a share of 255
HALVES, KINDS = ("train", "t10k"), ("images-idx3-ubyte", "labels-idx1-ubyte")
FILES = [f"{half}-{kind}" for half in HALVES for kind in KINDS]


class Digits(Dataset):
    """Images kept as bytes, and turned into floats of mean 0 and standard deviation 1 over MNIST.

    digits[i] is (float tensor (1, 28, 28), int label), which any DataLoader takes. Faster is one
    with collate_fn=as_batch, where one indexing gives a complete batch. `halves` is what
    read_folder returns; without it, the default data set is loaded at first use.
    """

    def __init__(self, train, name="auto", halves=None):
        self.train, self.name = train, name
        if halves:
            images, labels = halves[0 if train else 1]
            self.tensors = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()

    @cached_property
    def tensors(self):
        """(uint8 images (N, 1, 28, 28), int64 labels (N,))."""
        return default_datasets()[0 if self.train else 1].tensors

    def __len__(self):
        return len(self.tensors[1])

    def __getitem__(self, index):
        images, labels = (tensor[index] for tensor in self.tensors)
        return (images / 255 - MEAN) / STD, labels if labels.dim() else int(labels)

    def __getitems__(self, indices):
        """What a DataLoader of PyTorch 2 asks for: the samples of a list of indices."""
        return TensorDataset(*self[indices])


def as_batch(samples):
    """The collate_fn for Digits: (float images (B, 1, 28, 28), int64 labels (B,))."""
    return samples.tensors


train_dataset, test_dataset = Digits(train=True), Digits(train=False)


def load_datasets(dataset="auto", data_dir="data"):
    """(training set, test set) as Digits, in memory.

    dataset: "mnist" (in torchvision's layout below data_dir, downloaded if it is not there or
    damaged), "synthetic", or "auto": MNIST if it can be had, else synthetic digits and a warning.
    Raises FileNotFoundError, whose one line says why there is no MNIST and what to do.
    """
    name, halves = "mnist", None
    if dataset != "synthetic":
        try:
            halves = read_mnist(Path(data_dir, "MNIST", "raw"))
        except FileNotFoundError as error:
            if dataset == "mnist":
                raise FileNotFoundError(f"no MNIST: {error}, or use --dataset synthetic") from None
            if not os.environ.get("RANK") or os.environ.get("LOCAL_RANK") in ("", "0"):  # once
                print(f"warning: no MNIST ({error}): using the synthetic digits", flush=True)
    if halves is None:
        name, halves = "synthetic", load_digits(Path(data_dir, "synthetic_digits.npz"))
    return Digits(True, name, halves), Digits(False, name, halves)


default_datasets = lru_cache(maxsize=1)(load_datasets)


def read_mnist(folder):
    """What read_folder returns, after a download where that is needed; or FileNotFoundError."""
    try:
        return read_folder(folder)
    except (OSError, ValueError) as error:
        problem = error
    try:
        download_mnist(folder)
        return read_folder(folder)
    except Exception as error:  # whatever a network, a mirror or a disk can do
        reason = str(error).split("\n")[0] or type(error).__name__
        problem = f"{problem}; downloading it failed: {reason}"
        raise FileNotFoundError(f"{problem}; copy the four files there by hand") from None


def download_mnist(folder):
    """Download MNIST through torchvision, from the first mirror that has all of it.

    Each answer may take 10 s. Raises what the last mirror raised, and then leaves nothing behind.
    """
    from torchvision.datasets import MNIST  # a slow import: only the process that downloads pays
    from torchvision.datasets.utils import download_and_extract_archive

    folder.mkdir(parents=True, exist_ok=True)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        for mirror in MNIST.mirrors:
            try:
                with TemporaryDirectory(dir=folder) as part:
                    for name, md5 in MNIST.resources:
                        download_and_extract_archive(mirror + name, part, md5=md5)
                    read_folder(part)
                    for name in FILES:
                        os.replace(Path(part, name), folder / name)
                return
            except Exception as error:
                failure = error
        raise failure
    finally:
        socket.setdefaulttimeout(timeout)


def read_folder(folder):
    """The four IDX files as ((training images, labels), (test images, labels)), all uint8.

    Raises OSError or ValueError, which name what is missing, damaged or does not fit.
    """
    arrays = [read_idx(Path(folder, name), 3 if "images" in name else 1) for name in FILES]
    halves = tuple(zip(arrays[::2], arrays[1::2]))
    for images, labels in halves:
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise ValueError(f"{folder}: {images.shape} images do not fit {len(labels)} labels")
    return halves


def read_idx(path, dims):
    """A file of bytes in IDX format, or its .gz, as a uint8 array of so many dimensions.

    The format, from the page of MNIST's authors: the bytes 0, 0, 8 (unsigned byte) and the number
    of dimensions; the size of each as big-endian int32; the data. Raises OSError or ValueError.
    """
    packed = Path(f"{path}.gz")
    found = path if path.exists() or not packed.exists() else packed
    try:
        with (gzip.open if found == packed else open)(found, "rb") as file:
            raw = np.frombuffer(bytearray(file.read()), np.uint8)  # not mapped: files can change
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except (EOFError, zlib.error):
        raise ValueError(f"{found} is cut off") from None
    start = 4 + 4 * dims
    shape = raw[4:start].view(">i4").tolist() if len(raw) >= start else [-1]
    if raw[:4].tolist() != [0, 0, 8, dims] or len(raw) != start + np.prod(shape, dtype=np.int64):
        raise ValueError(f"{found} is cut off or not the IDX file that its name says")
    return raw[start:].reshape(shape)
