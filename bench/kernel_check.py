"""One call of a CUDA kernel compared with the CPU backend, in one block of bytes with NaN between the tensors.

    case = Case("relu", "relu.forward", {"x": x}, {"y": np.full_like(x, np.nan)})
    print(difference(case, "channels", machine))      # None, or what is wrong

A byte that is written outside of the results shows, and so does a number that is read between the tensors. Activations
have the dtype of the machine's kernels: 16-bit ones are rounded before the call, and the CPU's results after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vdnn.layers import Op
from vdnn.layers.tensor import MEMORY_ORDERS, Shape
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, CudaKernel, workspace_bytes
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels
from vdnn.runtime.backends.cuda.prepare import store_filter_gradient
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16

Array = NDArray[Any]
EXACT = 0.0
FINE, COARSE = 1e-6, 1e-5
"""Largest error allowed, relative to the largest number of the result: of a few roundings, and of sums."""
ALIGNED_CHANNELS = 8
"""Of 16 bits in 16 bytes; of float32 they are 32."""
LAYOUTS: Mapping[str, tuple[int, int, int, str]] = {
    "whole": (0, 0, 0, "NCHW"),
    "aligned channels": (ALIGNED_CHANNELS, 4, 0, "NCHW"),
    "channels": (1, 2, 4, "NCHW"),
    "NHWC": (0, 0, 0, "NHWC"),
    "aligned channels of NHWC": (ALIGNED_CHANNELS, 4, 0, "NHWC"),
    "channels of NHWC": (1, 2, 4, "NHWC"),
    "CHWN": (0, 0, 0, "CHWN"),
    "channels of CHWN": (1, 2, 4, "CHWN"),
}
"""Channels before, at least so many after, bytes that the address is off a multiple of 256, and the order in memory."""
GAP_BYTES, ALIGN_BYTES, NAN_BYTE = 64, 256, 0xFF
TRANSFORM = "layout.transform"
BATCHED = ("x", "y", "dy", "dx", "a", "z", "dz")
"""Arguments that may be channels of a larger tensor; `b` too where it is a term of a sum. They are activations."""
STORE = "filter gradient"
"""In place of an op kind: store_filter_gradient of vdnn.runtime.backends.cuda.prepare, scratch → dw."""
WHOLE = ("filter.prepare", "filter.prepare_all", STORE)
"""Kinds whose tensors are never channels of others."""
UNIT_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of a number rounded to nearest, on top of a tolerance: 2^-p for p binary digits, one of them
not stored. That of float32 is part of the tolerance."""
SMALLEST = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}
"""Half the distance of the numbers next to 0."""


def _store(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    fold = op.attrs.get("fold", 1)
    store_filter_gradient(arrays["dw"], arrays["scratch"], bool(op.accumulate), kernels, stream, fold)


CALLS: Mapping[str, CudaKernel] = {**CUDA_KERNELS, STORE: _store}
"""What a case of each kind calls."""


def is_activation(kind: str, argument: str) -> bool:
    """Whether an argument of such an op has the dtype of activations, unless it has that of uploaded pixels."""
    if kind == "filter.prepare_all":
        return argument.startswith("y")
    return argument in BATCHED or (kind, argument) in (("add.forward", "b"), (STORE, "scratch"))


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        reads, writes: arrays by argument name; those of `writes` hold what the call finds there.
        over: argument of `writes` → argument of `reads` whose bytes it takes.
        tolerance: EXACT for equal bits with float32 on the CPU, else of the distance to float64.
        reference: where the CPU backend's kernel of that kind does more than the GPU's.
        orders: argument → its order in memory, where not all of a call have the same.
    """

    name: str
    kind: str
    reads: Mapping[str, Array]
    writes: Mapping[str, Array]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    accumulate: tuple[str, ...] = ()
    over: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = EXACT
    reference: Callable[..., None] | None = None
    orders: Mapping[str, str] = field(default_factory=dict)

    @property
    def op(self) -> Op:
        """The op that a program would hold."""
        names = {argument: argument for argument in (*self.reads, *self.writes)}
        reads = {argument: names[argument] for argument in self.reads}
        writes = {argument: self.over.get(argument, argument) for argument in self.writes}
        return Op(self.name, self.kind, "layer", "forward", reads, writes, dict(self.attrs), self.accumulate)

    def stored(self, argument: str, dtype: str) -> Array:
        """What is stored before the call where activations have `dtype`."""
        value = {**self.reads, **self.writes}[argument]
        return _rounded(value, dtype) if is_activation(self.kind, argument) and value.dtype == np.float32 else value

    def expected(self, dtype: str = "float32") -> dict[str, Array]:
        """What `writes` hold afterwards, on the CPU, in float32 or float64 however activations are stored."""
        wide = self.tolerance > EXACT
        names = (*self.reads, *self.writes)
        known = {a: _known(self.stored(a, dtype)) for a in names}
        arrays = {a: _widened(v) if wide else v.copy() for a, v in known.items()}
        arrays.update({written: arrays[read] for written, read in self.over.items()})
        (self.reference or KERNELS[self.kind])(self.op, **arrays)
        return {argument: arrays[argument] for argument in self.writes}


class Machine(Protocol):
    """Memory in which kernels run."""

    stream: Any

    @property
    def kernels(self) -> Kernels:
        """What runs there."""

    def run(self, content: NDArray[np.uint8], work: Callable[[int], None]) -> NDArray[np.uint8]:
        """Put `content` at an address that is a multiple of 256, call `work` with it, return what lies there then."""


def applies(case: Case, layout: str) -> bool:
    """Whether the call exists there: images are vectors too in NCHW alone, those of one pixel in NHWC as well, and a
    transform has one of each; a stride or zeros are in channels in NHWC alone."""
    order = LAYOUTS[layout][3]
    if case.orders:
        return order == "NCHW"
    batches = [v.shape for a, v in {**case.reads, **case.writes}.items() if a in BATCHED]
    images = [shape for shape in batches if len(shape) == 4 and (order == "CHWN" or prod(shape[2:]) > 1)]
    mixed = bool(images) and any(len(shape) == 2 for shape in batches)
    if "fold" in case.attrs or (case.kind in ("filter.prepare", STORE) and _differ(case)):
        return order == "NHWC"
    return mixed and order != "NCHW" if case.kind == TRANSFORM else not (mixed and order != "NCHW")


def _differ(case: Case) -> bool:
    return len({value.shape for value in (*case.reads.values(), *case.writes.values())}) > 1


def difference(case: Case, layout: str, machine: Machine) -> str | None:
    """What is wrong with the call on `machine`, in words; None if nothing is, or if it does not apply."""
    if not applies(case, layout):
        return None
    dtype = machine.kernels.dtype
    content, places = _lay_out(case, layout, dtype)
    before = content.copy()

    def work(address: int) -> None:
        arrays = {
            name: DeviceArray(address + start, shape, strides, dtype_name(kind), prod(shape) * kind.itemsize, order)
            for name, (start, shape, strides, kind, order) in places.items()
        }
        CALLS[case.kind](case.op, arrays, machine.kernels, machine.stream)

    after = machine.run(content, work)
    for argument, want in case.expected(dtype).items():
        stored = dtype if dtype_name(places[argument][3]) == dtype else "float32"
        wrong = _compare(_view(after, places[argument]), want, case.tolerance, stored)
        if wrong:
            return f"{argument}: {wrong}"
    for argument in case.writes:  # put back what may differ: then nothing else must
        _view(after, places[argument])[...] = _view(before, places[argument])
    if "workspace" in places:
        _view(after, places["workspace"])[...] = NAN_BYTE
    stray = np.flatnonzero(after != before)
    return f"{len(stray)} bytes written outside of the results, the first at {stray[0]}" if len(stray) else None


_Place = tuple[int, Shape, Shape, np.dtype[Any], str]


def dtype_name(dtype: np.dtype[Any]) -> str:
    """What a DeviceArray calls it."""
    return "bfloat16" if dtype == np.uint16 else str(dtype)


def _lay_out(case: Case, layout: str, dtype: str) -> tuple[NDArray[np.uint8], dict[str, _Place]]:
    """The bytes before the call, and where in them each argument lies: start, shape, strides in elements, dtype,
    order."""
    arrays = {a: case.stored(a, dtype) for a in (*case.reads, *case.writes) if a not in case.over}
    scratch = workspace_bytes(case.kind, {a: v.shape for a, v in arrays.items()}, LAYOUTS[layout][3])
    if scratch:
        arrays["workspace"] = np.full(scratch, NAN_BYTE, np.uint8)
    places: dict[str, _Place] = {}
    end = 0
    for argument, array in arrays.items():
        sliced = is_activation(case.kind, argument) and case.kind not in WHOLE and array.ndim > 1
        before, after, offset = LAYOUTS[layout][:3] if sliced else (0, 0, 0)
        if layout.startswith("aligned channels") and before:
            after += -(before + after + array.shape[1]) % ALIGNED_CHANNELS
        order = _order(case, argument, layout) if array.ndim == 4 else "NCHW"
        sizes = [*array.shape]
        if before:
            sizes[1] += before + after
        strides = _strides(sizes, order)
        channel = strides[1] if before else 1
        start = -(-(end + GAP_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
        first = start + (offset + before * channel * array.itemsize if array.dtype != np.uint8 else before * channel)
        places[argument] = first, array.shape, strides, array.dtype, order
        end = start + offset + prod(sizes) * array.itemsize
    content = np.full(end + GAP_BYTES, NAN_BYTE, np.uint8)
    for argument, array in arrays.items():
        _view(content, places[argument])[...] = array
    places.update({written: places[read] for written, read in case.over.items()})
    return content, places


def _order(case: Case, argument: str, layout: str) -> str:
    """Of an argument of four dimensions; pixels that are uploaded are NCHW in any case."""
    if (case.kind, argument) == ("input.normalize", "x"):
        return "NCHW"
    return case.orders.get(argument, LAYOUTS[layout][3])


def _strides(sizes: Sequence[int], order: str) -> Shape:
    """In elements, of a tensor without gaps."""
    strides, step = [1] * len(sizes), 1
    for axis in reversed(MEMORY_ORDERS[order] if len(sizes) == 4 else range(len(sizes))):
        strides[axis] = step
        step *= sizes[axis]
    return tuple(strides)


def _view(content: NDArray[np.uint8], place: _Place) -> Array:
    start, shape, strides, dtype, _ = place
    return np.ndarray(shape, dtype, content.data, start, tuple(s * dtype.itemsize for s in strides))


def _compare(got: Array, want: Array, tolerance: float, dtype: str) -> str | None:
    got = _known(got)
    if tolerance == EXACT and want.dtype == np.float32:
        want = _known(_rounded(want, dtype))
    if not (np.isnan(got) == np.isnan(want)).all():
        return f"{np.isnan(got).sum()} NaN, expected {np.isnan(want).sum()}"
    if tolerance == EXACT or want.dtype.kind != "f":
        differ = ~((got == want) | np.isnan(want))
        return f"{differ.sum()} of {got.size} differ, the first at {np.argwhere(differ)[0]}" if differ.any() else None
    finite = np.isfinite(want)
    size = np.abs(want[finite]).max(initial=0.0)
    rounding = UNIT_ROUNDOFF[dtype] * np.abs(want[finite]) + SMALLEST[dtype]
    error = (np.abs(got.astype(np.float64)[finite] - want[finite]) - rounding).max(initial=0.0)
    return f"error {error / size:.1e} of the largest, allowed {tolerance:.1e}" if error > tolerance * size else None


def _rounded(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return to_bfloat16(array)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _known(array: Array) -> Array:
    """The numbers of a 16-bit array as float32, exactly; others as they are."""
    if array.dtype == np.uint16:
        return from_bfloat16(array)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _widened(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array.copy()
