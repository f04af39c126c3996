"""Biases of convolutions and fully connected layers on the GPU: added to y, and their gradients; see bias.cu.

    bias_forward(op, {"y": y, "b": b}, kernels, stream)       # after the convolution or product has written y

y, dy (N, K, P, Q) or (N, K), float32, may be channels of a larger tensor; b, db (K,) float32.
"""

from __future__ import annotations

from math import prod
from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import Arrays, Channels, Kernels, Rows, join_blocks, operands, workspace
from vdnn.runtime.backends.cuda.source import constants, source

COLUMNS = constants(source())["COLUMNS"]
IMAGES_A_BLOCK = 256


def bias_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y += b, if the op has a b."""
    if "b" not in arrays:
        return
    y, b = operands(op, arrays, "y", "b")
    rows = Rows.images(y)
    inner, chunks, width = rows.args
    args = [y.ptr, y.image_stride, b.ptr, y.image_size // y.shape[1], inner, chunks, width]
    kernels.launch("bias_add", rows.blocks, args, stream)


def conv_bgrad(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """db = sum of dy over N, P, Q; added to db if op accumulates it. Workspace: channel_bytes(dy.shape)."""
    dy, db = operands(op, arrays, "dy", "db")
    sums = Channels.of(dy)
    partials = workspace(op, arrays, sums.partial_bytes)
    kernels.launch("bias_sums", sums.blocks, [dy.ptr, dy.image_stride, *sums.args, partials], stream)
    _finish(op, partials, sums.splits, db, kernels, stream)


def linear_bgrad(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """db = sum of dy over N; added to db if op accumulates it. Workspace: column_bytes(dy.shape)."""
    dy, db = operands(op, arrays, "dy", "db")
    n, k = dy.shape
    splits, share = _column_split(n)
    partials = workspace(op, arrays, column_bytes(dy.shape))
    args = [dy.ptr, dy.image_stride, n, k, splits, share, partials]
    kernels.launch("bias_column_sums", -(-k // COLUMNS) * splits, args, stream)
    _finish(op, partials, splits, db, kernels, stream)


def _finish(op: Op, partials: int, splits: int, db: DeviceArray, kernels: Kernels, stream: Any) -> None:
    args = [partials, splits, db.size, db.ptr, bool(op.accumulate)]
    kernels.launch("bias_finish", join_blocks(db.size), args, stream)


def channel_bytes(shape: Shape) -> int:
    """Bytes of workspace for sums over each channel of a tensor of `shape` (N, C, ...)."""
    n, c, *rest = shape
    return 16 * c * Channels.split(c, n * prod(rest))[0]


def column_bytes(shape: Shape) -> int:
    """Bytes of workspace of linear_bgrad for dy of `shape` (N, K)."""
    return 16 * shape[1] * _column_split(shape[0])[0]


def _column_split(n: int) -> tuple[int, int]:
    """Blocks that share the N images of some columns, and the images of each."""
    splits = -(-n // IMAGES_A_BLOCK)
    share = -(-n // splits)
    return -(-n // share), share
