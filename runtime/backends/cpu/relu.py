"""Rectified linear unit on the CPU; see vdnn.layers.relu.

    relu_forward(op, x=x, y=y)

Shapes: x, y, dy, dx (N, ...) of equal size and dtype; y may be the bytes of x, dx those of dy.
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, chunked
from vdnn.runtime.backends.cpu.conv import conv_bgrad
from vdnn.runtime.backends.cpu.linear import linear_bgrad
from vdnn.runtime.backends.cpu.select import select


def relu_forward(op: Op, *, x: Array, y: Array) -> None:
    """y = max(x, 0); a NaN stays a NaN."""
    for y_part, x_part in chunked(y, x):
        np.maximum(x_part, 0, out=y_part)


def relu_backward(op: Op, *, y: Array, dy: Array, dx: Array) -> None:
    """dx = dy where y > 0, else 0; added to dx if op accumulates it."""
    for dx_part, y_part, dy_part in chunked(dx, y, dy):
        passed = select(dy_part, y_part > 0, out=np.empty_like(dx_part) if op.accumulate else dx_part)
        if op.accumulate:
            dx_part += passed


def relu_bias_backward(op: Op, *, y: Array, dy: Array, dx: Array, db: Array) -> None:
    """dx = dy where y > 0, else 0, of a layer that applied its ReLU itself; db = sum of dx over all but channels.

    db: (K,), added to if op accumulates it.
    """
    for dx_part, y_part, dy_part in chunked(dx, y, dy):
        select(dy_part, y_part > 0, out=dx_part)
    bias_gradient = linear_bgrad if dx.ndim == 2 else conv_bgrad
    bias_gradient(op, dy=dx, db=db)
