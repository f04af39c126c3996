"""The order of a step without places: what is allocated, launched, copied and freed when, and how much is live.

    schedule = make_schedule(program, decisions, budget_bytes=transient_budget)
    schedule.ideal_bytes        # most bytes live at any moment: no placement can need less

Layer-wise allocation: a storage holds bytes from its first to its last use. An offloaded one leaves after its last
reader in forward (so a forked map leaves once, when the last branch has read it) and comes back as `prefetch` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vdnn.layers.op import Program
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import Uses, storage_uses
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
    ideal_bytes: int
    peak_layer: str


def make_schedule(program: Program, decisions: Decisions, budget_bytes: int | None = None) -> Schedule:
    """Schedule `program` (after `apply_decisions`).

    Args:
        budget_bytes: for what is not persistent; prefetches that would exceed it are postponed.
    """
    uses = storage_uses(program)
    offload = [name for name in decisions.offload if name in uses and uses[name].backward_first is not None]
    live = live_bytes(program, offload)
    room = _Room(live, uses, budget_bytes)
    points = prefetch_points(program, uses, offload, decisions.prefetch_bytes, room)
    builder = _Builder(program, uses)
    builder.build(points, joins=decisions.join == "layer", network=decisions.allocation == "network")
    return builder.finish()


class _Room:
    """Whether a storage fits early, beside what is live at every op until its use."""

    def __init__(self, live: list[int], uses: dict[str, Uses], budget_bytes: int | None):
        self.live, self.uses, self.budget_bytes = live, uses, budget_bytes

    def __call__(self, storage: str, first: int, last: int) -> bool:
        nbytes = self.uses[storage].nbytes
        if self.budget_bytes is not None and max(self.live[first:last]) + nbytes > self.budget_bytes:
            return False
        for i in range(first, last):
            self.live[i] += nbytes
        return True


def live_bytes(program: Program, offload: Iterable[str]) -> list[int]:
    """Bytes live at each op and after the last, persistent ones aside; offloaded ones count again when they return."""
    uses = storage_uses(program)
    away = set(offload)
    change = [0] * (len(program.ops) + 2)
    for name, use in uses.items():
        stays = [(use.first, use.last)]
        if name in away and use.forward_last is not None and use.backward_first is not None:
            stays = [(use.first, use.forward_last), (use.backward_first, use.last)]
        for first, last in stays:
            change[max(first, 0)] += use.nbytes
            change[min(last, len(program.ops)) + 1] -= use.nbytes
    return list(accumulate(change[:-1]))


class _Builder:
    def __init__(self, program: Program, uses: dict[str, Uses]):
        self.program, self.uses = program, uses
        self.actions: list[Action] = []
        self.open: dict[str, tuple[int, int]] = {}  # storage → rank of its residency, first action
        self.stays: list[Residency | None] = []
        self.host: dict[str, int] = {}
        self.host_bytes = 0
        self.live = self.peak = 0
        self.layer = self.peak_layer = program.ops[0].layer if program.ops else program.name

    def build(self, points: dict[str, int], *, joins: bool, network: bool) -> None:
        """Lay out every action; `points` maps the offloaded storages to the op before which they return."""
        program, count = self.program, len(self.program.ops)
        first_at: dict[int, list[str]] = {}
        last_at: dict[int, list[str]] = {}
        out_at: dict[int, list[str]] = {}
        in_at: dict[int, list[str]] = {}
        for name, use in self.uses.items():
            whole_step = network and program.tensors[name].role == "act"
            first_at.setdefault(-1 if whole_step else use.first, []).append(name)
            last_at.setdefault(count if whole_step else use.last, []).append(name)
            if name in points:
                out_at.setdefault(use.forward_last or 0, []).append(name)
                in_at.setdefault(points[name], []).append(name)
        ends = {end for phases in (("forward",), ("backward", "update")) for _, _, end in layer_passes(program, phases)}
        for name in first_at.pop(-1, []):
            self.alloc(name)
        self.actions.extend(Feed(tensor, "in") for tensor in program.feeds)
        copied = False
        for i, op in enumerate(program.ops):
            self.layer = op.layer
            for name in in_at.get(i, []):
                self.alloc(name)
                self.actions.append(CopyIn(name, "in"))
                copied = True
            for name in first_at.get(i, []):
                self.alloc(name)
            self.actions.append(Launch(op.name, "compute"))
            leaving = out_at.get(i, [])
            for name in leaving:
                self.actions.append(CopyOut(name, self._host_place(name), "out"))
                copied = True
            if joins and copied and i + 1 in ends:
                self.actions.append(Join())
                copied = False
            for name in leaving:
                self.free(name, "out")
            for name in last_at.get(i, []):
                self.free(name, "compute")
        self.actions.extend(Fetch(tensor, "out") for tensor in program.fetches)
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
        return Schedule(tuple(self.actions), stays, self.host_bytes, self.peak, self.peak_layer)

    def _host_place(self, name: str) -> int:
        # every offloaded storage is on the host at the turn from forward to backward: no place can serve two
        self.host[name] = self.host_bytes
        self.host_bytes += align(self.uses[name].nbytes)
        return self.host[name]
