"""Batch normalisation on the CPU; see vdnn.layers.batchnorm for the formulas.

    batchnorm_forward(op, x=x, weight=weight, bias=bias, y=y, mean=mean, invstd=invstd)

Shapes: x, y, dy, dx (N, C, H, W) or (N, C); weight, bias, mean, invstd, running_mean, running_var, dweight, dbias
(C,), of one dtype. Sums over a batch are taken in float64. op.attrs: eps; momentum and count for update_stats.
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, chunked, plane_sums, planes


def batchnorm_forward(op: Op, *, x: Array, weight: Array, bias: Array, y: Array, mean: Array, invstd: Array) -> None:
    """y = weight * (x - mean) * invstd + bias; mean and invstd = 1 / sqrt(variance + eps) of the batch are written."""
    count = x.size // weight.size
    total, squares = np.zeros((2, weight.size))
    for _, x_part in chunked(y, x):
        total += _channel_sums(x_part)
    mean[...] = total / count
    for _, x_part in chunked(y, x):
        deviation = planes(x_part) - mean[:, None]
        deviation *= deviation
        squares += _channel_sums(deviation)
    invstd[...] = 1 / np.sqrt(squares / count + op.attrs["eps"])
    _normalize(x, y, mean, invstd * weight, bias)


def batchnorm_inference(
    op: Op, *, x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array
) -> None:
    """y = weight * (x - running_mean) / sqrt(running_var + eps) + bias; y may be the bytes of x."""
    factor = weight / np.sqrt(running_var + op.attrs["eps"], dtype=weight.dtype)
    _normalize(x, y, running_mean, factor, bias)


def batchnorm_update_stats(op: Op, *, mean: Array, invstd: Array, running_mean: Array, running_var: Array) -> None:
    """running = (1 - momentum) * running + momentum * batch, with the unbiased variance of the batch."""
    momentum, count = op.attrs["momentum"], op.attrs["count"]
    variance = np.maximum(1 / np.square(invstd, dtype=np.float64) - op.attrs["eps"], 0) * (count / (count - 1))
    running_mean[...] = (1 - momentum) * running_mean + momentum * mean
    running_var[...] = (1 - momentum) * running_var + momentum * variance


def batchnorm_backward(
    op: Op,
    *,
    x: Array,
    dy: Array,
    weight: Array,
    mean: Array,
    invstd: Array,
    dweight: Array,
    dbias: Array,
    dx: Array | None = None,
) -> None:
    """With x' = (x - mean) * invstd: dbias = sum dy, dweight = sum dy * x', and, if dx is given,
    dx = weight * invstd * (dy - (dbias + x' * dweight) / count). Each is added to what op accumulates."""
    count = x.size // weight.size
    bias_sum, weight_sum = np.zeros((2, weight.size))
    for dy_part, x_part in chunked(dy, x):
        normal = planes(x_part) - mean[:, None]
        normal *= planes(dy_part)
        bias_sum += _channel_sums(dy_part)
        weight_sum += _channel_sums(normal)
    weight_sum *= invstd
    for name, out, sums in (("dbias", dbias, bias_sum), ("dweight", dweight, weight_sum)):
        out[...] = out + sums if name in op.accumulate else sums
    if dx is None:
        return
    slope = (weight_sum * invstd / count).astype(x.dtype)[:, None]
    shift = (bias_sum / count).astype(x.dtype)[:, None]
    factor = (weight * invstd)[:, None]
    for dx_part, dy_part, x_part in chunked(dx, dy, x):
        channels = (len(dx_part), weight.size, -1)
        part = x_part.reshape(channels) - mean[:, None]
        part *= -slope
        part += dy_part.reshape(channels)
        part -= shift
        part *= factor
        shaped = part.reshape(dx_part.shape)
        np.copyto(dx_part, dx_part + shaped if "dx" in op.accumulate else shaped)


def _normalize(x: Array, y: Array, mean: Array, factor: Array, bias: Array) -> None:
    for y_part, x_part in chunked(y, x):
        out = planes(y_part)
        np.subtract(planes(x_part), mean[:, None], out=out)
        out *= factor[:, None]
        out += bias[:, None]


def _channel_sums(part: Array) -> Array:
    """Sum over all but channels, (C,) float64; planes in their own dtype where that is done pairwise."""
    return np.asarray(plane_sums(part).sum(axis=0, dtype=np.float64))
