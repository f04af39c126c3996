"""Batch normalisation on the GPU, with the sum and the ReLU that may follow; see vdnn.layers.batchnorm for formulas.

    batchnorm_forward(op, {"x": x, "weight": w, "bias": b, "y": y, "mean": m, "invstd": s, "workspace": ...}, ...)

x, y, z, dy, dx, dz (N, C, H, W) or (N, C) of kernels.dtype, all in one layout, any of them channels of a larger tensor;
weight, bias, mean, invstd, running_mean, running_var, dweight, dbias (C,) float32. A pass over the batch sums, a small
kernel joins the sums of each channel in float64, in one order, and a pass maps. op.attrs: eps; activation "relu" or
none; momentum and count for update_stats. Workspace of forward and backward: batchnorm_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.array import DeviceArray
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
from vdnn.runtime.backends.cuda.tables import tables

STATISTICS = ("mean", "invstd", "running_mean", "running_var")
"""Arguments of update_stats."""


def batchnorm_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = weight * (x - mean) * invstd + bias, + z if given, then max(y, 0) for "relu".

    mean and invstd = 1 / sqrt(variance + eps) of the batch are written.
    """
    (x,) = rows_of(op, arrays, "x", dtype=kernels.dtype)
    mean, invstd = operands(op, arrays, "mean", "invstd")
    sums = Channels.of(x)
    partials = workspace(op, arrays, sums.partial_bytes)
    kernels.launch("batchnorm_sums", sums.blocks, [x.ptr, x.image_stride, *sums.args, partials], stream)
    args = [x.ptr, sums.hw, sums.count, partials, sums.splits, sums.channels, op.attrs["eps"], mean.ptr, invstd.ptr]
    kernels.launch("batchnorm_finish", join_blocks(sums.channels), args, stream)
    _normalize(op, arrays, ("mean", "invstd"), kernels, stream)


def batchnorm_inference(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """The same with running_mean and 1 / sqrt(running_var + eps); y may be the bytes of x or z."""
    _normalize(op, arrays, ("running_mean", "running_var"), kernels, stream)


def batchnorm_update_stats(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """running = (1 - momentum) * running + momentum * batch, with the unbiased variance of the batch."""
    found, count = operands(op, arrays, *STATISTICS), op.attrs["count"]
    channels = found[0].size
    args = [*(array.ptr for array in found), channels, op.attrs["momentum"], op.attrs["eps"], count / (count - 1)]
    kernels.launch("batchnorm_update_stats", -(-channels // THREADS), args, stream)


def batchnorm_update_stats_all(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """The same of many norms in a launch or a few: arguments mean0, invstd0, running_mean0, running_var0, mean1, ...;
    attributes are lists."""
    for blocks, norms, table in tables("Norms", _norms(op, arrays)):
        kernels.launch("batchnorm_update_stats_all", blocks, [table, norms], stream)


def _norms(op: Op, arrays: Arrays) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Blocks of each norm, and its row of struct Norms."""
    rules = zip(*(op.attrs[name] for name in ("momentum", "eps", "count")), strict=True)
    for i, (momentum, eps, count) in enumerate(rules):
        found = operands(op, arrays, *(f"{name}{i}" for name in STATISTICS))
        channels = found[0].size
        row = (*(array.ptr for array in found), momentum, eps, count / (count - 1), channels)
        yield -(-channels // THREADS), row


def batchnorm_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """With g = dy, or for "relu" dy where y > 0, else 0, and x' = (x - mean) * invstd: dbias = sum g,
    dweight = sum g * x', dx = weight * invstd * (g - (dbias + x' * dweight) / count) if given, dz = g if given.

    Each is added to what op accumulates. The sign of y is found from x and bias, or read from y where dz is written;
    dz may be the bytes of dy.
    """
    mask = "" if "activation" not in op.attrs else "_by_x" if "dz" not in arrays else "_by_y"
    named = {"": ("x", "dy"), "_by_x": ("x", "dy"), "_by_y": ("x", "dy", "y")}[mask]
    batches = rows_of(op, arrays, *named, dtype=kernels.dtype)
    mean, invstd, weight, dweight, dbias = operands(op, arrays, "mean", "invstd", "weight", "dweight", "dbias")
    norm = [mean.ptr, invstd.ptr, weight.ptr]
    if mask == "_by_x":
        norm += [array.ptr for array in operands(op, arrays, "bias")]
    term = rows_of(op, arrays, "dz", dtype=kernels.dtype) if mask == "_by_y" else []
    sums = Channels.of(*batches, *term)
    partials = workspace(op, arrays, sums.partial_bytes + 8 * sums.channels)
    means = partials + sums.partial_bytes
    args = [*_places(*batches, *term), *(norm if mask == "_by_x" else norm[:1]), *sums.args, partials]
    args += ["dz" in op.accumulate] if term else []
    kernels.launch(f"batchnorm_gradient_sums{mask}", sums.blocks, args, stream)
    adds = ["dweight" in op.accumulate, "dbias" in op.accumulate]
    args = [partials, sums.splits, sums.channels, sums.count, invstd.ptr, dweight.ptr, dbias.ptr, means, *adds]
    kernels.launch("batchnorm_gradient_finish", join_blocks(sums.channels), args, stream)
    if "dx" not in arrays:
        return
    if term and "dz" not in op.accumulate:  # dz is g, wherever it lies
        mask, batches = "", [batches[0], *term]
    (dx,) = rows_of(op, arrays, "dx", dtype=kernels.dtype)
    blocks, grid = _batch(*batches, dx)
    args = [*_places(*batches, dx), *norm, means, *grid, "dx" in op.accumulate]
    kernels.launch(f"batchnorm_gradient{mask}", blocks, args, stream)


def batchnorm_bytes(shape: Shape, layout: str) -> int:
    """Bytes of workspace for x of `shape` in `layout`: the sums of each block, and two float32 a channel."""
    return channel_bytes(shape, layout) + 8 * shape[1]


def _normalize(op: Op, arrays: Arrays, statistics: tuple[str, str], kernels: Kernels, stream: Any) -> None:
    """The pass that writes y, by the mean and the invstd or variance so named."""
    name, names = ("batchnorm_normalize_and_add", ("x", "z", "y")) if "z" in arrays else ("batchnorm_normalize", "xy")
    batches = rows_of(op, arrays, *names, dtype=kernels.dtype)
    norm = operands(op, arrays, *statistics, "weight", "bias")
    floor = 0.0 if "activation" in op.attrs else -inf
    blocks, grid = _batch(*batches)
    how = [op.attrs["eps"], floor, op.kind == "batchnorm.inference"]
    args = [*_places(*batches), *(array.ptr for array in norm), *how, *grid]
    kernels.launch(name, blocks, args, stream)


def _places(*batches: DeviceArray) -> list[int]:
    """Address and stride of each."""
    return [number for batch in batches for number in (batch.ptr, batch.image_stride)]


def _batch(*batches: DeviceArray) -> tuple[int, list[int]]:
    """Blocks of a kernel that maps these, and its hw, inner, chunks, count, width."""
    found = Channels.of(*batches)
    if found.hw == 1:
        return found.blocks, [1, found.channels, found.splits, found.count, -found.width]
    rows = Rows.images(*batches)
    inner, chunks, width = rows.args
    return rows.blocks, [found.hw, inner, chunks, rows.count, width]
