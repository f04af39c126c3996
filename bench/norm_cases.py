"""Calls of vdnn's batch normalisation on CUDA, with sum and ReLU, and what they give in float64.

    for case in norm_cases():
        print(case.name, difference(case, "NHWC", machine))      # see vdnn.bench.kernel_check

Numbers are laid out so that no sign is in doubt: where a ReLU is found again from x, no y lies near 0 however x is
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from vdnn.bench.kernel_check import COARSE, FINE, Array, Case
from vdnn.layers import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16

EPS = 1e-5
SMALL: tuple[Shape, ...] = ((3, 5, 7, 9), (2, 4, 6, 10), (5, 70), (6, 3, 1, 3))
"""Odd sizes; by fours; vectors; three numbers a channel."""
LARGE: tuple[Shape, ...] = ((40, 3, 11, 20), (2, 1, 64, 66), (3, 40, 17, 23), (150, 264))
"""Several blocks a channel; one channel; rows that leave threads idle; several blocks of channels side by
side."""


def norm_cases() -> Iterator[Case]:
    """Forward, inference, statistics and backward: everything on small shapes, what a network has on large ones."""
    rng = np.random.default_rng(11)
    for shape in (*SMALL, *LARGE):
        yield from _forward(rng, shape)
        yield from _backward(rng, shape)
    yield from _statistics_of_all(rng)


def _forward(rng: np.random.Generator, shape: Shape) -> Iterator[Case]:
    c = shape[1]
    reads = {"x": _far_from_zero(rng, shape), "weight": _normal(rng, c), "bias": _normal(rng, c)}
    running = {"running_mean": _normal(rng, c), "running_var": 1 + _normal(rng, c) ** 2}
    case = Case("", "batchnorm.forward", {}, {}, tolerance=COARSE, reference=normalize)
    for adds, relu in product((False, True), (False, True)):
        read = {**reads, "z": 10 * _normal(rng, *shape)} if adds else reads
        attrs = {"eps": EPS, **({"activation": "relu"} if relu else {})}
        name = f"norm{' and sum' if adds else ''}{' and relu' if relu else ''} {shape}"
        writes = {"y": _unknown(*shape), "mean": _unknown(c), "invstd": _unknown(c)}
        yield replace(case, name=name, reads=read, writes=writes, attrs=attrs)
        if shape in LARGE:
            continue
        inference = replace(case, kind="batchnorm.inference", reads={**read, **running}, attrs=attrs)
        yield replace(inference, name=f"inference of {name}", writes={"y": _unknown(*shape)})
        over = "z" if adds else "x"
        yield replace(inference, name=f"inference over {over} of {name}", writes={"y": read[over]}, over={"y": over})
    saved = {"mean": _normal(rng, c), "invstd": 1 / (0.5 + _normal(rng, c) ** 2)}
    attrs = {"eps": EPS, "momentum": 0.1, "count": 7}
    name = f"statistics {shape}"
    yield Case(name, "batchnorm.update_stats", saved, running, attrs, tuple(running), tolerance=FINE)


def _statistics_of_all(rng: np.random.Generator) -> Iterator[Case]:
    few, many = (5, 1, 600, 256, 64), tuple(1 + 37 * i % 50 for i in range(70))  # more than go into one launch
    for channels in (few, many):
        reads, running = dict[str, Array](), dict[str, Array]()
        for i, c in enumerate(channels):
            reads |= {f"mean{i}": _normal(rng, c), f"invstd{i}": 1 / (0.5 + _normal(rng, c) ** 2)}
            running |= {f"running_mean{i}": _normal(rng, c), f"running_var{i}": 1 + _normal(rng, c) ** 2}
        numbers = range(len(channels))
        attrs = {"eps": [EPS * (1 + i % 2) for i in numbers], "momentum": [0.1 + 0.2 * (i % 3) for i in numbers]}
        attrs["count"] = [2 + i for i in numbers]
        name = f"statistics of {len(channels)}"
        yield Case(name, "batchnorm.update_stats_all", reads, running, attrs, tuple(running), tolerance=FINE)


def _backward(rng: np.random.Generator, shape: Shape) -> Iterator[Case]:
    c, axes = shape[1], (0, *range(2, len(shape)))
    x, weight, bias = _far_from_zero(rng, shape), _normal(rng, c), _normal(rng, c)
    weight += np.copysign(np.float32(0.5), weight)  # far enough from 0 for y to depend on x
    saved = {"mean": x.mean(axis=axes), "invstd": 1 / np.sqrt(x.var(axis=axes) + np.float32(EPS))}
    reads = {"x": x, "dy": _normal(rng, *shape), "weight": weight, **saved}
    plain = Case("", "batchnorm.backward", reads, {}, {"eps": EPS}, tolerance=COARSE, reference=gradient)
    by_x = replace(plain, reads={**reads, "x": _without_doubt(rng, x, weight, bias, **saved), "bias": bias})
    by_y = replace(plain, reads={**reads, "y": np.maximum(_normal(rng, *shape), 0)})
    for name, case in (("", plain), (" of relu", by_x), (" of sum and relu", by_y)):
        attrs = {"eps": EPS, **({"activation": "relu"} if name else {})}
        sums = (((), True), ((), False), (("dx",), True), (("dweight", "dbias", "dx"), True))
        for adds, dx in sums[:1] if shape in LARGE else sums:
            shapes = {"dweight": (c,), "dbias": (c,), **({"dx": shape} if dx else {})}
            writes = {a: _normal(rng, *s) if a in adds else _unknown(*s) for a, s in shapes.items()}
            called = f"norm gradient{name}, {', '.join(writes)}, added {adds} {shape}"
            made = replace(case, name=called, writes=writes, attrs=attrs, accumulate=adds)
            if case is not by_y:
                yield made
                continue
            over = {**writes, "dz": reads["dy"]}
            yield replace(made, name=f"{called}, dz over dy", writes=over, over={"dz": "dy"})
            held = {**writes, "dz": _normal(rng, *shape)}
            yield replace(made, name=f"{called}, dz added", writes=held, accumulate=(*adds, "dz"))
            if shape in SMALL:
                yield replace(made, name=f"{called}, dz", writes={**writes, "dz": _unknown(*shape)})


def normalize(op: Op, *, x: Array, weight: Array, bias: Array, y: Array, **others: Array) -> None:
    """batchnorm.forward and batchnorm.inference."""
    axes = (0, *range(2, x.ndim))
    if op.kind == "batchnorm.inference":
        mean, variance = others["running_mean"], others["running_var"]
    else:
        mean, variance = x.mean(axis=axes), x.var(axis=axes)
        others["mean"][...] = mean
        others["invstd"][...] = 1 / np.sqrt(variance + op.attrs["eps"])
    made = (x - _each(mean, x)) / _each(np.sqrt(variance + op.attrs["eps"]), x) * _each(weight, x) + _each(bias, x)
    made += others.get("z", 0)
    y[...] = np.maximum(made, 0) if "activation" in op.attrs else made


def gradient(
    op: Op,
    *,
    x: Array,
    dy: Array,
    weight: Array,
    mean: Array,
    invstd: Array,
    dweight: Array,
    dbias: Array,
    **others: Array,
) -> None:
    """batchnorm.backward."""
    axes = (0, *range(2, x.ndim))
    normal = (x - _each(mean, x)) * _each(invstd, x)
    g = dy.copy()
    if "activation" in op.attrs:
        y = others["y"] if "dz" in others else normal * _each(weight, x) + _each(others["bias"], x)
        g[y <= 0] = 0
    results = {"dbias": g.sum(axis=axes), "dweight": (g * normal).sum(axis=axes), "dz": g}
    mean_terms = (_each(results["dbias"], x) + normal * _each(results["dweight"], x)) / (x.size // weight.size)
    results["dx"] = _each(weight * invstd, x) * (g - mean_terms)
    for argument, out in {"dweight": dweight, "dbias": dbias, **others}.items():
        if argument in results:
            out[...] = out + results[argument] if argument in op.accumulate else results[argument]


def _each(channels: Array, x: Array) -> Array:
    """(C,) as it goes with x."""
    return channels.reshape(-1, *[1] * (x.ndim - 2))


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def _unknown(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def _far_from_zero(rng: np.random.Generator, shape: Shape) -> Array:
    """Of standard deviation 2 about -100, 0 or 100 in each channel."""
    means = 100 * rng.integers(-1, 2, (shape[1], *[1] * (len(shape) - 2)))
    return 2 * _normal(rng, *shape) + means.astype(np.float32)


def _without_doubt(
    rng: np.random.Generator, x: Array, weight: Array, bias: Array, *, mean: Array, invstd: Array
) -> Array:
    """x, where a normalised number that is nearly 0 in one of the ways to store x is replaced by another of x's."""
    x = x.copy()
    stored: dict[str, Any] = {
        "float32": lambda a: a,
        "bfloat16": lambda a: from_bfloat16(to_bfloat16(a)),
        "float16": lambda a: a.astype(np.float16).astype(np.float32),
    }
    center, factor = _each(mean, x), _each(invstd * weight, x)
    while True:
        doubtful = np.zeros(x.shape, bool)
        for store in stored.values():
            doubtful |= np.abs((store(x) - center) * factor + _each(bias, x)) < 1e-3
        if not doubtful.any():
            return x
        x[doubtful] += rng.choice([-1, 1], int(doubtful.sum())).astype(np.float32)
