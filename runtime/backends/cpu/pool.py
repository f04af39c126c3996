"""Pooling on the CPU, one place of the window at a time over all outputs at once; see vdnn.layers.pool.

    pool_forward(op, x=x, y=y)

Shapes: x, dx (N, C, H, W); y, dy (N, C, P, Q), equal dtype. op.attrs: mode "max" or "average", kernel, stride,
padding (pairs, vertical first), count_include_pad.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, image_slices
from vdnn.runtime.backends.cpu.select import select
from vdnn.runtime.backends.cpu.windows import Tap, taps


def pool_forward(op: Op, *, x: Array, y: Array) -> None:
    """y = maximum or average over each window."""
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


def pool_backward(op: Op, *, dy: Array, dx: Array, x: Array | None = None, y: Array | None = None) -> None:
    """dx = dy at the first largest pixel of each window in row order, or its share of an average's dy.

    Added to dx if op accumulates it. x and y are those of forward, given for mode "max" only.
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
        elif x is not None and y is not None:
            _maximum_backward(windows, x[images], y[images], dy_part, dx_part)


def _maximum_backward(windows: tuple[tuple[Tap, Tap], ...], x: Array, y: Array, dy: Array, dx: Array) -> None:
    unclaimed = np.ones(y.shape, np.bool_)
    for row, column in windows:
        outputs, pixels = np.s_[:, :, row.outputs, column.outputs], np.s_[:, :, row.pixels, column.pixels]
        takes = x[pixels] == y[outputs]
        takes &= unclaimed[outputs]
        unclaimed[outputs] ^= takes
        into = dx[pixels]
        into += select(dy[outputs], takes, out=np.empty(takes.shape, dy.dtype))


def _windows(op: Op, x: Array, y: Array) -> tuple[tuple[Tap, Tap], ...]:
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
