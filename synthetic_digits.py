"""Digits drawn by the program, for machines that cannot download MNIST. Used by data.py alone."""

import itertools
import os
from pathlib import Path

import numpy as np

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


def load_digits(path):
    """60,000 training and 10,000 test digits: ((images, labels), (images, labels)), all uint8.

    They are drawn at the first use, and then kept in the .npz file `path` if that can be written.
    """
    try:
        with np.load(path) as file:
            train_images, train_labels, test_images, test_labels = file.values()
        return (train_images, train_labels), (test_images, test_labels)
    except Exception:  # not there, or damaged
        train, test = draw_digits(60000, seed=0), draw_digits(10000, seed=1)
    part = Path(f"{path}.{os.getpid()}.npz")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part, *train, *test)
        os.replace(part, path)
    except OSError:
        pass  # a folder that cannot be written: they are drawn again the next time
    return train, test


def draw_digits(count, seed):
    """Draw digits: images uint8 (count, 28, 28), 0 paper to 255 ink, and labels uint8 (count,).

    The labels 0..9 are balanced and shuffled. The same count and seed give the same digits.
    """
    rng = np.random.RandomState(seed)  # gives the same numbers in every numpy version
    labels = rng.permutation(np.arange(count) % 10).astype(np.uint8)
    images = np.empty((count, 28, 28), np.uint8)
    # A quadratic B-spline: 8 dots per point, each a weighted mean of it and its two neighbours.
    t = (np.arange(8)[:, None] + 0.5) / 8
    place = np.hstack(((1 - t) ** 2, 1 + 2 * t * (1 - t), t**2)) / 2
    slope = np.hstack((t - 1, 1 - 2 * t, t)) / 8  # the step from one dot to the next
    # About 250 images at a time, all of one digit written one way, to bound the memory.
    for start, digit, way in itertools.product(range(0, count, 7500), range(10), range(3)):
        part = start + np.flatnonzero(labels[start : start + 7500] == digit)[way::3]
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
        blots = np.exp(-(((dots[..., None] - np.arange(28)) / pen[..., None]) ** 2) / 2)
        sums = (blots[:, :, 1] * ink * scale / pen).transpose(0, 2, 1) @ blots[:, :, 0]
        images[part] = 255 * np.clip(sums - 0.3, 0, 1)
    return images, labels
