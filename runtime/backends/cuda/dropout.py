"""Dropout on the GPU, its mask drawn anew in backward; see vdnn.layers.dropout for the counters, and dropout.cu.

    dropout_forward(op, {"x": x, "step": record, "y": y}, kernels, stream)

x, y, dy, dx (N, ...) of equal size, activations, any of them channels of a larger tensor; y may be the bytes of x, dx
those of dy. step: the 64-byte record of vdnn.runtime.step. op.attrs: p and key.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import (
    THREADS,
    Arrays,
    Kernels,
    Rows,
    by,
    check_index,
    common_layout,
    operands,
)

FOUR = 4
"""Numbers of a counter."""


def dropout_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x / (1 - p) where the value is kept, else 0."""
    _drop(op, arrays, "x", "y", kernels, stream)


def dropout_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy / (1 - p) where forward kept the value, else 0; added to dx if op accumulates it."""
    _drop(op, arrays, "dy", "dx", kernels, stream)


def _drop(op: Op, arrays: Arrays, source: str, target: str, kernels: Kernels, stream: Any) -> None:
    x, y = operands(op, arrays, source, target, dtype=kernels.dtype)
    p, step = op.attrs["p"], arrays["step"].ptr
    rule = [op.attrs["key"], ceil(p * 2**32), 1 / (1 - p), bool(op.accumulate)]
    layout = common_layout(op, x, y)
    if layout == "CHWN":
        images = y.shape[0]
        places = y.size // images
        threads = check_index(images * -(-places // FOUR), "counters of a batch")
        kernels.launch("dropout_columns", -(-threads // THREADS), [x.ptr, y.ptr, step, images, places, *rule], stream)
        return
    if layout == "NHWC":
        n, channels, h, w = y.shape
        blocks = -(-check_index(y.size, "numbers of a batch") // THREADS)
        args = [x.ptr, x.pixel_stride, y.ptr, y.pixel_stride, step, h * w, channels, n * h * w]
        kernels.launch("dropout_pixels", blocks, [*args, *rule], stream)
        return
    rows = Rows.images(x, y)
    chunks = rows.chunks(FOUR * THREADS)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, step, rows.inner, chunks]
    args += [FOUR if by(FOUR, x, y, rows=rows.count) else 1]
    kernels.launch("dropout", rows.count * chunks, [*args, *rule], stream)
