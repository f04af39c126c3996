"""When copies should run, from the times of a CostTable: how long an offloaded map may stay, how early it must return.

    decisions = pace(program, costs, decisions, room_bytes)
    decisions.hold["conv1_1"], decisions.fetch["conv1_1"]      # names of ops

The paper frees a map at the end of the layer that read it last and fetches one a layer ahead. Where the budget leaves
room, bytes need not be given back before their copy is over: computation waits for the oldest copy only when the next
op does not fit beside those in flight. Fetches are the same thing with time reversed: walking back from the end of the
step, a map "leaves" after the op that will need it first, and its copy begins when it is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vdnn.layers.op import Program
from vdnn.memory.clock import op_times
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import offloaded, storage_uses
from vdnn.memory.schedule import live_bytes


def pace(program: Program, costs: CostTable, decisions: Decisions, room_bytes: int | None = None) -> Decisions:
    """`decisions` with `hold` and `fetch` for every offloaded storage.

    Args:
        program: with algorithms, see `apply_decisions`.
        room_bytes: most bytes live at once, persistent ones aside; None for no limit.
    """
    count = len(program.ops)
    away = offloaded(storage_uses(program, decisions.guard_bytes), decisions.offload)
    nbytes = {stay.storage: stay.nbytes for stay in away}
    table = op_times(program, costs)
    times = [table[op.name] for op in program.ops]
    live = live_bytes(program, decisions.offload, decisions.guard_bytes)[:count]
    turn = next((i for i, op in enumerate(program.ops) if op.phase != "forward"), count)

    leaving = {stay.storage: stay.forward_last for stay in away}
    hold = _gone(leaving, nbytes, times, live, costs.rates.d2h_gbps, room_bytes)
    for stay in away:
        hold[stay.storage] = min(hold[stay.storage], stay.backward_first - 1)
        for i in range(stay.forward_last + 1, hold[stay.storage] + 1):
            live[i] += stay.nbytes

    back = {stay.storage: count - 1 - stay.backward_first for stay in away}
    gone = _gone(back, nbytes, times[::-1], live[::-1], costs.rates.h2d_gbps, room_bytes)
    fetch = {
        stay.storage: min(max(turn, hold[stay.storage] + 1, count - 1 - gone[stay.storage]), stay.backward_first)
        for stay in away
    }
    names = [op.name for op in program.ops]
    return replace(
        decisions,
        hold={name: names[i] for name, i in hold.items()},
        fetch={name: names[i] for name, i in fetch.items()},
    )


def _gone(
    last_use: Mapping[str, int],
    nbytes: Mapping[str, int],
    times: Sequence[float],
    live: Sequence[int],
    gbps: float,
    room_bytes: int | None,
) -> dict[str, int]:
    """The last op beside which each storage is still there, when copies queue up on one link behind its last use.

    Args:
        last_use: the op after which the copy of each storage may begin.
        times, live: of every op in order, ms and bytes without the copies in flight.
    """
    waiting = deque(sorted(last_use, key=last_use.__getitem__))
    flying: deque[tuple[float, str]] = deque()  # (when its copy is over, storage), oldest first
    found: dict[str, int] = {}
    now = link_free = 0.0
    held = 0

    def release(before_op: int) -> float:
        nonlocal held
        over, name = flying.popleft()
        held -= nbytes[name]
        found[name] = max(before_op - 1, last_use[name])
        return over

    for i, time_ms in enumerate(times):
        while flying and flying[0][0] <= now:
            release(i)
        while flying and room_bytes is not None and live[i] + held > room_bytes:
            now = max(now, release(i))
        now += time_ms
        while waiting and last_use[waiting[0]] == i:
            name = waiting.popleft()
            link_free = max(link_free, now) + nbytes[name] / (gbps * 1e6)
            flying.append((link_free, name))
            held += nbytes[name]
    while flying:
        release(len(times))
    return found
