"""Small ragged calls of every kind of vdnn's CUDA kernels.

for case in all_cases():
    for layout in LAYOUTS:
        print(case.name, layout, difference(case, layout, machine))      # see vdnn.bench.kernel_check
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod

import numpy as np

from vdnn.bench.kernel_check import COARSE, FINE, STORE, TRANSFORM, Array, Case
from vdnn.bench.norm_cases import norm_cases
from vdnn.bench.pool_cases import pool_cases
from vdnn.layers import Op
from vdnn.layers.images import folded_filters
from vdnn.layers.tensor import MEMORY_ORDERS, Shape
from vdnn.runtime.backends.cpu.fold import unfolded_filters
from vdnn.runtime.backends.cpu.philox import philox
from vdnn.runtime.step import new_step

RNG = np.random.default_rng(8)
SHAPES: tuple[Shape, ...] = ((3, 5, 7, 9), (2, 4, 6, 10), (1, 1, 1, 1), (2, 3, 41, 37), (5, 1003), (2, 2, 64, 68))
"""Odd sizes, sizes by fours, one number, rows of several blocks."""


def normal(*shape: int) -> Array:
    """Random float32."""
    return RNG.normal(size=shape).astype(np.float32)


def unknown(*shape: int) -> Array:
    """float32 NaN: what an output holds before."""
    return np.full(shape, np.nan, np.float32)


def all_cases() -> Iterator[Case]:
    """Every kind, in the order of a network."""
    yield from _pixels_and_terms()
    yield from _moves()
    yield from _pointwise()
    yield from pool_cases()
    yield from _lrns()
    yield from norm_cases()
    yield from _filters()
    yield from _filters_together()
    yield from _biases()
    yield from _losses()
    yield from _updates()


MOVED: tuple[tuple[Shape, tuple[str, ...]], ...] = (
    ((9, 5, 6, 7), ("", "NAIVE", "TILED", "VECTOR")),
    ((16, 24, 4, 4), ("", "TILED", "VECTOR")),
    ((2, 3, 40, 52), ("", "VECTOR")),
    ((3, 40, 13, 13), ("", "VECTOR")),
    ((1, 6, 5, 7), ("",)),
    ((70, 18, 1, 1), ("", "NAIVE", "VECTOR")),
    ((1, 96, 9, 11), ("",)),
)
"""Images that go from any layout to any other, and algorithms by which they do; "" is the usual one. Odd sizes, whole
squares of 16 bytes, 3 channels, long odd rows, one image, one pixel, strips of 96 channels."""


def _moves() -> Iterator[Case]:
    for shape, algorithms in MOVED:
        for (one, two), algorithm in product(permutations(MEMORY_ORDERS, 2), algorithms):
            attrs, orders = {"algorithm": algorithm} if algorithm else {}, {"x": one, "y": two}
            name, read = f"{one} to {two} {algorithm} {shape}", {"x": normal(*shape)}
            yield Case(name, TRANSFORM, read, {"y": unknown(*shape)}, attrs, orders=orders)
            if algorithm in ("", "VECTOR"):
                yield Case(f"{name} added", TRANSFORM, read, {"y": normal(*shape)}, attrs, ("y",), orders=orders)


def _pixels_and_terms() -> Iterator[Case]:
    for n, c, h, w in ((2, 3, 28, 28), (3, 1, 5, 7), (1, 4, 70, 61)):
        x, attrs = RNG.integers(0, 256, (n, c, h, w)).astype(np.uint8), {"mean": [0.1 * i for i in range(c)]}
        attrs["std"] = [0.2 + i for i in range(c)]
        for channels in {c, 4, 8} if c < 4 else {c, 11}:
            y, name = unknown(n, channels, h, w), f"pixels {x.shape} to {channels} channels"
            yield Case(name, "input.normalize", {"x": x}, {"y": y}, attrs, tolerance=FINE)
    yield from _folded_pixels()
    for shape in SHAPES:
        flat = shape[0], prod(shape[1:])
        yield Case(f"copy {shape}", "copy.forward", {"x": normal(*flat)}, {"y": unknown(*shape)})
        if len(shape) == 4:
            yield Case(f"to vectors {shape}", "layout.transform", {"x": normal(*shape)}, {"y": unknown(*flat)})
            yield Case(f"to images {shape}", "layout.transform", {"x": normal(*flat)}, {"y": unknown(*shape)})
            held, name = {"y": normal(*shape)}, f"to images, added {shape}"
            yield Case(name, "layout.transform", {"x": normal(*flat)}, held, accumulate=("y",))
        yield Case(f"copy added {shape}", "copy.forward", {"x": normal(*shape)}, {"y": normal(*shape)}, {}, ("y",))
        terms = {"a": normal(*shape), "b": normal(*shape)}
        yield Case(f"sum {shape}", "add.forward", terms, {"y": unknown(*shape)})
        yield Case(f"sum in place {shape}", "add.forward", terms, {"y": terms["a"]}, over={"y": "a"})


FOLDS = (
    ((2, 3, 30, 28), 2, (3, 3), (16, 18, 17)),
    ((3, 1, 9, 11), 3, (0, 1), (9, 3, 4)),
    ((2, 3, 35, 38), 4, (2, 2), (48, 9, 10)),
    ((1, 4, 7, 6), 2, (1, 0), (20, 4, 4)),
    ((2, 6, 10, 9), 2, (2, 1), (24, 7, 6)),
    ((2, 3, 8, 8), 8, (0, 0), (192, 1, 1)),
    ((1, 10, 5, 7), 2, (3, 3), (43, 6, 6)),
)
"""Images, the stride in their channels, padding, and what is made of each image."""


def _folded_pixels() -> Iterator[Case]:
    for shape, fold, padding, made in FOLDS:
        rule = {"mean": [0.1 + 0.07 * i for i in range(shape[1])], "std": [0.2 + 0.1 * i for i in range(shape[1])]}
        attrs, x = {**rule, "fold": fold, "padding": padding}, RNG.integers(0, 256, shape).astype(np.uint8)
        name = f"pixels {shape} by {fold} to {made}"
        yield Case(name, "input.normalize", {"x": x}, {"y": unknown(shape[0], *made)}, attrs, tolerance=FINE)


def _pointwise() -> Iterator[Case]:
    step = new_step(0.1, 1.0, 2**33 + 9, 2**45 + 12345, 6)
    for shape in SHAPES:
        x, dy = normal(*shape), normal(*shape)
        x.reshape(-1)[::5] = 0
        x.reshape(-1)[3::7] = np.nan
        y = np.maximum(normal(*shape), 0)
        yield Case(f"relu {shape}", "relu.forward", {"x": x}, {"y": unknown(*shape)})
        yield Case(f"relu in place {shape}", "relu.forward", {"x": x}, {"y": x}, over={"y": "x"})
        reads = {"y": y, "dy": dy}
        yield Case(f"relu gradient {shape}", "relu.backward", reads, {"dx": unknown(*shape)})
        yield Case(f"relu gradient in place {shape}", "relu.backward", reads, {"dx": dy}, over={"dx": "dy"})
        yield Case(f"relu gradient added {shape}", "relu.backward", reads, {"dx": normal(*shape)}, {}, ("dx",))
        for p in (0.0, 0.3, 0.5, 0.999):
            attrs = {"p": p, "key": 0xDEADBEEF}
            reads = {"x": x, "step": step}
            yield Case(f"dropout {p} {shape}", "dropout.forward", reads, {"y": unknown(*shape)}, attrs)
            yield Case(f"dropout {p} in place {shape}", "dropout.forward", reads, {"y": x}, attrs, over={"y": "x"})
            reads = {"dy": dy, "step": step}
            held = normal(*shape)
            yield Case(f"dropout {p} gradient {shape}", "dropout.backward", reads, {"dx": held}, attrs, ("dx",))
    zero, sample, turn, key = (np.array([part], np.uint64) for part in (0, 6, 9, 0xDEADBEEF))
    word = int(philox((zero, sample, turn, key), (12345, 2**13))[0][0])  # of the first number under `step`: just kept
    attrs, reads = {"p": word / 2**32, "key": 0xDEADBEEF}, {"x": normal(1, 5), "step": step}
    yield Case("dropout at the threshold", "dropout.forward", reads, {"y": unknown(1, 5)}, attrs)


def _lrns() -> Iterator[Case]:
    sizes = (((2, 70, 3, 5), 5), ((1, 3, 17, 16), 5), ((2, 33, 4, 4), 4), ((2, 9, 2, 3), 3), ((1, 1, 2, 2), 5))
    for (shape, size), beta in product(sizes, (0.75, 0.5)):
        attrs = {"size": size, "alpha": 0.5, "beta": beta, "k": 2.0}
        x = normal(*shape) * 3
        forward = Case(
            f"lrn {size} beta {beta} {shape}", "lrn.forward", {"x": x}, {"y": unknown(*shape)}, attrs, tolerance=COARSE
        )
        yield forward
        reads = {"x": x, "y": forward.expected()["y"].astype(np.float32), "dy": normal(*shape)}
        for adds in (False, True):
            dx = normal(*shape) if adds else unknown(*shape)
            name = f"lrn {size} beta {beta} gradient{' added' if adds else ''} {shape}"
            yield Case(name, "lrn.backward", reads, {"dx": dx}, attrs, ("dx",) if adds else (), tolerance=COARSE)


def _biases() -> Iterator[Case]:
    def added(op: Op, *, y: Array, b: Array | None = None) -> None:
        if b is not None:
            y += b.reshape(-1, *[1] * (y.ndim - 2))
        if "activation" in op.attrs:
            np.maximum(y, 0, out=y)

    for shape in (*SHAPES, (70, 3, 13, 20), (300, 37), (2, 41), (2, 2, 1, 3)):
        kind = "conv" if len(shape) == 4 else "linear"
        k = shape[1]
        for attrs, what in (({}, "bias"), ({"activation": "relu"}, "bias and relu")):
            y = normal(*shape)
            y.reshape(-1)[1::5] = np.nan
            yield Case(f"{what} {shape}", f"{kind}.forward", {"b": normal(k)}, {"y": y}, attrs, reference=added)
        yield Case(f"relu alone {shape}", f"{kind}.forward", {}, {"y": y}, attrs, reference=added)
        for adds in ((), ("db",)):
            writes, name = {"db": normal(k) if adds else unknown(k)}, f"bias gradient{' added' if adds else ''} {shape}"
            yield Case(name, f"{kind}.bgrad", {"dy": normal(*shape)}, writes, {}, adds, tolerance=COARSE)
            reads = {"y": np.maximum(normal(*shape), 0), "dy": normal(*shape)}
            for over in ({}, {"dx": "dy"}) if k < 100 else ():
                called = f"relu gradient and {name}{' in place' if over else ''}"
                both = {"dx": reads["dy"] if over else unknown(*shape), **writes}
                yield Case(called, "relu.bias_backward", reads, both, {}, adds, over, COARSE)


def _filters() -> Iterator[Case]:
    def stored(op: Op, *, scratch: Array, dw: Array) -> None:
        found = scratch[:, : dw.shape[1]]
        if "fold" in op.attrs:
            found = unfolded_filters(scratch, op.attrs["fold"], dw.shape)
        dw[...] = found + (dw if op.accumulate else 0)

    for shape in ((5, 3, 7, 7), (4, 16, 3, 3), (70, 64, 1, 1), (3, 1, 1, 1), (33, 65), (130, 96)):
        forms = [(shape[1], 1), (-(-shape[1] // 8) * 8, 1)]
        forms += [(fold * fold * shape[1] + more, fold) for fold, more in ((2, 0), (2, 4), (3, 5))]
        for channels, fold in dict.fromkeys(forms if len(shape) == 4 else forms[:1]):
            y, attrs = unknown(*folded_filters(shape, fold, channels)), {"fold": fold} if fold > 1 else {}
            yield Case(f"filter {shape} to {y.shape}", "filter.prepare", {"w": normal(*shape)}, {"y": y}, attrs)
            for adds in ((), ("dw",)):
                reads, writes = {"scratch": normal(*y.shape)}, {"dw": normal(*shape) if adds else unknown(*shape)}
                name = f"filter gradient {shape} of {y.shape} {adds}"
                yield Case(name, STORE, reads, writes, attrs, adds, reference=stored)


def _filters_together() -> Iterator[Case]:
    few = ((5, 3, 7, 7), (4, 16, 3, 3), (70, 64, 1, 1), (3, 1, 1, 1), (33, 65), (130, 96), (9, 1000))
    many = tuple((1 + 37 * i % 50, 8) for i in range(130))  # more than go into one launch
    for shapes in (few, many):
        reads = {f"w{i}": normal(*shape) for i, shape in enumerate(shapes)}
        writes = {f"y{i}": unknown(*shape) for i, shape in enumerate(shapes)}
        yield Case(f"{len(shapes)} filters", "filter.prepare_all", reads, writes)


def _losses() -> Iterator[Case]:
    for (n, k), smoothing in product(((4, 5), (3, 10), (2, 1000), (5, 257), (37, 31), (9, 200)), (0.0, 0.1)):
        yield from _loss(n, k, smoothing)
    for n, k in ((2, 2049), (3, 8192), (2, 8193), (2, 20008)):  # one block a row, then several
        yield from _loss(n, k, 0.1)
    for n, k in ((3, 10), (2, 1000), (3, 4099), (2, 16000), (2, 20000), (2, 20001), (3, 40000)):
        yield Case(
            f"softmax {n}x{k}", "softmax.forward", {"x": 3 * normal(n, k)}, {"y": unknown(n, k)}, tolerance=COARSE
        )


def _loss(n: int, k: int, smoothing: float) -> Iterator[Case]:
    labels = RNG.integers(0, k, n).astype(np.int32)
    x = normal(n, k) * 3
    x[0, [1, k - 1]] = 19  # two largest scores: the first is the choice
    labels[:2] = 1, x[1].argmax()
    losses = {"loss": unknown(n), "correct": np.full(n, 7, np.uint8)}
    attrs = {"label_smoothing": smoothing}
    name = f"loss {n}x{k} smoothing {smoothing}"
    writes = {"probs": unknown(n, k), **losses}
    forward = Case(name, "softmax_loss.forward", {"x": x, "labels": labels}, writes, attrs, tolerance=COARSE)
    yield forward
    probs = forward.expected()["probs"].astype(np.float32)
    labelled: dict[str, Array] = {"labels": labels, "step": new_step(0.1, 0.25, 0, 0)}
    for adds in (False, True):
        dx = normal(n, k) if adds else unknown(n, k)
        attrs, accumulate = {"label_smoothing": smoothing, "weight": 0.3}, ("dx",) if adds else ()
        called = f"{name} gradient{' added' if adds else ''}"
        reads = {"probs": probs, **labelled}
        yield Case(called, "softmax_loss.backward", reads, {"dx": dx}, attrs, accumulate, tolerance=FINE)
        reads, writes = {"x": x.reshape(n, k, 1, 1), **labelled}, {"dx": dx, **losses}
        yield Case(f"{called} at once", "softmax_loss.train", reads, writes, attrs, accumulate, tolerance=COARSE)


def _updates() -> Iterator[Case]:
    for shape, momentum, nesterov in product(((3, 5, 3, 3), (5003,), (1,)), (0.0, 0.9), (False, True)):
        for bad in (None, np.nan, np.inf):
            dw, record = normal(*shape), new_step(0.125, 1.0, 0, 0, 0, 1 / 3)
            if bad is not None:
                dw.reshape(-1)[-1] = bad
            writes: dict[str, Array] = {"w": normal(*shape), "status": record}
            writes |= {"v": normal(*shape)} if momentum else {}
            attrs = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": 0.01}
            reads, name = {"dw": dw, "step": record}, f"update {shape} {momentum} {nesterov} {bad}"
            yield Case(name, "sgd.update", reads, writes, attrs, tuple(writes), {"status": "step"}, FINE)
    record = new_step(0.125, 1.0, 0, 0)
    record[28] = 1  # not_finite, set by an earlier layer
    attrs = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    reads, writes = {"dw": normal(9), "step": record}, {"w": normal(9), "status": record}
    yield Case("update that is held", "sgd.update", reads, writes, attrs, tuple(writes), {"status": "step"})
    yield from _updates_together()


def _updates_together() -> Iterator[Case]:
    few = ((3, 5, 3, 3), (9,), (5003,), (1,), (130, 96))
    many = tuple((1 + 37 * i % 50,) for i in range(110))  # more than go into one launch
    rules = [(few, *rule) for rule in product((0.0, 0.9), (False, True))]
    for shapes, momentum, nesterov in (*rules, (many, 0.9, False)):
        for bad in (None, 0, len(shapes) - 1):
            record = new_step(0.125, 1.0, 0, 0, 0, 0.5)
            reads: dict[str, Array] = {"step": record}
            writes: dict[str, Array] = {"status": record}
            for i, shape in enumerate(shapes):
                reads[f"dw{i}"], writes[f"w{i}"] = normal(*shape), normal(*shape)
                if momentum:
                    writes[f"v{i}"] = normal(*shape)
            if bad is not None:
                reads[f"dw{bad}"].reshape(-1)[0] = np.inf
            decays = [0.01 * (i % 3) for i in range(len(shapes))]
            attrs = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": decays}
            name = f"{len(shapes)} updates {momentum} {nesterov} {bad}"
            yield Case(name, "sgd.update_all", reads, writes, attrs, tuple(writes), {"status": "step"}, FINE)
