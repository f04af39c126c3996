"""How tensors become arguments and grids of CUDA kernels, what is refused, and the bytes that debug kernels watch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from host_cupy import HostCupy

from vdnn.bench import gpu_kernels
from vdnn.bench.gpu_kernels import Load, loads, measure
from vdnn.bench.kernel_cases import all_cases, normal
from vdnn.bench.kernel_check import LAYOUTS, Case
from vdnn.errors import VdnnError
from vdnn.layers import Op
from vdnn.runtime.backends.cuda import debug
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, KernelSet, workspace_bytes
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, THREADS, Channels, Rows
from vdnn.runtime.backends.cuda.source import MODULES, OPTIONS, convert, signatures, source
from vdnn.runtime.step import new_step


def op(kind: str) -> Op:
    return Op("the-op", kind, "the-layer", "forward", {}, {})


class Dry:
    """A probe that launches nothing: arguments are converted, grids are looked at."""

    def __init__(self, dtype: str = "float32") -> None:
        self.kernels, self.stream, self.blocks, self.dtype = self, None, [0], dtype

    def fill(self, address: int, nbytes: int) -> None:
        assert address % 256 == 0

    def time_ms(self, work: Callable[[], None]) -> float:
        work()
        return 1.0

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: None) -> None:
        convert(name, signatures(source())[name], args)
        self.blocks.append(blocks)


def test_kernels_are_compiled_once_and_launched_on_the_stream_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    kernels, stream, x = KernelSet(), cupy.cuda.Stream(non_blocking=True), contiguous(4096, (2, 3000))
    kernels.load()
    assert set(kernels.registers) == set(signatures(source()))
    CUDA_KERNELS["relu.forward"](op("relu.forward"), {"x": x, "y": x}, kernels, stream)
    assert cupy.compiled == [(source(), OPTIONS)]
    args = (4096, 3000, 4096, 3000, 6000, 2, 4)
    assert cupy.launches == [(stream, "relu_forward", (2,), (THREADS,), args)]
    with pytest.raises(VdnnError, match="'relu_forward': expected from 1 to 2147483647 blocks, got 2147483648"):
        kernels.launch("relu_forward", 2**31, args, stream)


def test_kernels_are_compiled_for_the_storage_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    kernels, x = KernelSet("bfloat16"), contiguous(4096, (2, 3000), "bfloat16")
    CUDA_KERNELS["relu.forward"](op("relu.forward"), {"x": x, "y": x}, kernels, cupy.cuda.Stream(non_blocking=True))
    assert cupy.compiled == [(source("bfloat16"), OPTIONS)]
    assert cupy.launches[0][4][-3:] == (6000, 1, 8)  # 8192 numbers of 16 bits a block
    with pytest.raises(VdnnError, match="expected activations of float32, bfloat16, float16, got float64"):
        KernelSet("float64")


def test_a_table_of_parameters_is_one_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy passes an array by value only if it has one element, and a kernel's arguments have 4 KiB."""
    cupy = HostCupy(HostKernels())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    record, updates = new_step(0.5, 1.0, 0, 0), 100
    arrays = {"step": array_of(record), "status": array_of(record)}
    weights, gradients = (np.full((updates, 8), value, np.float32) for value in (3, 2))
    for i in range(updates):
        arrays |= {f"w{i}": array_of(weights[i]), f"dw{i}": array_of(gradients[i])}
    attrs = {"momentum": 0.0, "nesterov": False, "weight_decay": [0.0] * updates}
    update = Op("update", "sgd.update_all", "loss", "update", {}, {}, attrs)
    CUDA_KERNELS["sgd.update_all"](update, arrays, KernelSet(), cupy.cuda.Stream(non_blocking=True))
    assert (weights == 2).all()
    assert [launch[1] for launch in cupy.launches] == ["sgd_check_all"] * 2 + ["sgd_update_all"] * 2
    for *_, args in cupy.launches:
        assert args[0].size == 1
        assert sum(value.nbytes for value in args) < 4096


def test_the_study_of_kernels_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From end to end on host memory: a few small calls, one of which is made to fail, and two bandwidths."""
    cupy = HostCupy(HostKernels())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("OUT", str(tmp_path))
    shape, window = (2, 3, 8, 8), gpu_kernels.window("max", 2, 2)
    reads = {"x": shape, "y": (2, 3, 4, 4), "dy": (2, 3, 4, 4)}
    small = [
        Load("relu", "relu.forward", {"x": shape}, {"y": shape}),
        Load("max gradient", "pool.backward", reads, {"dx": shape}, window, (), "pool.forward"),
        Load("unknown", "relu.sideways", {"x": shape}, {"y": shape}),
    ]
    wrong = Case("wrong", "relu.forward", {"x": normal(2, 3)}, {"y": normal(2, 3)}, reference=lambda op, x, y: None)
    cases = [next(c for c in all_cases() if c.kind == kind) for kind in ("relu.forward", "batchnorm.backward")]
    monkeypatch.setattr(gpu_kernels, "loads", lambda: small)
    monkeypatch.setattr(gpu_kernels, "all_cases", lambda: [wrong, *cases])
    monkeypatch.setattr(gpu_kernels, "COPIED", shape)
    assert gpu_kernels.main(["float32"]) == 1
    result = json.loads((tmp_path / "gpu_kernels.json").read_text())["dtypes"]["float32"]
    count = len(LAYOUTS)
    assert (result["calls"], len(result["failures"]), result["unequal"]) == (3 * count, count + 1, 0)
    assert all("wrong" in text for text in result["failures"][:count])
    assert result["failures"][count] == "relu.sideways, unknown: KeyError: 'relu.sideways'"
    assert [(row["name"], row["nbytes"], row["gbps"] > 0) for row in result["bandwidth"]] == [
        ("relu", 2 * 4 * 384, True),
        ("max gradient", 4 * (2 * 384 + 2 * 96), True),
    ]


# ---- poison and canaries


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 256), (0, 70_000), (3, 1001), (16, 1)])
def test_filled_bytes_are_checked(offset: int, nbytes: int) -> None:
    room, first_wrong = np.zeros(offset + nbytes + 32, np.uint8), np.full(1, debug.INTACT, np.uint64)
    start = -room.ctypes.data % 16 + offset if offset % 16 else offset
    ptr = room.ctypes.data + start
    debug.fill(HostKernels(), ptr, nbytes, 0xC5, None)
    assert (room[start : start + nbytes] == 0xC5).all()
    assert (room == 0xC5).sum() == nbytes
    debug.check(HostKernels(), ptr, nbytes, 0xC5, first_wrong.ctypes.data, None)
    assert first_wrong[0] == debug.INTACT
    for wrong in (nbytes - 1, nbytes // 2):
        room[start + wrong] ^= 4
        debug.check(HostKernels(), ptr, nbytes, 0xC5, first_wrong.ctypes.data, None)
        assert first_wrong[0] == wrong


# ---- refusals


X = contiguous(4096, (2, 3, 4, 5))
NHWC = DeviceArray(0, (2, 3, 4, 5), (60, 1, 15, 3), "float32", 480)


@pytest.mark.parametrize(
    ("kind", "arrays", "message"),
    [
        (
            "relu.forward",
            {"x": contiguous(0, (2, 3), "float16"), "y": X},
            r"op 'the-op' .*'x': expected float32.*float16",
        ),
        (
            "relu.forward",
            {"x": X, "y": NHWC},
            "'y'.*without gaps",
        ),
        ("conv.bgrad", {"dy": X, "db": contiguous(0, (3,))}, "'workspace': expected 48 bytes or more, got 0"),
        (
            "pool.forward",
            {"x": contiguous(0, (1, 2, 2**15, 2**15)), "y": X},
            "fewer than 2147483648 numbers of one image",
        ),
        ("lrn.forward", {"x": contiguous(0, (2**11, 1, 2**10, 2**10)), "y": X}, "pixels of a batch, got 2147483648"),
    ],
)
def test_what_kernels_do_not_take_is_said(kind: str, arrays: dict[str, DeviceArray], message: str) -> None:
    with pytest.raises(VdnnError, match=message):
        CUDA_KERNELS[kind](op(kind), arrays, Dry(), None)


def test_an_update_wants_aligned_weights() -> None:
    arrays = {name: contiguous(4100, (8,)) for name in ("dw", "w", "step", "status")}
    with pytest.raises(VdnnError, match="on 16 bytes"):
        CUDA_KERNELS["sgd.update"](op("sgd.update"), arrays, Dry(), None)


def test_arguments_are_converted_to_what_the_kernel_declares() -> None:
    signature = signatures(source())["dropout"]
    args = [2**40, 5, 2**41, 6, 2**42, 7, 8, 4, 0xDEADBEEF, 2**32, 0.5, True]
    values = convert("dropout", signature, args)
    assert [str(value.dtype) for value in values] == [
        *("uint64", "int64", "uint64", "int64", "uint64", "uint32", "uint32"),
        *("int32", "uint32", "uint64", "float32", "int32"),
    ]
    assert [value.item() for value in values] == args
    with pytest.raises(VdnnError, match="'dropout': expected 12 arguments, got 11"):
        convert("dropout", signature, args[1:])
    with pytest.raises(VdnnError, match="argument 'inner': 4294967296 does not fit u32"):
        convert("dropout", signature, [*args[:5], 2**32, *args[6:]])


def test_every_cuda_file_is_compiled() -> None:
    folder = Path(debug.__file__).parent
    assert sorted({name for names in MODULES.values() for name in names}) == sorted(
        path.name for path in folder.iterdir() if path.suffix in (".cu", ".cuh")
    )


@pytest.mark.parametrize("shape", [(64, 3, 224, 224), (1, 1, 1, 1), (5, 2048, 7, 7), (2, 1, 64, 66), (128, 25088)])
def test_sums_of_a_channel_are_shared_out_whole(shape: tuple[int, ...]) -> None:
    sums = Channels.of(contiguous(0, shape))
    assert (sums.splits - 1) * sums.share < sums.count <= sums.splits * sums.share
    assert sums.hw == 1 or sums.share % 4 == 0
    assert sums.splits == 1 or sums.blocks < Channels.TARGET_BLOCKS + sums.channels
    assert workspace_bytes("batchnorm.backward", {"x": shape}) <= 2**20


def test_rows_are_long_where_nothing_lies_between_images() -> None:
    assert Rows.of(contiguous(0, (2, 3, 4, 4)), contiguous(256, (2, 48))) == Rows(1, 96, 4)
    part = DeviceArray(0, (2, 3, 4, 4), (64, 16, 4, 1), "float32", 384)
    assert Rows.of(contiguous(0, (2, 3, 4, 4)), part) == Rows(2, 48, 4)
    assert Rows.of(replace(part, ptr=4)).width == 1
    assert Rows.of(contiguous(0, (1, INDEX_LIMIT * 2))).blocks == INDEX_LIMIT * 2 // 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", list(loads()), ids=lambda load: load.name)
def test_large_calls_can_be_launched(load: Load, dtype: str) -> None:
    probe = Dry(dtype)
    row = measure(probe, load, 1 << 20)  # type: ignore[arg-type]
    assert row["nbytes"] > 2**25
    assert 0 < max(probe.blocks) < INDEX_LIMIT
