"""Times of short GPU work on operands that lie in memory, not in the cache: copies of the operands taken in turns.

    clock = Clock(probe)
    places = [slab + i * nbytes for i in range(clock.count(nbytes))]    # where copies of the operands begin
    clock.time_us([lambda at=at: launch(at) for at in places])          # of one of these calls

The calls are captured in one CUDA graph, so that the time the host takes to launch is not in it; the time is the median
of a few launches of the graph, over the calls in it. The copies together are several times the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from vdnn.layers.op import Op
from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.copy import copy_forward
from vdnn.runtime.backends.cuda.libraries import load_cupy

ALIGN_BYTES = 512
CACHES = 3
"""Bytes of all copies together, in L2 caches."""
FEWEST, MOST = 2, 96
"""Copies of operands."""
CALLS = 8
"""In a graph, at least."""
ROUNDS = 7
SHIFTS = (0, 8 * ALIGN_BYTES, 136 * ALIGN_BYTES)
"""Bytes by which the distance of a copy's two operands is varied, where they are few beside it."""


class Memory(Protocol):
    """What a vdnn.runtime.backends.cuda.probe.Probe has that is needed here."""

    stream: Any

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...


class Clock:
    """Times work on the stream of `memory`.

    Args:
        cache_bytes: of the L2 cache; None asks the GPU.
    """

    def __init__(self, memory: Memory, cache_bytes: int | None = None) -> None:
        self.memory = memory
        cupy = load_cupy()
        self._cuda = cupy.cuda
        if cache_bytes is None:
            properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
            cache_bytes = int(properties["l2CacheSize"])
        self.cache_bytes = cache_bytes

    def count(self, nbytes: int) -> int:
        """How many copies of operands of `nbytes` it takes to be rid of the cache."""
        return max(FEWEST, min(MOST, -(-CACHES * self.cache_bytes // nbytes)))

    def time_us(self, calls: Sequence[Callable[[], None]]) -> float:
        """Time of one call in µs, the calls taken in turns."""
        stream, event = self.memory.stream, self._cuda.Event
        calls[0]()  # whatever happens at the first call must not be captured
        stream.synchronize()
        rounds = -(-CALLS // len(calls))
        stream.begin_capture()
        try:
            for _ in range(rounds):
                for call in calls:
                    call()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(ROUNDS):
            start, end = event(), event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(self._cuda.get_elapsed_time(start, end))
        return 1000 * float(median(times)) / (rounds * len(calls))

    def copy_us(self, places: Sequence[int], nbytes: int) -> float:
        """Time of a device copy that reads half of `nbytes` and writes the other half, at each of `places`.

        The least of a few whose target lies SHIFTS further on, for at some distances a copy is up to a third slower,
        and of vdnn's own copy kernel, if the memory comes with kernels.
        """
        half = nbytes // 2 // ALIGN_BYTES * ALIGN_BYTES or ALIGN_BYTES

        def copy(at: int, shift: int) -> Callable[[], None]:
            return lambda: self.memory.copy(at + half + shift, at, half - shift)

        shifts = [shift for shift in SHIFTS if half >= 256 * shift]
        times = {shift: self.time_us([copy(at, shift) for at in places]) for shift in shifts}
        found = [time * half / (half - shift) for shift, time in times.items()]
        if getattr(self.memory, "kernels", None) is not None:
            found.append(self.time_us([self._own_copy(at, half) for at in places]))
        return min(found)

    def _own_copy(self, at: int, half: int) -> Callable[[], None]:
        kernels = getattr(self.memory, "kernels")  # noqa: B009, not every memory has some
        shape = 1, half // DTYPE_BYTES[kernels.dtype], 1, 1
        arrays = {name: contiguous(at + i * half, shape, kernels.dtype, "NCHW") for i, name in enumerate("xy")}
        op = Op("copy", "copy.forward", "copy", "forward", {"x": "x"}, {"y": "y"}, {})
        return lambda: copy_forward(op, arrays, kernels, self.memory.stream)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
