"""Small ragged calls of every kind of vdnn's CUDA kernels.

for case in all_cases():
    for layout in LAYOUTS:
        print(case.name, layout, difference(case, layout, machine))      # see vdnn.bench.kernel_check
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vdnn.bench.kernel_check import COARSE, EXACT, FINE, STORE, Array, Case
from vdnn.bench.norm_cases import norm_cases
from vdnn.layers import Op, Pool
from vdnn.layers.images import folded_filters
from vdnn.layers.tensor import Shape
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
    yield from _pointwise()
    yield from _pools()
    yield from _lrns()
    yield from norm_cases()
    yield from _filters()
    yield from _filters_together()
    yield from _biases()
    yield from _losses()
    yield from _updates()


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


WINDOWS: tuple[tuple[tuple[int, int], Mapping[str, Any]], ...] = (
    ((6, 8), {"kernel": 2}),
    ((7, 9), {"kernel": 3, "stride": 2}),
    ((6, 8), {"kernel": 3, "stride": 2, "ceil_mode": True}),
    ((5, 5), {"kernel": 2, "stride": 3, "padding": 1, "ceil_mode": True}),
    ((5, 4), {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1)}),
    ((6, 7), {"kernel": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    ((7, 7), {"kernel": 3, "stride": 1, "padding": 1}),
    ((9, 7), {"kernel": (2, 1), "stride": (4, 3)}),
    ((4, 4), {"kernel": 1}),
    ((5, 7), {"kernel": "global"}),
    ((56, 52), {"kernel": 3, "stride": 2, "ceil_mode": True}),
    ((28, 28), {"kernel": 5, "stride": 3}),
    ((18, 18), {"kernel": "global"}),
    ((7, 9), {"kernel": 2}),
    ((8, 16), {"kernel": 2}),
    ((9, 28), {"kernel": 2, "ceil_mode": True}),
    ((12, 24), {"kernel": 3, "stride": 2, "ceil_mode": True}),
    ((9, 12), {"kernel": 3, "stride": 2}),
    ((12, 16), {"kernel": 3, "stride": 2, "padding": 1}),
    ((15, 11), {"kernel": 3, "stride": 2, "padding": 1}),
    ((10, 12), {"kernel": 3, "stride": 1, "padding": 1}),
    ((40, 60), {"kernel": 3, "stride": 1, "padding": 1}),
)
"""Images and the arguments of a Pool layer: the CPU tests', a few of several blocks, and rows loaded by fours."""


USUAL: tuple[tuple[tuple[int, int], Mapping[str, Any]], ...] = (
    ((7, 9), {"kernel": 2}),
    ((8, 6), {"kernel": 2, "ceil_mode": True}),
    ((7, 9), {"kernel": 3, "stride": 2}),
    ((6, 8), {"kernel": 3, "stride": 2, "ceil_mode": True}),
    ((7, 6), {"kernel": 3, "stride": 2, "padding": 1}),
    ((9, 7), {"kernel": 3, "stride": 1, "padding": 1}),
)
"""Those that have kernels of their own in NHWC, where channels go by 16 bytes."""


def _pools() -> Iterator[Case]:
    yield from _pools_of(3, WINDOWS)
    yield from _pools_of(16, USUAL)
    for stride, padding, ceil in product((1, 2, 3), (0, 1), (False, True)):
        yield from _nans(Pool("max", 3, stride, padding, ceil), (8, 8))


def _pools_of(channels: int, windows: Iterable[tuple[tuple[int, int], Mapping[str, Any]]]) -> Iterator[Case]:
    for (h, w), arguments in windows:
        for mode, count in (("max", True), ("average", True), ("average", False)):
            layer = Pool(mode, count_include_pad=count, **arguments)  # type: ignore[arg-type]
            _, p, q = layer.output_shape("pool", ((channels, h, w),))
            attrs = pool_attributes(layer, (h, w))
            exact = EXACT if mode == "max" else FINE
            for ties in (False, True) if mode == "max" else (False,):
                shape = 2, channels, h, w
                x = RNG.integers(-2, 1, shape).astype(np.float32) if ties else normal(*shape)
                name = f"{mode}{' with ties' if ties else ''}{'' if count else ' inside'} {channels} {arguments}"
                forward = Case(
                    name, "pool.forward", {"x": x}, {"y": unknown(2, channels, p, q)}, attrs, tolerance=exact
                )
                yield forward
                dy = normal(2, channels, p, q)
                told: dict[str, dict[str, Array]] = {"": {}}
                if mode == "max":
                    told = {"": {"x": x, "y": forward.expected()["y"]}}
                    if layer.can_index_winners((channels, h, w)):
                        writes = {**forward.writes, "indices": np.full(dy.shape, 7, np.uint8)}
                        indexed = Case(f"{name} indexed", "pool.forward", {"x": x}, writes, attrs, tolerance=exact)
                        yield indexed
                        found = indexed.expected()
                        told |= {" indexed": {"indices": found["indices"]}, " masked": {**found}}
                for (how, reads), adds in product(told.items(), (False, True)):
                    dx = normal(*x.shape) if adds else unknown(*x.shape)
                    accumulate = ("dx",) if adds else ()
                    called = f"{name}{how} gradient{' added' if adds else ''}"
                    reads = {**reads, "dy": dy}
                    yield Case(called, "pool.backward", reads, {"dx": dx}, attrs, accumulate, tolerance=exact)


def _nans(layer: Pool, size: tuple[int, int]) -> Iterator[Case]:
    """NaN and infinities: a window with a NaN has no winner, one of equal infinities its first pixel."""
    x = normal(1, 8, *size)
    x[0, ::2, 2, 3], x[0, ::2, 2, 4], x[0, ::2, 3, 3] = np.nan, -np.nan, 0.0
    x[0, 1::2, :4] = -np.inf
    x[0, 3, 5:], x[0, 3, 5:, ::2] = 0.0, -0.0
    _, p, q = layer.output_shape("pool", (x.shape[1:],))
    attrs, y, indices = pool_attributes(layer, size), unknown(1, 8, p, q), np.full((1, 8, p, q), 7, np.uint8)
    yield Case(f"max of a NaN {layer}", "pool.forward", {"x": x}, {"y": y}, attrs)
    forward = Case(f"max of a NaN, indexed {layer}", "pool.forward", {"x": x}, {"y": y, "indices": indices}, attrs)
    yield forward
    found, dy = forward.expected(), normal(1, 8, p, q)
    for reads in ({"x": x, "y": found["y"]}, {"indices": found["indices"]}, found):
        name = f"gradient of a max of a NaN by {', '.join(reads)} {layer}"
        yield Case(name, "pool.backward", {**reads, "dy": dy}, {"dx": unknown(*x.shape)}, attrs)


def pool_attributes(layer: Pool, size: tuple[int, int]) -> dict[str, Any]:
    """The attributes that lowering gives a pool op on images of that size."""
    kernel = size if layer.kernel == "global" else layer.kernel
    stride = kernel if layer.stride is None else layer.stride
    pairs = {"kernel": kernel, "stride": stride, "padding": layer.padding}
    listed = {key: [value] * 2 if isinstance(value, int) else list(value) for key, value in pairs.items()}
    return {"mode": layer.mode, "count_include_pad": layer.count_include_pad, **listed}


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
    for (n, k), smoothing in product(((4, 5), (3, 10), (2, 1000), (5, 257)), (0.0, 0.1)):
        labels = RNG.integers(0, k, n).astype(np.int32)
        x = normal(n, k, 1, 1) * 3
        x[0, [1, 3]] = 9  # two largest scores: the first is the choice
        labels[0] = 1
        writes = {"probs": unknown(n, k), "loss": unknown(n), "correct": np.full(n, 7, np.uint8)}
        attrs = {"label_smoothing": smoothing}
        name = f"loss {n}x{k} smoothing {smoothing}"
        forward = Case(name, "softmax_loss.forward", {"x": x, "labels": labels}, writes, attrs, tolerance=COARSE)
        yield forward
        probs = forward.expected()["probs"].astype(np.float32)
        reads: dict[str, Array] = {"probs": probs, "labels": labels, "step": new_step(0.1, 0.25, 0, 0)}
        for adds in (False, True):
            dx = normal(n, k, 1, 1) if adds else unknown(n, k)
            attrs, accumulate = {"label_smoothing": smoothing, "weight": 0.3}, ("dx",) if adds else ()
            called = f"{name} gradient{' added' if adds else ''}"
            yield Case(called, "softmax_loss.backward", reads, {"dx": dx}, attrs, accumulate, tolerance=FINE)


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
