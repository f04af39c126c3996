"""Cutting a batch into slices of images, so that what NumPy allocates on the side stays small.

    for dx_part, dy_part in chunked(dx, dy):
        np.add(dx_part, dy_part, out=dx_part)

Slices depend on shapes and dtype only, never on a memory limit: results are the same bits under every budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.units import MIB

Array = NDArray[Any]

TEMPORARY_BYTES = 2 * MIB
"""Bytes of one slice of a batch; a kernel holds at most a few arrays of this size, or of one image if that is more."""


def image_slices(array: Array) -> Iterator[slice]:
    """Slices of the first dimension of TEMPORARY_BYTES or less, at least one image each.

    Args:
        array: (N, ...), any strides.
    """
    image_bytes = prod(array.shape[1:]) * array.itemsize
    step = max(1, TEMPORARY_BYTES // max(1, image_bytes))
    for start in range(0, array.shape[0], step):
        yield slice(start, min(start + step, array.shape[0]))


def chunked(target: Array, *sources: Array) -> Iterator[tuple[Array, ...]]:
    """Matching slices of `target` and of each source, the sources in the target's shape.

    Flatten changes a shape without an op, so that a source may be (N, C, H, W) where the target is (N, C*H*W).

    Args:
        target: (N, ...), a view that may be written.
        sources: as many numbers an image as the target, only to be read.
    """
    for images in image_slices(target):
        part = target[images]
        yield (part, *(source[images].reshape(part.shape) for source in sources))


def planes(array: Array) -> Array:
    """(N, C, H, W) or (N, C) → the view (N, C, H*W) or (N, C, 1); in every layout rows follow each other evenly."""
    return array.reshape(array.shape[0], array.shape[1], prod(array.shape[2:]))


def plane_sums(array: Array) -> Array:
    """Sums over H and W of (N, C, ...), shape (N, C): pairwise where a plane is contiguous, else in float64."""
    rows = planes(array)
    contiguous = rows.strides[2] == rows.itemsize or rows.shape[2] == 1
    return np.asarray(rows.sum(axis=2) if contiguous else rows.sum(axis=2, dtype=np.float64))


def in_memory_order(array: Array) -> Array:
    """The numbers of an array without gaps, in whatever order of dimensions, as the flat view over its memory."""
    order = sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], -array.shape[axis]))
    flat = array.transpose(order).view()
    flat.shape = (array.size,)  # unlike reshape this never copies
    return flat
