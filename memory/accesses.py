"""Who touches which bytes when: the vector clocks and the versions behind the verifier.

    accesses.step = 7
    stream = accesses.enter("compute")
    accesses.read(region, wanted, stream)     # PlanError unless it surely finds the wanted versions

For every stream a clock says which step of each stream is certainly over (as FastTrack, Flanagan and Freund 2009).
Every part of an allocated storage knows the version that it holds, the step that wrote it and the steps that read it
since. Two accesses of the same bytes, one of them a write or a Free, must be ordered by the clocks: then every order
that can happen gives what list order gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.errors import PlanError
from vdnn.memory.plan import STREAMS, Launch, Step
from vdnn.memory.versions import Region, Versions

NEVER = -1
_STREAM_INDEX = {stream: index for index, stream in enumerate(STREAMS)}


class Cell:
    """One part of an allocated storage: the version it holds, the stream and step that wrote it, and who read it since.

    Steps of one stream are ordered, so the latest of each stream stands for all of its reads.
    """

    __slots__ = ("read_at", "version", "writer", "written_at")

    def __init__(self, version: int):
        self.version, self.writer, self.written_at = version, 0, NEVER
        self.read_at = [NEVER] * len(STREAMS)


class Residency:
    """A storage in the slab, from Alloc to Free.

    Attributes:
        cells: its parts.
        used_at: by stream, the last step that touched it.
        before: by stream, the last Free of another storage that had some of its bytes.
        freed_by, freed_at: stream and step of its own Free.
    """

    __slots__ = ("before", "cells", "freed_at", "freed_by", "storage", "used_at")

    def __init__(self, storage: str, parts: int, version: int):
        self.storage, self.freed_by, self.freed_at = storage, 0, NEVER
        self.cells = [Cell(version) for _ in range(parts)]
        self.used_at, self.before = [NEVER] * len(STREAMS), [NEVER] * len(STREAMS)

    def follow(self, old: Residency) -> None:
        """Take bytes that `old` has freed: its Free counts as a read, which the first write must wait for."""
        step = max(old.freed_at, self.before[old.freed_by])
        self.before[old.freed_by] = self.used_at[old.freed_by] = step
        for cell in self.cells:
            cell.read_at[old.freed_by] = step


class Accesses:
    """The state of one pass over `steps`; a step is named by its index, a stream by its index in STREAMS.

    Attributes:
        step: the step being looked at; None outside of the list.
        live: the storages that have bytes now.
    """

    def __init__(self, versions: Versions, steps: Sequence[Step]):
        self.versions, self.steps = versions, steps
        self.step: int | None = None
        self.live: dict[str, Residency] = {}
        self._freed: dict[str, int] = {}  # storage → step of its latest Free
        self._clocks = [[NEVER] * len(STREAMS) for _ in STREAMS]
        self._events: dict[int, list[int]] = {}

    def enter(self, name: str) -> int:
        """Index of the stream `name`, whose clock moves on to this step."""
        if name not in _STREAM_INDEX:
            raise self.fault(f"unknown stream '{name}', expected one of {', '.join(STREAMS)}")
        index = _STREAM_INDEX[name]
        self._clocks[index][index] = self.now
        return index

    @property
    def now(self) -> int:
        """The step being looked at."""
        assert self.step is not None
        return self.step

    def record(self, event: int, stream: int) -> None:
        """`event` is over when all that `stream` knows to be over is."""
        if event in self._events:
            raise self.fault(f"event {event} is recorded a second time")
        self._events[event] = list(self._clocks[stream])

    def wait(self, event: int, stream: int) -> None:
        """From here on `stream` knows what `event` knows."""
        if event not in self._events:
            raise self.fault(f"'{STREAMS[stream]}' waits for event {event}, which no step before this one records")
        self._clocks[stream][:] = map(max, self._clocks[stream], self._events[event])

    def residency(self, storage: str) -> Residency:
        """The bytes of `storage`, which must have some."""
        residency = self.live.get(storage)
        if residency is None:
            when = (
                f"was freed by {self.name(self._freed[storage])}" if storage in self._freed else "was never allocated"
            )
            raise self.fault(f"{self._actor()} uses '{storage}', which {when}")
        return residency

    def free(self, storage: str, stream: int) -> None:
        """`storage` gives its bytes back, surely after all that touched them."""
        residency = self.residency(storage)
        # executors may poison the bytes here, so a Free must follow whoever had them before, too
        self.after(residency.used_at, stream, f"the Free of '{storage}'")
        residency.freed_by, residency.freed_at = stream, self.now
        del self.live[storage]
        self._freed[storage] = self.now

    def read(self, region: Region, wanted: Sequence[int], stream: int) -> None:
        """Every part of `region` holds the wanted version, surely written by now."""
        residency, now, clock = self.residency(region.storage), self.now, self._clocks[stream]
        residency.used_at[stream] = now
        for part, version in zip(region.parts, wanted, strict=True):
            cell = residency.cells[part]
            if cell.version != version:
                raise self._wrong(region, cell, version, part)
            if cell.written_at > clock[cell.writer]:
                raise self._unordered(cell.written_at, cell.writer, stream, f"{self._actor()} reads '{region.tensor}'")
            cell.read_at[stream] = now

    def write(self, region: Region, versions: Sequence[int], stream: int) -> None:
        """The parts of `region` get new versions, surely after every earlier access to them."""
        residency, now, clock = self.residency(region.storage), self.now, self._clocks[stream]
        residency.used_at[stream] = now
        for part, version in zip(region.parts, versions, strict=True):
            cell = residency.cells[part]
            if cell.written_at > clock[cell.writer]:
                raise self._unordered(cell.written_at, cell.writer, stream, f"{self._actor()} writes '{region.tensor}'")
            for reader, read_at in enumerate(cell.read_at):
                if read_at > clock[reader]:
                    raise self._unordered(read_at, reader, stream, f"{self._actor()} writes '{region.tensor}'")
            cell.version, cell.writer, cell.written_at = version, stream, now

    def after(self, steps: Sequence[int], stream: int, what: str) -> None:
        """`steps`, one of each stream or NEVER, are surely over before this step of `stream`, which does `what`."""
        for other, step in enumerate(steps):
            if step > self._clocks[stream][other]:
                raise self._unordered(step, other, stream, what)

    def fault(self, message: str) -> PlanError:
        """The error to raise about this step."""
        return PlanError(message, step=self.step)

    def name(self, step: int) -> str:
        """`step` in words."""
        return f"step {step} {self.steps[step]!r}"

    def holds(self, cell: Cell) -> str:
        """What `cell` holds, in words."""
        since = "" if cell.written_at == NEVER else f", since {self.name(cell.written_at)}"
        return self.versions.describe(cell.version) + since

    def _wrong(self, region: Region, cell: Cell, version: int, part: int) -> PlanError:
        return self.fault(
            f"{self._actor()} reads '{region.tensor}': {self.versions.place(region.storage, part)} should hold"
            f" {self.versions.describe(version)}, but holds {self.holds(cell)}"
        )

    def _unordered(self, step: int, other: int, stream: int, what: str) -> PlanError:
        return self.fault(
            f"{what} on stream '{STREAMS[stream]}', but {self.name(step)} need not be over by then: let"
            f" '{STREAMS[stream]}' wait for an event recorded on '{STREAMS[other]}' after it"
        )

    def _actor(self) -> str:
        step = self.steps[self.now]
        return f"op '{step.op}'" if isinstance(step, Launch) else type(step).__name__
