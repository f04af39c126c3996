"""Calls of vdnn's pools on CUDA: windows of all sizes, and of the usual ones every way to compute them.

for case in pool_cases():
    print(case.name, difference(case, "CHWN", machine))      # see vdnn.bench.kernel_check
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from vdnn.bench.kernel_check import EXACT, FINE, Array, Case
from vdnn.layers import Pool

RNG = np.random.default_rng(12)


def normal(*shape: int) -> Array:
    """Random float32."""
    return RNG.normal(size=shape).astype(np.float32)


def unknown(*shape: int) -> Array:
    """float32 NaN: what an output holds before."""
    return np.full(shape, np.nan, np.float32)


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
    ((7, 7), {"kernel": "global"}),
    ((1, 3), {"kernel": "global"}),
)
"""Those that have kernels of their own in NHWC, where channels go by 16 bytes."""

PLANES = ("PLANES_8", "PLANES_16", "PLANES_32", "TURNS_28", "TURNS_7")
WAYS: tuple[tuple[tuple[int, int, int, int], Mapping[str, Any], tuple[str, ...]], ...] = (
    ((16, 16, 5, 6), {"kernel": 2}, ("TILE_1x1", "TILE_2x1")),
    ((3, 16, 7, 9), {"kernel": 2, "padding": 1}, ("TILE_1x1", "TILE_2x1", "PLANES_8")),
    ((16, 16, 7, 8), {"kernel": 3, "stride": 2}, ("TILE_1x1", "TILE_2x1", "TILE_2x2", "TILE_4x1")),
    ((2, 24, 11, 14), {"kernel": 3, "stride": 2, "padding": 1}, ("TILE_1x1", "TILE_2x1", "TILE_2x2", "TILE_4x1")),
    ((16, 8, 8, 7), {"kernel": 3, "stride": 2, "ceil_mode": True}, ("TILE_1x1", "TILE_2x1", "TILE_2x2", "TILE_4x1")),
    ((3, 16, 7, 6), {"kernel": 3, "stride": 1, "padding": 1}, ("TILE_2x1", "TILE_2x2")),
    ((16, 8, 5, 6), {"kernel": 3, "stride": 1}, ("TILE_2x1", "TILE_2x2")),
    ((1, 2, 10, 12), {"kernel": 3, "stride": 2}, ("TILE_1x4",)),
    ((1, 2, 9, 8), {"kernel": 3, "stride": 1, "padding": 1}, ("TILE_1x4",)),
    ((1, 2, 8, 8), {"kernel": 3, "stride": 2, "padding": 1}, ("TILE_1x4",)),
    ((1, 2, 6, 8), {"kernel": 2}, ("TILE_1x4",)),
    ((1, 2, 61, 75), {"kernel": 3, "stride": 2, "ceil_mode": True}, PLANES),
    ((1, 1, 62, 70), {"kernel": 3, "stride": 2, "padding": 1}, PLANES),
    ((1, 1, 63, 71), {"kernel": 3, "stride": 1, "padding": 1}, PLANES),
    ((1, 2, 59, 77), {"kernel": 2}, PLANES),
    ((2, 20, 13, 13), {"kernel": 3, "stride": 2}, PLANES),
    ((2, 1, 6, 800), {"kernel": 3, "stride": 2}, PLANES),
    ((1, 1, 5, 3500), {"kernel": 3, "stride": 2}, PLANES),
    ((2, 1, 6, 1601), {"kernel": 3, "stride": 2}, ("PLANES_16",)),
    ((1, 1, 5, 901), {"kernel": 2}, PLANES),
    ((1, 1, 5, 1801), {"kernel": 2}, PLANES),
    ((1, 1, 61, 301), {"kernel": 3, "stride": 2}, PLANES),
)
"""Images, the arguments of a Pool layer, and algorithms: tiles in NHWC and CHWN, TILE_1x4 in NCHW; in shared memory
several planes, bands of rows, those of all rows of a plane that does not fit, and those of rows that no window holds.
Where there is no such algorithm, a case runs as if it had been told none."""


def pool_cases() -> Iterator[Case]:
    """All windows with few channels, the usual ones with channels by 16 bytes, NaN, and each way to compute them."""
    yield from _pools_of(3, WINDOWS)
    yield from _pools_of(16, USUAL)
    for stride, padding, ceil in product((1, 2, 3), (0, 1), (False, True)):
        yield from _nans(Pool("max", 3, stride, padding, ceil), (8, 8))
    for shape, arguments, labels in WAYS:
        for label in labels:
            yield from _way(shape, arguments, label)


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


def _way(shape: tuple[int, int, int, int], arguments: Mapping[str, Any], label: str) -> Iterator[Case]:
    """Forward of a maximum, with and without indices, and of an average, and backward by indices with a mask."""
    n, channels, h, w = shape
    layer = Pool("max", **arguments)
    _, p, q = layer.output_shape("pool", (shape[1:],))
    attrs = {**pool_attributes(layer, (h, w)), "algorithm": label}
    x, dy = RNG.integers(-3, 4, shape).astype(np.float32), normal(n, channels, p, q)
    name, y = f"{label} {shape} {arguments}", unknown(n, channels, p, q)
    yield Case(f"max {name}", "pool.forward", {"x": x}, {"y": y}, attrs)
    writes = {"y": y, "indices": np.full(dy.shape, 7, np.uint8)}
    indexed = Case(f"max {name} indexed", "pool.forward", {"x": x}, writes, attrs)
    yield indexed
    average = {**attrs, "mode": "average", "count_include_pad": False}
    yield Case(f"average {name}", "pool.forward", {"x": x}, {"y": y}, average, tolerance=FINE)
    reads = indexed.expected()
    reads["y"] = reads["y"].astype(np.float32)
    for adds, mask in ((False, True), (True, False), (True, True)):
        dx, accumulate = (normal(*shape), ("dx",)) if adds else (unknown(*shape), ())
        given = {a: v for a, v in reads.items() if mask or a != "y"} | {"dy": dy}
        called = f"{name} gradient{' masked' if mask else ''}{' added' if adds else ''}"
        yield Case(called, "pool.backward", given, {"dx": dx}, attrs, accumulate)


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
