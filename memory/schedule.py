"""The order of a step without places: what is allocated, launched, copied and freed when, and how much is live.

    schedule = make_schedule(program, decisions, budget_bytes=transient_budget)
    schedule.ideal_bytes        # most bytes live at any moment: no placement can need less

Layer-wise allocation: a storage holds bytes from its first to its last use. An offloaded one leaves after its last
reader in forward (so a forked map leaves once, when the last branch has read it) and comes back as `prefetch` says.
What is fed for the next run comes right after the last reader of what is there, beside the rest of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from vdnn.layers.op import Program
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import Offloaded, Uses, last_reader, offloaded, storage_uses
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Step, align
from vdnn.memory.prefetch import layer_passes, prefetch_points


class Join(NamedTuple):
    """All streams meet here (the paper's synchronisation at the end of a layer)."""


Action = Step | Join


@dataclass(frozen=True, slots=True)
class Residency:
    """One stay of a storage on the device: actions [start, end) of the schedule."""

    storage: str
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions in order; every Alloc has offset -1 and stands for the residency of the same rank."""

    actions: tuple[Action, ...]
    residencies: tuple[Residency, ...]
    host_bytes: int
    stage_bytes: int
    ideal_bytes: int
    peak_layer: str


def make_schedule(program: Program, decisions: Decisions, budget_bytes: int | None = None) -> Schedule:
    """Schedule `program` (after `apply_decisions`).

    Args:
        budget_bytes: for what is not persistent; prefetches that would exceed it are postponed.
    """
    uses = storage_uses(program, decisions.guard_bytes)
    away = offloaded(uses, decisions.offload)
    live = live_bytes(program, decisions.offload, decisions.guard_bytes)
    limits = [limit for limit in (budget_bytes, decisions.pace_bytes) if limit is not None]
    room = _Room(live, uses, min(limits, default=None))
    ends = {stay.storage: stay.forward_last for stay in away}
    if decisions.fetch and decisions.prefetch_bytes is None:
        position = {op.name: i for i, op in enumerate(program.ops)}
        points = _paced_points(away, {name: position[op] for name, op in decisions.fetch.items()}, room)
        for name in sorted(ends, key=ends.__getitem__):
            ends[name] = room.extend(name, ends[name], min(position[decisions.hold[name]], points[name] - 1))
    else:
        points = prefetch_points(program, away, decisions.prefetch_bytes, room)
    builder = _Builder(program, uses, away)
    builder.build(points, ends, joins=decisions.join == "layer", network=decisions.allocation == "network")
    return builder.finish()


def _paced_points(away: Sequence[Offloaded], wanted: Mapping[str, int], room: _Room) -> dict[str, int]:
    """Op before which each storage is fetched: as early as wanted if it fits, never before one that is used sooner."""
    points: dict[str, int] = {}
    earliest = 0
    for stay in sorted(away, key=attrgetter("backward_first")):
        first = max(earliest, wanted[stay.storage], stay.forward_last + 1)
        earliest = points[stay.storage] = room.earliest(stay.storage, first, stay.backward_first)
    return points


class _Room:
    """Whether a storage fits early, or longer, beside what is live then; if so, it takes that place."""

    def __init__(self, live: list[int], uses: dict[str, Uses], budget_bytes: int | None):
        self.live, self.uses, self.budget_bytes = live, uses, budget_bytes

    def earliest(self, storage: str, first: int, use: int) -> int:
        """The first op from `first` on from which `storage` fits until `use`."""
        nbytes, start = self.uses[storage].nbytes, use
        while start > first and self._fits(start - 1, nbytes):
            start -= 1
            self.live[start] += nbytes
        return start

    def extend(self, storage: str, last: int, wanted: int) -> int:
        """The last op up to `wanted` to which `storage`, in use until op `last`, can stay."""
        nbytes, end = self.uses[storage].nbytes, last
        while end < wanted and self._fits(end + 1, nbytes):
            end += 1
            self.live[end] += nbytes
        return end

    def _fits(self, op: int, nbytes: int) -> bool:
        return self.budget_bytes is None or self.live[op] + nbytes <= self.budget_bytes

    def __call__(self, storage: str, first: int, last: int) -> bool:
        nbytes = self.uses[storage].nbytes
        if self.budget_bytes is not None and max(self.live[first:last]) + nbytes > self.budget_bytes:
            return False
        for i in range(first, last):
            self.live[i] += nbytes
        return True


def live_bytes(program: Program, offload: Iterable[str], guard_bytes: int = 0) -> list[int]:
    """Bytes live at each op and after the last, persistent ones aside; offloaded ones count again when they return."""
    uses = storage_uses(program, guard_bytes)
    away = {stay.storage: stay for stay in offloaded(uses, offload)}
    change = [0] * (len(program.ops) + 2)
    for name, use in uses.items():
        stays = [(use.first, use.last)]
        if name in away:
            stays = [(use.first, away[name].forward_last), (away[name].backward_first, use.last)]
        for first, last in stays:
            change[max(first, 0)] += use.nbytes
            change[min(last, len(program.ops)) + 1] -= use.nbytes
    return list(accumulate(change[:-1]))


class _Builder:
    def __init__(self, program: Program, uses: dict[str, Uses], away: Sequence[Offloaded]):
        self.program, self.uses = program, uses
        self.away = {stay.storage: stay for stay in away}
        self.actions: list[Action] = []
        self.open: dict[str, tuple[int, int]] = {}  # storage → rank of its residency, first action
        self.stays: list[Residency | None] = []
        self.host_bytes = self.stage_bytes = 0
        self.live = self.peak = 0
        self.layer = self.peak_layer = program.ops[0].layer if program.ops else program.name

    def build(self, points: dict[str, int], ends: dict[str, int], *, joins: bool, network: bool) -> None:
        """Lay out every action.

        Args:
            points: offloaded storage → the op before which it returns.
            ends: offloaded storage → the op after which its bytes are given back.
        """
        program, count = self.program, len(self.program.ops)
        first_at: dict[int, list[str]] = {}
        last_at: dict[int, list[str]] = {}
        out_at: dict[int, list[str]] = {}
        in_at: dict[int, list[str]] = {}
        gone_at: dict[int, list[str]] = {}
        for name, use in self.uses.items():
            whole_step = network and program.tensors[name].role == "act"
            first_at.setdefault(-1 if whole_step else use.first, []).append(name)
            last_at.setdefault(count if whole_step else use.last, []).append(name)
            if name in points:
                out_at.setdefault(self.away[name].forward_last, []).append(name)
                in_at.setdefault(points[name], []).append(name)
                gone_at.setdefault(ends[name], []).append(name)
        layer_ends = {
            end for phases in (("forward",), ("backward", "update")) for _, _, end in layer_passes(program, phases)
        }
        for name in first_at.pop(-1, []):
            self.alloc(name)
        self.actions.extend(self._feed(tensor) for tensor in program.feeds if tensor not in program.ahead)
        feed_at = {tensor: last_reader(program, tensor) for tensor in program.ahead}
        copied = False
        for i, op in enumerate(program.ops):
            self.layer = op.layer
            for name in sorted(in_at.get(i, []), key=lambda name: self.away[name].backward_first):
                self.alloc(name)
                self.actions.append(CopyIn(name, "in"))
                copied = True
            for name in first_at.get(i, []):
                self.alloc(name)
            self.actions.append(Launch(op.name, "compute"))
            self.actions.extend(self._feed(tensor) for tensor, last in feed_at.items() if last == i)
            leaving = out_at.get(i, [])
            for name in leaving:
                self.actions.append(CopyOut(name, self._host_place(name), "out"))
                copied = True
            if joins and copied and i + 1 in layer_ends:
                self.actions.append(Join())
                copied = False
            for name in gone_at.get(i, []):
                # on "out" a later point would also stand behind the copies that have been queued since
                self.free(name, "out" if i == self.away[name].forward_last else "compute")
            for name in last_at.get(i, []):
                self.free(name, "compute")
        self.actions.extend(Fetch(tensor, "out", self._stage_place(tensor)) for tensor in program.fetches)
        fetched = {program.storage(tensor) for tensor in program.fetches}
        for name in last_at.get(count, []):
            self.free(name, "out" if name in fetched else "compute")

    def alloc(self, name: str) -> None:
        """Open a residency of `name`."""
        nbytes = self.uses[name].nbytes
        self.open[name] = (len(self.stays), len(self.actions))
        self.stays.append(None)
        self.actions.append(Alloc(name, -1, nbytes))
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self.peak_layer = self.live, self.layer

    def free(self, name: str, stream: str) -> None:
        """Close the residency of `name` at this point of `stream`."""
        rank, start = self.open.pop(name)
        self.actions.append(Free(name, stream))
        self.stays[rank] = Residency(name, self.uses[name].nbytes, start, len(self.actions) - 1)
        self.live -= self.uses[name].nbytes

    def finish(self) -> Schedule:
        """The schedule built so far."""
        stays = tuple(stay for stay in self.stays if stay is not None)
        return Schedule(tuple(self.actions), stays, self.host_bytes, self.stage_bytes, self.peak, self.peak_layer)

    def _feed(self, tensor: str) -> Feed:
        return Feed(tensor, "in", self._stage_place(tensor))

    def _stage_place(self, tensor: str) -> int:
        # the host fills and reads the stage at times that no event orders: no place can serve two
        place = self.stage_bytes
        self.stage_bytes += align(self.program.tensors[tensor].nbytes)
        return place

    def _host_place(self, name: str) -> int:
        # every offloaded storage is on the host at the turn from forward to backward: no place can serve two
        place = self.host_bytes
        self.host_bytes += self.uses[name].nbytes
        return place
