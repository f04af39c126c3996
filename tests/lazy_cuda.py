"""A CUDA that runs everything as late as it may: streams, events, captures and graphs as CuPy offers them.

    cuda = LazyCuda()
    stream = cuda.Stream("in"); stream.add(work); stream.synchronize()

Work is queued, and runs when somebody waits for it: of the streams whose next work is not held by an event, the first
in `order` goes on. A capture that CUDA would refuse is an AssertionError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace

Work = Callable[[], object]


class LazyCuda:
    """The part of cupy.cuda that a backend's streams need.

    Args:
        order: names of streams, from the most to the least favoured.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self.order = order
        self.streams: dict[str, LazyStream] = {}
        self.graph: LazyGraph | None = None
        self.log: list[str] = []
        self.runtime = SimpleNamespace(
            memcpyHostToDevice="in", memcpyDeviceToHost="out", memcpyAsync=self._memcpy, memcpy=self._memcpy_now
        )

    def Stream(self, name: str) -> LazyStream:
        """A new stream."""
        self.streams[name] = LazyStream(self, name)
        return self.streams[name]

    def Event(self, disable_timing: bool = True) -> LazyEvent:
        """A new event."""
        return LazyEvent(self)

    def drain(self, until: LazyStream) -> None:
        """Run what may run until `until` has nothing left."""
        assert self.graph is None, "a synchronisation while a capture is under way"
        while until.queue:
            ready = next((s for name in self.order if (s := self.streams[name]).ready()), None)
            assert ready is not None, "every stream waits for another"
            ready.queue.pop(0)[0]()

    def _memcpy(self, target: int, source: int, nbytes: int, kind: str, stream: LazyStream) -> None:
        stream.add(lambda: ctypes.memmove(target, source, nbytes))

    @staticmethod
    def _memcpy_now(target: int, source: int, nbytes: int, kind: str) -> None:
        ctypes.memmove(target, source, nbytes)


class LazyStream:
    """A queue of work, each with the event and record that it is held by."""

    def __init__(self, cuda: LazyCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.queue: list[tuple[Work, LazyEvent | None, int]] = []

    @property
    def ptr(self) -> LazyStream:
        """What copies are given."""
        return self

    def ready(self) -> bool:
        """Whether the next work may run."""
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].reached >= self.queue[0][2])

    def add(self, work: Work) -> None:
        """Queue `work`, or capture it."""
        graph = self.cuda.graph
        if graph is None:
            self.queue.append((work, None, 0))
            return
        assert self.name in graph.loose, f"stream {self.name} takes no part in the capture"
        graph.loose[self.name] += 1
        graph.work.append(work)

    def wait_event(self, event: LazyEvent) -> None:
        """Hold this stream until the latest record of `event`."""
        graph = self.cuda.graph
        if graph is None:
            assert event.captured is None, "a wait for an event of a graph"
            self.queue.append((lambda: None, event, event.records))
            return
        assert event.captured is not None, "a capture waits for an event outside of it"
        captured, stream, count = event.captured
        assert captured is graph, "a capture waits for an event of another graph"
        graph.loose[self.name] = graph.loose.get(self.name, 0) + 1
        if self.name == graph.origin and graph.loose[stream] == count:
            graph.joined[stream] = count

    def begin_capture(self) -> None:
        """All work from here on makes a graph."""
        assert self.cuda.graph is None
        self.cuda.graph = LazyGraph(self.cuda, self.name)

    def end_capture(self) -> LazyGraph:
        """The graph."""
        graph = self.cuda.graph
        self.cuda.graph = None
        assert graph is not None
        assert graph.origin == self.name
        for name, count in graph.loose.items():
            assert name == self.name or graph.joined.get(name) == count, f"stream {name} was not joined"
        return graph

    def synchronize(self) -> None:
        """Run all of it."""
        self.cuda.drain(self)


class LazyEvent:
    """How often it was recorded and reached, and where in a capture."""

    def __init__(self, cuda: LazyCuda) -> None:
        self.cuda = cuda
        self.records = self.reached = 0
        self.captured: tuple[LazyGraph, str, int] | None = None

    def record(self, stream: LazyStream) -> None:
        """Mark this point of `stream`."""
        graph = self.cuda.graph
        if graph is None:
            self.records, self.captured = self.records + 1, None
            number = self.records
            stream.add(lambda: setattr(self, "reached", number))
        else:
            assert stream.name in graph.loose, f"stream {stream.name} takes no part in the capture"
            self.captured = (graph, stream.name, graph.loose[stream.name])


class LazyGraph:
    """Captured work, in an order that its events allow."""

    def __init__(self, cuda: LazyCuda, origin: str) -> None:
        self.cuda, self.origin = cuda, origin
        self.work: list[Work] = []
        self.loose = {origin: 0}
        self.joined: dict[str, int] = {}

    def launch(self, stream: LazyStream) -> None:
        """Queue all of it as one piece of work."""
        self.cuda.log.append("launch")
        stream.add(lambda: [work() for work in self.work])
