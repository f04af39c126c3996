"""Batch normalisation on the CPU; see vdnn.layers.batchnorm for the formulas.

    batchnorm_forward(op, x=x, weight=weight, bias=bias, y=y, mean=mean, invstd=invstd)

Shapes: x, y, z, dy, dx, dz (N, C, H, W) or (N, C); weight, bias, mean, invstd, running_mean, running_var, dweight,
dbias (C,), of one dtype. Sums over a batch are taken in float64. op.attrs: eps; activation, where there is one;
momentum and count for update_stats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, chunked, image_slices, plane_sums, planes
from vdnn.runtime.backends.cpu.select import select

STATISTICS = ("mean", "invstd", "running_mean", "running_var")
"""Arguments of update_stats."""


def batchnorm_forward(
    op: Op, *, x: Array, weight: Array, bias: Array, y: Array, mean: Array, invstd: Array, z: Array | None = None
) -> None:
    """y = weight * (x - mean) * invstd + bias + z; mean and invstd = 1 / sqrt(variance + eps) of the batch are written.

    With the activation "relu" y is the maximum of that and 0.
    """
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
    _normalize(op, x, y, Scale(mean, invstd * weight, bias), z)


def batchnorm_inference(
    op: Op,
    *,
    x: Array,
    weight: Array,
    bias: Array,
    running_mean: Array,
    running_var: Array,
    y: Array,
    z: Array | None = None,
) -> None:
    """y = weight * (x - running_mean) / sqrt(running_var + eps) + bias + z; y may be the bytes of x.

    With the activation "relu" y is the maximum of that and 0.
    """
    factor = weight / np.sqrt(running_var + op.attrs["eps"], dtype=weight.dtype)
    _normalize(op, x, y, Scale(running_mean, factor, bias), z)


def batchnorm_update_stats(op: Op, *, mean: Array, invstd: Array, running_mean: Array, running_var: Array) -> None:
    """running = (1 - momentum) * running + momentum * batch, with the unbiased variance of the batch."""
    momentum, count = op.attrs["momentum"], op.attrs["count"]
    variance = np.maximum(1 / np.square(invstd, dtype=np.float64) - op.attrs["eps"], 0) * (count / (count - 1))
    running_mean[...] = (1 - momentum) * running_mean + momentum * mean
    running_var[...] = (1 - momentum) * running_var + momentum * variance


def batchnorm_update_stats_all(op: Op, **arrays: Array) -> None:
    """The same of many norms: arguments mean0, invstd0, running_mean0, running_var0, mean1, ...; attrs are lists."""
    for i in range(len(op.attrs["count"])):
        one = replace(op, attrs={name: values[i] for name, values in op.attrs.items()})
        batchnorm_update_stats(one, **{name: arrays[f"{name}{i}"] for name in STATISTICS})


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
    y: Array | None = None,
    dz: Array | None = None,
    bias: Array | None = None,
) -> None:
    """With x' = (x - mean) * invstd and g = dy: dbias = sum g, dweight = sum g * x', and, if dx is given,
    dx = weight * invstd * (g - (dbias + x' * dweight) / count). Each is added to what op accumulates.

    With the activation "relu" g = dy where y > 0, else 0. Where forward added z, y is given, and dz = g is written,
    over dy or elsewhere; without it the sign of y is found from x and bias.
    """
    count = x.size // weight.size
    scale = Scale(mean, invstd * weight, bias) if bias is not None else None
    bias_sum, weight_sum = np.zeros((2, weight.size))
    for images, g, x_part in _gradients(dy, x, y, scale):
        if dz is not None:
            term = g.reshape(dz[images].shape)
            np.copyto(dz[images], dz[images] + term if "dz" in op.accumulate else term)
        normal = planes(x_part) - mean[:, None]
        normal *= planes(g)
        bias_sum += _channel_sums(g)
        weight_sum += _channel_sums(normal)
    weight_sum *= invstd
    for name, out, sums in (("dbias", dbias, bias_sum), ("dweight", dweight, weight_sum)):
        out[...] = out + sums if name in op.accumulate else sums
    if dx is None:
        return
    slope = (weight_sum * invstd / count).astype(x.dtype)[:, None]
    shift = (bias_sum / count).astype(x.dtype)[:, None]
    factor = (weight * invstd)[:, None]
    for images, g, x_part in _gradients(dy, x, y, scale):  # over dy, dz is masked once more, which changes nothing
        part = planes(x_part) - mean[:, None]
        part *= -slope
        part += planes(g)
        part -= shift
        part *= factor
        shaped = part.reshape(dx[images].shape)
        np.copyto(dx[images], dx[images] + shaped if "dx" in op.accumulate else shaped)


class Scale(NamedTuple):
    """What every channel is shifted and multiplied by: (x - mean) * factor + bias, each (C,)."""

    mean: Array
    factor: Array
    bias: Array

    def apply(self, x: Array, out: Array) -> Array:
        """out = the scaled x (N, C, ...); returns out."""
        rows = planes(out)
        np.subtract(planes(x), self.mean[:, None], out=rows)
        rows *= self.factor[:, None]
        rows += self.bias[:, None]
        return out


def _normalize(op: Op, x: Array, y: Array, scale: Scale, z: Array | None) -> None:
    for y_part, x_part, *z_part in chunked(y, x, *(() if z is None else (z,))):
        scale.apply(x_part, y_part)
        for term in z_part:
            y_part += term
        if "activation" in op.attrs:
            np.maximum(y_part, 0, out=y_part)


def _gradients(dy: Array, x: Array, y: Array | None, scale: Scale | None) -> Iterator[tuple[slice, Array, Array]]:
    """Slices of the batch, with g and x there in the shape of dy; the sign of y is that of y, or of the scaled x."""
    for images in image_slices(dy):
        g = dy[images]
        x_part = x[images].reshape(g.shape)
        if y is not None:
            g = select(g, y[images].reshape(g.shape) > 0, out=np.empty_like(g))
        elif scale is not None:
            g = select(g, scale.apply(x_part, np.empty_like(g)) > 0, out=np.empty_like(g))
        yield images, g, x_part


def _channel_sums(part: Array) -> Array:
    """Sum over all but channels, (C,) float64; planes in their own dtype where that is done pairwise."""
    return np.asarray(plane_sums(part).sum(axis=0, dtype=np.float64))
