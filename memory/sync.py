"""Events: the fewest Record and Wait steps that order the streams where data or bytes pass from one to another.

    steps = synchronise(actions, ops, program.storage)

One vector clock per stream says how far it knows every other stream to be. An action waits only for what its stream
does not know yet; what a wait teaches is everything the other stream knew at that point.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from vdnn.layers.op import Op
from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Record, Step, Wait
from vdnn.memory.schedule import Action, Join

Point = tuple[int, int]
"""(stream, its n-th action): a moment on a stream."""

_INDEX = {name: i for i, name in enumerate(STREAMS)}


@dataclass(slots=True)
class _Stay:
    """What has happened to one storage in its present residency."""

    low: int
    high: int
    before_use: list[Point] = field(default_factory=list)  # frees of the bytes' earlier holders
    written: Point | None = None
    used: dict[int, int] = field(default_factory=dict)  # stream → its last action on it


class _Freed:
    """Byte ranges given back, with the moment of it; sorted by first byte, never overlapping."""

    def __init__(self) -> None:
        self.lows: list[int] = []
        self.parts: list[tuple[int, int, Point]] = []

    def add(self, low: int, high: int, point: Point) -> None:
        i = bisect_left(self.lows, low)
        self.lows.insert(i, low)
        self.parts.insert(i, (low, high, point))

    def take(self, low: int, high: int) -> list[Point]:
        """Remove [low, high) and return the moments at which its parts became free."""
        i = bisect_left(self.lows, low)
        if i and self.parts[i - 1][1] > low:
            i -= 1
        j = i
        while j < len(self.parts) and self.parts[j][0] < high:
            j += 1
        taken = self.parts[i:j]
        kept = [(a, low, p) for a, _, p in taken if a < low] + [(high, b, p) for _, b, p in taken if b > high]
        self.parts[i:j] = kept
        self.lows[i:j] = [a for a, _, _ in kept]
        return [p for _, _, p in taken]


class _Synchroniser:
    def __init__(self, ops: dict[str, Op], storage: Callable[[str], str]):
        self.ops, self.storage = ops, storage
        self.clocks = [[0, 0, 0] for _ in STREAMS]
        self.history: list[list[tuple[int, int, int]]] = [[(0, 0, 0)] for _ in STREAMS]
        self.stays: dict[str, _Stay] = {}
        self.on_host: dict[str, Point] = {}  # storage → its copy-out
        self.freed = _Freed()
        self.steps: list[Step] = []
        self.at: dict[Point, int] = {}  # index in `steps` of the n-th action of a stream
        self.records: dict[Point, int] = {}  # point → event

    def run(self, actions: tuple[Action, ...]) -> tuple[Step, ...]:
        for action in actions:
            if isinstance(action, Alloc):
                low, high = action.offset, action.offset + action.nbytes
                self.stays[action.storage] = _Stay(low, high, self.freed.take(low, high))
                self.steps.append(action)
            elif isinstance(action, Join):
                self._join()
            else:
                self._act(action)
        return self._with_records()

    def _act(self, action: Step) -> None:
        stream = _INDEX[action.stream]  # type: ignore[union-attr]
        reads: tuple[str, ...] = ()
        writes: tuple[str, ...] = ()
        match action:
            case Launch():
                op = self.ops[action.op]
                reads = tuple(self.storage(t) for t in op.reads.values())
                writes = tuple(self.storage(t) for t in op.writes.values())
            case CopyOut():
                reads = (action.storage,)
            case CopyIn():
                writes = (action.storage,)
            case Feed():
                writes = (self.storage(action.tensor),)
            case Fetch():
                reads = (self.storage(action.tensor),)
            case Free():
                writes = (action.storage,)
        needs: list[Point] = []
        for name in dict.fromkeys((*reads, *writes)):
            stay = self.stays.setdefault(name, _Stay(0, 0))  # a persistent storage has no Alloc
            needs.extend(stay.before_use)
            if stay.written is not None:
                needs.append(stay.written)
            if name in writes:
                needs.extend(stay.used.items())
        if isinstance(action, CopyIn):
            needs.append(self.on_host[action.storage])
        self._wait_for(stream, needs)
        point = self._advance(stream, action)
        for name in dict.fromkeys((*reads, *writes)):
            stay = self.stays[name]
            stay.before_use = []
            stay.used[stream] = point[1]
            if name in writes:
                stay.written = point
        if isinstance(action, CopyOut):
            self.on_host[action.storage] = point
        if isinstance(action, Free):
            stay = self.stays.pop(action.storage)
            self.freed.add(stay.low, stay.high, point)

    def _wait_for(self, stream: int, needs: list[Point]) -> None:
        latest: dict[int, int] = {}
        for other, n in needs:
            if other != stream and n > self.clocks[stream][other]:
                latest[other] = max(n, latest.get(other, 0))
        for other, n in sorted(latest.items()):
            if n <= self.clocks[stream][other]:  # learnt from the wait just made
                continue
            event = self.records.setdefault((other, n), len(self.records))
            self.steps.append(Wait(event, STREAMS[stream]))
            known = self.history[other][n]
            self.clocks[stream] = [max(a, b) for a, b in zip(self.clocks[stream], known, strict=True)]

    def _advance(self, stream: int, action: Step) -> Point:
        clock = self.clocks[stream]
        clock[stream] += 1
        point = (stream, clock[stream])
        self.history[stream].append((clock[0], clock[1], clock[2]))
        self.at[point] = len(self.steps)
        self.steps.append(action)
        return point

    def _join(self) -> None:
        now = [(stream, self.clocks[stream][stream]) for stream in range(len(STREAMS))]
        for stream in range(len(STREAMS)):
            self._wait_for(stream, now)

    def _with_records(self) -> tuple[Step, ...]:
        after: dict[int, list[Record]] = {}
        for (stream, n), event in self.records.items():
            after.setdefault(self.at[stream, n], []).append(Record(event, STREAMS[stream]))
        steps: list[Step] = []
        for i, step in enumerate(self.steps):
            steps.append(step)
            steps.extend(after.get(i, ()))
        return tuple(steps)


def synchronise(actions: tuple[Action, ...], ops: dict[str, Op], storage: Callable[[str], str]) -> tuple[Step, ...]:
    """Plan steps from placed actions (offsets known at every Alloc)."""
    return _Synchroniser(ops, storage).run(actions)
