"""One call of a CUDA kernel compared with the CPU backend, in one block of bytes with NaN between the tensors.

    case = Case("relu", "relu.forward", {"x": x}, {"y": np.full_like(x, np.nan)})
    print(difference(case, "channels", machine))      # None, or what is wrong

A byte that is written outside of the results shows, and so does a number that is read between the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vdnn.layers import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.launch import Kernels

Array = NDArray[Any]
EXACT = 0.0
FINE, COARSE = 1e-6, 1e-5
"""Largest error allowed, relative to the largest number of the result: of a few roundings, and of sums."""
LAYOUTS: Mapping[str, tuple[int, int, int, str]] = {
    "whole": (0, 0, 0, "NCHW"),
    "aligned channels": (4, 4, 0, "NCHW"),
    "channels": (1, 2, 4, "NCHW"),
    "NHWC": (0, 0, 0, "NHWC"),
    "aligned channels of NHWC": (4, 4, 0, "NHWC"),
    "channels of NHWC": (1, 2, 4, "NHWC"),
}
"""Channels before, at least so many after, bytes that the address is off a multiple of 256, and the order in memory."""
GAP_BYTES, ALIGN_BYTES, NAN_BYTE = 64, 256, 0xFF
TRANSFORM = "layout.transform"
BATCHED = ("x", "y", "dy", "dx", "a")
"""Arguments that may be channels of a larger tensor; `b` too where it is a term of a sum."""


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        reads, writes: arrays by argument name; those of `writes` hold what the call finds there.
        over: argument of `writes` → argument of `reads` whose bytes it takes.
        tolerance: EXACT for equal bits with float32 on the CPU, else of the distance to float64.
        reference: where the CPU backend's kernel of that kind does more than the GPU's.
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

    @property
    def op(self) -> Op:
        """The op that a program would hold."""
        names = {argument: argument for argument in (*self.reads, *self.writes)}
        reads = {argument: names[argument] for argument in self.reads}
        writes = {argument: self.over.get(argument, argument) for argument in self.writes}
        return Op(self.name, self.kind, "layer", "forward", reads, writes, dict(self.attrs), self.accumulate)

    def expected(self) -> dict[str, Array]:
        """What `writes` hold afterwards, on the CPU."""
        wide = self.tolerance > EXACT
        arrays = {a: _widened(v) if wide else v.copy() for a, v in {**self.reads, **self.writes}.items()}
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
    """Whether the call exists there: images are vectors too in NCHW alone, and a transform has one of each."""
    batches = [v.shape for a, v in {**case.reads, **case.writes}.items() if a in BATCHED]
    mixed = any(len(s) == 2 for s in batches) and any(len(s) == 4 and prod(s[2:]) > 1 for s in batches)
    channels_last = LAYOUTS[layout][3] == "NHWC"
    return mixed and channels_last if case.kind == TRANSFORM else not (mixed and channels_last)


def difference(case: Case, layout: str, machine: Machine) -> str | None:
    """What is wrong with the call on `machine`, in words; None if nothing is, or if it does not apply."""
    if not applies(case, layout):
        return None
    content, places = _lay_out(case, layout)
    before = content.copy()

    def work(address: int) -> None:
        arrays = {
            name: DeviceArray(address + start, shape, strides, str(dtype), prod(shape) * dtype.itemsize, order)
            for name, (start, shape, strides, dtype, order) in places.items()
        }
        CUDA_KERNELS[case.kind](case.op, arrays, machine.kernels, machine.stream)

    after = machine.run(content, work)
    for argument, want in case.expected().items():
        wrong = _compare(_view(after, places[argument]), want, case.tolerance)
        if wrong:
            return f"{argument}: {wrong}"
    for argument in case.writes:  # put back what may differ: then nothing else must
        _view(after, places[argument])[...] = _view(before, places[argument])
    if "workspace" in places:
        _view(after, places["workspace"])[...] = NAN_BYTE
    stray = np.flatnonzero(after != before)
    return f"{len(stray)} bytes written outside of the results, the first at {stray[0]}" if len(stray) else None


_Place = tuple[int, Shape, Shape, np.dtype[Any], str]


def _lay_out(case: Case, layout: str) -> tuple[NDArray[np.uint8], dict[str, _Place]]:
    """The bytes before the call, and where in them each argument lies: start, shape, strides in elements, dtype,
    order."""
    arrays = {**case.reads, **{a: v for a, v in case.writes.items() if a not in case.over}}
    scratch = workspace_bytes(case.kind, {a: v.shape for a, v in arrays.items()}, LAYOUTS[layout][3])
    if scratch:
        arrays["workspace"] = np.full(scratch, NAN_BYTE, np.uint8)
    batched = {*BATCHED, "b"} if case.kind == "add.forward" else set(BATCHED)
    places: dict[str, _Place] = {}
    end = 0
    for argument, array in arrays.items():
        sliced = argument in batched and array.ndim > 1
        before, after, offset = LAYOUTS[layout][:3] if sliced else (0, 0, 0)
        if layout.startswith("aligned channels") and before:
            after += -(before + after + array.shape[1]) % 4
        # pixels that are uploaded are NCHW in any case
        order = LAYOUTS[layout][3] if array.ndim == 4 and (case.kind, argument) != ("input.normalize", "x") else "NCHW"
        channel = prod(array.shape[2:]) if order == "NCHW" else 1
        strides = [prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        if before:
            strides[0] = (before + array.shape[1] + after) * prod(array.shape[2:])
        if order == "NHWC":
            step = before + array.shape[1] + after
            strides[1:] = [1, step * array.shape[3], step]
        start = -(-(end + GAP_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
        first = start + (offset + before * channel * array.itemsize if array.dtype != np.uint8 else before * channel)
        places[argument] = first, array.shape, tuple(strides), array.dtype, order
        end = start + offset + (strides[0] * array.shape[0] if array.ndim else 1) * array.itemsize
    content = np.full(end + GAP_BYTES, NAN_BYTE, np.uint8)
    for argument, array in arrays.items():
        _view(content, places[argument])[...] = array
    places.update({written: places[read] for written, read in case.over.items()})
    return content, places


def _view(content: NDArray[np.uint8], place: _Place) -> Array:
    start, shape, strides, dtype, _ = place
    return np.ndarray(shape, dtype, content.data, start, tuple(s * dtype.itemsize for s in strides))


def _compare(got: Array, want: Array, tolerance: float) -> str | None:
    if not (np.isnan(got) == np.isnan(want)).all():
        return f"{np.isnan(got).sum()} NaN, expected {np.isnan(want).sum()}"
    if tolerance == EXACT or want.dtype.kind != "f":
        differ = ~((got == want) | np.isnan(want))
        return f"{differ.sum()} of {got.size} differ, the first at {np.argwhere(differ)[0]}" if differ.any() else None
    size = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    error = np.abs(got.astype(np.float64) - want)[np.isfinite(want)].max(initial=0.0)
    return f"error {error / size:.1e} of the largest, allowed {tolerance:.1e}" if error > tolerance * size else None


def _widened(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array.copy()
