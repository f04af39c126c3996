"""Convolutions in CHWN: every kernel on the host against sums written out in float64, and against the CPU backend."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from host_cupy import HostCupy
from numpy.typing import NDArray

from vdnn.errors import PlanError, VdnnError
from vdnn.layers import Op
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda import chwn_conv, chwn_tiles
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.chwn_conv import chwn_convolve
from vdnn.runtime.backends.cuda.chwn_tiles import GRADIENT_TILES, SMALL_BYTES, TILES, Tile, chwn_candidates
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.kernels import KernelSet
from vdnn.runtime.backends.cuda.source import OPTIONS, signatures, source
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16

Array = NDArray[Any]
GAP = 64
"""Numbers before and behind every tensor that must be neither read nor written."""
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    # x, w, attributes
    "one channel": ((8, 1, 7, 6), (16, 1, 5, 5), {"padding": [2, 2]}),
    "three channels, stride": ((4, 3, 9, 11), (20, 3, 3, 3), {"stride": [2, 2]}),
    "many channels": ((32, 20, 4, 5), (12, 20, 3, 3), {"padding": [1, 1]}),
    "ragged images": ((5, 7, 6, 4), (10, 7, 3, 2), {"padding": [1, 0]}),
    "one image, 1 x 1": ((1, 9, 5, 5), (7, 9, 1, 1), {}),
    "groups": ((4, 12, 5, 5), (24, 4, 3, 3), {"groups": 3, "padding": [1, 1]}),
    "ragged groups": ((4, 9, 5, 5), (15, 3, 3, 3), {"groups": 3, "padding": [1, 1]}),
    "depthwise": ((8, 6, 5, 6), (6, 1, 3, 3), {"groups": 6, "padding": [1, 1]}),
    "dilation": ((4, 4, 9, 9), (8, 4, 3, 3), {"dilation": [2, 3], "padding": [2, 3]}),
    "stride and dilation": ((4, 3, 13, 12), (8, 3, 3, 2), {"stride": [3, 4], "dilation": [2, 2], "padding": [2, 1]}),
    "uneven": ((12, 5, 8, 5), (36, 5, 2, 4), {"stride": [1, 2], "padding": [0, 3]}),
    "stride beyond the filter": ((4, 4, 9, 9), (8, 4, 1, 1), {"stride": [3, 2]}),
    "padding beyond the image": ((4, 2, 2, 2), (4, 2, 3, 3), {"padding": [3, 3]}),
    "whole image": ((20, 6, 4, 4), (66, 6, 4, 4), {}),
    "linear": ((20, 40, 1, 1), (66, 40, 1, 1), {}),
}
LARGER: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    # of many blocks, whose last ones are not full
    "several tiles": ((64, 36, 9, 10), (100, 36, 3, 3), {"padding": [1, 1]}),
    "several tiles, stride": ((36, 20, 15, 14), (68, 20, 5, 3), {"stride": [2, 2], "padding": [2, 0]}),
    "many images": ((256, 3, 20, 20), (48, 3, 5, 5), {"padding": [2, 2]}),
}
"""For a GPU."""
SCALE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest error, relative to the largest result: of float32 sums, and of what is stored."""


class Tensor:
    """An array in CHWN between gaps of NaN.

    Args:
        pixel: elements from a pixel to the next; None for N.
    """

    def __init__(self, values: Array, dtype: str = "float32", pixel: int | None = None) -> None:
        n, *rest = values.shape
        self.dtype, self.shape = dtype, values.shape
        pixel = pixel or n
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
        self.room = np.full(int(np.prod(rest)) * pixel + 2 * GAP, 0x7FC1 if dtype == "bfloat16" else np.nan, kind)
        self.own = self.room[GAP:-GAP].reshape(*rest, pixel)[..., :n].transpose(3, 0, 1, 2)
        self.own[...] = to_bfloat16(values.astype(np.float32)) if dtype == "bfloat16" else values
        self.gaps = self.others()

    def others(self) -> bytes:
        """What does not belong to the tensor."""
        room = self.room.copy()
        found = np.lib.stride_tricks.as_strided(room[GAP:], self.shape, self.own.strides)
        found[...] = 0
        return room.tobytes()

    @property
    def values(self) -> Array:
        """As float64; AssertionError if anything else was written."""
        assert self.others() == self.gaps
        own = np.ascontiguousarray(self.own)
        return (from_bfloat16(own) if self.dtype == "bfloat16" else own).astype(np.float64)

    @property
    def device(self) -> DeviceArray:
        """As the kernels get it."""
        return array_of(self.own, "CHWN")


def attributes(given: dict[str, Any]) -> dict[str, Any]:
    return {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, **given}


def output_shape(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any]) -> tuple[int, ...]:
    sizes = zip(x[2:], w[2:], attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    return (x[0], w[0], *((h + 2 * pad - dilation * (r - 1) - 1) // step + 1 for h, r, step, pad, dilation in sizes))


def windows(x: Array, w: tuple[int, ...], y: tuple[int, ...], attrs: dict[str, Any]) -> Array:
    """What tap (r, s) meets of padded images: a view of shape (R, S, N, C, P, Q)."""
    (v, h), (dv, dh) = attrs["stride"], attrs["dilation"]
    taps = [
        [
            x[:, :, r * dv : r * dv + v * (y[2] - 1) + 1 : v, s * dh : s * dh + h * (y[3] - 1) + 1 : h]
            for s in range(w[3])
        ]
        for r in range(w[2])
    ]
    return np.array(taps)


def exact(direction: str, x: Array, w: Array, y: Array, attrs: dict[str, Any]) -> Array:
    """The definition in float64; of x, w and y that which is wanted only tells its shape."""
    (pad_v, pad_h), groups = attrs["padding"], attrs["groups"]
    border = ((0, 0), (0, 0), (pad_v, pad_v), (pad_h, pad_h))
    found = np.zeros({"forward": y, "dgrad": x, "wgrad": w}[direction].shape)
    for g in range(groups):
        c, k = x.shape[1] // groups, w.shape[0] // groups
        own_c, own_k = slice(g * c, (g + 1) * c), slice(g * k, (g + 1) * k)
        if direction == "dgrad":
            padded = np.zeros([size + low + high for size, (low, high) in zip(x[:, own_c].shape, border, strict=True)])
            (v, h), (dv, dh) = attrs["stride"], attrs["dilation"]
            for r, s, p, q in product(range(w.shape[2]), range(w.shape[3]), range(y.shape[2]), range(y.shape[3])):
                padded[:, :, r * dv + p * v, s * dh + q * h] += y[:, own_k, p, q] @ w[own_k, :, r, s]
            found[:, own_c] = padded[:, :, pad_v : pad_v + x.shape[2], pad_h : pad_h + x.shape[3]]
            continue
        seen = windows(np.pad(x[:, own_c], border), w.shape, y.shape, attrs)
        if direction == "forward":
            found[:, own_k] = np.einsum("rsncpq,kcrs->nkpq", seen, w[own_k])
        else:
            found[own_k] = np.einsum("rsncpq,nkpq->kcrs", seen, y[:, own_k])
    return found


def tf32(values: Array) -> Array:
    """float32 numbers, as float64, to the nearest of 10 binary digits, ties away from zero."""
    digits = values.astype(np.float32).view(np.uint32) + 0x1000 & np.uint32(0xFFFFE000)
    return digits.view(np.float32).astype(np.float64)


NAMES = {"forward": ("x", "w", "y"), "dgrad": ("dx", "w", "dy"), "wgrad": ("x", "dw", "dy")}
MADE = {"forward": 2, "dgrad": 0, "wgrad": 1}


class Run:
    """One convolution of random numbers by a kernel on the host."""

    def __init__(self, direction: str, case: str, dtype: str = "float32", pixel: int = 0, **more: Any) -> None:
        x_shape, w_shape, given = (CASES | LARGER)[case]
        self.attrs = attributes(given) | more
        self.direction, self.dtype, self.pixel = direction, dtype, pixel
        y_shape = output_shape(x_shape, w_shape, self.attrs)
        random = np.random.default_rng(sum(x_shape))
        self.tensors = {}
        for i, (name, shape) in enumerate(zip(NAMES[direction], (x_shape, w_shape, y_shape), strict=True)):
            stored = "float32" if name == "dw" else dtype
            gap = shape[0] + pixel if pixel and i != 1 else None
            self.tensors[name] = Tensor(random.standard_normal(shape), stored, gap)
        self.made = NAMES[direction][MADE[direction]]
        self.before = self.tensors[self.made].values
        self.b = random.standard_normal(w_shape[0]).astype(np.float32)

    @property
    def problem(self) -> ConvProblem:
        x, w, y = (self.tensors[name].shape for name in NAMES[self.direction])
        pairs = (tuple(self.attrs[name]) for name in ("stride", "padding", "dilation"))
        return ConvProblem(
            *(self.direction, x, w, y, *pairs, self.attrs["groups"]),  # type: ignore[arg-type]
            dtype=self.dtype,
            layout="CHWN",
        )

    def run(
        self, kernels: HostKernels, algorithm: str | None = None, *, adds: bool = False, bias: bool = False
    ) -> Array:
        self.tensors[self.made].own[...] = Tensor(self.before, self.tensors[self.made].dtype).own
        attrs = self.attrs | ({"algorithm": algorithm} if algorithm else {})
        op = Op("op", f"conv.{self.direction}", "conv", "forward", {}, {}, attrs, (self.made,) if adds else ())
        arrays = {name: tensor.device for name, tensor in self.tensors.items()}
        if bias:
            arrays["b"] = array_of(self.b)
        workspace = np.full(SMALL_BYTES * 4, 0xFF, np.uint8)
        arrays["workspace"] = array_of(workspace)
        chwn_convolve(op, arrays, kernels, None)
        return self.tensors[self.made].values

    def expected(self, *, adds: bool = False, bias: bool = False, tensor: bool = False) -> Array:
        """tensor: of operands rounded to TF32."""
        x, w, y = (self.tensors[name].values for name in NAMES[self.direction])
        if tensor:
            x, w, y = (tf32(operand) for operand in (x, w, y))
        found = exact(self.direction, x, w, y, self.attrs) + (self.before if adds else 0)
        found = found + self.b.astype(np.float64)[:, None, None] if bias else found
        return np.maximum(found, 0) if "activation" in self.attrs else found

    def check(self, found: Array, expected: Array) -> None:
        scale = SCALE[self.tensors[self.made].dtype] + SCALE["float32"]
        assert np.abs(found - expected).max() <= scale * max(1, np.abs(expected).max())


@pytest.fixture(params=[False, True], ids=["rising", "falling"])
def falling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def kernels(dtype: str = "float32", *, falling: bool = False) -> HostKernels:
    return HostKernels(dtype=dtype, falling=falling, text=source(dtype, "chwn"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("direction", NAMES)
def test_every_direction_agrees_with_float64(direction: str, case: str) -> None:
    run = Run(direction, case)
    run.check(run.run(kernels()), run.expected())


@pytest.mark.parametrize("case", ["many channels", "three channels, stride", "groups", "stride and dilation"])
@pytest.mark.parametrize(
    ("direction", "tile"), [*product(("forward", "dgrad"), TILES), *(("wgrad", tile) for tile in GRADIENT_TILES)]
)
def test_every_tile_agrees_with_float64(direction: str, tile: str, case: str, falling: bool) -> None:
    run, host = Run(direction, case), kernels(falling=falling)
    adds = direction != "forward"
    found = run.run(host, f"DIRECT_{tile}", adds=adds)
    run.check(found, run.expected(adds=adds, tensor=tile.startswith("TENSOR")))
    assert f"chwn_{'wgrad' if direction == 'wgrad' else 'conv'}_{tile.lower()}" in host.launched


@pytest.mark.parametrize(("direction", "tiles"), [("forward", TILES), ("dgrad", TILES), ("wgrad", GRADIENT_TILES)])
def test_any_number_of_images_has_kernels_of_its_own(direction: str, tiles: dict[str, Tile]) -> None:
    run = Run(direction, "ragged images")
    labels = {label for label, _ in chwn_candidates(run.problem)}
    assert labels == {f"DIRECT_{name}" for name, tile in tiles.items() if tile.any_images}
    for label in labels:
        host = kernels()
        run.check(run.run(host, label), run.expected())
        assert f"chwn_{'wgrad' if direction == 'wgrad' else 'conv'}_any_{label[7:]}" in host.launched
    with pytest.raises(PlanError, match="DIRECT_128x128 expects images by 4"):
        run.run(kernels(), "DIRECT_128x128")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["many channels", "ragged images", "stride and dilation", "ragged groups"])
@pytest.mark.parametrize("direction", NAMES)
def test_16_bits_are_stored_and_summed_in_float32(direction: str, case: str, dtype: str) -> None:
    run = Run(direction, case, dtype)
    run.check(run.run(kernels(dtype)), run.expected())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", NAMES)
def test_tensor_cores_round_no_number_of_16_bits(direction: str, dtype: str) -> None:
    run = Run(direction, "many channels", dtype)
    for tile in GRADIENT_TILES if direction == "wgrad" else TILES:
        if tile.startswith("TENSOR"):
            run.check(run.run(kernels(dtype), f"DIRECT_{tile}"), run.expected())


@pytest.mark.parametrize("pixel", [3, 4])
@pytest.mark.parametrize("direction", NAMES)
def test_images_of_a_larger_batch(direction: str, pixel: int) -> None:
    run = Run(direction, "many channels", pixel=pixel)
    host = kernels()
    run.check(run.run(host, "DIRECT_64x64" if direction == "wgrad" else "DIRECT_128x32"), run.expected())
    assert any("_any_" in name for name in host.launched) == (pixel == 3)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["many channels", "ragged images", "ragged groups"])
def test_bias_and_activation_are_part_of_the_store(case: str, dtype: str, relu: bool) -> None:
    run = Run("forward", case, dtype, **({"activation": "relu"} if relu else {}))
    run.check(run.run(kernels(dtype), bias=True), run.expected(bias=True))


def test_a_nan_stays_a_nan() -> None:
    run = Run("forward", "many channels", activation="relu")
    run.tensors["x"].own[3, 5, 1, 1] = np.nan
    found = run.run(kernels())
    assert np.isnan(found[3, :, 0:3, 0:3]).all()
    assert not np.isnan(np.delete(found, 3, 0)).any()


@pytest.mark.parametrize("algorithm", ["DIRECT_128x16", "DIRECT_32x64", "DIRECT_32x64_SMALL"])
def test_shares_of_a_filter_gradient_are_added_up_in_order(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, falling: bool
) -> None:
    monkeypatch.setattr(chwn_tiles, "LEAST_SHARE", 16)
    run, host = Run("wgrad", "three channels, stride"), kernels(falling=falling)
    run.check(run.run(host, algorithm, adds=True), run.expected(adds=True))
    assert host.launched[1:] == ["chwn_wgrad_sum"]
    monkeypatch.setattr(chwn_conv, "SMALL_BYTES", 1)
    if algorithm.endswith("_SMALL"):
        host = kernels()
        run.check(run.run(host, algorithm, adds=True), run.expected(adds=True))
        assert host.launched == ["chwn_wgrad_32x64"]


@pytest.mark.parametrize("count", [3, 8, 9, 40])
def test_the_sum_of_shares(count: int) -> None:
    shares = np.random.default_rng(1).standard_normal((count, 333)).astype(np.float32)
    before = np.arange(333, dtype=np.float32)
    for lanes, adds in ((1, 0), (16, 0), (16, 1)):
        dw = before.copy()
        args = [shares.ctypes.data, dw.ctypes.data, 333, count, lanes, adds]
        kernels().launch("chwn_wgrad_sum", -(-333 // (256 // lanes)), args, None)
        np.testing.assert_allclose(dw, shares.sum(0, dtype=np.float64) + adds * before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("direction", NAMES)
def test_the_cpu_backend_agrees(direction: str) -> None:
    run = Run(direction, "uneven")
    found = run.run(kernels())
    arrays = {name: np.ascontiguousarray(tensor.values.astype(np.float32)) for name, tensor in run.tensors.items()}
    arrays[run.made][...] = 0
    attrs = run.attrs | {"algorithm": "im2col"}
    op = Op("op", f"conv.{direction}", "conv", "forward", {}, {}, attrs)
    KERNELS[op.kind](op, **arrays, workspace=np.zeros(2**22, np.uint8))
    run.check(found, arrays[run.made].astype(np.float64))


def test_candidates_are_few_and_fit_the_shape() -> None:
    def labels(
        direction: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], dtype: str = "float32"
    ) -> Any:
        return chwn_candidates(ConvProblem(direction, x, w, y, dtype=dtype, layout="CHWN"))  # type: ignore[arg-type]

    large = ((64, 256, 56, 56), (512, 256, 3, 3), (64, 512, 54, 54))
    assert labels("forward", *large)[0] == ("DIRECT_128x128", 0)
    assert labels("dgrad", *large)[0] == ("DIRECT_128x128", 4 * 512 * 256 * 9)
    assert labels("dgrad", *large, dtype="bfloat16")[0][1] == 2 * 512 * 256 * 9
    small = ((128, 1, 28, 28), (16, 1, 5, 5), (128, 16, 24, 24))
    assert labels("forward", *small)[0] == ("DIRECT_256x16", 0)
    for shapes in (large, small):
        for direction in NAMES:
            found = labels(direction, *shapes)
            assert 1 <= len({label for label, _ in found}) == len(found) <= 4
    half = [label for label, _ in labels("forward", *large, dtype="bfloat16")]
    assert half[0] == "DIRECT_TENSOR_128x128"
    problem = ConvProblem("forward", *large, layout="CHWN")  # type: ignore[arg-type]
    assert [label for label, _ in chwn_candidates(problem, tensor_cores=True)] == half
    assert not any("TENSOR" in label for label, _ in chwn_candidates(problem, 20))
    last, nbytes = labels("wgrad", *large)[-1]
    assert (last, nbytes) == ("DIRECT_128x128_SMALL", 0)


def test_shares_cover_every_output_once() -> None:
    for n, side, k, c in product((1, 8, 128), (1, 13, 224), (16, 512), (1, 3, 256)):
        problem = ConvProblem("wgrad", (n, c, side, side), (k, c, 1, 1), (n, k, side, side), layout="CHWN")
        for tile, limit in product(GRADIENT_TILES.values(), (None, SMALL_BYTES)):
            shares, share = chwn_tiles.shares_of(problem, tile, limit)
            assert (shares - 1) * share < n * side * side <= shares * share
            assert share % chwn_tiles.DEPTH == 0
            assert limit is None or shares == 1 or 4 * shares * k * c <= limit
            assert limit is not None or share <= chwn_tiles.MOST_SHARE


def test_what_is_no_convolution_in_chwn_is_refused() -> None:
    run = Run("forward", "many channels")
    with pytest.raises(PlanError, match=r"expected one of DIRECT_128x128, .*, got algorithm GEMM; plan again"):
        run.run(kernels(), "GEMM")
    run.tensors["x"].own = np.zeros(run.tensors["x"].shape, np.float32)
    with pytest.raises(VdnnError, match="tensor 'x': expected float32 in CHWN, got float32 CHWN with strides"):
        run.run(kernels())


def test_kernels_are_a_module_that_is_compiled_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    made, whole = KernelSet("float16"), (source("float16", "chwn"), OPTIONS)
    made.load()
    assert whole not in cupy.compiled
    for _ in range(2):
        made.load("chwn")
        assert cupy.compiled == [(source("float16"), OPTIONS), whole]
    other = KernelSet("float16")
    other.launch("chwn_wgrad_sum", 3, [256, 512, 700, 2, 1, False], cupy.cuda.Stream(non_blocking=True))
    assert cupy.compiled[2:] == [whole]
    assert set(other.registers) == set(signatures(source(module="chwn")))


def test_every_kernel_has_a_candidate_of_its_name() -> None:
    names = {"chwn_filters", "chwn_wgrad_sum"}
    for kind, tiles in (("conv", TILES), ("wgrad", GRADIENT_TILES)):
        names |= {f"chwn_{kind}_{name.lower()}" for name in tiles}
        names |= {f"chwn_{kind}_any_{name}" for name, tile in tiles.items() if tile.any_images}
    assert set(signatures(source(module="chwn"))) == names
