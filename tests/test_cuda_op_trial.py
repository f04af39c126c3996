"""Ops timed in memory of their own, on a device of the tests: places, contents, chains."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from host_cupy import ALIGN_BYTES
from op_device import ALONE_MS, CHAINED_MS, SCRATCH_BYTES, Device, device, relu, small

from vdnn.layers import Op, Update, lower
from vdnn.layers.tensor import DTYPE_BYTES, TensorSpec
from vdnn.memory.passes import slice_op
from vdnn.networks import build
from vdnn.runtime.backends.cuda import op_trial
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.op_trial import OpTrial, Place, op_key, place_operands, trial_bytes
from vdnn.runtime.backends.cuda.products import CONV_KINDS, LINEAR_KINDS
from vdnn.runtime.step import STEP_DTYPE

__all__ = ["device"]  # a fixture


# ---- places


def elements(spec: TensorSpec, root: TensorSpec) -> np.ndarray[Any, Any]:
    """Numbers of the elements of `spec` in its storage, in the order of its shape, by slicing an array of them."""
    count = int(np.prod(root.shape))
    if spec.layout == "NHWC" and len(root.shape) == 4:
        n, c, h, w = root.shape
        whole = np.arange(count).reshape(n, h, w, c).transpose(0, 3, 1, 2)
    else:
        whole = np.arange(count).reshape(root.shape)
    if spec.nbytes == root.nbytes:
        return whole if spec.shape == root.shape else np.arange(count).reshape(spec.shape)
    part = whole[spec.image : spec.image + spec.shape[0]]
    return part if part.size == np.prod(spec.shape) else part[:, spec.channel : spec.channel + spec.shape[1]]


def placed(place: Place) -> np.ndarray[Any, Any]:
    """Bytes from the start of the memory to every element of an argument."""
    grid = np.indices(place.spec.shape)
    steps = np.array(place.strides).reshape(-1, *[1] * len(place.spec.shape))
    found: np.ndarray[Any, Any] = place.offset + DTYPE_BYTES[place.spec.dtype] * (grid * steps).sum(0)
    return found


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_operands_share_bytes_and_are_aligned_as_in_the_program(layout: str) -> None:
    program = small(layout)
    shared = 0
    for op in program.ops:
        places, nbytes = place_operands(op, program)
        assert list(places) == [*op.reads, *op.writes]
        base: dict[str, int] = {}
        used: dict[str, set[int]] = {}
        for arg, name in (*op.reads.items(), *op.writes.items()):
            spec = program.tensors[name]
            in_storage = DTYPE_BYTES[spec.dtype] * elements(spec, program.tensors[spec.storage])
            at = placed(places[arg])
            shift = int((at - in_storage).flat[0])
            assert ((at - in_storage) == shift).all(), (op.name, arg)
            assert base.setdefault(spec.storage, shift) == shift, "arguments of one storage lie as in it"
            assert shift % 256 == 0, "alignment is that of the storage's start"
            assert at.min() == places[arg].offset >= 0
            assert at.max() + DTYPE_BYTES[spec.dtype] == places[arg].offset + places[arg].span_bytes <= nbytes
            used.setdefault(spec.storage, set()).update(at.ravel().tolist())
        shared += len(used) < len(places)
        assert sum(map(len, used.values())) == len(set().union(*used.values())), f"storages of {op.name} overlap"
    assert shared > 10


def test_a_slice_of_a_batch_takes_only_its_images() -> None:
    program = small()
    whole = next(op for op in program.ops if op.name == "conv2.forward")
    tensors = dict(program.tensors)
    op = slice_op(whole, tensors, 2, 1)
    part = trial_bytes(op, replace(program, tensors=tensors), 0)
    assert part < 0.5 * trial_bytes(whole, program, 0)


def test_a_key_tells_apart_what_takes_another_time_and_nothing_else() -> None:
    keys = [op_key(*relu(64), 0), op_key(*relu(64, "another layer"), 0)]
    assert keys[0] == keys[1]
    others = [
        (relu(65), 0),
        (relu(64, over="a.x"), 0),
        (relu(64, attrs={"slope": 0.1}), 0),
        (relu(64, accumulate=("y",)), 0),
        (relu(64), 512),
    ]
    op, program = relu(64)
    half = {name: replace(spec, dtype="bfloat16") for name, spec in program.tensors.items()}
    others += [((op, replace(program, tensors=half)), 0), ((replace(op, kind="copy.forward"), program), 0)]
    assert len({keys[0], *(op_key(*one, nbytes) for one, nbytes in others)}) == 1 + len(others)
    attrs = ({"key": 1}, {"key": 2}, {"algorithm": "default"})
    assert {op_key(*relu(64, attrs=each), 0) for each in attrs} == {keys[0]}


def test_keys_of_networks_are_few_and_short() -> None:
    program = lower(build("resnet50"), 64, update=Update(momentum=0.9), layout="NHWC")
    own = [op for op in program.ops if op.kind not in CONV_KINDS]
    keys = {op_key(op, program, 0) for op in own}
    assert len(keys) < 0.3 * len(own)
    assert max(map(len, keys)) < 450


# ---- content


def test_operands_hold_what_such_an_operand_may_hold(device: Device) -> None:
    program = small()
    for op in program.ops:
        if op.kind in CONV_KINDS:
            continue
        with OpTrial(op, program, 0, device.launch, device.stream, 2**30) as trial:
            trial.alone_ms()
            arrays = device.seen[-1]
            for arg, array in arrays.items():
                assert array.ptr % 4 == 0 or array.dtype == "uint8"
                spec = program.tensors[{**op.reads, **op.writes}[arg]]
                kind = {"float32": ctypes.c_float, "int32": ctypes.c_int32, "uint8": ctypes.c_uint8}[array.dtype]
                span = 1 + sum(step * (size - 1) for size, step in zip(array.shape, array.strides, strict=True))
                numbers = np.ctypeslib.as_array((kind * span).from_address(array.ptr)).copy()
                if spec.role == "state" and spec.dtype == "uint8":
                    record = numbers.view(STEP_DTYPE)[0]
                    assert record["lr"] > 0
                    assert record["not_finite"] == 0
                elif spec.dtype == "int32":
                    assert set(numbers) <= set(range(5))
                    assert len(set(numbers)) > 1
                elif spec.name.endswith(".indices"):
                    assert set(numbers) == set(range(4))
                elif spec.dtype == "float32":
                    assert np.isfinite(numbers).all()
                    assert len(spec.shape) > 1 or (numbers > 0).all(), "a variance below zero"
                    assert numbers.std() > 0 or numbers.size == 1
    assert not device.memory, "memory was not given back"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_sixteen_bits_are_normal(device: Device, dtype: str) -> None:
    op, program = relu(4096)
    program = replace(program, tensors={n: replace(s, dtype=dtype) for n, s in program.tensors.items()})
    with OpTrial(op, program, 0, device.launch, device.stream, 2**30) as trial:
        trial.alone_ms()
        bits = np.ctypeslib.as_array((ctypes.c_uint16 * 8192).from_address(device.seen[-1]["x"].ptr))
        if dtype == "float16":
            numbers = bits.view(np.float16).astype(float)
        else:
            numbers = (bits.astype(np.uint32) << 16).view(np.float32).astype(float)
    assert abs(numbers.mean()) < 0.1
    assert numbers.std() == pytest.approx(1, abs=0.05)


# ---- time


def test_what_it_takes_to_start_a_graph_is_left_out(device: Device) -> None:
    op, program = relu(64)
    with OpTrial(op, program, 0, device.launch, device.stream, 2**30) as trial:
        assert trial.time_ms(CHAINED_MS) == pytest.approx(CHAINED_MS)
        assert trial.alone_ms() == pytest.approx(ALONE_MS)
    assert device.stream.captures == [2, 22]
    assert device.written == 9 * 3 * SCRATCH_BYTES, "the GPU is not kept busy before each of nine timed runs"
    with OpTrial(op, program, 0, device.launch, device.stream, 2**30) as trial:
        trial.time_ms(100.0)
    assert device.stream.captures[2:] == [2, 4], "an op that takes long is run few times"


@pytest.mark.parametrize(("floats", "sets"), [(4096, 1), (8192, 4), (16384, 2), (32768, 1)])
def test_operands_that_the_cache_holds_in_part_are_laid_out_more_than_once(
    device: Device, floats: int, sets: int
) -> None:
    op, program = relu(floats // 2, over="a.x")
    with OpTrial(op, program, 0, device.launch, device.stream, 2**30) as trial:
        trial.time_ms(CHAINED_MS)
        chain = device.seen[-22:]
        assert len({arrays["x"].ptr for arrays in chain}) == sets
        assert all(one["x"].ptr != two["x"].ptr for one, two in pairwise(chain)) or sets == 1
        assert device.taken == [sets * 4 * floats + SCRATCH_BYTES]


def test_the_limit_bounds_how_often_operands_are_laid_out(device: Device) -> None:
    op, program = relu(2048, over="a.x")
    with OpTrial(op, program, 512, device.launch, device.stream, 40_000) as trial:
        trial.time_ms(CHAINED_MS)
    assert device.taken == [2 * (16384 + 512)]
    assert device.seen[-1]["workspace"].nbytes == 512


def test_a_launch_that_fails_ends_the_capture_and_gives_the_memory_back(device: Device) -> None:
    op, program = relu(64)

    def fails(op: Op, arrays: Any, stream: str) -> None:
        if device.stream.capture is not None:
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), OpTrial(op, program, 0, fails, device.stream, 2**30) as trial:
        trial.time_ms(1.0)
    assert device.stream.capture is None
    assert not device.memory


# ---- vdnn's own kernels


@pytest.mark.parametrize(
    ("layout", "dtype", "options"),
    [
        ("NCHW", "float32", {}),
        ("NHWC", "float32", {"fuse": True}),
        ("NHWC", "bfloat16", {"fuse": True, "update_together": True, "pad_channels": 8}),
    ],
)
def test_every_own_kernel_runs_in_a_trial(
    device: Device, layout: str, dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_trial, "SCRATCH_BYTES", 2**40)  # none: nothing lies behind the operands
    program, kernels = small(layout, dtype=dtype, **options), HostKernels(dtype=dtype)

    def launch(op: Op, arrays: Any, stream: str) -> None:
        device.launch(op, arrays, stream)
        CUDA_KERNELS[op.kind](op, arrays, kernels, None)

    kinds = set()
    for op in program.ops:
        if op.kind in (*CONV_KINDS, *LINEAR_KINDS):
            continue
        kinds.add(op.kind)
        shapes = {arg: program.tensors[t].shape for arg, t in (*op.reads.items(), *op.writes.items())}
        with OpTrial(op, program, workspace_bytes(op.kind, shapes, layout), launch, device.stream, 2**30) as trial:
            assert trial.time_ms(1.0) > 0
            ((address, room),) = device.memory.items()
            end = address - room.ctypes.data + device.taken[-1]
            assert (room[end:] == 0x55).all(), f"{op.kind} wrote behind its memory"
            assert room.size == device.taken[-1] + ALIGN_BYTES
    assert len(kinds) > 8
