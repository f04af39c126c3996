"""Beyond the paper's search: of what it would offload only as much as pays, and copies paced by the cost table.

    decisions = refine(program, costs, [decisions, slower_ones], device_bytes, persistent)

The maps with the shortest way from forward to backward stay on the device while there is room: those at the end of the
network, whose copies would have the least time to hide. How much room is better left to copies in flight is tried out:
every choice is planned and timed by the clock, and the quickest wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from vdnn.errors import BudgetError
from vdnn.layers.op import Program
from vdnn.memory.clock import simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.ease import ease
from vdnn.memory.liveness import offloaded, storage_uses
from vdnn.memory.offsets import CLOSE
from vdnn.memory.pace import pace
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, Free, Plan
from vdnn.memory.planner import draft
from vdnn.memory.schedule import live_bytes
from vdnn.units import format_bytes

RESERVES = (1, 0, 2)
"""Room left to copies in flight while choosing what stays, in largest offloaded maps."""
SHARES = (0.97, 0.85)
"""Of the room, what copies are paced to fill; placement takes a little more than what is live."""
CAUTION = 0.9
"""Of the copy rates, what is counted on here: beside VGG-19's first layers 46 of 55 GB/s were measured (H200), beside
its other layers all of them."""
NEAR = 1.005
"""Times this close to the quickest, or to the kernels alone, are as good: what moves and wastes fewest bytes wins."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A variant of an option as the planner and the clock see it; tidy if placement wastes no more than CLOSE."""

    option: Decisions
    variant: Decisions
    time_ms: float
    kernels_ms: float
    host_bytes: int
    tidy: bool


def refine(
    program: Program,
    costs: CostTable,
    options: Sequence[Decisions],
    device_bytes: int,
    persistent: tuple[Mapping[str, int], int],
) -> Decisions:
    """The quickest of `options`, with fewer maps offloaded and with copies paced; the first where none fits.

    Args:
        options: which offload the same maps, with other algorithms.
        device_bytes, persistent: as `plan_program` takes them.
    """
    room = device_bytes - persistent[1]
    costs = _cautious(costs)

    def trials(option: Decisions, variants: Iterable[Decisions]) -> Iterator[_Trial]:
        for variant in variants:
            planned = apply_decisions(program, variant)
            with suppress(BudgetError):
                plan = draft(planned, variant, device_bytes, *persistent)
                timing = simulate(plan, planned, costs)
                tidy = plan.slab_bytes <= CLOSE * (persistent[1] + _most_live(plan))
                yield _Trial(option, variant, timing.total_ms, timing.compute_ms, plan.host_bytes, tidy)

    found = [
        trial for option in options for trial in trials(option, islice(_variants(program, costs, option, room), 1))
    ]
    chosen = min(found, key=attrgetter("time_ms")).option if found else options[0]
    for trial in trials(chosen, islice(_variants(program, costs, chosen, room), 1, None)):
        if any(seen.tidy and seen.time_ms <= NEAR * min(s.kernels_ms for s in found) for seen in found):
            break  # nothing can be quicker by more than that
        found.append(trial)
    found += trials(options[0], [options[0]])  # what the paper would do, as it stands
    if not found:
        return options[0]
    quickest = min(trial.time_ms for trial in found)
    near = [trial for trial in found if trial.time_ms <= NEAR * quickest]
    best = min(near, key=lambda trial: (not trial.tidy, trial.host_bytes, trial.time_ms)).variant
    best = ease(program, costs, best, device_bytes, persistent)
    return replace(best, notes=(*options[0].notes, *_told(program, options[0], best)))


def keep(program: Program, decisions: Decisions, room: int) -> tuple[str, ...]:
    """What is left of `decisions.offload` when maps stay, innermost first, as long as at most `room` bytes are live.

    Args:
        program: with algorithms, see `apply_decisions`.
    """
    live = live_bytes(program, decisions.offload, decisions.guard_bytes)
    away = offloaded(storage_uses(program, decisions.guard_bytes), decisions.offload)
    staying = set()
    for stay in sorted(away, key=lambda stay: stay.backward_first - stay.forward_last):
        between = range(stay.forward_last + 1, stay.backward_first)
        if all(live[i] + stay.nbytes <= room for i in between):
            staying.add(stay.storage)
            for i in between:
                live[i] += stay.nbytes
    return tuple(name for name in decisions.offload if name not in staying)


def _variants(program: Program, costs: CostTable, option: Decisions, room: int) -> Iterator[Decisions]:
    """`option` with fewer maps offloaded and its copies paced, the likeliest first."""
    planned = apply_decisions(program, option)
    largest = max(program.tensors[storage].nbytes for storage in option.offload)
    offloads = [keep(planned, option, room - share * largest) for share in RESERVES]
    for offload in dict.fromkeys((*offloads, option.offload)):
        less = replace(option, offload=offload)
        if not offload or less.join != "reuse" or less.prefetch_bytes is not None:
            yield less
            continue
        for share in SHARES if offload == offloads[0] else SHARES[:1]:
            bound = int(share * room)
            yield replace(pace(planned, costs, less, bound), pace_bytes=bound)


def _cautious(costs: CostTable) -> CostTable:
    """The same with copies as they run beside kernels that use memory."""
    rates = costs.rates
    slower = replace(rates, d2h_gbps=CAUTION * rates.d2h_gbps, h2d_gbps=CAUTION * rates.h2d_gbps)
    return replace(costs, rates=slower)


def _most_live(plan: Plan) -> int:
    live = most = 0
    sizes: dict[str, int] = {}
    for step in plan.steps:
        if isinstance(step, Alloc):
            sizes[step.storage] = step.nbytes
            live += step.nbytes
            most = max(most, live)
        elif isinstance(step, Free):
            live -= sizes[step.storage]
    return most


def _told(program: Program, before: Decisions, after: Decisions) -> tuple[str, ...]:
    told = []
    kept = [name for name in before.offload if name not in after.offload]
    if kept:
        nbytes = format_bytes(sum(program.tensors[name].nbytes for name in kept))
        told.append(f"{len(kept)} of its {len(before.offload)} maps stay on the device, as there is room: {nbytes}")
    had, has = ({**decisions.algorithms, **decisions.slices} for decisions in (before, after))
    slower = sum(has[op] != choice for op, choice in had.items())
    if slower:
        who = "op takes" if slower == 1 else "ops take"
        told.append(f"{slower} {who} an algorithm with less workspace, or smaller slices, which leaves copies room")
    return tuple(told)
