"""A stride in the channels of images and filters on the CPU; see vdnn.layers.images.

    fold_images(x, y, fold=2, padding=(3, 3))         # (N, C, H, W) to (N, C', I, J)
    fold_filters(w, used, fold=2)                     # (K, C, R, S) to (K, C', R', S')
    dw = unfolded_filters(folded, 2, (K, C, R, S))    # and back

Channels of zeros may follow, of which unfolding takes no notice. With a fold of 1 these are all that is added.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cpu.chunks import Array
from vdnn.runtime.backends.cpu.windows import taps


def fold_images(x: Array, y: Array, fold: int, padding: tuple[int, int]) -> None:
    """y[n, (a * fold + b) * C + c, i, j] = x[n, c, fold * i + a - top, fold * j + b - left], 0 where x has none.

    padding: (top, left).
    """
    channels, (rows, columns) = x.shape[1], y.shape[2:]
    y[...] = 0
    vertical = taps(x.shape[2], fold, (0, rows), fold, padding[0])
    horizontal = taps(x.shape[3], fold, (0, columns), fold, padding[1])
    for row, column in product(vertical, horizontal):
        first = (row.offset * fold + column.offset) * channels
        into = y[:, first : first + channels, row.outputs, column.outputs]
        np.copyto(into, x[:, :, row.pixels, column.pixels])


def fold_filters(w: Array, y: Array, fold: int) -> None:
    """y[k, (a * fold + b) * C + c, i, j] = w[k, c, fold * i + a, fold * j + b], 0 where w has none."""
    k, channels, r, s = w.shape
    whole = np.zeros((k, channels, fold * y.shape[2], fold * y.shape[3]), w.dtype)
    whole[:, :, :r, :s] = w
    parts = whole.reshape(k, channels, y.shape[2], fold, y.shape[3], fold)
    held = fold * fold * channels
    y[:, :held] = parts.transpose(0, 3, 5, 1, 2, 4).reshape(k, held, *y.shape[2:])
    y[:, held:] = 0


def unfolded_filters(y: Array, fold: int, shape: Shape) -> Array:
    """The filters (K, C, R, S) of which fold_filters makes y, a copy."""
    k, channels, r, s = shape
    parts = y[:, : fold * fold * channels].reshape(k, fold, fold, channels, *y.shape[2:])
    whole = parts.transpose(0, 3, 4, 1, 5, 2).reshape(k, channels, fold * y.shape[2], fold * y.shape[3])
    return whole[:, :, :r, :s]
