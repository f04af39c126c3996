"""What training reads from: a source with a training and a test split, each an indexed set of images and labels.

source.description; len(source.train); source.train.images(np.array([3, 1, 2])).shape == (3, 1, 28, 28)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.integer]
ImageShape = tuple[int, int, int]


class Split(Protocol):
    """The training or the test images; several threads may read at the same time."""

    def __len__(self) -> int:
        """Images in it."""

    def images(self, indices: Indices) -> NDArray[np.uint8]:
        """Images in the order of `indices`: (n, C, H, W), uint8."""

    def labels(self, indices: Indices) -> NDArray[np.int32]:
        """Their labels from 0 to classes - 1: (n,), int32."""


@dataclass(frozen=True)
class Source:
    """Images and labels to train on and to test with.

    Args:
        name: as in the configuration.
        description: for people; contains the word "synthetic" where no real data is read.
        mean, std: per channel, of the training pixels divided by 255.
    """

    name: str
    description: str
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
