"""Dropout on the GPU, its mask drawn anew in backward; see vdnn.layers.dropout for the counters, and dropout.cu.

    dropout_forward(op, {"x": x, "step": record, "y": y}, kernels, stream)

x, y, dy, dx (N, ...) of equal size, float32, any of them channels of a larger tensor; y may be the bytes of x, dx those
of dy. step: the 64-byte record of vdnn.runtime.step. op.attrs: p and key.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import THREADS, Arrays, Kernels, Rows, operands


def dropout_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x / (1 - p) where the value is kept, else 0."""
    _drop(op, arrays, "x", "y", kernels, stream)


def dropout_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy / (1 - p) where forward kept the value, else 0; added to dx if op accumulates it."""
    _drop(op, arrays, "dy", "dx", kernels, stream)


def _drop(op: Op, arrays: Arrays, source: str, target: str, kernels: Kernels, stream: Any) -> None:
    x, y = operands(op, arrays, source, target)
    rows, p = Rows.images(x, y), op.attrs["p"]
    chunks = rows.chunks(4 * THREADS)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, arrays["step"].ptr, rows.inner, chunks, rows.width]
    args += [op.attrs["key"], ceil(p * 2**32), 1 / (1 - p), bool(op.accumulate)]
    kernels.launch("dropout", rows.count * chunks, args, stream)
