"""The three streams of the CPU backend: as real threads, or one after another as badly as the waits allow.

    streams = ThreadedStreams()
    streams.run("conv1.forward", partial(kernel, op, x=x, y=y), "compute")
    streams.record(0, "compute"); streams.wait(0, "out"); streams.run("copy out", copy, "out")
    streams.sync()

A wait is for the latest record of its event before it in call order. What a task raises is raised by the next sync; no
task starts after it, and no stream hangs. A wait for an event without a record is such an error.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from vdnn.errors import VdnnError
from vdnn.memory.plan import STREAMS

Task = Callable[[], object]


class Streams(Protocol):
    """What the backend needs of its streams."""

    def run(self, what: str, task: Task, stream: str) -> None:
        """Queue `task` on `stream`; `what` names it in errors."""

    def record(self, event: int, stream: str) -> None:
        """Mark this point of `stream`."""

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until the latest record of `event` is reached."""

    def sync(self) -> None:
        """Return when every stream has reached this point; raises the first error since the last sync."""

    def close(self) -> None:
        """Let go of threads; the streams must be idle or failed."""


def run_task(what: str, task: Task, stream: str) -> None:
    """Run `task`; an error that is not one of vdnn's becomes a VdnnError that says where it happened."""
    try:
        task()
    except VdnnError:
        raise
    except Exception as error:
        raise VdnnError(f"{what}, stream '{stream}': {type(error).__name__}: {error}") from error


class ThreadedStreams:
    """One thread a stream."""

    def __init__(self) -> None:
        self._events: dict[int, threading.Event] = {}
        self._error: VdnnError | None = None
        self._lock = threading.Lock()
        self._queues: dict[str, SimpleQueue[Task | None]] = {stream: SimpleQueue() for stream in STREAMS}
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"vdnn-{stream}", daemon=True)
            for stream, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def run(self, what: str, task: Task, stream: str) -> None:
        def attempt() -> None:
            if self._error is not None:
                return
            try:
                run_task(what, task, stream)
            except VdnnError as error:
                self._fail(error)

        self._queues[stream].put(attempt)

    def record(self, event: int, stream: str) -> None:
        reached = self._events[event] = threading.Event()
        self._queues[stream].put(reached.set)

    def wait(self, event: int, stream: str) -> None:
        reached = self._events.get(event)
        if reached is None:
            self._fail(VdnnError(f"stream '{stream}' waits for event {event}, which no stream has recorded"))
        else:
            self._queues[stream].put(reached.wait)

    def sync(self) -> None:
        for queue in self._queues.values():
            arrived = threading.Event()
            queue.put(arrived.set)
            arrived.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _fail(self, error: VdnnError) -> None:
        with self._lock:
            self._error = self._error or error

    @staticmethod
    def _work(queue: SimpleQueue[Task | None]) -> None:
        while (task := queue.get()) is not None:
            task()


class _Step(NamedTuple):
    """A queued task; without one, the record of an event or the wait for it: the record with that number."""

    what: str
    task: Task | None
    event: int = 0
    number: int = 0


class OrderedStreams:
    """No threads: sync runs, again and again, the next step of the first stream in `order` that is not held by a wait.

    The first stream runs as early and the last as late as the waits allow, so that a missing wait shows every time.
    """

    def __init__(self, order: Sequence[str]) -> None:
        if sorted(order) != sorted(STREAMS):
            raise VdnnError(f"expected an order of the streams {', '.join(STREAMS)}, got {', '.join(order)}")
        self._queues: dict[str, deque[_Step]] = {stream: deque() for stream in order}
        self._recorded: Counter[int] = Counter()
        self._reached: dict[int, int] = {}

    def run(self, what: str, task: Task, stream: str) -> None:
        self._queues[stream].append(_Step(what, task))

    def record(self, event: int, stream: str) -> None:
        self._recorded[event] += 1
        self._queues[stream].append(_Step("record", None, event, self._recorded[event]))

    def wait(self, event: int, stream: str) -> None:
        self._queues[stream].append(_Step("wait", None, event, self._recorded[event]))

    def sync(self) -> None:
        try:
            while (stream := next(filter(self._can_run, self._queues), None)) is not None:
                step = self._queues[stream].popleft()
                if step.task is not None:
                    run_task(step.what, step.task, stream)
                elif step.what == "record":
                    self._reached[step.event] = step.number
            self._raise_if_held()
        finally:
            for queue in self._queues.values():
                queue.clear()
            self._reached = dict(self._recorded)

    def close(self) -> None:
        """No threads to let go of."""

    def _can_run(self, stream: str) -> bool:
        queue = self._queues[stream]
        return bool(queue) and not (queue[0].what == "wait" and self._held(queue[0]))

    def _held(self, wait: _Step) -> bool:
        return wait.number == 0 or self._reached.get(wait.event, 0) < wait.number

    def _raise_if_held(self) -> None:
        held = {stream: queue[0].event for stream, queue in self._queues.items() if queue}
        if held:
            waits = ", ".join(f"stream '{stream}' for event {event}" for stream, event in held.items())
            raise VdnnError(f"deadlock: {waits}, which no stream has recorded before")
