"""A few results of a convolution in float64, against which a plan's error is measured.

    pieces = exact_pieces(problem, read, repeat)    # read(role, image, channel, channels) -> float32 array
    [(piece.place, piece.values) for piece in pieces]

forward and dgrad: whole planes, of the first and the last image; wgrad: whole filters. The sums are written out by
their definition. Few numbers, but over all images, rows and columns that they depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem

Array = NDArray[Any]
Place = tuple[int, int]
Read = Callable[[str, int, int, int], Array]
"""(role, i, first, count) → elements [i, first:first + count] of "x", "w" or "y", shape (count, rows, columns)."""

LEAST_FILTER_VALUES = 16
"""Of the filter gradient: enough that their mean square tells TF32 from fp32."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`values` in float64, shape (rows, columns), of out[place] with `place` = (i, channel)."""

    place: tuple[int, int]
    values: Array


def exact_pieces(problem: ConvProblem, read: Read, repeat: int | None = None) -> list[Piece]:
    """The pieces of one problem without its epilogue, whose operands `read` tells.

    repeat: if image n + repeat of x and y equals image n; a filter gradient then reads no more than `repeat` images.
    """
    chosen = places(problem)
    if problem.direction == "wgrad":
        found = _wgrad(problem, read, chosen, repeat or problem.x[0])
    else:
        one = {"forward": _forward, "dgrad": _dgrad}[problem.direction]
        found = [one(problem, read, *place) for place in chosen]
    return [Piece(*pair) for pair in zip(chosen, found, strict=True)]


def places(problem: ConvProblem) -> list[tuple[int, int]]:
    """Which pieces are computed: the first and the last, of small filters more in between."""
    shape = {"forward": problem.y, "dgrad": problem.x, "wgrad": problem.w}[problem.direction]
    images, channels = shape[:2]
    count = 2
    if problem.direction == "wgrad":
        count = max(2, -(-LEAST_FILTER_VALUES // (shape[2] * shape[3])))
    steps = [step / (count - 1) for step in range(count)]
    return list(dict.fromkeys((round(step * (images - 1)), round(step * (channels - 1))) for step in steps))


def _taps(problem: ConvProblem) -> list[tuple[int, int, slice, slice]]:
    """Of every filter tap (r, s): the rows and columns of the padded input that it meets, one per output."""
    (v, h), (dil_v, dil_h), (p, q) = problem.stride, problem.dilation, problem.y[2:]
    return [
        (
            *(r, s),
            slice(r * dil_v, r * dil_v + v * (p - 1) + 1, v),
            slice(s * dil_h, s * dil_h + h * (q - 1) + 1, h),
        )
        for r, s in product(range(problem.w[2]), range(problem.w[3]))
    ]


def _padded(problem: ConvProblem, planes: Array) -> Array:
    (pad_v, pad_h) = problem.padding
    return np.pad(planes.astype(np.float64), ((0, 0), (pad_v, pad_v), (pad_h, pad_h)))


def _forward(problem: ConvProblem, read: Read, n: int, k: int) -> Array:
    channels = problem.w[1]
    group = k // (problem.w[0] // problem.groups)
    x, w = _padded(problem, read("x", n, group * channels, channels)), read("w", k, 0, channels).astype(np.float64)
    y = np.zeros(problem.y[2:])
    for r, s, rows, columns in _taps(problem):
        y += np.tensordot(w[:, r, s], x[:, rows, columns], 1)
    return y


def _dgrad(problem: ConvProblem, read: Read, n: int, c: int) -> Array:
    filters, channels = problem.w[0] // problem.groups, problem.w[1]
    group, inner = divmod(c, channels)
    first = group * filters
    dy = read("y", n, first, filters).astype(np.float64)
    w = np.concatenate([read("w", first + k, inner, 1) for k in range(filters)]).astype(np.float64)
    (height, width), (pad_v, pad_h) = problem.x[2:], problem.padding
    dx = np.zeros((height + 2 * pad_v, width + 2 * pad_h))
    for r, s, rows, columns in _taps(problem):
        dx[rows, columns] += np.tensordot(w[:, r, s], dy, 1)
    return dx[pad_v : pad_v + height, pad_h : pad_h + width]


def _wgrad(problem: ConvProblem, read: Read, chosen: Sequence[Place], repeat: int) -> list[Array]:
    """Image by image, of which no more than one channel is read; all taps of a filter at once."""
    images = problem.x[0]
    found = [np.zeros(problem.w[2:]) for _ in chosen]
    for n in range(min(images, repeat)):
        times = len(range(n, images, repeat))
        for dw, (k, c) in zip(found, chosen, strict=True):
            group = k // (problem.w[0] // problem.groups)
            x = _padded(problem, read("x", n, group * problem.w[1] + c, 1))[0]
            dy = read("y", n, k, 1)[0].astype(np.float64)
            dw += times * np.einsum("rspq,pq->rs", _windows(problem, x), dy)
    return found


def _windows(problem: ConvProblem, x: Array) -> Array:
    """What every tap (r, s) meets of one padded plane, a view of shape (R, S, P, Q)."""
    (v, h), (dil_v, dil_h), (row, column) = problem.stride, problem.dilation, x.strides
    steps = (dil_v * row, dil_h * column, v * row, h * column)
    return np.lib.stride_tricks.as_strided(x, (*problem.w[2:], *problem.y[2:]), steps, writeable=False)
