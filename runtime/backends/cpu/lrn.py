"""Local response normalisation across channels on the CPU; see vdnn.layers.lrn for the formula.

    lrn_forward(op, x=x, y=y)

Shapes: x, y, dy, dx (N, C, H, W), equal dtype; op.attrs: size, alpha, beta, k. With
scale = k + alpha / size * windowed sum of x^2, so that y = x * scale^-beta, the gradient is
dx[i] = dy[i] * scale[i]^-beta - 2 * alpha * beta / size * x[i] * sum of dy[j] * y[j] / scale[j]
over the channels j whose window holds i.
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, chunked


def lrn_forward(op: Op, *, x: Array, y: Array) -> None:
    """y = x * scale^-beta."""
    for y_part, x_part in chunked(y, x):
        factor = _scale(op, x_part)
        np.power(factor, -op.attrs["beta"], out=factor)
        np.multiply(x_part, factor, out=y_part)


def lrn_backward(op: Op, *, x: Array, y: Array, dy: Array, dx: Array) -> None:
    """The gradient above; added to dx if op accumulates it."""
    size, alpha, beta = op.attrs["size"], op.attrs["alpha"], op.attrs["beta"]
    for dx_part, x_part, y_part, dy_part in chunked(dx, x, y, dy):
        scale = _scale(op, x_part)
        ratio = dy_part * y_part
        ratio /= scale
        across = _window_sum(ratio, below=size // 2, above=(size - 1) // 2)
        across *= x_part
        across *= -2 * alpha * beta / size
        np.power(scale, -beta, out=scale)
        scale *= dy_part
        across += scale
        np.copyto(dx_part, dx_part + across if op.accumulate else across)


def _scale(op: Op, x: Array) -> Array:
    size = op.attrs["size"]
    scale = _window_sum(x * x, below=(size - 1) // 2, above=size // 2)
    scale *= op.attrs["alpha"] / size
    scale += op.attrs["k"]
    return scale


def _window_sum(values: Array, below: int, above: int) -> Array:
    """Sum over the channels c - below to c + above of each channel c, clipped; (N, C, H, W)."""
    total = values.copy()
    channels = values.shape[1]
    for shift in range(1, min(above, channels - 1) + 1):
        total[:, :-shift] += values[:, shift:]
    for shift in range(1, min(below, channels - 1) + 1):
        total[:, shift:] += values[:, :-shift]
    return total
