"""A stride in channels on the cuda backend, its kernels run on the host: ops of a step in three storages, the filter
gradient behind a library's workspace, the problem that the library gets, and what else counts its sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from interpreter import Array, Run
from test_cuda_fused import HostPlan, nhwc, room
from test_cuda_kernels import compute
from test_fold import UPDATE, network

from vdnn.bench.op_count import work_of
from vdnn.layers import Conv, Op, Program, lower
from vdnn.runtime.backends.cpu.half import run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.operands import load, store
from vdnn.runtime.backends.cuda.products import Products, conv_problem, unplaced_problem, workspace_bytes
from vdnn.runtime.bfloat16 import from_bfloat16
from vdnn.runtime.spectra import conv_size

UNITS = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LAYERS = {
    "resnet": (Conv(8, 7, stride=2, padding=3), (3, 30, 27)),
    "alexnet": (Conv(8, 11, stride=4, padding=2), (3, 47, 50)),
    "patches": (Conv(6, 4, stride=4), (1, 19, 16)),
    "many channels": (Conv(6, (3, 5), stride=3, padding=(2, 0)), (6, 11, 14)),
}


def program_of(layer: str, dtype: str, **options: Any) -> Program:
    conv, image = LAYERS[layer]
    multiple = 4 if dtype == "float32" else 8
    return lower(network(conv, image), 4, dtype=dtype, layout="NHWC", pad_channels=multiple, **options)


def op_of(program: Program, name: str) -> Op:
    return next(op for op in program.ops if op.name == name)


def numbers(array: Array) -> Array:
    return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_ops_of_a_folded_layer_agree_with_the_cpu(layer: str, dtype: str) -> None:
    """Each op of both begins with the same bytes: no rounding of an earlier one is carried on."""
    program = program_of(layer, dtype, update=UPDATE, fuse=True, update_together=True)
    assert "fold" in op_of(program, "data.normalize").attrs
    on_cpu, on_gpu, kernels = Run(program, 4), Run(program, 4), HostKernels(dtype=dtype)
    for (op, arrays), (_, others) in zip(on_cpu.ops, on_gpu.ops, strict=True):
        for name, storage in on_cpu.storages.items():
            on_gpu.storages[name][...] = storage
        run_rounded(KERNELS[op.kind], op, arrays)
        compute(program, op, others, "NHWC", kernels)
        for name in op.writes.values():
            wanted, got = numbers(on_cpu.values[name]), numbers(on_gpu.values[name])
            size = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
            close = max(2 * UNITS[dtype] if on_cpu.values[name].dtype.itemsize == 2 else 1e-5, UNITS[dtype])
            np.testing.assert_allclose(got, wanted, rtol=close, atol=close * size, err_msg=f"{op.name}: {name}")
    assert {"normalize_pixels", "filter_fold"} <= set(kernels.launched)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", UNITS)
def test_a_filter_gradient_is_brought_to_the_places_of_its_parameter(dtype: str, accumulate: bool) -> None:
    filters, channels, kernel, fold, padded = 5, 3, 7, 2, 16
    shape, folded = (filters, kernel, kernel, channels), (filters, 4, 4, padded)
    rng = np.random.default_rng(9)
    old, bits = rng.standard_normal(shape).astype(np.float32), store(rng.standard_normal(folded).astype("f4"), dtype)
    memory, start = room(1 << 14)
    held, address = room(old.nbytes)
    dw = np.frombuffer(held, np.float32, old.size, address - held.ctypes.data).reshape(shape)
    dw[...] = old
    arrays = {
        "x": nhwc((2, padded, 9, 9), dtype),
        "dw": nhwc((filters, channels, kernel, kernel), "float32", address),
        "dy": nhwc((2, filters, 6, 6), dtype, 8192),
    }
    attrs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, "fold": fold}
    accumulates = ("dw",) if accumulate else ()
    op = Op("c.wgrad", "conv.wgrad", "c", "backward", {}, {}, {**attrs, "algorithm": "graph:eng1"}, accumulates)
    problem = conv_problem(op, arrays)
    assert (problem.w, problem.channels, problem.stride) == ((filters, padded, 4, 4), channels, (1, 1))
    plan = HostPlan(problem, "graph:eng1")
    plan.result = bits
    needed = workspace_bytes(plan, problem)  # type: ignore[arg-type]
    assert needed == 256 + bits.nbytes
    products = Products(None, None)  # type: ignore[arg-type]
    products._plans[problem, "graph:eng1"] = plan  # type: ignore[assignment]
    arrays["workspace"] = contiguous(start, (needed,), "uint8")
    products.convolve(op, arrays, HostKernels(dtype=dtype), None)
    made = load(bits, dtype)
    for k, r, s, c in np.ndindex(shape):
        value = made[k, r // fold, s // fold, ((r % fold) * fold + s % fold) * channels + c]
        assert dw[k, r, s, c] == value + (old[k, r, s, c] if accumulate else 0)
    assert (memory[start - memory.ctypes.data + needed :] == 0x55).all()


def test_the_library_sees_a_convolution_of_stride_1() -> None:
    program = program_of("resnet", "bfloat16")
    forward, gradient = (unplaced_problem(op_of(program, f"conv1.{name}"), program) for name in ("forward", "wgrad"))
    for problem in (forward, gradient):
        assert (problem.x, problem.w, problem.y) == ((4, 16, 18, 17), (8, 16, 4, 4), (4, 8, 15, 14))
        assert (problem.stride, problem.padding) == ((1, 1), (0, 0))
    assert str(gradient).endswith(
        "stride (1, 1), padding (0, 0), dilation (1, 1), groups 1, bfloat16, NHWC, 3 channels wanted"
    )
    assert gradient.scratch_bytes == 2 * 8 * 16 * 4 * 4
    specs = program.tensors
    for name, tensors in (("forward", ("data", "conv1.weight.used")), ("wgrad", ("data", "conv1.weight.grad"))):
        op = op_of(program, f"conv1.{name}")
        size = conv_size(op, {a: specs[t] for a, t in {**op.reads, **op.writes}.items()})
        assert (size.c, size.r, size.s, size.h, size.p) == (16, 4, 4, 18, 15), tensors


def test_the_floor_counts_the_products_of_the_definition() -> None:
    folded, plain = program_of("resnet", "bfloat16"), lower(network(*LAYERS["resnet"]), 4)
    for name in ("conv1.forward", "conv1.wgrad"):
        found, wanted = (work_of(op_of(program, name), program).operations for program in (folded, plain))
        assert found == wanted == 2 * 4 * 8 * 15 * 14 * 3 * 7 * 7
