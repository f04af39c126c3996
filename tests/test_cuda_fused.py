"""Convolutions in 16 bits, with bias and ReLU in one plan, and of padded images: cuDNN's plans for a GPU that is not
there, and what is done around them.

Skipped in part, with the reason, where cuDNN is not installed or is of a version that cannot list plans.
"""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from test_cuda_plans import h200

from vdnn.errors import PlanError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda import cudnn_graph
from vdnn.runtime.backends.cuda import products as products_module
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.cudnn import CudnnError
from vdnn.runtime.backends.cuda.cudnn_backend import Attribute, DeviceProperties
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, load, store
from vdnn.runtime.backends.cuda.products import Products, conv_problem, tail_bytes, workspace_bytes

__all__ = ["h200"]

DATA_TYPES = {"float32": "CUDNN_DATA_FLOAT", "float16": "CUDNN_DATA_HALF", "bfloat16": "CUDNN_DATA_BFLOAT16"}
VGG = ((64, 64, 56, 56), (64, 64, 3, 3), (64, 64, 56, 56))
SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "3x3": (VGG, {"padding": (1, 1)}),
    "1x1": (((64, 256, 28, 28), (128, 256, 1, 1), (64, 128, 28, 28)), {}),
    "strided": (((64, 128, 56, 56), (128, 128, 3, 3), (64, 128, 28, 28)), {"padding": (1, 1), "stride": (2, 2)}),
    "padded images": (((64, 8, 224, 224), (64, 8, 7, 7), (64, 64, 112, 112)), {"padding": (3, 3), "stride": (2, 2)}),
    "groups": (((64, 96, 27, 27), (256, 48, 5, 5), (64, 256, 27, 27)), {"padding": (2, 2), "groups": 2}),
    "channels of a concatenation": (
        ((64, 192, 28, 28), (64, 192, 1, 1), (64, 64, 28, 28)),
        {"y_strides": (256 * 784, 1, 256 * 28, 256)},
    ),
}


# ---- cuDNN's plans


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", OPERANDS)
@pytest.mark.parametrize("name", SHAPES)
def test_16_bit_convolutions_have_plans_without_much_workspace(
    h200: DeviceProperties, name: str, direction: str, dtype: str
) -> None:
    shapes, options = SHAPES[name]
    problem = ConvProblem(direction, *shapes, **options, dtype=dtype, layout="NHWC")
    plans = cudnn_graph.plans(h200, problem, tensor_cores=True)
    assert len(plans) >= 3
    assert any(plan.deterministic and "TENSOR_CORE" in plan.notes for plan in plans)
    assert min(plan.workspace_bytes for plan in plans) <= 2**20
    told = json.loads(_built(plans[0]).get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]
    assert {tensor["dataType"] for tensor in told["tensors"]} == {DATA_TYPES[dtype]}
    assert told["nodes"][0]["mathPrec"] == "CUDNN_DATA_FLOAT"
    assert cudnn_graph.plan(h200, problem, plans[0].algorithm).workspace_bytes == plans[0].workspace_bytes
    # a filter gradient in 16 bits is brought to dw, or added to it, by a kernel of ours
    assert set(plans[0]._plans) == ({False} if direction == "wgrad" else {False, True})


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_bias_and_relu_are_part_of_some_plans(h200: DeviceProperties, dtype: str, layout: str) -> None:
    plain = ConvProblem("forward", *VGG, padding=(1, 1), dtype=dtype, layout=layout)
    problem = ConvProblem("forward", *VGG, padding=(1, 1), dtype=dtype, layout=layout, epilogue="bias+relu")
    assert problem.plain == plain
    plans = cudnn_graph.plans(h200, problem, tensor_cores=True)
    assert len(plans) >= 20  # 31 to 40 with cuDNN 9.19
    assert all(plan.algorithm.startswith("fused:graph:eng") for plan in plans)
    assert len({plan.algorithm for plan in plans}) == len(plans)
    told = json.loads(_built(plans[0]).get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]
    assert [node.get("pointwiseMode", node.get("mode")) for node in told["nodes"]] == [
        *("CUDNN_CROSS_CORRELATION", "CUDNN_POINTWISE_ADD", "CUDNN_POINTWISE_RELU_FWD")
    ]
    virtual = [tensor["dataType"] for tensor in told["tensors"] if tensor["isVirtual"]]
    assert virtual == ["CUDNN_DATA_FLOAT"] * 2  # the sums are rounded once, at the end
    stored = {tuple(tensor["dim"]): tensor for tensor in told["tensors"] if not tensor["isVirtual"]}
    assert {tensor["dataType"] for tensor in stored.values()} == {DATA_TYPES[dtype]}
    assert (1, 64, 1, 1) in stored
    label = plans[0].algorithm
    assert cudnn_graph.plan(h200, problem, label).workspace_bytes == plans[0].workspace_bytes
    for wrong, of in ((label, plain), (label.removeprefix("fused:"), problem)):
        with pytest.raises(ValueError, match="is not a label"):
            cudnn_graph.plan(h200, of, wrong)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_a_plan_with_bias_and_relu(h200: DeviceProperties, name: str) -> None:
    shapes, options = SHAPES[name]
    for dtype in ("float32", "bfloat16"):
        problem = ConvProblem("forward", *shapes, **options, dtype=dtype, layout="NHWC", epilogue="bias+relu")
        assert cudnn_graph.plans(h200, problem, tensor_cores=True), dtype


def test_fp32_has_plans_with_bias_and_relu_without_tensor_cores(h200: DeviceProperties) -> None:
    problem = ConvProblem("forward", *VGG, padding=(1, 1), epilogue="bias+relu")
    plans = cudnn_graph.plans(h200, problem)
    assert plans
    assert all(cudnn_graph.INEXACT.isdisjoint(plan.notes) for plan in plans)
    assert min(plan.workspace_bytes for plan in plans) == 0


def test_a_fused_plan_gets_the_bias_under_its_own_name(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem("forward", (2, 8, 8, 8), (16, 8, 3, 3), (2, 16, 6, 6), layout="NHWC", epilogue="bias+relu")
    plan = cudnn_graph.plans(h200, problem, tensor_cores=True)[0]
    told = json.loads(_built(plan).get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]
    shapes = {tensor["name"]: tuple(tensor["dim"]) for tensor in told["tensors"]}
    api, given = h200.api, {}
    original = api._functions["cudnnBackendSetAttribute"]

    def set_attribute(descriptor: int, attribute: int, type_: int, count: int, array: Any) -> Any:
        given[attribute] = list(array)
        return original(descriptor, attribute, type_, count, array)

    monkeypatch.setitem(api._functions, "cudnnBackendSetAttribute", set_attribute)
    monkeypatch.setitem(api._functions, "cudnnBackendExecute", lambda handle, built, pack: 0)
    handle: Any = SimpleNamespace(api=api, pointer=1)
    plan.run(handle, 0x1000, 0x2000, 0x3000, 0x4000, False, 0x5000)
    names = [shapes[str(name)] for name in given[Attribute.VARIANT_PACK_UNIQUE_IDS]]
    assert names == [problem.x, problem.w, problem.y, (1, 16, 1, 1)]
    assert given[Attribute.VARIANT_PACK_DATA_POINTERS] == [0x1000, 0x2000, 0x3000, 0x5000]


def test_a_relu_without_bias_is_left_to_a_kernel_where_cudnn_has_nothing_compiled(h200: DeviceProperties) -> None:
    problem = ConvProblem("forward", *VGG, padding=(1, 1), dtype="bfloat16", layout="NHWC", epilogue="relu")
    assert cudnn_graph.plans(h200, problem, tensor_cores=True) == []


def _built(plan: Any) -> Any:
    return plan._plans[False]


# ---- what is compiled at run time


def test_plans_compiled_at_run_time_are_taken_only_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[tuple[str, tuple[str, ...]]] = []
    tried: list[str] = []

    class Made:
        def __init__(self, target: Any, problem: ConvProblem) -> None:
            pass

        built = cudnn_graph._Convolution.built

        def suggestions(self) -> Any:
            return iter(listed)

        def plan(self, label: str) -> Any:
            tried.append(label)
            if label == "refuses":
                raise CudnnError(3000, "CUDNN_STATUS_NOT_SUPPORTED", "made up")
            return label

    monkeypatch.setattr(cudnn_graph, "_Convolution", Made)
    problem: Any = None
    compiled = ("RUNTIME_COMPILATION", "TENSOR_CORE")
    listed += [("a", compiled), ("b", ("TENSOR_CORE",)), ("refuses", compiled), ("c", compiled), ("d", compiled)]
    handle: Any = None
    assert cudnn_graph.plans(handle, problem, tensor_cores=True, runtime_compiled=2) == ["b"]
    assert tried == ["b"]
    del listed[1]
    assert cudnn_graph.plans(handle, problem, tensor_cores=True) == []
    assert cudnn_graph.plans(handle, problem, tensor_cores=True, runtime_compiled=2) == ["a", "c"]
    assert "d" not in tried
    assert cudnn_graph.plans(handle, problem, runtime_compiled=2) == []
    listed[:] = [("e", ()), ("refuses", ()), ("f", ()), ("g", ())]
    assert cudnn_graph.plans(handle, problem, most=2) == ["e", "f"]


# ---- problems of ops


def nhwc(shape: tuple[int, int, int, int], dtype: str, ptr: int = 4096) -> DeviceArray:
    return contiguous(ptr, shape, dtype, "NHWC")


ATTRS = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}


def conv_op(kind: str, accumulate: tuple[str, ...] = (), **attrs: object) -> Op:
    return Op(f"conv1.{kind[5:]}", kind, "conv1", "forward", {}, {}, {**ATTRS, **attrs}, accumulate)


def test_the_problem_tells_dtype_epilogue_and_padded_images() -> None:
    images, y = nhwc((2, 8, 6, 6), "bfloat16"), nhwc((2, 16, 6, 6), "bfloat16", 8192)
    used, dw = nhwc((16, 8, 3, 3), "bfloat16", 12288), nhwc((16, 3, 3, 3), "float32", 16388)
    bias = contiguous(20484, (16,))
    forward = {"x": images, "w": used, "y": y, "b": bias}
    plain = conv_problem(conv_op("conv.forward"), forward)
    assert (plain.dtype, plain.epilogue, plain.scratch_bytes, plain.alignment) == ("bfloat16", "", 0, 16)
    relu = conv_problem(conv_op("conv.forward", activation="relu"), forward)
    assert (relu.epilogue, relu.plain) == ("bias+relu", plain)
    assert relu.alignment == 16  # of the bias a copy in 16 bits is made
    without = conv_problem(conv_op("conv.forward", activation="relu"), {k: a for k, a in forward.items() if k != "b"})
    assert without.epilogue == "relu"
    gradient = conv_problem(conv_op("conv.wgrad"), {"x": images, "dw": dw, "dy": y})
    assert (gradient.w, gradient.channels) == ((16, 8, 3, 3), 3)
    assert gradient.scratch_bytes == 16 * 8 * 9 * 2
    assert gradient.alignment == 16  # dw begins on 4 bytes, but the scratch is written
    whole = conv_problem(conv_op("conv.wgrad"), {"x": images, "dw": nhwc((16, 8, 3, 3), "float32"), "dy": y})
    assert (whole.channels, whole.scratch_bytes) == (None, 16 * 8 * 9 * 2)
    assert len({str(p) for p in (plain, relu, without, gradient, whole)}) == 5


def test_fp32_problems_are_called_what_they_were() -> None:
    """Stored tables go by these words."""
    x, y = contiguous(4096, (2, 3, 6, 6)), contiguous(8192, (2, 16, 6, 6))
    w = contiguous(12288, (16, 3, 3, 3))
    problem = conv_problem(conv_op("conv.forward"), {"x": x, "w": w, "y": y, "b": contiguous(16384, (16,))})
    assert str(problem) == (
        "convolution forward, x (2, 3, 6, 6), w (16, 3, 3, 3), y (2, 16, 6, 6), stride (1, 1), padding (1, 1), "
        "dilation (1, 1), groups 1, float32"
    )
    padded = conv_problem(conv_op("conv.wgrad"), {"x": nhwc((2, 4, 6, 6), "float32"), "dw": w, "dy": y})
    assert (padded.channels, padded.scratch_bytes) == (3, 16 * 4 * 9 * 4)  # images of TF32 are padded too


# ---- around a plan


class HostPlan:
    """Writes numbers that are known where cuDNN would write, and looks at the bias that it is given."""

    def __init__(self, problem: ConvProblem, algorithm: str, workspace_nbytes: int = 100) -> None:
        self.problem, self.algorithm, self.workspace_bytes = problem, algorithm, workspace_nbytes
        self.deterministic, self.notes = True, ()
        self.runs: list[tuple[int, ...]] = []
        self.bias: Any = None
        self.result: Any = None

    def run(self, handle: Any, a: int, b: int, out: int, workspace: int, accumulate: bool, *bias: int) -> None:
        self.runs.append((a, b, out, workspace, int(accumulate)))
        if self.result is not None:
            _host(out, self.result.size, self.result.dtype)[:] = self.result.ravel()
        if bias:
            bits = _host(bias[0], self.problem.w[0], NUMPY_DTYPES[self.problem.dtype]).copy()
            self.bias = load(bits, self.problem.dtype)


def _host(address: int, count: int, dtype: Any) -> Any:

    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HostPlan]:
    """The plans that were asked for."""
    plans: list[HostPlan] = []

    def plan(handle: Any, problem: ConvProblem, label: str) -> HostPlan:
        plans.append(HostPlan(problem, label))
        return plans[-1]

    monkeypatch.setattr(cudnn_graph, "plan", plan)
    monkeypatch.setattr(products_module.cudnn_conv, "plan", plan)
    return plans


def room(nbytes: int) -> tuple[Any, int]:
    """Memory of so many bytes and its address, aligned as on a GPU."""
    memory = np.full(nbytes + 512, 0x55, np.uint8)
    return memory, int(memory.ctypes.data) + -memory.ctypes.data % 512


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", 8), ("bfloat16", 3), ("float16", 8), ("float32", 3)])
def test_a_filter_gradient_comes_from_behind_the_workspace(
    made: list[HostPlan], dtype: str, wanted: int, accumulate: bool
) -> None:
    filters, channels = 6, 8
    memory, start = room(1 << 14)
    old = np.random.default_rng(3).standard_normal((filters, 3, 3, wanted)).astype(np.float32)
    held, address = room(old.nbytes)
    _host(address, old.size, np.float32)[:] = old.ravel()
    scratch = np.random.default_rng(4).standard_normal((filters, 3, 3, channels)).astype(np.float32)
    bits = store(scratch, dtype)
    arrays = {
        "x": nhwc((2, channels, 6, 6), dtype),
        "dw": nhwc((filters, wanted, 3, 3), "float32", address),
        "dy": nhwc((2, filters, 6, 6), dtype, 8192),
    }
    op = conv_op("conv.wgrad", ("dw",) if accumulate else (), algorithm="graph:eng1")
    problem = conv_problem(op, arrays)
    plan = HostPlan(problem, "graph:eng1")
    needed = workspace_bytes(plan, problem)  # type: ignore[arg-type]
    assert needed == 256 + bits.nbytes  # cuDNN's 100 bytes, rounded up
    products = Products(None, None)  # type: ignore[arg-type]
    plan.result = bits
    products._plans[problem, "graph:eng1"] = plan  # type: ignore[assignment]
    arrays["workspace"] = contiguous(start, (needed,), "uint8")
    products.convolve(op, arrays, HostKernels(dtype=dtype), None)
    assert plan.runs == [(4096, 8192, start + 256, start, 0)]  # it is written anew, and added by the kernel
    expected = load(bits, dtype)[..., :wanted] + (old if accumulate else 0)
    assert (_host(address, old.size, np.float32).reshape(old.shape) == expected).all()
    assert (memory[start - memory.ctypes.data + needed :] == 0x55).all()
    arrays["workspace"] = contiguous(start, (needed - 1,), "uint8")
    with pytest.raises(PlanError, match=f"expected a workspace of {needed} bytes, got {needed - 1}"):
        products.convolve(op, arrays, HostKernels(dtype=dtype), None)
    del held


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_fused_plan_adds_the_bias_in_its_own_dtype(made: list[HostPlan], dtype: str) -> None:
    filters = 24
    values = np.random.default_rng(5).standard_normal(filters).astype(np.float32)
    held, address = room(values.nbytes)
    _host(address, filters, np.float32)[:] = values
    memory, start = room(1 << 12)
    arrays = {
        "x": nhwc((2, 8, 6, 6), dtype),
        "w": nhwc((filters, 8, 3, 3), dtype, 8192),
        "y": nhwc((2, filters, 6, 6), dtype, 12288),
        "b": contiguous(address, (filters,)),
        "workspace": contiguous(start, (512,), "uint8"),
    }
    op = conv_op("conv.forward", activation="relu", algorithm="fused:graph:eng1")
    products = Products(None, None)  # type: ignore[arg-type]
    products.convolve(op, arrays, HostKernels(dtype=dtype), None)
    (plan,) = made
    assert plan.problem.epilogue == "bias+relu"
    assert plan.runs == [(4096, 8192, 12288, start, 0)]
    assert (plan.bias == load(store(values, dtype), dtype)).all()
    assert tail_bytes(plan.problem, plan.algorithm) == (0 if dtype == "float32" else 2 * filters)
    products.convolve(
        conv_op("conv.forward", activation="relu", algorithm="GEMM"), arrays, HostKernels(dtype=dtype), None
    )
    assert (made[1].problem, made[1].bias) == (plan.problem.plain, None)
    del held, memory
