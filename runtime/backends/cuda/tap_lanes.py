"""Streams beside one, on which products run at the same time: those that read the same rows then share the L2 cache.

    lanes = Lanes(stream)
    lanes.run([first, second])             # first(stream), second(another stream); `stream` goes on after both

Where they fork and join is told by events, of which a capture of the stream makes branches of its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vdnn.runtime.backends.cuda.libraries import load_cupy

LANES = 3
"""The stream itself and others: as many as a usual filter has taps one above the other."""


class Lanes:
    """LANES - 1 streams beside `stream`, a cupy stream, with their events."""

    def __init__(self, stream: Any) -> None:
        cuda = load_cupy().cuda
        self.stream = stream
        self._fork = cuda.Event(disable_timing=True)
        self._others = [(cuda.Stream(non_blocking=True), cuda.Event(disable_timing=True)) for _ in range(LANES - 1)]

    def run(self, works: Sequence[Callable[[Any], None]]) -> None:
        """Start each of at most LANES works on a stream of its own, when what is on `stream` is done."""
        first, *rest = works
        used = list(zip(rest, self._others, strict=False))
        self._fork.record(self.stream)
        for work, (lane, done) in used:
            lane.wait_event(self._fork)
            work(lane)
            done.record(lane)
        first(self.stream)
        for _, (_, done) in used:
            self.stream.wait_event(done)
