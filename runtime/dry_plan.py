"""Plans of a training step for looking at, also where they do not fit: what `vdnn plan` shows.

parts = plan_parts(config, graph, backend, make_budget(config, backend))
[part.refusal for part in parts]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vdnn.errors import BudgetError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.planner import persistent_places
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, make_plan, smallest_plan
from vdnn.memory.report import Report
from vdnn.memory.verify import verify
from vdnn.runtime.backend import Backend
from vdnn.runtime.config import Config
from vdnn.runtime.planset import step_parts
from vdnn.runtime.prepare import backend_costs, make_recipe
from vdnn.units import format_bytes

SMALLEST: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "dyn": ("all", {"algorithms": MEMORY_OPTIMAL}, "all with memory-optimal algorithms"),
}
"""Policy that searches → what it takes last: a policy, what it changes of the budget, and both in words."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step: its plan, or the smallest one with why it was refused; `program` has its algorithms."""

    program: Program
    decisions: Decisions
    plan: Plan
    costs: CostTable
    refusal: BudgetError | None


def plan_parts(config: Config, graph: Graph, backend: Backend, budget: Budget) -> list[Part]:
    """Plan every part of a training step, as training would: in one slab, with equal persistent places."""
    micro = -(-config.train.batch_size // config.train.accumulate)
    recipe = make_recipe(config)
    programs = [recipe.lower(graph, key) for key in step_parts(config.train.batch_size, micro)]
    shared = replace(budget, shared=persistent_places(max(programs, key=lambda p: len(p.persistent))))
    known: dict[tuple[str, int], Part] = {}
    for program in programs:
        if (program.mode, program.batch) in known:
            continue
        costs = backend_costs(backend, program, config.deterministic)
        refusal: BudgetError | None = None
        try:
            decisions, made = make_plan(program, costs, config.memory.policy, shared)
        except BudgetError as error:
            refusal = error
            decisions, made = refused_plan(program, costs, config.memory.policy, shared)
        planned = apply_decisions(program, decisions)
        verify(planned, made)
        known[program.mode, program.batch] = Part(planned, decisions, made, costs, refusal)
    return [known[program.mode, program.batch] for program in programs]


def whole_step(worst: Report, parts: list[Report], batch_size: int) -> Report:
    """The report of the part that needs most, with the times of all parts; unchanged if there is only one."""
    if len(parts) == 1:
        return worst
    times = ("predicted_step_ms", "compute_ms", "copy_out_ms", "copy_in_ms", "exposed_ms")
    sums = {name: sum(getattr(part, name) for part in parts) for name in times}
    note = f"a step is {len(parts)} parts; bytes are those of the part that needs most ({worst.batch_size} images)"
    return replace(worst, batch_size=batch_size, notes=(*worst.notes, note), **sums)


def refused_plan(program: Program, costs: CostTable, policy: str, budget: Budget) -> tuple[Decisions, Plan]:
    """The plan of `policy` that takes least of the device, for a budget in which none of its plans fits."""
    slabs = (("device", budget.device_bytes), ("host", budget.host_bytes))
    limits = " and ".join(f"{format_bytes(n)} of the {slab}" for slab, n in slabs if n is not None)
    used, changes, words = SMALLEST.get(policy, (policy, {}, ""))
    free = replace(budget, device_bytes=None, host_bytes=None)
    decisions = POLICIES[used](program, costs, replace(free, **changes))
    how = [words] * bool(words) + ["nothing fetched early"] * bool(decisions.offload)
    note = f"nothing fits in {limits} with policy '{policy}'; this is its smallest plan"
    note += f": {', '.join(how)}" if how else ""
    decisions = replace(decisions, policy=policy, prefetch_bytes=0, notes=(*decisions.notes, note))
    return decisions, smallest_plan(program, decisions, free)
