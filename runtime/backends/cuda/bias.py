"""Biases of convolutions and fully connected layers on the GPU: added to y, and their gradients; see bias.cu.

    bias_forward(op, {"y": y, "b": b}, kernels, stream)       # after the convolution or product has written y

y, dy (N, K, P, Q) or (N, K), activations, in any layout, may be channels of a larger tensor; b, db (K,) float32.
"""

from __future__ import annotations

from math import prod
from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.cudnn_graph import FUSED
from vdnn.runtime.backends.cuda.launch import (
    Arrays,
    Channels,
    Kernels,
    Rows,
    join_blocks,
    operands,
    rows_of,
    workspace,
)
from vdnn.runtime.backends.cuda.relu import relu_forward


def bias_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y += b, if the op has a b, then y = max(y, 0) for op.attrs["activation"] "relu".

    Nothing where the algorithm's label in op.attrs begins with FUSED: then the product has done both.
    """
    rectifies = op.attrs.get("activation") == "relu"
    if str(op.attrs.get("algorithm", "")).startswith(FUSED):
        return
    if "b" not in arrays:
        if rectifies:
            relu_forward(op, {"x": arrays["y"], "y": arrays["y"]}, kernels, stream)
        return
    (y,), (b,) = rows_of(op, arrays, "y", dtype=kernels.dtype), operands(op, arrays, "b")
    rows = Rows.images(y)
    inner, chunks, width = rows.args
    args = [y.ptr, y.image_stride, b.ptr, y.image_size // y.shape[1], inner, chunks, width, rectifies]
    kernels.launch("bias_add", rows.blocks, args, stream)


def bias_gradient(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """db = sum of dy over N, P, Q; added to db if op accumulates it. Workspace: channel_bytes."""
    (dy,), (db,) = rows_of(op, arrays, "dy", dtype=kernels.dtype), operands(op, arrays, "db")
    sums = Channels.of(dy)
    partials = workspace(op, arrays, sums.partial_bytes)
    kernels.launch("bias_sums", sums.blocks, [dy.ptr, dy.image_stride, *sums.args, partials], stream)
    args = [partials, sums.splits, db.size, db.ptr, bool(op.accumulate)]
    kernels.launch("bias_finish", join_blocks(db.size), args, stream)


def relu_bias_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy where y > 0, else 0; db = sum of dx over N, P, Q, added to db if op accumulates it.

    dx may be the bytes of dy. Workspace: channel_bytes.
    """
    y, dy, dx = rows_of(op, arrays, "y", "dy", "dx", dtype=kernels.dtype)
    (db,) = operands(op, arrays, "db")
    sums = Channels.of(dy, y, dx)
    partials = workspace(op, arrays, sums.partial_bytes)
    args = [value for array in (y, dy, dx) for value in (array.ptr, array.image_stride)]
    kernels.launch("relu_bias_sums", sums.blocks, [*args, *sums.args, partials], stream)
    args = [partials, sums.splits, db.size, db.ptr, "db" in op.accumulate]
    kernels.launch("bias_finish", join_blocks(db.size), args, stream)


def channel_bytes(shape: Shape, layout: str) -> int:
    """Bytes of workspace for sums over each channel of a tensor of `shape` (N, C, ...) in `layout`."""
    n, c, *rest = shape
    hw = prod(rest)
    if layout == "NHWC":
        n, hw = n * hw, 1
    elif layout == "CHWN" and rest:
        n, hw = 1, n * hw
    return 16 * c * Channels.split(n, c, hw)[0]
