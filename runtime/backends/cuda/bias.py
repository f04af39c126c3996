"""Biases of convolutions and fully connected layers on the GPU: added to y, and their gradients; see bias.cu.

    bias_forward(op, {"y": y, "b": b}, kernels, stream)       # after the convolution or product has written y

y, dy (N, K, P, Q) or (N, K), float32, NCHW or NHWC, may be channels of a larger tensor; b, db (K,) float32.
"""

from __future__ import annotations

from math import prod
from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.launch import Arrays, Channels, Kernels, Rows, join_blocks, rows_of, workspace


def bias_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y += b, if the op has a b."""
    if "b" not in arrays:
        return
    y, b = rows_of(op, arrays, "y", "b")
    rows = Rows.images(y)
    inner, chunks, width = rows.args
    args = [y.ptr, y.image_stride, b.ptr, y.image_size // y.shape[1], inner, chunks, width]
    kernels.launch("bias_add", rows.blocks, args, stream)


def bias_gradient(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """db = sum of dy over N, P, Q; added to db if op accumulates it. Workspace: channel_bytes."""
    dy, db = rows_of(op, arrays, "dy", "db")
    sums = Channels.of(dy)
    partials = workspace(op, arrays, sums.partial_bytes)
    kernels.launch("bias_sums", sums.blocks, [dy.ptr, dy.image_stride, *sums.args, partials], stream)
    args = [partials, sums.splits, db.size, db.ptr, bool(op.accumulate)]
    kernels.launch("bias_finish", join_blocks(db.size), args, stream)


def channel_bytes(shape: Shape, layout: str) -> int:
    """Bytes of workspace for sums over each channel of a tensor of `shape` (N, C, ...) in `layout`."""
    n, c, *rest = shape
    hw = prod(rest)
    if layout == "NHWC":
        n, hw = n * hw, 1
    return 16 * c * Channels.split(n, c, hw)[0]
