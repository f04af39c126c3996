"""Batch normalisation on CUDA, on the host: fused and unfused bit for bit, hard numbers, grids.

In every storage and layout it is compared with float64 in test_cuda_kernels.py, by the calls of vdnn.bench.norm_cases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import host_cupy
import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from host_cupy import HostCupy

from vdnn.bench import gpu_batchnorm
from vdnn.bench.kernel_check import Array
from vdnn.errors import VdnnError
from vdnn.layers import Op
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.launch import COLUMNS, Channels
from vdnn.runtime.bfloat16 import from_bfloat16, host_dtype, to_bfloat16

RNG = np.random.default_rng(4)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


# ---- what is fused gives the same bits


def run(kind: str, arrays: Mapping[str, Array], layout: str, falling: bool, *accumulate: str, **attrs: Any) -> None:
    """One op on images that lie in `layout`, with exactly the workspace it asks for."""
    nbytes = workspace_bytes(kind, {name: array.shape for name, array in arrays.items()}, layout)
    scratch = np.full(max(nbytes, 1), 0xFF, np.uint8)
    held = {name: (in_layout(a, layout) if a.ndim == 4 else a) for name, a in arrays.items()}
    placed = {name: array_of(a, layout if a.ndim == 4 else "NCHW") for name, a in held.items()}
    placed["workspace"] = array_of(scratch)
    op = Op("the-op", kind, "the-layer", "forward", {}, {}, {"eps": 1e-5, **attrs}, accumulate)
    CUDA_KERNELS[kind](op, placed, HostKernels(falling=falling), None)
    for name, array in arrays.items():
        array[...] = held[name]


def in_layout(array: Array, layout: str) -> Array:
    """The same numbers, laid out so."""
    if layout == "NCHW":
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("shape", "adds"), [((5, 24, 16, 20), True), ((3, 5, 7, 9), True), ((5, 24, 16, 20), False)])
def test_a_fused_norm_gives_the_bits_of_its_parts(shape: tuple[int, ...], adds: bool, layout: str) -> None:
    c = shape[1]
    x, z, dy, dz = normal(*shape), normal(*shape), normal(*shape), normal(*shape)
    parameters = {"weight": normal(c), "bias": normal(c)}
    y, once, total, dx, g = (np.empty_like(x) for _ in range(5))
    saved = {"mean": np.empty(c, np.float32), "invstd": np.empty(c, np.float32)}
    sums = {"dweight": np.empty(c, np.float32), "dbias": np.empty(c, np.float32)}
    run("batchnorm.forward", {"x": x, "y": once, **parameters, **saved}, layout, False)
    if adds:
        run("add.forward", {"a": once, "b": z, "y": total}, layout, False)
    else:
        total = once
    run("relu.forward", {"x": total, "y": y}, layout, False)
    run("relu.backward", {"y": y, "dy": dy, "dx": g}, layout, False)
    backward = {"x": x, "weight": parameters["weight"], **saved}
    run("batchnorm.backward", {**backward, "dy": g, "dx": dx, **sums}, layout, False)
    term = {"z": z} if adds else {}
    for falling in (False, True):
        fused, found = np.empty_like(x), {name: np.empty(c, np.float32) for name in (*saved, *sums)}
        reads = {"x": x, "y": fused, **term, **parameters, **{name: found[name] for name in saved}}
        run("batchnorm.forward", reads, layout, falling, activation="relu")
        same = {"y": (fused, y), **{name: (found[name], saved[name]) for name in saved}}
        for accumulate in ((), ("dz",)) if adds else ((),):
            new_dx, new_dz = np.empty_like(x), dz.copy() if accumulate else np.empty_like(x)
            reads = {**backward, "dy": dy, "dx": new_dx, **{name: found[name] for name in sums}}
            reads |= {"y": y, "dz": new_dz} if adds else {"bias": parameters["bias"]}
            run("batchnorm.backward", reads, layout, falling, *accumulate, activation="relu")
            same |= {"dx": (new_dx, dx), **{name: (found[name], sums[name]) for name in sums}}
            same |= {"dz": (new_dz, dz + g if accumulate else g)} if adds else {}
            for name, (got, want) in same.items():
                assert (got.view(np.uint32) == want.view(np.uint32)).all(), (name, falling, accumulate)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_nan_reaches_every_number_of_its_channel_and_no_other(layout: str) -> None:
    x, z = normal(4, 8, 5, 6), normal(4, 8, 5, 6)
    x[1, 3, 2, 2] = np.nan
    x[2, 5, 1, 0] = np.inf
    y, mean, invstd = np.zeros_like(x), normal(8), normal(8)
    arrays = {"x": x, "z": z, "y": y, "weight": normal(8), "bias": normal(8), "mean": mean, "invstd": invstd}
    run("batchnorm.forward", arrays, layout, False, activation="relu")
    assert np.isnan(y).all(axis=(0, 2, 3)).tolist() == np.isnan(y).any(axis=(0, 2, 3)).tolist()
    assert np.isnan(y[0, :, 0, 0]).tolist() == [i in (3, 5) for i in range(8)]


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance() -> None:
    x = (1000 + normal(64, 8, 20, 20)).astype(np.float32)
    y, mean, invstd = np.empty_like(x), np.empty(8, np.float32), np.empty(8, np.float32)
    one = np.ones(8, np.float32)
    arrays = {"x": x, "y": y, "weight": one, "bias": 0 * one, "mean": mean, "invstd": invstd}
    for layout in ("NCHW", "NHWC"):
        run("batchnorm.forward", arrays, layout, False)
        wide = x.astype(np.float64)
        np.testing.assert_allclose(invstd, 1 / np.sqrt(wide.var(axis=(0, 2, 3)) + 1e-5), rtol=3e-7)
        np.testing.assert_allclose(mean, wide.mean(axis=(0, 2, 3)), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_stored_as_zero_has_no_gradient(dtype: str) -> None:
    """The mask of a ReLU, found again from x: y is not above 0 where rounding makes it 0, as half the smallest is."""
    smallest = np.ones(1, np.uint32 if dtype == "float32" else np.uint16)
    x = np.repeat(smallest.view(np.float32 if dtype == "float32" else host_dtype(dtype)), 5)[None]
    weight = np.array([1, 0.75, 0.5, 0.25, -1], np.float32)  # times the smallest number that can be stored
    product = (known(x)[0] * weight).astype(np.float32)
    y = stored(product, dtype)
    assert [bool(value > 0) for value in known(y)] == [True, True, dtype == "float32" and product[2] > 0, False, False]
    one, sums = np.ones(5, np.float32), {name: np.full(5, np.nan, np.float32) for name in ("dweight", "dbias")}
    dy, dx = stored(one[None], dtype), np.zeros_like(x)
    held = {"x": x, "dy": dy, "dx": dx, "weight": weight, "mean": 0 * one, "invstd": one, "bias": 0 * one, **sums}
    scratch = np.zeros(workspace_bytes("batchnorm.backward", {"x": x.shape}), np.uint8)
    op = Op("the-op", "batchnorm.backward", "the-layer", "forward", {}, {}, {"eps": 0.0, "activation": "relu"})
    placed = {name: array_of(array) for name, array in {**held, "workspace": scratch}.items()}
    CUDA_KERNELS[op.kind](op, placed, HostKernels(dtype=dtype), None)
    assert (sums["dbias"] == (known(y) > 0)).all()


def stored(values: Array, dtype: str) -> Array:
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def known(array: Array) -> Array:
    return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


# ---- grids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 60, 6272, 802_816, 3_211_264, 2**31 - 1])
@pytest.mark.parametrize("channels", [1, 3, 16, 64, 208, 264, 832, 2048, 30_000])
def test_columns_are_shared_out_whole(channels: int, rows: int, dtype: str) -> None:
    sums = Channels.of(contiguous(0, (rows, channels), dtype))
    groups = channels // sums.width
    blocks = -(-groups // COLUMNS)
    across = -(-groups // blocks)
    assert sums.hw == 1
    assert sums.blocks == sums.splits * blocks
    assert across * (blocks - 1) < groups <= across * blocks  # no block without channels
    down = 256 // across
    of_a_thread = -(-rows // (down * sums.splits))
    assert of_a_thread <= 4096 // sums.width + 4  # what it adds in float32
    assert sums.splits == 1 or rows // sums.splits >= down  # no block without rows
    assert sums.blocks <= 1024 + 2 * blocks or rows * channels > 2**27
    assert sums.partial_bytes <= max(2**21 + 2**16, 32 * channels, rows * channels // 64)


def test_the_workspace_does_not_depend_on_the_type_or_alignment() -> None:
    for shape in ((256, 64, 56, 56), (3, 5, 7, 9), (128, 2048), (32, 1024, 14, 14)):
        for layout in ("NCHW", "NHWC"):
            wanted = workspace_bytes("batchnorm.backward", {"x": shape}, layout) - 8 * shape[1]
            for dtype in ("float32", "bfloat16"):
                for ptr in (0, 4):
                    x = contiguous(ptr, shape, dtype, layout)
                    assert Channels.of(x.pixels() if x.is_channels_last else x).partial_bytes <= wanted


def test_another_type_than_that_of_the_kernels_is_refused() -> None:
    x, c = contiguous(0, (2, 8, 4, 4)), contiguous(0, (8,))
    arrays = {"x": x, "y": x, **dict.fromkeys(("weight", "bias", "mean", "invstd"), c)}
    op = Op("the-op", "batchnorm.forward", "the-layer", "forward", {}, {}, {"eps": 1e-5})
    with pytest.raises(VdnnError, match=r"'the-op' .*tensor 'x': expected bfloat16 .*got float32"):
        CUDA_KERNELS["batchnorm.forward"](op, arrays, SimpleNamespace(dtype="bfloat16"), None)


# ---- the study


def test_the_study_of_bandwidths_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Graph:
        def launch(self, stream: Any) -> None:
            """Its calls were made while it was captured."""

    monkeypatch.setattr(host_cupy.HostStream, "begin_capture", lambda self: None, raising=False)
    monkeypatch.setattr(host_cupy.HostStream, "end_capture", lambda self: Graph(), raising=False)
    monkeypatch.setitem(sys.modules, "cupy", HostCupy(HostKernels(dtype="bfloat16")))
    monkeypatch.setattr(gpu_batchnorm, "SHAPES", (("small", (2, 8, 4, 4)),))
    monkeypatch.setattr(gpu_batchnorm, "COPY_BYTES", 4096)
    monkeypatch.setattr(gpu_batchnorm, "GRAPH_CALLS", 1)
    for name in ("COLUMN_BLOCKS", "BLOCK_NUMBERS"):
        monkeypatch.setattr(Channels, name, getattr(Channels, name))
    gpu_batchnorm.main(["--dtypes", "bfloat16", "--cuts", "256:1024:14", "4:8:10"])
    lines = capsys.readouterr().out.splitlines()
    for call in gpu_batchnorm.CALLS:
        assert sum(f" {call.name}  " in line for line in lines) == 4, call
    assert [line for line in lines if line.startswith("cut")] == ["cut 256:1024:14", "cut 4:8:10"]
    assert (Channels.COLUMN_BLOCKS, Channels.BLOCK_NUMBERS) == ((4, 8), (2**13, 2**10, 2**19))
