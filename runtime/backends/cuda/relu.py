"""Rectified linear unit on the GPU; see vdnn.layers.relu and relu.cu.

    relu_forward(op, {"x": x, "y": y}, kernels, stream)

x, y, dy, dx (N, ...) of equal size, activations, any of them channels of a larger tensor; y may be the bytes of x, dx
those of dy.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, Rows, rows_of


def relu_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = max(x, 0); a NaN stays a NaN."""
    x, y = rows_of(op, arrays, "x", "y", dtype=kernels.dtype)
    rows = Rows.of(x, y)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *rows.args]
    kernels.launch("relu_forward", rows.blocks, args, stream)


def relu_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy where y > 0, else 0; added to dx if op accumulates it."""
    y, dy, dx = rows_of(op, arrays, "y", "dy", "dx", dtype=kernels.dtype)
    rows = Rows.of(y, dy, dx)
    args = [y.ptr, y.image_stride, dy.ptr, dy.image_stride, dx.ptr, dx.image_stride, *rows.args]
    kernels.launch("relu_backward", rows.blocks, [*args, bool(op.accumulate)], stream)
