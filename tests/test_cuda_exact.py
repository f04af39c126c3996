"""The float64 results that plans are judged by, against the convolution written as loops over every product."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.exact import exact_pieces, places

SHAPES: dict[str, tuple[Any, ...]] = {
    "plain": ((2, 3, 5, 6), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1": ((3, 4, 4, 3), (5, 4, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "strided": ((2, 2, 9, 8), (3, 2, 3, 2), (2, 3), (1, 0), (1, 1), 1),
    "dilated": ((2, 2, 9, 8), (3, 2, 3, 2), (1, 2), (2, 1), (2, 3), 1),
    "grouped": ((2, 6, 5, 5), (4, 3, 2, 3), (1, 1), (0, 1), (1, 1), 2),
    "depthwise": ((2, 3, 5, 5), (3, 1, 3, 3), (1, 1), (1, 1), (1, 1), 3),
}


def problem_of(name: str, direction: str) -> ConvProblem:
    x, w, stride, padding, dilation, groups = SHAPES[name]
    sides = [
        (size + 2 * pad - dil * (r - 1) - 1) // step + 1
        for size, pad, dil, r, step in zip(x[2:], padding, dilation, w[2:], stride, strict=True)
    ]
    return ConvProblem(direction, x, w, (x[0], w[0], *sides), stride, padding, dilation, groups)


def by_loops(problem: ConvProblem, x: Any, w: Any, y: Any) -> Any:
    """y, dx or dw: every product on its own."""
    (n_, _, height, width), (k_, c_, r_, s_), (_, _, p_, q_) = problem.x, problem.w, problem.y
    out = np.zeros({"forward": problem.y, "dgrad": problem.x, "wgrad": problem.w}[problem.direction])
    for n, k, c, r, s, p, q in product(*map(range, (n_, k_, c_, r_, s_, p_, q_))):
        row = p * problem.stride[0] + r * problem.dilation[0] - problem.padding[0]
        column = q * problem.stride[1] + s * problem.dilation[1] - problem.padding[1]
        if not (0 <= row < height and 0 <= column < width):
            continue
        channel = k // (k_ // problem.groups) * c_ + c
        if problem.direction == "forward":
            out[n, k, p, q] += x[n, channel, row, column] * w[k, c, r, s]
        elif problem.direction == "dgrad":
            out[n, channel, row, column] += y[n, k, p, q] * w[k, c, r, s]
        else:
            out[k, c, r, s] += x[n, channel, row, column] * y[n, k, p, q]
    return out


@pytest.mark.parametrize("direction", OPERANDS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_pieces_are_those_of_the_definition(name, direction):
    problem = problem_of(name, direction)
    rng = np.random.default_rng(3)
    arrays = {
        role: rng.standard_normal(shape) for role, shape in {"x": problem.x, "w": problem.w, "y": problem.y}.items()
    }
    expected = by_loops(problem, **arrays)
    read: list[str] = []

    def reader(role: str, i: int, first: int, count: int) -> Any:
        read.append(role)
        assert first + count <= arrays[role].shape[1]
        return arrays[role][i, first : first + count]

    pieces = exact_pieces(problem, reader)
    for piece in pieces:
        np.testing.assert_allclose(piece.values, expected[piece.place], rtol=1e-12, atol=1e-12)
    assert set(read) == set(OPERANDS[direction][:2])  # never what the plan writes
    last = tuple(size - 1 for size in expected.shape[:2])
    assert {(0, 0), last} <= {piece.place for piece in pieces}
    assert len({piece.place for piece in pieces}) == len(pieces)


def test_small_filters_are_looked_at_in_more_places():
    assert len(places(ConvProblem("wgrad", (8, 64, 7, 7), (64, 64, 1, 1), (8, 64, 7, 7)))) == 16
    assert len(places(ConvProblem("wgrad", (8, 64, 7, 7), (64, 64, 3, 3), (8, 64, 5, 5)))) == 2
    assert len(places(ConvProblem("forward", (1, 64, 7, 7), (1, 64, 1, 1), (1, 1, 7, 7)))) == 1
