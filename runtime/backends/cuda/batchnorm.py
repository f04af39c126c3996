"""Batch normalisation on the GPU; see vdnn.layers.batchnorm for the formulas, and batchnorm.cu.

    batchnorm_forward(op, {"x": x, "weight": w, "bias": b, "y": y, "mean": m, "invstd": s, "workspace": ...}, ...)

x, y, dy, dx (N, C, H, W) or (N, C), any of them channels of a larger tensor; weight, bias, mean, invstd, running_mean,
running_var, dweight, dbias (C,); all float32. Sums over a batch are taken in float64, in one order. op.attrs: eps;
momentum and count for update_stats. Workspace of forward and backward:
batchnorm_bytes.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.bias import channel_bytes
from vdnn.runtime.backends.cuda.launch import (
    THREADS,
    Arrays,
    Channels,
    Kernels,
    Rows,
    join_blocks,
    operands,
    rows_of,
    workspace,
)


def batchnorm_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = weight * (x - mean) * invstd + bias; mean and invstd = 1 / sqrt(variance + eps) of the batch are written."""
    x, y, mean, invstd, weight, bias = rows_of(op, arrays, "x", "y", "mean", "invstd", "weight", "bias")
    sums = Channels.of(x)
    partials = workspace(op, arrays, sums.partial_bytes)
    kernels.launch("batchnorm_sums", sums.blocks, [x.ptr, x.image_stride, *sums.args, partials], stream)
    args = [x.ptr, sums.hw, sums.count, partials, sums.splits, sums.channels, op.attrs["eps"], mean.ptr, invstd.ptr]
    kernels.launch("batchnorm_finish", join_blocks(sums.channels), args, stream)
    rows = Rows.images(x, y)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, mean.ptr, invstd.ptr, weight.ptr, bias.ptr]
    kernels.launch("batchnorm_normalize", rows.blocks, [*args, sums.hw, *rows.args], stream)


def batchnorm_inference(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = weight * (x - running_mean) / sqrt(running_var + eps) + bias; y may be the bytes of x."""
    x, y = rows_of(op, arrays, "x", "y")
    constants = operands(op, arrays, "running_mean", "running_var", "weight", "bias")
    rows = Rows.images(x, y)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *(array.ptr for array in constants), op.attrs["eps"]]
    kernels.launch("batchnorm_inference", rows.blocks, [*args, x.image_size // x.shape[1], *rows.args], stream)


def batchnorm_update_stats(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """running = (1 - momentum) * running + momentum * batch, with the unbiased variance of the batch."""
    found = operands(op, arrays, "mean", "invstd", "running_mean", "running_var")
    channels, count = found[0].size, op.attrs["count"]
    args = [*(array.ptr for array in found), channels, op.attrs["momentum"], op.attrs["eps"], count / (count - 1)]
    kernels.launch("batchnorm_update_stats", -(-channels // THREADS), args, stream)


def batchnorm_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """With x' = (x - mean) * invstd: dbias = sum dy, dweight = sum dy * x', and, if dx is given,
    dx = weight * invstd * (dy - (dbias + x' * dweight) / count). Each is added to what op accumulates."""
    x, dy, mean, invstd, weight = rows_of(op, arrays, "x", "dy", "mean", "invstd", "weight")
    dweight, dbias = operands(op, arrays, "dweight", "dbias")
    sums = Channels.of(x, dy)
    partials = workspace(op, arrays, sums.partial_bytes + 8 * sums.channels)
    means = partials + sums.partial_bytes
    pair = [x.ptr, x.image_stride, dy.ptr, dy.image_stride]
    kernels.launch("batchnorm_gradient_sums", sums.blocks, [*pair, mean.ptr, *sums.args, partials], stream)
    adds = ["dweight" in op.accumulate, "dbias" in op.accumulate]
    args = [partials, sums.splits, sums.channels, sums.count, invstd.ptr, dweight.ptr, dbias.ptr, means, *adds]
    kernels.launch("batchnorm_gradient_finish", join_blocks(sums.channels), args, stream)
    if "dx" not in arrays:
        return
    (dx,) = rows_of(op, arrays, "dx")
    rows = Rows.images(x, dy, dx)
    args = [*pair, dx.ptr, dx.image_stride, mean.ptr, invstd.ptr, weight.ptr, means, sums.hw, *rows.args]
    kernels.launch("batchnorm_gradient", rows.blocks, [*args, "dx" in op.accumulate], stream)


def batchnorm_bytes(shape: Shape, layout: str) -> int:
    """Bytes of workspace for x of `shape` in `layout`: the sums of each block, and two float32 a channel."""
    return channel_bytes(shape, layout) + 8 * shape[1]
