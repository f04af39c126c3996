"""Real images and labels from a folder of IDX files: MNIST under its usual names, or any images under plain names.

    source = open_folder(DataConfig(source="mnist"), (1, 28, 28), classes=10, seed=0)        # the packaged digits
    source = open_folder(DataConfig(source="idx", path="flowers"), (3, 224, 224), classes=102, seed=0)

Source "idx" reads train-images.idx, train-labels.idx, test-images.idx and test-labels.idx, each plain or with .gz:
images as uint8 of shape (N, C, H, W) or (N, H, W), labels as uint8, int16 or int32 of shape (N,). Plain files are
mapped, not loaded, and so may be larger than memory.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import DataError
from vdnn.runtime.config import DataConfig
from vdnn.runtime.data.idx import read_idx
from vdnn.runtime.data.source import ImageShape, Indices, Source
from vdnn.runtime.files import user_path

NAMES = {
    "mnist": {
        "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    },
    "idx": {
        "train": ("train-images.idx", "train-labels.idx"),
        "test": ("test-images.idx", "test-labels.idx"),
    },
}
"""File names of images and labels, by source and split."""

STATISTICS_IMAGES = 4096
"""Mean and deviation are taken over so many training images at most, evenly spaced."""


class ArraySplit:
    """Images (N, C, H, W) uint8 and labels (N,) in arrays, in memory or mapped."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.integer]):
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def images(self, indices: Indices) -> NDArray[np.uint8]:
        """(n, C, H, W), uint8."""
        return np.take(np.asarray(self._images), indices, axis=0)  # several times as fast as by an index

    def labels(self, indices: Indices) -> NDArray[np.int32]:
        """(n,), int32."""
        return self._labels[indices].astype(np.int32)


def open_folder(data: DataConfig, input_shape: ImageShape, classes: int, seed: int) -> Source:
    """Source "mnist" or "idx"; a path of None is the packaged subset of MNIST. `seed` changes nothing."""
    folder = Path(str(files("vdnn.runtime.data") / "mnist5k")) if data.path is None else user_path(data.path)
    if not folder.is_dir():
        raise DataError(f"data folder '{folder}': expected a folder, got {'a file' if folder.exists() else 'nothing'}")
    splits = {}
    for split, (images, labels) in NAMES[data.source].items():
        splits[split] = _open_split(_find(folder, images), _find(folder, labels), input_shape, classes)
    train, test = splits["train"], splits["test"]
    where = "packaged subset" if data.path is None else f"from {folder}"
    kind = "MNIST digits" if data.source == "mnist" else "images"
    description = f"{kind}, {where}: {len(train):,} training and {len(test):,} test images"
    return Source(data.source, description, train, test, *_statistics(train))


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"data folder '{folder}': expected a file {name} or {name}.gz, found neither")


def _open_split(images_file: Path, labels_file: Path, input_shape: ImageShape, classes: int) -> ArraySplit:
    images = read_idx(images_file, ranks=(3, 4), dtypes=("uint8",))
    labels = read_idx(labels_file, ranks=(1,), dtypes=("uint8", "int16", "int32"))
    images = images if images.ndim == 4 else images[:, None]
    if images.shape[1:] != input_shape:
        raise DataError(
            f"data file '{images_file}': the network takes images of shape (C, H, W) = {input_shape}, "
            f"the file holds {images.shape[1:]}"
        )
    if len(images) != len(labels):
        raise DataError(
            f"data file '{labels_file}': expected {len(images):,} labels, one for each image in {images_file.name}, "
            f"got {len(labels):,}"
        )
    _check_labels(labels_file, labels, classes)
    return ArraySplit(images, labels)


def _check_labels(file: Path, labels: NDArray[Any], classes: int) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"data file '{file}': expected labels from 0 to {classes - 1}, got {labels[wrong[0]]} "
            f"for image {wrong[0]}: set network.classes to the number of classes"
        )


def _statistics(train: ArraySplit) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixel / 255 per channel, exact over the images taken."""
    indices = np.linspace(0, len(train) - 1, min(len(train), STATISTICS_IMAGES)).astype(np.int64)
    counts: NDArray[np.int64] | None = None
    for part in np.array_split(indices, -(-len(indices) // 256)):
        pixels = train.images(part)
        new = np.stack([np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(pixels.shape[1])])
        counts = new if counts is None else counts + new
    assert counts is not None
    share = counts / counts.sum(axis=1, keepdims=True)
    value = np.arange(256) / 255
    mean = share @ value
    deviation = np.sqrt(np.maximum(share @ value**2 - mean**2, 0.0))
    # a channel of one value only must not divide by zero: one grey level is the least deviation
    return tuple(mean.tolist()), tuple(np.maximum(deviation, 1 / 255).tolist())
