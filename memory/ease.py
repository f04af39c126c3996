"""Less workspace where computation waits for bytes: the last step of dyn's search, op by op, judged by the clock.

    decisions = ease(program, costs, decisions, device_bytes, persistent)

An op that starts late often waits for a copy whose bytes its workspace will take. An algorithm with less of it may take
longer and end sooner. Each change is planned and timed, and kept only if the whole step is quicker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vdnn.errors import BudgetError
from vdnn.layers.op import Program
from vdnn.memory.clock import Timing, simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Algorithm, Decisions
from vdnn.memory.pace import pace
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Launch, Plan
from vdnn.memory.planner import draft

TRIES, FEW_TRIES, MANY_OPS = 12, 4, 600
"""Changes tried, as each costs a plan: of programs with no more ops than that, and of larger ones."""
WORTH = 0.002
"""Of a step: a wait that is looked at, and a gain that is taken."""


def ease(
    program: Program,
    costs: CostTable,
    decisions: Decisions,
    device_bytes: int,
    persistent: tuple[Mapping[str, int], int],
) -> Decisions:
    """`decisions` with smaller algorithms for ops that wait, as far as the step gets quicker by it.

    Args:
        device_bytes, persistent: as `plan_program` takes them.
    """

    def timed(option: Decisions) -> tuple[Plan, Timing]:
        planned = apply_decisions(program, option)
        plan = draft(planned, option, device_bytes, *persistent)
        return plan, simulate(plan, planned, costs)

    try:
        plan, timing = timed(decisions)
    except BudgetError:
        return decisions
    tried: set[tuple[str, str]] = set()
    for _ in range(TRIES if len(program.ops) <= MANY_OPS else FEW_TRIES):
        changed = _smaller(costs, decisions, _waits(plan, timing), tried)
        if changed is None:
            break
        if decisions.fetch:
            changed = pace(apply_decisions(program, changed), costs, changed, decisions.pace_bytes)
        try:
            other, its = timed(changed)
        except BudgetError:
            continue
        if its.total_ms < timing.total_ms * (1 - WORTH):
            decisions, plan, timing = changed, other, its
    return decisions


def _waits(plan: Plan, timing: Timing) -> list[str]:
    """Ops that start when the one before them has been over for a while, the longest wait first."""
    found: list[tuple[float, str]] = []
    over = 0.0
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if isinstance(step, Launch) and span is not None:
            if span[0] - over > WORTH * timing.total_ms:
                found.append((span[0] - over, step.op))
            over = span[1]
    return [op for _, op in sorted(found, reverse=True)]


def _smaller(costs: CostTable, decisions: Decisions, ops: list[str], tried: set[tuple[str, str]]) -> Decisions | None:
    """The first op that can, with the fastest algorithm of less workspace that has not been tried for it."""
    for op in ops:
        present = decisions.algorithms.get(op)
        if present is None or not present.workspace_bytes:
            continue
        less = [c for c in costs.candidates[op] if c.workspace_bytes < present.workspace_bytes]
        for candidate in less:  # fastest first
            if (op, candidate.algorithm) not in tried:
                tried.add((op, candidate.algorithm))
                chosen = Algorithm(candidate.algorithm, candidate.workspace_bytes)
                return replace(decisions, algorithms={**decisions.algorithms, op: chosen})
    return None
