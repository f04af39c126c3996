"""Copies, sums of two tensors, and pixels to numbers on the GPU; see vdnn.layers.add and concat, and copy.cu.

    copy_forward(op, {"x": x, "y": y}, kernels, stream)

float32 unless stated; sizes of all arguments of a call are equal; any may be channels of a larger tensor.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, Rows, operands


def copy_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x, or y += x if op accumulates y; (N, ...)."""
    x, y = operands(op, arrays, "x", "y")
    rows = Rows.of(x, y)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *rows.args, bool(op.accumulate)]
    kernels.launch("copy_rows", rows.blocks, args, stream)


def add_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = a + b; (N, ...). y may be the bytes of a."""
    a, b, y = operands(op, arrays, "a", "b", "y")
    rows = Rows.of(a, b, y)
    args = [a.ptr, a.image_stride, b.ptr, b.image_stride, y.ptr, y.image_stride, *rows.args]
    kernels.launch("add_rows", rows.blocks, args, stream)


def input_normalize(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y[n,c] = (x[n,c] / 255 - mean[c]) / std[c], one launch a channel.

    x: (N, C, H, W) uint8; y: the same in float32; op.attrs: mean and std, a number for each channel.
    """
    (x,), (y,) = operands(op, arrays, "x", dtype="uint8"), operands(op, arrays, "y")
    hw = y.image_size // y.shape[1]
    rows = Rows.channel(hw, x, y)
    for c, (mean, std) in enumerate(zip(op.attrs["mean"], op.attrs["std"], strict=True)):
        args = [x.ptr + c * hw, x.image_stride, y.ptr + y.itemsize * c * hw, y.image_stride, *rows.args, mean, std]
        kernels.launch("normalize_channel", rows.blocks, args, stream)
