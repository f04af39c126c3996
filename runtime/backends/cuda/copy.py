"""Copies and sums of two tensors on the GPU; see vdnn.layers.add and concat, and copy.cu.

    copy_forward(op, {"x": x, "y": y}, kernels, stream)

Activations; sizes of all arguments of a call are equal; any may be channels of a larger tensor, all in one layout.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, Rows, rows_of


def copy_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x, or y += x if op accumulates y; (N, ...)."""
    x, y = rows_of(op, arrays, "x", "y", dtype=kernels.dtype)
    rows = Rows.of(x, y)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *rows.args, bool(op.accumulate)]
    kernels.launch("copy_rows", rows.blocks, args, stream)


def add_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = a + b; (N, ...). y may be the bytes of a."""
    a, b, y = rows_of(op, arrays, "a", "b", "y", dtype=kernels.dtype)
    rows = Rows.of(a, b, y)
    args = [a.ptr, a.image_stride, b.ptr, b.image_stride, y.ptr, y.image_stride, *rows.args]
    kernels.launch("add_rows", rows.blocks, args, stream)
