"""Convolution kernels against loops over single numbers, for every algorithm, and cut as large layers are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from interpreter import Array
from kernel_calls import call, channel_slice

from vdnn.errors import VdnnError
from vdnn.layers import Op
from vdnn.runtime.backends.cpu import geometry
from vdnn.runtime.backends.cpu.conv import conv_forward


class Case(NamedTuple):
    """Images (N, C, H, W), K filters of R x S, and the attributes, vertical first."""

    images: tuple[int, int, int, int]
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def attrs(self) -> dict[str, Any]:
        pairs = {key: list(getattr(self, key)) for key in ("stride", "padding", "dilation")}
        return {**pairs, "groups": self.groups}

    @property
    def output(self) -> tuple[int, int, int, int]:
        sides = zip(self.images[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        p, q = ((size + 2 * pad - dilation * (r - 1) - 1) // step + 1 for size, r, step, pad, dilation in sides)
        return (self.images[0], self.filters, p, q)

    @property
    def algorithms(self) -> tuple[str, ...]:
        free = (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))
        return ("GEMM",) if free else ("GEMM_BATCH", "GEMM_TILE")

    @property
    def all_algorithms(self) -> tuple[str, ...]:
        """With those that CHWN has, which take any layout."""
        return (*self.algorithms, "GEMM_WIDE", "GEMM_WIDE_TILE")


CASES = {
    "plain": Case((2, 3, 5, 6), 4, (3, 3)),
    "one pixel": Case((1, 1, 1, 1), 1, (1, 1)),
    "1x1": Case((3, 4, 3, 5), 2, (1, 1)),
    "1x1 grouped": Case((3, 4, 3, 5), 6, (1, 1), groups=2),
    "1x1 strided": Case((2, 3, 5, 4), 2, (1, 1), stride=(2, 3)),
    "1x1 padded": Case((2, 3, 3, 4), 2, (1, 1), padding=(1, 0)),
    "1x1 dilated": Case((2, 3, 3, 4), 2, (1, 1), dilation=(3, 2)),
    "asymmetric": Case((2, 2, 6, 7), 3, (2, 4), stride=(1, 2), padding=(1, 2)),
    "strided past the end": Case((2, 2, 7, 8), 3, (3, 3), stride=(3, 2)),
    "dilated": Case((2, 2, 7, 9), 2, (3, 2), padding=(2, 1), dilation=(2, 3)),
    "padding wider than the filter": Case((1, 2, 2, 3), 2, (2, 2), stride=(2, 1), padding=(3, 4)),
    "filter of the whole image": Case((3, 2, 4, 3), 5, (4, 3)),
    "depthwise": Case((2, 4, 5, 5), 4, (3, 3), padding=(1, 1), groups=4),
    "grouped, all at once": Case((2, 4, 7, 6), 6, (3, 2), stride=(2, 1), padding=(1, 1), dilation=(1, 2), groups=2),
}
RUNS = [pytest.param(case, a, id=f"{name}, {a}") for name, case in CASES.items() for a in case.all_algorithms]


def taps(case: Case) -> list[tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, int, int, int]]]:
    """Every product of the convolution: indices of x, w and y."""
    _, c, height, width = case.images
    found = []
    in_group, out_group = c // case.groups, case.filters // case.groups
    for n, k, p, q in np.ndindex(case.output):
        for j, r, s in product(range(in_group), *map(range, case.kernel)):
            h = p * case.stride[0] - case.padding[0] + r * case.dilation[0]
            w = q * case.stride[1] - case.padding[1] + s * case.dilation[1]
            if 0 <= h < height and 0 <= w < width:
                found.append(((n, k // out_group * in_group + j, h, w), (k, j, r, s), (n, k, p, q)))
    return found


class Passes(NamedTuple):
    """Operands of a case and, from the list of products, what its four passes give."""

    x: Array
    w: Array
    b: Array
    dy: Array
    y: Array
    dx: Array
    dw: Array
    db: Array

    @classmethod
    def of(cls, case: Case) -> Passes:
        rng = np.random.default_rng(1)
        filters = (case.filters, case.images[1] // case.groups, *case.kernel)
        x, w, b, dy = (rng.normal(size=shape) for shape in (case.images, filters, (case.filters,), case.output))
        y, dx, dw = np.zeros(case.output) + b[:, None, None], np.zeros(x.shape), np.zeros(w.shape)
        for i, j, o in taps(case):
            y[o] += x[i] * w[j]
            dx[i] += dy[o] * w[j]
            dw[j] += dy[o] * x[i]
        return cls(x, w, b, dy, y, dx, dw, np.array([dy[:, k].sum() for k in range(case.filters)]))


def check(case: Case, algorithm: str, *, sliced: bool = False, accumulate: bool = False) -> None:
    """All four passes against the list of products, on plain arrays or on channels of larger ones."""
    want = Passes.of(case)
    attrs = {**case.attrs, "algorithm": algorithm}
    wrap = channel_slice if sliced else np.array
    held = 10.0 if accumulate else np.nan  # what gradients hold before

    def agree(kind: str, reads: dict[str, Array], name: str, out: Array, result: Array, **attrs: Any) -> None:
        adds = (name,) if accumulate and kind != "conv.forward" else ()
        got = call(kind, reads, {name: out}, adds, **attrs)[name]
        np.testing.assert_allclose(got, result + 10.0 if adds else result, rtol=1e-12, atol=1e-12, err_msg=kind)

    x, dy = wrap(want.x), wrap(want.dy)
    y, dx = wrap(np.full(want.y.shape, np.nan)), wrap(np.full(want.x.shape, held))
    dw, db = np.full(want.w.shape, held), np.full(want.b.shape, held)
    agree("conv.forward", {"x": x, "w": want.w, "b": want.b}, "y", y, want.y, **attrs)
    agree("conv.forward", {"x": x, "w": want.w}, "y", y, want.y - want.b[:, None, None], **attrs)
    agree("conv.wgrad", {"x": x, "dy": dy}, "dw", dw, want.dw, **attrs)
    agree("conv.dgrad", {"w": want.w, "dy": dy}, "dx", dx, want.dx, **attrs)
    agree("conv.bgrad", {"dy": dy}, "db", db, want.db)


@pytest.fixture(autouse=True)
def _cut_anew() -> Iterator[None]:
    """Cuts are remembered by shape; tests here change what they are made of."""
    geometry._split.cache_clear()
    yield
    geometry._split.cache_clear()


@pytest.mark.parametrize(("case", "algorithm"), RUNS)
def test_passes_equal_loops(case: Case, algorithm: str) -> None:
    check(case, algorithm)


@pytest.mark.parametrize(("case", "algorithm"), RUNS)
def test_passes_on_channels_of_larger_tensors_accumulate(case: Case, algorithm: str) -> None:
    check(case, algorithm, sliced=True, accumulate=True)


@pytest.mark.parametrize(("case", "algorithm"), RUNS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_passes_cut_into_the_smallest_parts(
    case: Case, algorithm: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers go image by image and row by row, and their filter gradients a few columns at a time."""
    for name in ("TILE_BYTES", "TILE_SCRATCH_BYTES", "BATCH_BYTES", "BATCH_SCRATCH_BYTES", "CACHE_BYTES"):
        monkeypatch.setattr(geometry, name, 1)
    monkeypatch.setattr(geometry, "WIDE", dict.fromkeys(geometry.WIDE, 1))
    check(case, algorithm, accumulate=accumulate)


def test_parts_of_unequal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five images two at a time, nine rows a few at a time."""
    case = Case((5, 2, 9, 8), 3, (3, 3), padding=(1, 1))
    monkeypatch.setattr(geometry, "CACHE_BYTES", 2 * (2 * 9 + 3) * 9 * 8 * 8)
    monkeypatch.setattr(geometry, "TILE_BYTES", 4 * 18 * 8 * 8)
    monkeypatch.setattr(geometry, "TILE_SCRATCH_BYTES", 5 * 3 * 8)
    cut = geometry.Geometry.of(case.attrs, case.images, (3, 2, 3, 3), case.output, 8)
    assert cut.split("GEMM_BATCH", "conv.forward", accumulate=False).images == 2
    assert cut.split("GEMM_TILE", "conv.forward", accumulate=False).rows == 3
    column_bytes = (2 * 9 + 3) * 8 * 8
    wide = {"GEMM_WIDE": 5 * 4 * column_bytes, "GEMM_WIDE_TILE": 2 * column_bytes}  # three images at once, and two
    monkeypatch.setattr(geometry, "WIDE", wide)
    cuts = [cut.split(name, "conv.forward", accumulate=False) for name in wide]
    assert [(part.images, part.rows) for part in cuts] == [(5, 3), (2, 1)]
    for algorithm in case.all_algorithms:
        check(case, algorithm)


LARGE = {
    "vgg conv1_2": Case((64, 64, 224, 224), 64, (3, 3), padding=(1, 1)),
    "vgg conv5_1": Case((256, 512, 14, 14), 512, (3, 3), padding=(1, 1)),
    "alexnet conv1": Case((128, 3, 224, 224), 64, (11, 11), (4, 4), (2, 2)),
    "resnet 1x1": Case((32, 2048, 7, 7), 512, (1, 1)),
    "depthwise": Case((32, 256, 56, 56), 256, (3, 3), padding=(1, 1), groups=256),
    "lenet conv2": Case((64, 20, 12, 12), 50, (5, 5)),
}


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("kind", ["conv.forward", "conv.wgrad", "conv.dgrad"])
def test_workspace_is_bounded(case: Case, kind: str) -> None:
    """GEMM_TILE takes about 1 MiB or one row, GEMM_BATCH 32 MiB, GEMM_WIDE 8 MiB, GEMM only what is added."""
    weights = (case.filters, case.images[1] // case.groups, *case.kernel)
    row = 4 * weights[1] * weights[2] * weights[3] * case.output[3]
    limits = {"GEMM": 0, "GEMM_TILE": max(2**20, row + 2**18), "GEMM_BATCH": 2**25}
    column = row + 4 * case.filters // case.groups * case.output[3]
    wide = {"GEMM_WIDE": max(2**23, column) + 2**18, "GEMM_WIDE_TILE": max(768 * 2**10, column) + 2**18}
    limits |= {name: limit + 1024 for name, limit in wide.items()}  # pieces are aligned
    g = geometry.Geometry.of(case.attrs, case.images, weights, case.output, 4)
    assert g.algorithms == case.algorithms
    for algorithm in case.all_algorithms:
        limit = limits[algorithm] + (2**18 if algorithm == "GEMM" and kind == "conv.wgrad" else 0)
        assert g.split(algorithm, kind, accumulate=False).nbytes <= limit
        assert g.split(algorithm, kind, accumulate=True).nbytes <= max(limit, 2**18)


def test_a_workspace_too_small_is_named() -> None:
    attrs = {**CASES["plain"].attrs, "algorithm": "GEMM_TILE"}
    op = Op("conv1.forward", "conv.forward", "conv1", "forward", {}, {}, attrs)
    with pytest.raises(VdnnError, match=r"conv1\.forward.*conv1.*GEMM_TILE.*expected a workspace of 1536 bytes.*got 8"):
        conv_forward(
            op,
            x=np.zeros((2, 3, 5, 6), np.float32),
            w=np.zeros((4, 3, 3, 3), np.float32),
            y=np.zeros((2, 4, 3, 4), np.float32),
            workspace=np.zeros(8, np.uint8),
        )


@pytest.mark.parametrize("algorithm", ["GEMM_BATCH", "GEMM_TILE", "GEMM_WIDE"])
def test_float32_is_as_near_as_float32_can_be(algorithm: str) -> None:
    case = Case((4, 16, 12, 12), 8, (3, 3), padding=(1, 1))
    want = Passes.of(case)
    reads = {"x": want.x.astype("f4"), "w": want.w.astype("f4")}
    got = call("conv.forward", reads, {"y": case.output}, **case.attrs, algorithm=algorithm)["y"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want.y - want.b[:, None, None], rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [31, 32, 37])
def test_a_long_sum_of_few_numbers(width: int) -> None:
    """Thousands of outputs a filter: the sum is taken in pieces, the last one ragged or not."""
    case = Case((2, 1, 34, width + 1), 3, (3, 2))
    want = Passes.of(case)
    for algorithm in case.algorithms:
        attrs = {**case.attrs, "algorithm": algorithm}
        got = call("conv.wgrad", {"x": want.x, "dy": want.dy}, {"dw": want.w.shape}, **attrs)["dw"]
        np.testing.assert_allclose(got, want.dw, rtol=1e-11)
        held = np.full(want.w.shape, 10.0)
        call("conv.wgrad", {"x": want.x, "dy": want.dy}, {"dw": held}, ("dw",), **attrs)
        np.testing.assert_allclose(held, want.dw + 10, rtol=1e-11)
