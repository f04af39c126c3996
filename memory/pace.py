"""When copies should run, from the times of a CostTable: how long an offloaded map may stay, how early it must return.

    decisions = pace(program, costs, decisions)
    decisions.hold["conv1_1"], decisions.fetch["conv1_1"]      # names of ops

The paper frees a map at the end of the layer that read it last and fetches one a layer ahead. Where the budget leaves
room, bytes need not be given back before their copy is over, and a fetch may start as early as the link needs to be in
time: then computation waits for neither. Times are those of computation alone; the planner sees to the room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from vdnn.layers.op import Program
from vdnn.memory.clock import op_times
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import Offloaded, offloaded, storage_uses


def pace(program: Program, costs: CostTable, decisions: Decisions) -> Decisions:
    """`decisions` with `hold` and `fetch` for every offloaded storage.

    Args:
        program: with algorithms, see `apply_decisions`.
    """
    away = offloaded(storage_uses(program), decisions.offload)
    times = op_times(program, costs)
    starts = list(accumulate((times[op.name] for op in program.ops), initial=0.0))  # ms; one more than ops
    turn = next((i for i, op in enumerate(program.ops) if op.phase != "forward"), len(program.ops))
    hold = _holds(away, starts, costs)
    fetch = _fetches(away, starts, costs, turn)
    names = [op.name for op in program.ops]
    return replace(
        decisions,
        hold={name: names[i] for name, i in hold.items()},
        fetch={name: names[i] for name, i in fetch.items()},
    )


def _holds(away: list[Offloaded], starts: list[float], costs: CostTable) -> dict[str, int]:
    """The last op before the copy out of each storage is over; copies run one after the other."""
    over, found = 0.0, {}
    for use in sorted(away, key=attrgetter("forward_last")):
        last = use.forward_last
        over = max(over, starts[last]) + use.nbytes / (costs.rates.d2h_gbps * 1e6)
        found[use.storage] = min(max(last, bisect_left(starts, over) - 1), len(starts) - 2)
    return found


def _fetches(away: list[Offloaded], starts: list[float], costs: CostTable, turn: int) -> dict[str, int]:
    """The last op at which the copy in of each storage can start and still be in time, backward at the earliest."""
    begin, found = starts[-1], {}
    for use in sorted(away, key=lambda use: -use.backward_first):
        needed = use.backward_first
        begin = min(begin, starts[needed]) - use.nbytes / (costs.rates.h2d_gbps * 1e6)
        found[use.storage] = min(max(turn, bisect_right(starts, begin) - 1), needed)
    return found
