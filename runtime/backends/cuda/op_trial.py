"""One op on the GPU in memory of its own: filled with plausible numbers, launched as in a step, timed.

    with OpTrial(op, program, workspace_bytes, launch, stream, limit_bytes) as trial:
        trial.time_ms(expected_ms=0.05)

A step is replayed as a CUDA graph, where kernels follow each other more closely than when they are launched one by one.
So a chain of the op is captured and replayed, once longer and once shorter; the difference leaves out what it takes to
start a graph, and holds what lies between two kernels. Operands of a few MB stay in the L2 cache, as the results of the
op before would; larger ones are laid out several times, so that every launch finds its own in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, Shape, TensorSpec, element_strides, first_element
from vdnn.memory.passes import WORKSPACE
from vdnn.memory.plan import ALIGNMENT, align
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.trial import BUSY_BYTES
from vdnn.runtime.step import new_step

Launch = Callable[[Op, Mapping[str, DeviceArray], str], None]
ROUNDS = 3
"""Timed replays of a chain, of which the median counts."""
SHORT = 2
"""Launches of the shorter chain."""
MORE = (2, 20)
"""Fewest and most launches by which the longer chain is longer: enough of them take CHAIN_MS."""
CHAIN_MS = 1.0
SCRATCH_BYTES = 64 * 2**20
"""Written over and over to keep the GPU busy, where the limit has room for it."""
BLOCK = 1 << 20
"""Random numbers made on the host, and repeated over an operand."""
UNTIMED_ATTRS = frozenset(("algorithm", "key"))
"""Attributes that change no time: the name of an only candidate, the key of a dropout layer's random numbers."""
KEY_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Place:
    """Where one argument of an op lies in the memory of a trial: `offset` in bytes, strides in elements."""

    spec: TensorSpec
    strides: Shape
    offset: int

    @property
    def span_bytes(self) -> int:
        """From the first to the last of its elements, with what lies between."""
        steps = zip(self.spec.shape, self.strides, strict=True)
        return DTYPE_BYTES[self.spec.dtype] * (1 + sum(step * (size - 1) for size, step in steps))

    def at(self, address: int) -> DeviceArray:
        """The argument in the memory that begins at `address`."""
        spec = self.spec
        return DeviceArray(address + self.offset, spec.shape, self.strides, spec.dtype, spec.nbytes, spec.layout)


def place_operands(op: Op, program: Program) -> tuple[dict[str, Place], int]:
    """A place for each argument of `op`, and the bytes of all: they share bytes as in `program`, and are as aligned."""
    names = {arg: name for arg, name in (*op.reads.items(), *op.writes.items()) if arg != WORKSPACE}
    of: dict[str, dict[str, Place]] = {}  # storage → its arguments, placed in the storage
    for arg, name in names.items():
        spec = program.tensors[name]
        root = program.tensors[spec.storage]
        start = DTYPE_BYTES[spec.dtype] * first_element(spec, root)
        of.setdefault(spec.storage, {})[arg] = Place(spec, element_strides(spec, root), start)
    found: dict[str, Place] = {}
    end = 0
    for places in of.values():
        low = min(place.offset for place in places.values())
        shift = align(end) + low % ALIGNMENT
        for arg, place in places.items():
            found[arg] = Place(place.spec, place.strides, shift + place.offset - low)
            end = max(end, found[arg].offset + place.span_bytes)
    return {arg: found[arg] for arg in names}, align(end)


def op_key(op: Op, program: Program, workspace_bytes: int) -> str:
    """What the time of an op depends on, in words: kind, attributes, and how its arguments lie; no names."""
    places, _ = place_operands(op, program)
    attrs = {name: value for name, value in sorted(op.attrs.items()) if name not in UNTIMED_ATTRS}
    rows = [[arg, p.spec.shape, p.strides, p.spec.dtype, p.spec.layout, p.offset] for arg, p in places.items()]
    text = json.dumps([attrs, sorted(op.accumulate), rows, workspace_bytes], separators=(",", ":"))
    short = text if len(text) <= KEY_LENGTH else hashlib.sha256(text.encode()).hexdigest()[:32]
    return f"{op.kind} {short}"


def trial_bytes(op: Op, program: Program, workspace_bytes: int) -> int:
    """Device memory that a trial takes at least."""
    return place_operands(op, program)[1] + align(workspace_bytes)


class OpTrial:
    """The memory of one op, taken on entry and given back on exit.

    Args:
        workspace_bytes: what the op gets as its workspace; none if 0.
        launch: starts an op on the stream of that name, as Backend.launch does.
        stream: the cupy stream called "compute".
        limit_bytes: most device memory to take; at least `trial_bytes`.
    """

    def __init__(self, op: Op, program: Program, workspace_bytes: int, launch: Launch, stream: Any, limit_bytes: int):
        self.op, self._launch, self._stream, self._workspace = op, launch, stream, workspace_bytes
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._places, self._operand_bytes = place_operands(op, program)
        self._set_bytes = self._operand_bytes + align(workspace_bytes)
        cache_bytes = self._runtime.getDeviceProperties(self._cupy.cuda.Device().id).get("l2CacheSize", 0)
        self.sets = min(_sets(self._set_bytes, cache_bytes), max(1, limit_bytes // self._set_bytes))
        self._scratch_bytes = SCRATCH_BYTES if self.sets * self._set_bytes + SCRATCH_BYTES <= limit_bytes else 0
        self._memory = 0
        self._arrays: list[dict[str, DeviceArray]] = []

    def __enter__(self) -> OpTrial:
        self._memory = int(self._runtime.malloc(self.sets * self._set_bytes + self._scratch_bytes))
        self._arrays = [self._arrays_at(self._memory + number * self._set_bytes) for number in range(self.sets)]
        self._fill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        memory, self._memory = self._memory, 0
        try:
            self._stream.synchronize()
        finally:
            self._runtime.free(memory)

    def time_ms(self, expected_ms: float) -> float:
        """Time of one launch within a replayed step; `expected_ms` decides how many are timed."""
        for number in range(self.sets):  # what a capture cannot make is made now: plans, modules
            self._start(number)
        self._stream.synchronize()
        more = min(max(round(CHAIN_MS / expected_ms), MORE[0]), MORE[1])
        short_ms, long_ms = self._chain_ms(SHORT), self._chain_ms(SHORT + more)
        # where noise is larger than the op, its share of the chain is the best that is known
        return (long_ms - short_ms) / more if long_ms > short_ms else long_ms / (SHORT + more)

    def alone_ms(self) -> float:
        """Time of one launch between two events on a busy GPU, as convolutions are timed."""
        self._start(0)
        return median(self._timed(lambda: self._start(0)) for _ in range(ROUNDS))

    def _chain_ms(self, launches: int) -> float:
        """Median time of a replayed chain."""
        self._stream.begin_capture()
        try:
            self._chain(launches)
        except BaseException:
            self._stream.end_capture()
            raise
        graph = self._stream.end_capture()
        return median(self._timed(lambda: graph.launch(self._stream)) for _ in range(ROUNDS))

    def _chain(self, launches: int) -> None:
        for number in range(launches):
            self._start(number % self.sets)

    def _start(self, number: int) -> None:
        """Launch the op on operands of set `number`."""
        self._launch(self.op, self._arrays[number], "compute")

    def _arrays_at(self, address: int) -> dict[str, DeviceArray]:
        arrays = {arg: place.at(address) for arg, place in self._places.items()}
        if self._workspace:
            arrays[WORKSPACE] = contiguous(address + self._operand_bytes, (self._workspace,), "uint8")
        return arrays

    def _timed(self, work: Callable[[], None]) -> float:
        """Time of `work`; the GPU has something else to do until the host has issued it."""
        if self._scratch_bytes:
            scratch = self._memory + self.sets * self._set_bytes
            for _ in range(max(1, BUSY_BYTES // self._scratch_bytes)):
                self._runtime.memsetAsync(scratch, 0, self._scratch_bytes, self._stream.ptr)
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end))

    def _fill(self) -> None:
        """The first set from the host, the others from it."""
        self._runtime.memset(self._memory, 0, self._set_bytes)
        classes = min((prod(p.spec.shape[1:]) for p in self._places.values() if len(p.spec.shape) > 1), default=1)
        window = prod(self.op.attrs.get("kernel", (1, 1)))
        for place in self._places.values():
            block = _content(place.spec, classes, window)
            address, size = self._memory + place.offset, place.span_bytes
            filled = min(size, block.nbytes)
            self._runtime.memcpy(address, block.ctypes.data, filled, self._runtime.memcpyHostToDevice)
            self._runtime.deviceSynchronize()  # else another stream may read what has not arrived yet
            while filled < size:
                part = min(filled, size - filled)
                self._copy(address + filled, address, part)
                filled += part
        for number in range(1, self.sets):
            self._copy(self._memory + number * self._set_bytes, self._memory, self._set_bytes)
        self._stream.synchronize()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, self._stream.ptr)


def _sets(set_bytes: int, cache_bytes: int) -> int:
    """How often operands are laid out: once if they fit in a quarter of the cache; else to fill it twice."""
    return 1 if 4 * set_bytes <= cache_bytes else max(1, -(-2 * cache_bytes // set_bytes))


def _content(spec: TensorSpec, classes: int, window: int) -> NDArray[Any]:
    """Numbers that an operand may hold: repeated over it, so that as many as the operand has are enough.

    Args:
        classes: of the labels. window: pixels of a pool's window, which winners are numbered by.
    """
    if spec.role == "state" and spec.dtype == "uint8":
        return new_step(1e-6, 1e-3, 0, 0)
    if spec.dtype == "int32":
        return _block("int32", classes)
    if spec.dtype == "uint8":
        return _block("uint8", window if spec.role == "aux" else 256)
    # vectors are scales and statistics, some of which are variances
    return _block(spec.dtype, 0 if len(spec.shape) > 1 else 1)


@lru_cache(maxsize=16)
def _block(dtype: str, kind: int) -> NDArray[Any]:
    """BLOCK random numbers: integers below `kind`; of other types normal ones for 0, from 0.5 to 1.5 for 1."""
    rng = np.random.default_rng(0)
    if dtype in ("uint8", "int32"):
        return rng.integers(0, kind, BLOCK).astype(dtype)
    numbers = rng.uniform(0.5, 1.5, BLOCK) if kind else rng.standard_normal(BLOCK)
    if dtype == "bfloat16":  # its bits are the upper half of those of a float32
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype)
