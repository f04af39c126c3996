"""Fully connected layer on the CPU; see vdnn.layers.linear.

    linear_forward(op, x=x, w=w, b=b, y=y)

Shapes: x, dx (N, C) or an image (N, C', H, W) of C = C'*H*W numbers; y, dy (N, K); w, dw (K, C); b, db (K,), of one
dtype. Products that are added to something are taken in pieces of TEMPORARY_BYTES; an image x whose channels are a
slice of a larger tensor is copied.
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import TEMPORARY_BYTES, Array, image_slices
from vdnn.runtime.backends.cpu.columns import multiply


def linear_forward(op: Op, *, x: Array, w: Array, y: Array, b: Array | None = None) -> None:
    """y = x w^T + b; with the activation "relu" its maximum with 0."""
    np.matmul(_matrix(x), w.T, out=y)
    if b is not None:
        y += b
    if "activation" in op.attrs:
        np.maximum(y, 0, out=y)


def linear_wgrad(op: Op, *, x: Array, dy: Array, dw: Array) -> None:
    """dw = dy^T x; added to dw if op accumulates it."""
    multiply(dy.T, _matrix(x), dw, _scratch(dw) if op.accumulate else None)


def linear_dgrad(op: Op, *, w: Array, dy: Array, dx: Array) -> None:
    """dx = dy w; added to dx if op accumulates it."""
    if dx.ndim == 2 or dx.flags.c_contiguous:
        multiply(dy, w, _matrix(dx), _scratch(_matrix(dx)) if op.accumulate else None)
        return
    for images in image_slices(dx):  # channels of a larger tensor are no matrix
        product = (dy[images] @ w).reshape(dx[images].shape)
        np.copyto(dx[images], dx[images] + product if op.accumulate else product)


def linear_bgrad(op: Op, *, dy: Array, db: Array) -> None:
    """db = sum of dy over N; added to db if op accumulates it."""
    sums = dy.sum(axis=0)
    np.copyto(db, db + sums if op.accumulate else sums)


def _matrix(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _scratch(out: Array) -> Array:
    return np.empty(min(out.size, max(len(out), TEMPORARY_BYTES // out.itemsize)), out.dtype)
