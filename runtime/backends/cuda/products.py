"""Convolutions and matrix products of the cuda backend: from an op and its arrays to a cuDNN plan or a cuBLAS call.

    products = Products(handle, cublas)
    products.launch(op, arrays, stream)

Plans are made once per op and address alignment and kept; nothing is allocated when one runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, TensorSpec, element_strides, first_element
from vdnn.runtime.backends.cuda import cudnn_conv, cudnn_graph
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.cudnn import CudnnError, Handle
from vdnn.runtime.backends.cuda.cudnn_conv import ConvPlan, ConvProblem

CONV_KINDS = {
    "conv.forward": ("forward", "x", "w", "y"),
    "conv.dgrad": ("dgrad", "dx", "w", "dy"),
    "conv.wgrad": ("wgrad", "x", "dw", "dy"),
}
"""Direction, and the argument names of x, w and y, whichever of them is written."""
LINEAR_KINDS = ("linear.forward", "linear.dgrad", "linear.wgrad")
GRAPH_LABEL = "graph:"


def conv_problem(op: Op, arrays: Mapping[str, DeviceArray]) -> ConvProblem:
    """The convolution that `op` computes on `arrays`."""
    direction, *names = CONV_KINDS[op.kind]
    x, w, y = (arrays[name] for name in names)
    attrs = op.attrs
    return ConvProblem(
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
        alignment=min(16, *(_alignment(a.ptr) for a in (x, w, y))),
        layout=x.layout,
    )


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


class Products:
    """Runs conv.* and linear.* ops on the stream that the handles are bound to."""

    def __init__(self, handle: Handle, cublas: Cublas):
        self.handle, self.cublas = handle, cublas
        self._plans: dict[tuple[ConvProblem, str], ConvPlan] = {}

    def plans(self, problem: ConvProblem, *, tensor_cores: bool = False, named_only: bool = False) -> list[ConvPlan]:
        """Every candidate for `problem`: cuDNN's named algorithms, then the graph API's in its heuristic order.

        With `named_only` the former alone. Those with notes of arithmetic below fp32 are among them only with
        `tensor_cores`. CudnnError if there is none.
        """
        found: list[ConvPlan] = []
        refused: list[CudnnError] = []
        for make in (cudnn_conv.plans, cudnn_graph.plans)[: 1 if named_only else 2]:
            try:
                found += make(self.handle, problem, tensor_cores=tensor_cores)
            except CudnnError as error:  # this cuDNN has no engine, or no named algorithm, for such a case
                refused.append(error)
        if not found and refused:
            raise refused[0]
        return found

    def convolve(self, op: Op, arrays: Mapping[str, DeviceArray]) -> None:
        """Start the convolution of `op`; a bias is not added here."""
        plan = self._plan(conv_problem(op, arrays), op.attrs["algorithm"])
        workspace = arrays.get("workspace")
        names = {"x": CONV_KINDS[op.kind][1], "w": CONV_KINDS[op.kind][2], "y": CONV_KINDS[op.kind][3]}
        a, b, out = (arrays[names[role]].ptr for role in cudnn_conv.OPERANDS[CONV_KINDS[op.kind][0]])
        plan.run(self.handle, a, b, out, workspace.ptr if workspace is not None else 0, bool(op.accumulate))

    def multiply(self, op: Op, arrays: Mapping[str, DeviceArray], stream: int) -> None:
        """Start the product of a linear op; x and dx may have image shape, (N, ...). A bias is not added here."""
        workspace = arrays["workspace"]
        self.cublas.bind(stream, workspace.ptr, workspace.nbytes)
        adds = bool(op.accumulate)
        if op.kind == "linear.forward":  # y (N, K) = x (N, C) w (K, C)^T
            x, w, y = arrays["x"], arrays["w"], arrays["y"]
            n, k = y.shape
            self.cublas.gemm(n, k, w.shape[1], x.ptr, w.ptr, y.ptr, transpose_b=True, accumulate=adds)
        elif op.kind == "linear.dgrad":  # dx (N, C) = dy (N, K) w (K, C)
            w, dy, dx = arrays["w"], arrays["dy"], arrays["dx"]
            self.cublas.gemm(dy.shape[0], w.shape[1], dy.shape[1], dy.ptr, w.ptr, dx.ptr, accumulate=adds)
        else:  # dw (K, C) = dy (N, K)^T x (N, C)
            x, dy, dw = arrays["x"], arrays["dy"], arrays["dw"]
            k, c = dw.shape[0], prod(dw.shape[1:])
            self.cublas.gemm(k, c, dy.shape[0], dy.ptr, x.ptr, dw.ptr, transpose_a=True, accumulate=adds)

    def _plan(self, problem: ConvProblem, algorithm: str) -> ConvPlan:
        key = (problem, algorithm)
        if key not in self._plans:
            make = cudnn_graph.plan if algorithm.startswith(GRAPH_LABEL) else cudnn_conv.plan
            self._plans[key] = make(self.handle, problem, algorithm)
        return self._plans[key]
