"""Convolutions by cuDNN's named algorithms (the legacy API): the algorithm and workspace choice of the papers.

    problem = ConvProblem("forward", (64, 3, 224, 224), (64, 3, 3, 3), (64, 64, 224, 224), padding=(1, 1))
    for plan in plans(handle, problem):
        print(plan.algorithm, plan.workspace_bytes, plan.deterministic)
    plan.run(handle, x_ptr, w_ptr, y_ptr, workspace_ptr, accumulate=False)

x, y, dx and dy are whole or some channels of larger arrays, NCHW or NHWC; w and dw lie without gaps in the same layout.
Products of float32 operands are fp32; an algorithm whose label ends in "+TF32" may round them to TF32 for the tensor
cores. Those of 16-bit operands are exact. Sums are fp32 in any case.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

from vdnn.layers.tensor import DTYPE_BYTES, MEMORY_ORDERS
from vdnn.runtime.backends.cuda.cudnn import (
    ConvolutionDescriptor,
    CudnnError,
    FilterDescriptor,
    Handle,
    TensorDescriptor,
)

Shape4 = tuple[int, int, int, int]
Pair = tuple[int, int]

OPERANDS: Mapping[str, tuple[str, str, str]] = {
    "forward": ("x", "w", "y"),
    "dgrad": ("w", "y", "x"),
    "wgrad": ("x", "y", "w"),
}
"""Of each direction: the two operands it reads and the one it writes; y stands for dy, x for dx, w for dw."""


def contiguous(shape: Shape4, layout: str = "NCHW") -> Shape4:
    """Strides in elements of a dense array of logical shape (N, C, H, W) or (K, C, R, S) in a layout."""
    strides, step = [1] * 4, 1
    for axis in reversed(MEMORY_ORDERS[layout]):
        strides[axis] = step
        step *= shape[axis]
    return (strides[0], strides[1], strides[2], strides[3])


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """One convolution in numbers.

    Args:
        direction: "forward" (x, w → y), "dgrad" (w, dy → dx) or "wgrad" (x, dy → dw).
        x, w, y: shapes (N, C, H, W), (K, C/groups, R, S) and (N, K, P, Q), whichever of them is written.
        stride, padding, dilation: (vertical, horizontal).
        x_strides, y_strides: in elements, for (N, C, H, W); None for dense. Those of channels of a larger
            tensor are larger.
        alignment: bytes that the address of every operand is a multiple of; a power of two, an element's at least.
        dtype: of all operands, "float32", "bfloat16" or "float16"; sums are float32.
        layout: "NCHW", or "NHWC", in which filters lie as (K, R, S, C/groups); or "CHWN", which cuDNN does not know
            (see chwn_plans.py), and in which they lie as (C/groups, R, S, K).
        epilogue: what forward does to its sums before they are stored: nothing, "relu", or "bias+relu".
        channels: of wgrad, how many channels the wanted gradient has, where w has others (see vdnn.layers.images);
            None if it is that of w.
    """

    direction: str
    x: Shape4
    w: Shape4
    y: Shape4
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    x_strides: Shape4 | None = None
    y_strides: Shape4 | None = None
    alignment: int = 16
    dtype: str = "float32"
    layout: str = "NCHW"
    epilogue: str = ""
    channels: int | None = None

    @property
    def plain(self) -> ConvProblem:
        """The convolution alone, without its epilogue."""
        return replace(self, epilogue="") if self.epilogue else self

    @property
    def scratch_bytes(self) -> int:
        """Of wgrad: bytes of what cuDNN writes where that is not dw itself, float32 in the form of its filters."""
        if self.direction != "wgrad" or self.layout == "CHWN" or (self.dtype == "float32" and self.channels is None):
            return 0
        return prod(self.w) * DTYPE_BYTES[self.dtype]

    def dtypes(self) -> dict[str, str]:
        """Of "x", "w", "y" and a bias "b" as an algorithm takes them: kernels of vdnn's own, which are those in CHWN,
        take parameters and make their gradients in float32."""
        found = dict.fromkeys("xwyb", self.dtype)
        if self.layout == "CHWN":
            found |= {"b": "float32"} | ({"w": "float32"} if self.direction == "wgrad" else {})
        return found

    def strides(self) -> dict[str, Shape4]:
        """Strides in elements of "x", "w" and "y"."""
        return {
            "x": self.x_strides or contiguous(self.x, self.layout),
            "w": contiguous(self.w, self.layout),
            "y": self.y_strides or contiguous(self.y, self.layout),
        }

    def __str__(self) -> str:
        """The whole problem in one line, for error texts and as the key of what was measured."""
        strides = self.strides()
        x, y = (
            f"{shape}" if strides[name] == contiguous(shape, self.layout) else f"{shape} with strides {strides[name]}"
            for name, shape in (("x", self.x), ("y", self.y))
        )
        return (
            f"convolution {self.direction}, x {x}, w {self.w}, y {y}, stride {self.stride}, padding {self.padding}, "
            f"dilation {self.dilation}, groups {self.groups}, {self.dtype}"
            f"{'' if self.alignment == 16 else f', aligned to {self.alignment}'}"
            f"{'' if self.layout == 'NCHW' else f', {self.layout}'}"
            f"{'' if not self.epilogue else f', {self.epilogue}'}"
            f"{'' if self.channels is None else f', {self.channels} channels wanted'}"
        )


class ConvPlan(Protocol):
    """One way to compute one ConvProblem.

    `algorithm` is its label in the CostTable, `workspace_bytes` what `run` needs at `workspace_ptr`, `deterministic`
    whether two runs give equal bits, `notes` what cuDNN says about its arithmetic.
    """

    @property
    def algorithm(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...

    def run(self, handle: Any, a_ptr: int, b_ptr: int, out_ptr: int, workspace_ptr: int, accumulate: bool) -> None:
        """Start it on the handle's stream: out = conv(a, b), or out += conv(a, b); a, b, out are as in OPERANDS.

        One that applies an epilogue takes the address of the bias, in the dtype of the problem, as one more argument.
        Device addresses; the workspace is aligned to 256 bytes, and 0 will do where it is empty. Can be captured.
        """


@dataclass(frozen=True, slots=True)
class _Direction:
    """The functions of a direction, and its algorithms by label: cuDNN's number, and whether it is deterministic."""

    run: str
    workspace: str
    algorithms: Mapping[str, tuple[int, bool]]


# Numbers from cudnn_ops.h, which also marks what is not deterministic. Left out: DIRECT (forward 3) and WINOGRAD of the
# filter gradient (4), which no version implements.
_DIRECTIONS: Mapping[str, _Direction] = {
    "forward": _Direction(
        "cudnnConvolutionForward",
        "cudnnGetConvolutionForwardWorkspaceSize",
        {
            "IMPLICIT_GEMM": (0, True),
            "IMPLICIT_PRECOMP_GEMM": (1, True),
            "GEMM": (2, True),
            "FFT": (4, True),
            "FFT_TILING": (5, True),
            "WINOGRAD": (6, True),
            "WINOGRAD_NONFUSED": (7, True),
        },
    ),
    "dgrad": _Direction(
        "cudnnConvolutionBackwardData",
        "cudnnGetConvolutionBackwardDataWorkspaceSize",
        {
            "ALGO_0": (0, False),
            "ALGO_1": (1, True),
            "FFT": (2, True),
            "FFT_TILING": (3, True),
            "WINOGRAD": (4, True),
            "WINOGRAD_NONFUSED": (5, True),
        },
    ),
    "wgrad": _Direction(
        "cudnnConvolutionBackwardFilter",
        "cudnnGetConvolutionBackwardFilterWorkspaceSize",
        {
            "ALGO_0": (0, False),
            "ALGO_1": (1, True),
            "FFT": (2, True),
            "ALGO_3": (3, False),
            "WINOGRAD_NONFUSED": (5, True),
            "FFT_TILING": (6, True),
        },
    ),
}

TENSOR_CORE_ALGORITHMS = ("IMPLICIT_PRECOMP_GEMM", "ALGO_1")
"""Those that cuDNN's documentation says run on tensor cores: of the others 16-bit operands have nothing to gain."""
NCHW_ALGORITHMS = ("GEMM", "FFT", "FFT_TILING")
"""Those that refuse channels that lie side by side."""
TF32 = "+TF32"
"""End of the label of an algorithm that runs with the default math type instead of FMA."""

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@dataclass(frozen=True, slots=True)
class LegacyPlan:
    """A ConvPlan by one named algorithm."""

    algorithm: str
    workspace_bytes: int
    deterministic: bool
    problem: ConvProblem
    _number: int
    _operands: Mapping[str, TensorDescriptor | FilterDescriptor]
    _convolution: ConvolutionDescriptor
    notes: tuple[str, ...] = field(default=())

    def run(self, handle: Handle, a_ptr: int, b_ptr: int, out_ptr: int, workspace_ptr: int, accumulate: bool) -> None:
        """As ConvPlan.run."""
        a, b, out = (self._operands[name].pointer for name in OPERANDS[self.problem.direction])
        handle.api.call(
            _DIRECTIONS[self.problem.direction].run,
            handle.pointer,
            ctypes.byref(_ONE),
            a,
            a_ptr,
            b,
            b_ptr,
            self._convolution.pointer,
            self._number,
            workspace_ptr or None,
            self.workspace_bytes,
            ctypes.byref(_ONE if accumulate else _ZERO),
            out,
            out_ptr,
            about=self.problem,
            algorithm=self.algorithm,
        )


def plans(handle: Handle, problem: ConvProblem, *, tensor_cores: bool = False) -> list[LegacyPlan]:
    """The named algorithms that state a workspace for `problem`, in cuDNN's order; with `tensor_cores` in TF32 too.

    Those that are known not to serve its layout or dtype are not asked. An epilogue is left out: these have none.
    One that cuDNN refuses is not a candidate; if it refuses all, its first CudnnError is raised. A few accept here and
    refuse in `run`: a profile tries each once.
    """
    found, refused = [], []
    for label in _labels(problem, tensor_cores):
        try:
            found.append(plan(handle, problem, label))
        except CudnnError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


def _labels(problem: ConvProblem, tensor_cores: bool) -> list[str]:
    names = list(_DIRECTIONS[problem.direction].algorithms)
    if problem.dtype != "float32":
        return [name for name in names if name in TENSOR_CORE_ALGORITHMS]
    if problem.layout == "NHWC":
        names = [name for name in names if name not in NCHW_ALGORITHMS]
    return names + [f"{name}{TF32}" for name in names if tensor_cores]


def plan(handle: Handle, problem: ConvProblem, algorithm: str) -> LegacyPlan:
    """The plan of one algorithm by its label; CudnnError if cuDNN refuses it, ValueError if there is no such label."""
    direction, name = _DIRECTIONS[problem.direction], algorithm.removesuffix(TF32)
    if name not in direction.algorithms:
        known = ", ".join(direction.algorithms)
        raise ValueError(f"convolution {problem.direction} has no algorithm '{algorithm}', known: {known}")
    number, deterministic = direction.algorithms[name]
    tensor_cores = algorithm != name or problem.dtype != "float32"
    api, strides = handle.api, problem.strides()
    operands: dict[str, TensorDescriptor | FilterDescriptor] = {
        "x": TensorDescriptor(api, problem.x, strides["x"], problem.dtype),
        "w": FilterDescriptor(api, problem.w, problem.dtype, problem.layout),
        "y": TensorDescriptor(api, problem.y, strides["y"], problem.dtype),
    }
    convolution = ConvolutionDescriptor(
        api, problem.padding, problem.stride, problem.dilation, problem.groups, tensor_cores=tensor_cores
    )
    a, b, out = (operands[name].pointer for name in OPERANDS[problem.direction])
    nbytes = ctypes.c_size_t()
    arguments = (handle.pointer, a, b, convolution.pointer, out, number, ctypes.byref(nbytes))
    api.call(direction.workspace, *arguments, about=problem, algorithm=algorithm)
    notes = ("TENSOR_CORE",) if tensor_cores else ()
    return LegacyPlan(algorithm, nbytes.value, deterministic, problem, number, operands, convolution, notes)
