"""Pooling on the CPU, one place of the window at a time over all outputs at once; see vdnn.layers.pool.

    pool_forward(op, x=x, y=y)

Shapes: x, dx (N, C, H, W); y, dy (N, C, P, Q), equal dtype. op.attrs: mode "max" or "average", kernel, stride,
padding (pairs, vertical first), count_include_pad. indices (N, C, P, Q) uint8: vdnn.layers.pool.Pool.winners.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.op import Op
from vdnn.layers.pool import NO_WINNER
from vdnn.runtime.backends.cpu.chunks import Array, image_slices
from vdnn.runtime.backends.cpu.select import select
from vdnn.runtime.backends.cpu.windows import Tap, taps

Indices = NDArray[np.uint8]
Windows = tuple[tuple[Tap, Tap], ...]


def pool_forward(op: Op, *, x: Array, y: Array, indices: Indices | None = None) -> None:
    """y = maximum or average over each window; indices = the places of the maxima."""
    start, combine = _FORWARD[op.attrs["mode"]]
    windows = _windows(op, x, y)
    weight = _average_weight(op, x, y) if op.attrs["mode"] == "average" else None
    for images in image_slices(x):
        y_part, x_part = y[images], x[images]
        y_part[...] = start
        for row, column in windows:
            into = y_part[:, :, row.outputs, column.outputs]
            combine(into, x_part[:, :, row.pixels, column.pixels], out=into)
        if weight is not None:
            y_part *= weight
        if indices is not None:
            _find_winners(op, windows, x_part, y_part, indices[images])


def pool_backward(
    op: Op,
    *,
    dy: Array,
    dx: Array,
    x: Array | None = None,
    y: Array | None = None,
    indices: Indices | None = None,
) -> None:
    """dx = dy at the first largest pixel of each window in row order, or its share of an average's dy.

    Added to dx if op accumulates it. For mode "max": x and y of forward; or its indices, and y where ReLUs below leave
    their mask to this op: then dy counts as 0 where y <= 0.
    """
    windows = _windows(op, dx, dy)
    weight = _average_weight(op, dx, dy) if op.attrs["mode"] == "average" else None
    for images in image_slices(dx):
        dx_part, dy_part = dx[images], dy[images]
        if not op.accumulate:
            dx_part[...] = 0
        if weight is not None:
            shares = dy_part * weight
            for row, column in windows:
                into = dx_part[:, :, row.pixels, column.pixels]
                into += shares[:, :, row.outputs, column.outputs]
        elif indices is not None:
            if y is not None:
                dy_part = select(dy_part, y[images] > 0, out=np.empty_like(dy_part))
            _maximum_backward(op, windows, indices[images], dy_part, dx_part)
        elif x is not None and y is not None:
            found = np.empty(dy_part.shape, np.uint8 if len(windows) <= NO_WINNER else np.int64)
            _find_winners(op, windows, x[images], y[images], found)
            _maximum_backward(op, windows, found, dy_part, dx_part)


def _find_winners(op: Op, windows: Windows, x: Array, y: Array, indices: NDArray[Any]) -> None:
    """indices = r*S + s of the first pixel in row order that is y, or what no place has where y is a NaN."""
    none = NO_WINNER if indices.dtype == np.uint8 else -1
    indices[...] = none
    for row, column in reversed(windows):  # the first place is written last
        into = indices[:, :, row.outputs, column.outputs]
        equal = x[:, :, row.pixels, column.pixels] == y[:, :, row.outputs, column.outputs]
        mask = np.negative(equal.astype(indices.dtype))  # 1 → all bits
        mask &= into ^ _place(op, row, column)
        into ^= mask


def _maximum_backward(op: Op, windows: Windows, indices: NDArray[Any], dy: Array, dx: Array) -> None:
    for row, column in windows:
        outputs = np.s_[:, :, row.outputs, column.outputs]
        takes = indices[outputs] == _place(op, row, column)
        into = dx[:, :, row.pixels, column.pixels]
        into += select(dy[outputs], takes, out=np.empty(takes.shape, dy.dtype))


def _place(op: Op, row: Tap, column: Tap) -> int:
    return int(row.offset * op.attrs["kernel"][1] + column.offset)


def _windows(op: Op, x: Array, y: Array) -> Windows:
    """Every place of the window, in row order."""
    sides = zip(x.shape[2:], op.attrs["kernel"], y.shape[2:], op.attrs["stride"], op.attrs["padding"], strict=True)
    vertical, horizontal = (taps(size, r, (0, out), stride, pad) for size, r, out, stride, pad in sides)
    return tuple(product(vertical, horizontal))


def _average_weight(op: Op, x: Array, y: Array) -> Array:
    """1 / the pixels that count in each window, shape (P, Q)."""
    counts = []
    for axis in (0, 1):
        size, pad = x.shape[2 + axis], op.attrs["padding"][axis]
        first = np.arange(y.shape[2 + axis]) * op.attrs["stride"][axis] - pad
        end = first + op.attrs["kernel"][axis]
        low, high = (-pad, size + pad) if op.attrs["count_include_pad"] else (0, size)
        counts.append(np.minimum(end, high) - np.maximum(first, low))
    return np.asarray(1.0 / np.outer(*counts), y.dtype)


_FORWARD = {"max": (-np.inf, np.maximum), "average": (0, np.add)}
