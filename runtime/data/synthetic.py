"""Made-up images: a coarse pattern for each class under noise, any size and number, drawn when asked for.

    source = open_synthetic(DataConfig(train_images=10**6), (3, 224, 224), classes=1000, seed=0)
    source.train.images(np.array([999_999])).shape == (1, 3, 224, 224)

An image is a function of (seed, split, index) alone. A network can learn the classes, but the accuracy says nothing
about real images. Images of a small set are kept once drawn: a GPU takes less for a step than a thread to draw a batch.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.config import DataConfig
from vdnn.runtime.data.hashing import words
from vdnn.runtime.data.source import ImageShape, Indices, Source

GRID = 7
"""The pattern of a class has at most GRID x GRID squares per channel."""
KEPT_BYTES = 2**28
"""Of images that a split keeps, if all of its images together are no more."""

_LABELS, _PATTERNS, _NOISE = 1, 2, 3
_TRAIN, _TEST = 16, 32
_DEVIATION = (2 * 0.5**2 / 12) ** 0.5
"""A pixel is the mean of two values, both uniform over 0..1: variance 2 * (1/2)^2 / 12."""


class SyntheticSplit:
    """`count` images of shape (C, H, W) in `classes` classes; `stream` tells training from test."""

    def __init__(self, count: int, shape: ImageShape, classes: int, seed: int, stream: int):
        self._count, self._shape, self._classes, self._seed, self._stream = count, shape, classes, seed, stream
        self._pattern = lru_cache(maxsize=4096)(self._draw_pattern)
        self._kept: NDArray[np.uint8] | None = None
        if count * prod(shape) <= KEPT_BYTES:
            self._kept, self._known = np.empty((count, *shape), np.uint8), np.zeros(count, np.bool_)

    def __len__(self) -> int:
        return self._count

    def labels(self, indices: Indices) -> NDArray[np.int32]:
        """(n,), int32."""
        return (words(self._seed, self._stream + _LABELS, indices) % np.uint64(self._classes)).astype(np.int32)

    def images(self, indices: Indices) -> NDArray[np.uint8]:
        """(n, C, H, W), uint8: half the class pattern plus half the noise."""
        if self._kept is None:
            return self._draw(indices)
        missing = indices[~self._known[indices]]
        if len(missing):
            self._kept[missing] = self._draw(missing)
            self._known[missing] = True  # not before they are there: other threads read too
        return np.take(self._kept, indices, axis=0)

    def _draw(self, indices: Indices) -> NDArray[np.uint8]:
        c, h, w = self._shape
        out = np.empty((len(indices), c, h, w), np.uint8)
        keys = words(self._seed, self._stream + _NOISE, indices)
        rows, columns = (np.arange(n) * min(n, GRID) // n for n in (h, w))
        for image, key, label in zip(out, keys, self.labels(indices), strict=True):
            # the raw words of the generator; its `random_raw` would keep other threads waiting meanwhile
            generator = np.random.Generator(np.random.Philox(key=int(key)))
            noise = generator.integers(0, 2**64, -(-image.size // 8), np.uint64).view(np.uint8)
            pattern = self._pattern(int(label)).take(rows, axis=1).take(columns, axis=2)
            np.add(noise[: image.size].reshape(c, h, w) >> 1, pattern, out=image)
        return out

    def _draw_pattern(self, label: int) -> NDArray[np.uint8]:
        """(C, GRID, GRID) or less, values 0..127."""
        c, h, w = self._shape
        size = (c, min(h, GRID), min(w, GRID))
        index = label * (c * GRID * GRID) + np.arange(size[0] * size[1] * size[2])
        return (words(self._seed, _PATTERNS, index) >> np.uint64(57)).astype(np.uint8).reshape(size)


def open_synthetic(data: DataConfig, input_shape: ImageShape, classes: int, seed: int) -> Source:
    """Source "synthetic": `data.train_images` and `data.test_images` images with the patterns of `seed`."""
    train = SyntheticSplit(data.train_images, input_shape, classes, seed, _TRAIN)
    test = SyntheticSplit(data.test_images, input_shape, classes, seed, _TEST)
    description = f"synthetic images, no real data: {len(train):,} training and {len(test):,} test images"
    channels = input_shape[0]
    return Source("synthetic", description, train, test, (0.5,) * channels, (_DEVIATION,) * channels)
