"""Convolutions and matrix products of the cuda backend: from an op and its arrays to a cuDNN plan or a cuBLAS call.

    products = Products(handle, cublas)
    products.convolve(op, arrays, kernels, stream)

Plans are made once per op and address alignment and kept; nothing is allocated when one runs.

What cuDNN cannot do itself lies behind its own workspace in that of the op (see `tail_bytes`): a filter gradient of
16-bit operands or of images in another form, which `store_filter_gradient` then brings to dw, and the bias in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from vdnn.errors import PlanError
from vdnn.layers.images import folded_filters
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, TensorSpec, element_strides, first_element
from vdnn.runtime.backends.cuda import cudnn_conv, cudnn_graph
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.cudnn import CudnnError, Handle
from vdnn.runtime.backends.cuda.cudnn_conv import ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.cudnn_graph import FUSED
from vdnn.runtime.backends.cuda.launch import Kernels
from vdnn.runtime.backends.cuda.prepare import filter_prepare, store_filter_gradient
from vdnn.runtime.backends.cuda.taps import TAPS, TapPlans

CONV_KINDS = {
    "conv.forward": ("forward", "x", "w", "y"),
    "conv.dgrad": ("dgrad", "dx", "w", "dy"),
    "conv.wgrad": ("wgrad", "x", "dw", "dy"),
}
"""Direction, and the argument names of x, w and y, whichever of them is written."""
LINEAR_KINDS = ("linear.forward", "linear.dgrad", "linear.wgrad")
GRAPH_LABEL = "graph:"
RUNTIME_COMPILED = 2
"""Most plans that NVRTC compiles for one epilogue, where cuDNN has no compiled ones."""
TAIL_ALIGNMENT = 256
"""Bytes, of what lies behind cuDNN's workspace; the workspace itself is as well aligned."""


def conv_problem(op: Op, arrays: Mapping[str, DeviceArray]) -> ConvProblem:
    """The convolution that `op` computes on `arrays`."""
    direction, *names = CONV_KINDS[op.kind]
    x, w, y = (arrays[name] for name in names)
    attrs = op.attrs
    problem = ConvProblem(
        direction,
        _four(x.shape),
        _four(w.shape),
        _four(y.shape),
        _two(attrs["stride"]),
        _two(attrs["padding"]),
        _two(attrs["dilation"]),
        attrs["groups"],
        _four(x.strides),
        _four(y.strides),
        dtype=x.dtype,
        layout=x.layout,
    )
    channels = x.shape[1] // attrs["groups"]
    if direction == "wgrad" and channels != w.shape[1]:  # images with channels of zeros or strides, which dw has not
        filters = _four(folded_filters(w.shape, attrs.get("fold", 1), channels))
        problem = replace(problem, w=filters, channels=w.shape[1])
    if direction == "forward" and "activation" in attrs:
        problem = replace(problem, epilogue=f"bias+{attrs['activation']}" if "b" in arrays else attrs["activation"])
    # a scratch, or a bias in 16 bits, lies where it is aligned
    given = (x, y) if problem.scratch_bytes else (x, w, y)
    if problem.epilogue == "bias+relu" and problem.dtype == "float32":
        given = (*given, arrays["b"])
    return replace(problem, alignment=min(16, *(_alignment(a.ptr) for a in given)))


def applies_epilogue(problem: ConvProblem, algorithm: str) -> bool:
    """Whether `algorithm` applies the epilogue that `problem` has: all of CHWN do, of cuDNN's those labelled so."""
    return bool(problem.epilogue) and (problem.layout == "CHWN" or algorithm.startswith(FUSED))


def tail_bytes(problem: ConvProblem, algorithm: str) -> int:
    """Bytes of what lies behind cuDNN's workspace: a filter gradient on its way to dw, or a bias in 16 bits."""
    if algorithm.startswith(FUSED) and problem.epilogue == "bias+relu" and problem.dtype != "float32":
        return problem.w[0] * DTYPE_BYTES[problem.dtype]
    return problem.scratch_bytes


def workspace_bytes(plan: ConvPlan, problem: ConvProblem) -> int:
    """Bytes of workspace that `problem` needs with `plan`, cuDNN's and the tail."""
    tail = tail_bytes(problem, plan.algorithm)
    return _aligned(plan.workspace_bytes) + tail if tail else plan.workspace_bytes


def unplaced_problem(op: Op, program: Program) -> ConvProblem:
    """The convolution that `op` of `program` will compute wherever the plan puts its storages."""
    return conv_problem(op, {arg: _unplaced(program, name) for arg, name in (*op.reads.items(), *op.writes.items())})


def _unplaced(program: Program, name: str) -> DeviceArray:
    """The array in a storage at address 0: what its strides and its alignment will be, as storages are aligned."""
    spec: TensorSpec = program.tensors[name]
    root = program.tensors[spec.storage]
    start = DTYPE_BYTES[spec.dtype] * first_element(spec, root)
    return DeviceArray(start, spec.shape, element_strides(spec, root), spec.dtype, spec.nbytes, spec.layout)


def _four(values: Any) -> tuple[int, int, int, int]:
    a, b, c, d = values
    return int(a), int(b), int(c), int(d)


def _two(values: Any) -> tuple[int, int]:
    a, b = values
    return int(a), int(b)


def _alignment(ptr: int) -> int:
    return ptr & -ptr if ptr else 16


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TAIL_ALIGNMENT) * TAIL_ALIGNMENT


class Products:
    """Runs conv.* and linear.* ops on the stream that the handles are bound to.

    taps: makes filter gradients that cuDNN does not have, on the same stream; None for cuDNN's alone.
    """

    def __init__(self, handle: Handle, cublas: Cublas, taps: TapPlans | None = None):
        self.handle, self.cublas, self.taps = handle, cublas, taps
        self._plans: dict[tuple[ConvProblem, str], ConvPlan] = {}

    def plans(
        self, problem: ConvProblem, *, tensor_cores: bool = False, named_only: bool = False, most: int | None = None
    ) -> list[ConvPlan]:
        """Every candidate for `problem`: cuDNN's named algorithms, then the graph API's in its heuristic order, then
        those that apply its epilogue, then those of `taps`.

        With `named_only` the first alone. Those with notes of arithmetic below fp32 are among them only with
        `tensor_cores`. Of the graph API's `most` at most with the epilogue and as many without. CudnnError if there is
        none.
        """
        found: list[ConvPlan] = []
        refused: list[CudnnError] = []
        makers: list[Callable[[], Sequence[ConvPlan]]] = [
            lambda: cudnn_conv.plans(self.handle, problem.plain, tensor_cores=tensor_cores)
        ]
        if not named_only:
            makers.append(lambda: cudnn_graph.plans(self.handle, problem.plain, tensor_cores=tensor_cores, most=most))
        if problem.epilogue and not named_only:
            makers.append(
                lambda: cudnn_graph.plans(
                    *(self.handle, problem), tensor_cores=tensor_cores, runtime_compiled=RUNTIME_COMPILED, most=most
                )
            )
        for make in makers:
            try:
                found += make()
            except CudnnError as error:  # this cuDNN has no engine, or no named algorithm, for such a case
                refused.append(error)
        if self.taps is not None and tensor_cores and not named_only:
            found += self.taps.plans(problem)
        if not found and refused:
            raise refused[0]
        return found

    def convolve(self, op: Op, arrays: Mapping[str, DeviceArray], kernels: Kernels, stream: Any) -> None:
        """Start the convolution of `op` on `stream`, which is the handle's.

        Bias and activation are applied here by an algorithm whose label begins with "fused:", by none else.
        """
        problem = conv_problem(op, arrays)
        plan = self._plan(problem, op.attrs["algorithm"])
        workspace = arrays.get("workspace")
        start = workspace.ptr if workspace is not None else 0
        pointers = {role: arrays[name].ptr for role, name in zip("xwy", CONV_KINDS[op.kind][1:], strict=True)}
        tail = self._tail(op, plan, problem, workspace)
        extra: tuple[int, ...] = ()
        if problem.scratch_bytes:
            pointers["w"] = tail
        elif plan.algorithm.startswith(FUSED) and "b" in arrays:
            extra = (self._bias(op, arrays["b"], problem, tail, kernels, stream),)
        a, b, out = (pointers[role] for role in cudnn_conv.OPERANDS[problem.direction])
        plan.run(self.handle, a, b, out, start, bool(op.accumulate) and not problem.scratch_bytes, *extra)
        if problem.scratch_bytes:
            scratch = contiguous(tail, problem.w, problem.dtype, problem.layout)
            fold = op.attrs.get("fold", 1)
            store_filter_gradient(arrays["dw"], scratch, bool(op.accumulate), kernels, stream, fold)

    def multiply(self, op: Op, arrays: Mapping[str, DeviceArray], stream: int) -> None:
        """Start the product of a linear op; x and dx may have image shape, (N, ...). A bias is not added here."""
        workspace = arrays["workspace"]
        self.cublas.bind(stream, workspace.ptr, workspace.nbytes)
        adds = bool(op.accumulate)
        if op.kind == "linear.forward":  # y (N, K) = x (N, C) w (K, C)^T
            a, b, out = arrays["x"], arrays["w"], arrays["y"]
            m, n, k = *out.shape, b.shape[1]
        elif op.kind == "linear.dgrad":  # dx (N, C) = dy (N, K) w (K, C)
            a, b, out = arrays["dy"], arrays["w"], arrays["dx"]
            m, n, k = a.shape[0], b.shape[1], a.shape[1]
        else:  # dw (K, C) = dy (N, K)^T x (N, C)
            a, b, out = arrays["dy"], arrays["x"], arrays["dw"]
            m, n, k = out.shape[0], prod(out.shape[1:]), a.shape[0]
        self.cublas.gemm(
            *(m, n, k, a.ptr, b.ptr, out.ptr),
            transpose_a=op.kind == "linear.wgrad",
            transpose_b=op.kind == "linear.forward",
            accumulate=adds,
            dtype=a.dtype,
            out_dtype=out.dtype,
        )

    def _plan(self, problem: ConvProblem, algorithm: str) -> ConvPlan:
        key = (problem, algorithm)
        if key not in self._plans:
            if self.taps is not None and algorithm.startswith(TAPS):
                self._plans[key] = self.taps.plan(problem, algorithm)
                return self._plans[key]
            by_graph = algorithm.startswith((GRAPH_LABEL, FUSED))
            make = cudnn_graph.plan if by_graph else cudnn_conv.plan
            self._plans[key] = make(self.handle, problem if algorithm.startswith(FUSED) else problem.plain, algorithm)
        return self._plans[key]

    def _tail(self, op: Op, plan: ConvPlan, problem: ConvProblem, workspace: DeviceArray | None) -> int:
        """Address of what lies behind cuDNN's workspace; 0 if nothing does."""
        if not tail_bytes(problem, plan.algorithm):
            return 0
        needed, got = workspace_bytes(plan, problem), workspace.nbytes if workspace is not None else 0
        if workspace is None or got < needed:
            raise PlanError(
                f"op '{op.name}' (layer '{op.layer}'), algorithm {plan.algorithm}: expected a workspace of {needed} "
                f"bytes, got {got}; plan again, as the algorithm was measured with another cuDNN"
            )
        return workspace.ptr + _aligned(plan.workspace_bytes)

    def _bias(self, op: Op, b: DeviceArray, problem: ConvProblem, tail: int, kernels: Kernels, stream: Any) -> int:
        """Address of the bias as cuDNN adds it, in the dtype of the problem."""
        if problem.dtype == b.dtype:
            return b.ptr
        shape = (b.size, 1, 1, 1)
        arrays = {"w": contiguous(b.ptr, shape, b.dtype), "y": contiguous(tail, shape, problem.dtype)}
        filter_prepare(op, arrays, kernels, stream)
        return tail
