"""Pooling on the GPU; see vdnn.layers.pool and pool.cu.

    pool_forward(op, {"x": x, "y": y}, kernels, stream)

x, dx (N, C, H, W), y, dy (N, C, P, Q), float32, any of them channels of a larger tensor. op.attrs: mode "max" or
"average", kernel, stride, padding (pairs, vertical first), count_include_pad. Backward gathers: each pixel looks up the
windows that hold it, so that sums have one order.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import THREADS, Arrays, Kernels, Rows, operands

MAXIMUM, AVERAGE, AVERAGE_INSIDE = range(3)
"""enum Mode of pool.cu."""


def pool_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = maximum or average over each window."""
    x, y = operands(op, arrays, "x", "y")
    rows, inputs = Rows.images(y), Rows.images(x)
    chunks = rows.chunks(THREADS)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *_windows(op, x, y), rows.inner, chunks, _mode(op)]
    kernels.launch("pool_forward", inputs.count * chunks, args, stream)


def pool_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy at the first largest pixel of each window in row order, or its share of an average's dy.

    Added to dx if op accumulates it. x and y are those of forward, given for mode "max" only.
    """
    dy, dx = operands(op, arrays, "dy", "dx")
    mode = _mode(op)
    x, y = operands(op, arrays, "x", "y") if mode == MAXIMUM else (dx, dy)  # an average reads neither
    rows = Rows.images(dx, x)
    chunks = rows.chunks(THREADS * rows.width)
    args = [value for array in (x, y, dy, dx) for value in (array.ptr, array.image_stride)]
    args += [*_windows(op, dx, dy), rows.inner, chunks, rows.width, mode, bool(op.accumulate)]
    kernels.launch("pool_backward", rows.count * chunks, args, stream)


def _windows(op: Op, x: DeviceArray, y: DeviceArray) -> list[int]:
    """struct Windows of pool.cu."""
    return [*x.shape[2:], *y.shape[2:], *op.attrs["kernel"], *op.attrs["stride"], *op.attrs["padding"]]


def _mode(op: Op) -> int:
    if op.attrs["mode"] == "max":
        return MAXIMUM
    return AVERAGE if op.attrs["count_include_pad"] else AVERAGE_INSIDE
