"""The Backend interface over NumPy: one anonymous memory map as the device, another as the host.

    with_threads = CpuBackend()
    adversary = CpuBackend(poison=True, order=("in", "out", "compute"))

`poison` fills freed bytes with 0xFF, a NaN in every dtype that has one; `order` replaces the threads by a schedule that
runs the named streams as early and as late as their waits allow (vdnn.runtime.backends.cpu.streams).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from vdnn.errors import VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec, element_strides, first_element
from vdnn.memory.costs import Candidate
from vdnn.runtime.backend import Caps, check_stage
from vdnn.runtime.backends.cpu.blas import BlasThreads
from vdnn.runtime.backends.cpu.chunks import Array
from vdnn.runtime.backends.cpu.estimates import RATES, estimate, product_operations
from vdnn.runtime.backends.cpu.half import BFLOAT16, run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cpu.streams import OrderedStreams, Streams, Task, ThreadedStreams
from vdnn.runtime.bfloat16 import as_numbers, as_stored, host_dtype
from vdnn.runtime.held import Held

POISON = 0xFF
EMULATED = {name: f", {name} computed in fp32 and rounded" for name in ("bf16", "fp16")}
"""By precision that no CPU kernel computes in: words for what is done instead."""


class _Slab:
    """Page-aligned bytes that go back to the system on close, or when the last array over them is gone."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, nbytes)

    def close(self) -> None:
        """Give the bytes back; arrays over them stay valid and delay it."""
        del self.bytes
        with suppress(BufferError):  # while somebody holds an array; the map goes with it
            self._map.close()


def _name(array: Array) -> str:
    return "bfloat16" if array.dtype == BFLOAT16 else array.dtype.name


def _check_guard(guard: NDArray[np.uint8], what: str) -> None:
    wrong = np.flatnonzero(guard != POISON)
    if wrong.size:
        raise VdnnError(f"{what}: byte {wrong[0]} of {guard.size} that belong to nobody was written")


class _Mark:
    """When a stream got to a point, in seconds of the monotonic clock; NaN before."""

    def __init__(self) -> None:
        self.seconds = float("nan")

    def reach(self) -> None:
        """It is now."""
        self.seconds = perf_counter()


class CpuBackend:
    """Runs every step of a plan on the CPU.

    Args:
        poison: fill freed bytes with NaN.
        order: streams from the most to the least favoured, for a deterministic schedule without threads; None for
            one thread a stream.
        precision: of the programs to come; "bf16" and "fp16" are emulated, the others are all computed in fp32.
    """

    def __init__(self, poison: bool = False, order: Sequence[str] | None = None, precision: str = "fp32") -> None:
        self._poison = poison
        self._order = order
        self._blas = BlasThreads()
        self._opened: tuple[_Slab, _Slab, Streams] | None = None
        self._stage_bytes = 0
        self.held = Held()
        mode = "one thread a stream" if order is None else f"streams in order {', '.join(order)}"
        self.caps = Caps(
            name="cpu",
            has_data=True,
            simulated=False,
            description=f"CPU, NumPy {np.__version__}, {os.cpu_count()} cores, {mode}{EMULATED.get(precision, '')}",
            memory_bytes=int(0.8 * psutil.virtual_memory().available),
            rates=RATES,
            poisons=poison,
            cost_source="estimated from nominal CPU rates",
            precision=precision if precision in EMULATED else "fp32",
        )

    def open(self, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        """Take both slabs. Bytes, 0 or more; their content is 0 at first, or poison. The stage needs no memory here."""
        if self._opened is not None:
            raise VdnnError("the cpu backend is open already; close it first")
        streams = ThreadedStreams() if self._order is None else OrderedStreams(self._order)
        device = _Slab(slab_bytes)
        if self._poison:
            device.bytes.fill(POISON)
        self._opened, self._stage_bytes = (device, _Slab(host_bytes), streams), stage_bytes

    def view(self, spec: TensorSpec, root: TensorSpec, offset: int) -> Array:
        """The array of `spec` over the slab, in the order of its shape; layouts and channels are in its strides."""
        slab = self._open[0].bytes
        dtype = host_dtype(spec.dtype)
        strides = [dtype.itemsize * stride for stride in element_strides(spec, root)]
        start = offset + dtype.itemsize * first_element(spec, root)
        end = start + sum(step * (size - 1) for step, size in zip(strides, spec.shape, strict=True)) + dtype.itemsize
        if start < 0 or end > slab.nbytes:
            raise VdnnError(f"tensor '{spec.name}': bytes {start} to {end} lie outside the slab of {slab.nbytes} bytes")
        return np.ndarray(spec.shape, dtype, slab.data, start, tuple(strides))

    def launch(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """Run the kernel of op.kind."""
        kernel = KERNELS.get(op.kind)
        if kernel is None:
            raise VdnnError(f"op '{op.name}' (layer '{op.layer}'): the cpu backend has no kernel '{op.kind}'")
        operations = product_operations(op, {argument: array.shape for argument, array in arrays.items()})

        def compute() -> None:
            if operations:
                self._blas.use(operations)
            run_rounded(kernel, op, arrays)

        self._run(f"op '{op.name}' (layer '{op.layer}')", compute, stream)

    def copy_out(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Slab bytes to host slab bytes."""
        device, host = self._ranges(offset, host_offset, nbytes)
        self._run("copy out", partial(np.copyto, host, device), stream)

    def copy_in(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Host slab bytes to slab bytes."""
        device, host = self._ranges(offset, host_offset, nbytes)
        self._run("copy in", partial(np.copyto, device, host), stream)

    def record(self, event: int, stream: str) -> None:
        """Mark a point of `stream`."""
        self._open[2].record(event, stream)

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until the latest record of `event` before this call is reached."""
        self._open[2].wait(event, stream)

    def mark(self, stream: str) -> _Mark:
        """The time at which `stream` gets here."""
        mark = _Mark()
        self._run("mark", mark.reach, stream)
        return mark

    def between_ms(self, first: _Mark, second: _Mark) -> float:
        """Difference of the times; NaN if an error kept a stream from getting there."""
        return 1000 * (second.seconds - first.seconds)

    def feed(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """array = value, of equal shape and dtype."""
        check_stage(stage_offset, value.nbytes, self._stage_bytes)
        self._run("feed", partial(np.copyto, array, value, casting="no"), stream)

    def feed_ahead(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """As feed: the stream's thread copies beside the others."""
        self.feed(array, value, stage_offset, stream)

    def fetch(self, array: Any, out: NDArray[Any], stage_offset: int, stream: str) -> None:
        """out = array, of equal shape and dtype."""
        check_stage(stage_offset, out.nbytes, self._stage_bytes)
        self._run("fetch", partial(np.copyto, out, array, casting="no"), stream)

    def read(self, array: Any) -> NDArray[Any]:
        """A copy of `array`, contiguous in the order of its shape; bfloat16 as float32."""
        return np.array(as_numbers(array, _name(array)), order="C")

    def write(self, array: Any, value: NDArray[Any]) -> None:
        """array = value; into bfloat16 float32 is rounded."""
        np.copyto(array, as_stored(value, _name(array)), casting="no")

    def guarded(self, offset: int, nbytes: int, what: str, stream: str) -> None:
        """Check the poison in bytes that belong to nobody, if there is any."""
        if self._poison:
            self._run("guard", partial(_check_guard, self._open[0].bytes[offset : offset + nbytes], what), stream)

    def freed(self, offset: int, nbytes: int, stream: str) -> None:
        """Poison the bytes, if asked to."""
        if self._poison:
            self._run("poison", partial(self._open[0].bytes[offset : offset + nbytes].fill, POISON), stream)

    def sync(self) -> None:
        """Wait for all streams; raises the first error of any."""
        self._open[2].sync()

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Algorithms with exact workspaces and nominal times, fastest first."""
        return estimate(op, program)

    def knows_all(self, op: Op, program: Program) -> bool:
        """Yes: nothing is run."""
        return True

    def held_bytes(self) -> int:
        """0: the limit is for the slab alone."""
        return 0

    def capture(self, body: Callable[[], None]) -> None:
        """Nothing to capture: every run goes step by step."""

    def close(self) -> None:
        """Stop the threads and give both slabs back; arrays over them stay valid."""
        if self._opened is None:
            return
        device, host, streams = self._opened
        self._opened, self.held = None, Held()
        streams.close()
        self._blas.restore()
        device.close()
        host.close()

    @property
    def _open(self) -> tuple[_Slab, _Slab, Streams]:
        if self._opened is None:
            raise VdnnError("the cpu backend is closed; call open(slab_bytes, host_bytes, stage_bytes) first")
        return self._opened

    def _run(self, what: str, task: Task, stream: str) -> None:
        self._open[2].run(what, task, stream)

    def _ranges(self, offset: int, host_offset: int, nbytes: int) -> tuple[Array, Array]:
        device, host, _ = self._open
        pieces = []
        for name, slab, start in (("slab", device.bytes, offset), ("host slab", host.bytes, host_offset)):
            if not 0 <= start <= start + nbytes <= slab.nbytes:
                raise VdnnError(f"copy of bytes {start} to {start + nbytes}: outside the {name} of {slab.nbytes} bytes")
            pieces.append(slab[start : start + nbytes])
        return pieces[0], pieces[1]
