"""Convolutions in CHWN as the search tries them: vdnn's own kernels behind the interface of cuDNN's plans.

    made = ChwnPlans(kernels, stream)
    for plan in made.plans(problem):                      # labels DIRECT_*
        plan.run(None, x_ptr, w_ptr, y_ptr, workspace_ptr, accumulate=False)

Each applies bias and activation itself, sums in float32, and makes filter gradients in float32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Any

from vdnn.layers.op import Op
from vdnn.layers.tensor import DTYPE_BYTES, Shape
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.chwn_conv import chwn_convolve
from vdnn.runtime.backends.cuda.chwn_tiles import chwn_candidates
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.launch import Kernels
from vdnn.runtime.backends.cuda.products import CONV_KINDS
from vdnn.runtime.backends.cuda.source import source

MODULE = "chwn"
"""Of the kernels, a key of source.MODULES."""
KINDS = {direction: kind for kind, (direction, *_) in CONV_KINDS.items()}


@dataclass(frozen=True, slots=True)
class ChwnPlan:
    """A ConvPlan by one variant of the kernels."""

    algorithm: str
    workspace_bytes: int
    problem: ConvProblem
    kernels: Kernels
    stream: Any
    deterministic: bool = True
    notes: tuple[str, ...] = ()

    def run(
        self, handle: None, a_ptr: int, b_ptr: int, out_ptr: int, workspace_ptr: int, accumulate: bool, *extra: int
    ) -> None:
        """As ConvPlan.run, on the stream of the plan."""
        problem = self.problem
        kind = KINDS[problem.direction]
        names = dict(zip("xwy", CONV_KINDS[kind][1:], strict=True))
        pointers = dict(zip(OPERANDS[problem.direction], (a_ptr, b_ptr, out_ptr), strict=True))
        shapes: dict[str, Shape] = {"x": problem.x, "w": problem.w, "y": problem.y}
        dtypes, strides = problem.dtypes(), problem.strides()
        arrays: dict[str, DeviceArray] = {}
        for role, shape in shapes.items():
            nbytes = prod(shape) * DTYPE_BYTES[dtypes[role]]
            array = DeviceArray(pointers[role], shape, strides[role], dtypes[role], nbytes, "CHWN")
            arrays[names[role]] = array
        if extra:
            arrays["b"] = contiguous(extra[0], (problem.w[0],), dtypes["b"])
        if self.workspace_bytes:
            arrays["workspace"] = contiguous(workspace_ptr, (self.workspace_bytes,), "uint8")
        chwn_convolve(_op(problem, kind, names, self.algorithm, accumulate), arrays, self.kernels, self.stream)


def _op(problem: ConvProblem, kind: str, names: dict[str, str], algorithm: str, accumulate: bool) -> Op:
    attrs: dict[str, Any] = {
        "stride": list(problem.stride),
        "padding": list(problem.padding),
        "dilation": list(problem.dilation),
        "groups": problem.groups,
        "algorithm": algorithm,
    }
    if problem.epilogue:
        attrs["activation"] = "relu"
    made = names[OPERANDS[problem.direction][2]]
    reads = {name: name for name in names.values() if name != made}
    if problem.epilogue == "bias+relu":
        reads["b"] = "b"
    return Op("trial", kind, "trial", "forward", reads, {made: made}, attrs, (made,) if accumulate else ())


@dataclass(frozen=True, slots=True)
class ChwnPlans:
    """Makes plans that run with `kernels` on `stream`; what Products is for cuDNN."""

    kernels: Kernels
    stream: Any
    handle: None = None

    def plans(self, problem: ConvProblem, **options: Any) -> list[ChwnPlan]:
        """Variants for `problem`, the likely fastest first. Of the options of Products.plans tensor_cores counts:
        whether products of float32 operands may be TF32."""
        found = chwn_candidates(problem, tensor_cores=bool(options.get("tensor_cores")))
        return [ChwnPlan(label, nbytes, problem, self.kernels, self.stream) for label, nbytes in found]

    def kernels_digest(self) -> str:
        """Of the source of these kernels: what their measured times are kept under."""
        return hashlib.sha256(source(self.kernels.dtype, MODULE).encode()).hexdigest()[:8]
