"""An independent check of a plan: under every order that streams and events allow, it computes what its Program means.

    verify(program, plan)
    # silent, or PlanError: plan step 212: op 'conv3.wgrad' reads 'relu2' on stream 'compute', but step 208
    # CopyIn(storage='conv2', stream='in') need not be over by then: let 'compute' wait for an event ...

It trusts nothing but the Program and the steps. One pass in list order asks three questions: does every read find the
version that program order means (vdnn.memory.versions), are accesses of the same bytes ordered by streams and events
(vdnn.memory.accesses), and are bytes given to one storage at a time (an interval map over the slab, another over the
host's bytes)?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vdnn.layers.op import Program
from vdnn.memory.accesses import NEVER, Accesses, Residency
from vdnn.memory.intervals import IntervalMap
from vdnn.memory.plan import (
    ALIGNMENT,
    STREAMS,
    Alloc,
    CopyIn,
    CopyOut,
    Feed,
    Fetch,
    Free,
    Launch,
    Plan,
    Record,
    Wait,
)
from vdnn.memory.versions import LAST_RUN, NOTHING, Versions


def verify(program: Program, plan: Plan) -> None:
    """Check that `plan` computes `program`, in time that grows with the number of steps.

    The digests in the plan are not compared: that is the caller's, who may have them at hand.

    Raises:
        PlanError: the first fault, with its step (None where it belongs to no step).
        ProgramError: the program names tensors that are not there or that fit no storage.
    """
    check = _Check(program, plan)
    check.header()
    check.persistent()
    check.walk()
    check.end()


class _HostCopy:
    """What a CopyOut left at host bytes [start, end).

    Attributes:
        versions: of the storage's parts.
        written_at, used_at: by stream, the last step that wrote these bytes, that touched them.
        lost_at: the step that gave some of the bytes to another copy.
    """

    __slots__ = ("end", "lost_at", "start", "used_at", "versions", "written_at")

    def __init__(self, start: int, end: int, versions: list[int]):
        self.start, self.end, self.versions, self.lost_at = start, end, versions, NEVER
        self.written_at, self.used_at = [NEVER] * len(STREAMS), [NEVER] * len(STREAMS)


class _Check(Accesses):
    def __init__(self, program: Program, plan: Plan):
        super().__init__(Versions(program), plan.steps)
        self.program, self.plan = program, plan
        self.device: IntervalMap[Residency] = IntervalMap()
        self.host: IntervalMap[_HostCopy] = IntervalMap()
        self.stage: IntervalMap[int] = IntervalMap()
        self.copies: dict[str, _HostCopy] = {}  # storage → its latest
        self.done: dict[tuple[str, str], int] = {}  # ("op" | "feed" | "fetch", name) → step

    # ---- the whole

    def header(self) -> None:
        """Name, batch, mode and sizes."""
        for field in ("name", "batch", "mode"):
            expected, got = getattr(self.program, field), getattr(self.plan, field)
            if got != expected:
                raise self.fault(f"{field} is {got!r}, expected the program's, {expected!r}")
        plan = self.plan
        if not 0 <= plan.persistent_bytes <= plan.slab_bytes or min(plan.host_bytes, plan.stage_bytes) < 0:
            raise self.fault(
                f"expected 0 <= persistent section <= slab, 0 <= host and 0 <= stage, got {plan.persistent_bytes} B,"
                f" {plan.slab_bytes} B, {plan.host_bytes} B and {plan.stage_bytes} B"
            )

    def persistent(self) -> None:
        """Places of persistent storages. Of those that other plans put there only the offset is known, not the size."""
        own, plan = set(self.program.persistent), self.plan
        for storage in self.program.persistent:
            if storage not in plan.persistent:
                raise self.fault(f"persistent storage '{storage}' has no place in the persistent section")
            self.live[storage] = Residency(storage, self.versions.parts[storage], LAST_RUN)
        end, below = 0, ""
        for storage, offset in sorted(plan.persistent.items(), key=lambda item: item[1]):
            size = self.program.tensors[storage].nbytes if storage in own else 0
            if offset % ALIGNMENT:
                raise self.fault(f"persistent storage '{storage}' lies at {offset} B, no multiple of {ALIGNMENT} B")
            if offset < end:
                over = f"over '{below}', which ends at {end} B" if below else "before the slab"
                raise self.fault(f"persistent storage '{storage}' lies at {offset} B, {over}")
            if offset + size > plan.persistent_bytes:
                raise self.fault(
                    f"persistent storage '{storage}' ends at {offset + size} B, beyond the persistent section of"
                    f" {plan.persistent_bytes} B"
                )
            end, below = offset + size, storage

    def walk(self) -> None:
        """Every step in list order."""
        handlers: dict[type, Callable[[Any], None]] = {
            Alloc: self._alloc,
            Free: self._free,
            Launch: self._launch,
            CopyOut: self._copy_out,
            CopyIn: self._copy_in,
            Record: self._record,
            Wait: self._wait,
            Feed: self._feed,
            Fetch: self._fetch,
        }
        for index, step in enumerate(self.plan.steps):
            self.step = index
            handler = handlers.get(type(step))
            if handler is None:
                raise self.fault(f"{step!r} is no step")
            handler(step)

    def end(self) -> None:
        """Nothing left undone, unfreed, or of another version than the program leaves."""
        self.step = None
        wanted = (("op", self.versions.ops), ("feed", self.program.feeds), ("fetch", self.program.fetches))
        for kind, names in wanted:
            for name in names:
                if (kind, name) not in self.done:
                    raise self.fault(f"{kind} '{name}' is in no step")
        own = set(self.program.persistent)
        for storage in self.live:
            if storage not in own:
                raise self.fault(f"storage '{storage}' is allocated but not freed after its last use")
        for storage, versions in self.versions.final.items():
            for part, (cell, version) in enumerate(zip(self.live[storage].cells, versions, strict=True)):
                if cell.version != version:
                    raise self.fault(
                        f"persistent {self.versions.place(storage, part)} should end as"
                        f" {self.versions.describe(version)}, but ends as {self.holds(cell)}"
                    )

    # ---- steps

    def _alloc(self, step: Alloc) -> None:
        storage, start, end = step.storage, step.offset, step.offset + step.nbytes
        self._movable(storage)
        size = self.program.tensors[storage].nbytes
        if storage in self.live:
            raise self.fault(f"'{storage}' is allocated a second time before it is freed")
        if start % ALIGNMENT:
            raise self.fault(f"'{storage}' is put at {start} B, no multiple of {ALIGNMENT} B")
        if step.nbytes < size:
            raise self.fault(f"'{storage}' gets {step.nbytes} B, but needs {size} B")
        if start < self.plan.persistent_bytes or end > self.plan.slab_bytes:
            raise self.fault(
                f"'{storage}' is put at bytes {start} to {end}, outside of {self.plan.persistent_bytes} (end of the"
                f" persistent section) to {self.plan.slab_bytes} (end of the slab)"
            )
        residency = Residency(storage, self.versions.parts[storage], NOTHING)
        for old in self.device.put(start, end, residency):
            if old.freed_at == NEVER:
                raise self.fault(f"'{storage}' is put at bytes {start} to {end}, over '{old.storage}', not yet freed")
            residency.follow(old)
        self.live[storage] = residency

    def _free(self, step: Free) -> None:
        stream = self.enter(step.stream)
        self._movable(step.storage)
        self.free(step.storage, stream)

    def _launch(self, step: Launch) -> None:
        stream = self.enter(step.stream)
        if step.stream != "compute":
            raise self.fault(f"op '{step.op}' runs on stream '{step.stream}', expected 'compute'")
        if step.op not in self.versions.ops:
            raise self.fault(f"op '{step.op}' is not in the program")
        self._once("op", step.op)
        reads, writes, version = self.versions.ops[step.op]
        for region, wanted in reads:
            self.read(region, wanted, stream)
        for region in writes:
            self.write(region, [version] * len(region.parts), stream)

    def _copy_out(self, step: CopyOut) -> None:
        stream, storage = self.enter(step.stream), step.storage
        self._movable(storage)
        start, end = step.host_offset, step.host_offset + self.program.tensors[storage].nbytes
        if start < 0 or end > self.plan.host_bytes:
            raise self.fault(
                f"'{storage}' is copied to host bytes {start} to {end}, outside of 0 to {self.plan.host_bytes}"
            )
        residency = self.residency(storage)
        self.after(residency.before, stream, f"the copy-out of '{storage}'")
        copy = _HostCopy(start, end, [cell.version for cell in residency.cells])
        self.read(self.versions.whole(storage), copy.versions, stream)
        copy.written_at[stream] = copy.used_at[stream] = self.now
        for old in self.host.put(start, end, copy):
            self.after(old.used_at, stream, f"the copy-out of '{storage}' to host bytes {start} to {end}")
            old.lost_at = self.now
        self.copies[storage] = copy

    def _copy_in(self, step: CopyIn) -> None:
        stream, storage = self.enter(step.stream), step.storage
        self._movable(storage)
        if storage not in self.copies:
            raise self.fault(f"'{storage}' is copied in, but was never copied out")
        copy = self.copies[storage]
        if copy.lost_at != NEVER:
            raise self.fault(
                f"'{storage}' is copied in from host bytes {copy.start} to {copy.end}, of which"
                f" {self.name(copy.lost_at)} has taken some"
            )
        self.after(copy.written_at, stream, f"the copy-in of '{storage}'")
        copy.used_at[stream] = self.now
        self.write(self.versions.whole(storage), copy.versions, stream)

    def _record(self, step: Record) -> None:
        self.record(step.event, self.enter(step.stream))

    def _wait(self, step: Wait) -> None:
        self.wait(step.event, self.enter(step.stream))

    def _feed(self, step: Feed) -> None:
        stream = self.enter(step.stream)
        if step.tensor not in self.versions.feeds:
            raise self.fault(f"'{step.tensor}' is fed, but is no feed of the program")
        self._once("feed", step.tensor)
        self._stage(step)
        region, version = self.versions.feeds[step.tensor]
        self.write(region, [version] * len(region.parts), stream)

    def _fetch(self, step: Fetch) -> None:
        stream = self.enter(step.stream)
        if step.tensor not in self.versions.fetches:
            raise self.fault(f"'{step.tensor}' is fetched, but is no fetch of the program")
        self._once("fetch", step.tensor)
        self._stage(step)
        region, wanted = self.versions.fetches[step.tensor]
        self.read(region, wanted, stream)

    def _stage(self, step: Feed | Fetch) -> None:
        """The bytes of the stage are this step's alone: no event says when the host fills or reads them."""
        start, end = step.stage_offset, step.stage_offset + self.program.tensors[step.tensor].nbytes
        if start < 0 or end > self.plan.stage_bytes:
            raise self.fault(
                f"'{step.tensor}' passes through stage bytes {start} to {end}, outside of 0 to {self.plan.stage_bytes}"
            )
        for other in self.stage.put(start, end, self.now):
            raise self.fault(
                f"'{step.tensor}' passes through stage bytes {start} to {end}, of which {self.name(other)} has some"
            )

    def _movable(self, storage: str) -> None:
        """`storage` is one that the plan may allocate, free and copy."""
        spec = self.program.tensors.get(storage)
        if spec is None or spec.view_of is not None:
            what = "is not in the program" if spec is None else f"is a view of '{spec.view_of}', expected that storage"
            raise self.fault(f"'{storage}' {what}")
        if storage in self.versions.final:
            raise self.fault(f"'{storage}' is persistent: it is never allocated, freed or copied")

    def _once(self, kind: str, name: str) -> None:
        if (kind, name) in self.done:
            raise self.fault(f"{kind} '{name}' is done a second time, first by {self.name(self.done[kind, name])}")
        self.done[kind, name] = self.now
