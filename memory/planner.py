"""Program, Decisions and a budget to a Plan: schedule, place, synchronise.

    plan = plan_program(program, decisions, budget_bytes=12 * GIB)
    plan.slab_bytes <= 12 * GIB

Plans that share a slab are given the same `persistent` places. BudgetError if the plan does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from vdnn.errors import BudgetError
from vdnn.layers.op import Program
from vdnn.memory.decisions import Decisions
from vdnn.memory.network_wide import network_wide_offsets
from vdnn.memory.offsets import Block, place
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, Plan, align
from vdnn.memory.schedule import Action, Schedule, make_schedule
from vdnn.memory.sync import synchronise
from vdnn.units import format_bytes

LEAST_STEP = 0.005
"""Of the room: what a further try leaves free at least."""
LOOK_WORK, MOST_LOOK, TIDY_WORK = 250_000_000, 400_000, 1_500_000
"""Of the search for places where any height within the room will do: to look at a plan, divided by its number of
blocks, as large plans are looked at no longer than small ones, and at most; and for the plan itself."""
ROUNDS, LOOK_ROUNDS = 4, 3
"""Tries at making room for fragmentation by postponing prefetches before a plan is called too large."""


class _Fit(NamedTuple):
    """A schedule, an offset for each of its residencies, and the bytes that they span."""

    schedule: Schedule
    offsets: Sequence[int]
    height: int


def persistent_places(*programs: Program) -> tuple[dict[str, int], int]:
    """Offsets of all persistent storages of `programs`, in their order, and the end of their section.

    A storage gets the most bytes that any of them needs for it: images fed ahead may be more in one than in another.
    """
    sizes: dict[str, int] = {}
    for program in programs:
        for name in program.persistent:
            sizes[name] = max(program.tensors[name].nbytes, sizes.get(name, 0))
    places: dict[str, int] = {}
    end = 0
    for name, nbytes in sizes.items():
        places[name] = end
        end += align(nbytes)
    return places, end


def plan_program(
    program: Program,
    decisions: Decisions,
    budget_bytes: int | None = None,
    persistent: Mapping[str, int] | None = None,
    persistent_bytes: int | None = None,
) -> Plan:
    """Plan `program`, as `lower` made it, under `decisions`.

    Args:
        budget_bytes: most bytes of the slab; None for as many as it takes.
        persistent, persistent_bytes: places given by another plan of the same slab; by default the program's own.
    """
    if persistent is None or persistent_bytes is None:
        persistent, persistent_bytes = persistent_places(program)
    planned = apply_decisions(program, decisions)
    plan = draft(planned, decisions, budget_bytes, persistent, persistent_bytes, final=True)
    return replace(plan, program_digest=planned.digest(), decisions_digest=decisions.digest())


def draft(
    planned: Program,
    decisions: Decisions,
    budget_bytes: int | None,
    persistent: Mapping[str, int],
    persistent_bytes: int,
    final: bool = False,
) -> Plan:
    """A plan without digests, for looking at: its bytes and its time.

    Args:
        planned: with algorithms, see `apply_decisions`.
        final: search longer for places, and where copies do not fit as they are paced, plan with nothing fetched early
            in place of a BudgetError.
    """
    room = None if budget_bytes is None else budget_bytes - persistent_bytes
    schedule, offsets, height = _fit(planned, decisions, room, final)
    if budget_bytes is not None and persistent_bytes + height > budget_bytes:
        needed = persistent_bytes + height
        raise BudgetError(
            f"policy '{decisions.policy}' needs {format_bytes(needed)} ({needed:,} bytes) on the device at layer "
            f"'{schedule.peak_layer}', budget {format_bytes(budget_bytes)} ({budget_bytes:,} bytes)",
            layer=schedule.peak_layer,
            needed_bytes=needed,
            budget_bytes=budget_bytes,
            smallest_bytes=None,
        )
    actions = _placed(schedule, offsets, persistent_bytes)
    ops = {op.name: op for op in planned.ops}
    return Plan(
        name=planned.name,
        batch=planned.batch,
        mode=planned.mode,
        program_digest="",
        decisions_digest="",
        persistent=dict(persistent),
        persistent_bytes=persistent_bytes,
        slab_bytes=persistent_bytes + height,
        host_bytes=schedule.host_bytes,
        steps=synchronise(actions, ops, planned.storage),
        stage_bytes=schedule.stage_bytes,
    )


def _fit(planned: Program, decisions: Decisions, room: int | None, final: bool) -> _Fit:
    """A schedule and placement within `room` bytes if one is found, else the smallest."""
    tried = best = _try(planned, decisions, room, final)
    if room is None or not decisions.offload:
        return best
    target = room
    for _ in range((ROUNDS if final or not _is_paced(decisions) else LOOK_ROUNDS) - 1):
        if best.height <= room:
            return best
        # fragmentation took more than there is: schedule again for what was lost
        target -= max(tried.height - room, int(LEAST_STEP * room))
        tried = _try(planned, decisions, target, final)
        best = min(best, tried, key=attrgetter("height"))
    if best.height > room and (final or not _is_paced(decisions)):
        # with nothing fetched early the decisions need least, and as much as `smallest_budget` says
        best = min(best, _try(planned, replace(decisions, prefetch_bytes=0), room, final), key=attrgetter("height"))
    return best


def _try(planned: Program, decisions: Decisions, room: int | None, final: bool) -> _Fit:
    schedule = make_schedule(planned, decisions, room)
    if decisions.allocation == "network":
        return _Fit(schedule, *network_wide_offsets(planned, schedule))
    blocks = [Block(stay.start, stay.end, stay.nbytes) for stay in schedule.residencies]
    if room is not None and _is_paced(decisions):
        # copies paced to fill the room are worth no long search: less of them will fit too
        return _Fit(schedule, *place(blocks, room, TIDY_WORK if final else min(MOST_LOOK, LOOK_WORK // len(blocks))))
    return _Fit(schedule, *place(blocks))


def _is_paced(decisions: Decisions) -> bool:
    return bool(decisions.fetch) and decisions.prefetch_bytes is None


def _placed(schedule: Schedule, offsets: Sequence[int], base: int) -> tuple[Action, ...]:
    ranks = iter(offsets)
    return tuple(
        action._replace(offset=base + next(ranks)) if isinstance(action, Alloc) else action
        for action in schedule.actions
    )
