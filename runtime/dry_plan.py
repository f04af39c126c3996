"""Plans of a run for looking at, also where they do not fit: what `vdnn plan` shows.

run = plan_run(config, graph, backend, make_budget(config, backend))
[part.refusal for part in run.parts]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vdnn.errors import BudgetError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.plan import Plan
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, make_plan, smallest_plan
from vdnn.memory.report import Report
from vdnn.runtime.backend import Backend
from vdnn.runtime.config import Config
from vdnn.runtime.layouts import plan_layouts
from vdnn.runtime.planset import Planned, PlanSet, step_parts
from vdnn.runtime.prepare import backend_costs, make_recipe
from vdnn.units import exact_bytes, format_bytes

SMALLEST: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "dyn": ("all", {"algorithms": MEMORY_OPTIMAL}, "all with memory-optimal algorithms"),
}
"""Policy that searches → what it takes last: a policy, what it changes of the budget, and both in words."""
DYN = "dyn"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What training needs: every plan, those of the parts of a full step in order, and that of an evaluation batch.

    A plan that does not fit is the smallest one, with its refusal.
    """

    plans: PlanSet
    parts: list[Planned]
    evaluation: Planned

    def notes(self) -> tuple[str, ...]:
        """A sentence if evaluation needs more than the step."""
        step_bytes = max(part.plan.slab_bytes for part in self.parts)
        most = self.evaluation.plan.slab_bytes
        if most <= step_bytes:
            return ()
        return (evaluation_words(self.evaluation.program.batch, most, fits=self.evaluation.refusal is None),)


def evaluation_words(images: int, needed_bytes: int, *, fits: bool) -> str:
    """What to say of evaluation in batches of `images` that needs more than the step, and which option sets that."""
    not_fit = "" if fits else ", and does not fit"
    return (
        f"evaluation in batches of {images} images needs more than the step{not_fit}: "
        f"{exact_bytes(needed_bytes)}; evaluate.batch_size sets it"
    )


def plan_run(
    config: Config, graph: Graph, backend: Backend, budget: Budget, progress: Callable[[str], None] | None = None
) -> DryRun:
    """Plan a full step and an evaluation batch as training would, if there are as many images as they ask for.

    Args:
        progress: told in words what takes long.
    """
    micro = -(-config.train.batch_size // config.train.accumulate)
    step, evaluation = step_parts(config.train.batch_size, micro), ("eval", config.evaluate.batch_size or micro)
    keys = [*step, evaluation]

    def costs_of(program: Program) -> CostTable:
        return backend_costs(backend, program, config.deterministic)

    recipe = make_recipe(config, device=backend.caps.name)
    plans = plan_layouts(
        config, graph, keys, costs_of, recipe, backend, budget, instead=refused_plan, progress=progress
    )
    return DryRun(plans, [plans[key] for key in step], plans[evaluation])


def whole_step(worst: Report, parts: list[Report], batch_size: int) -> Report:
    """The report of the part that needs most, with the times of all parts; unchanged if there is only one."""
    if len(parts) == 1:
        return worst
    times = ("predicted_step_ms", "compute_ms", "copy_out_ms", "copy_in_ms", "exposed_ms")
    sums = {name: sum(getattr(part, name) for part in parts) for name in times}
    note = f"a step is {len(parts)} parts; bytes are those of the part that needs most ({worst.batch_size} images)"
    return replace(worst, batch_size=batch_size, notes=(*worst.notes, note), **sums)


def refused_plan(program: Program, costs: CostTable, policy: str, budget: Budget) -> tuple[Decisions, Plan]:
    """The plan of `policy` that takes least of the device, for a budget in which none of its plans fits.

    Its last note says so, and which options on the command line would make it fit, if any does.
    """
    slabs = (("device", budget.device_bytes), ("host", budget.host_bytes))
    limits = " and ".join(f"{format_bytes(n)} of the {slab}" for slab, n in slabs if n is not None)
    used, changes, words = SMALLEST.get(policy, (policy, {}, ""))
    free = replace(budget, device_bytes=None, host_bytes=None)
    decisions, plan = smallest_plan(program, POLICIES[used](program, costs, replace(free, **changes)), free)
    how = [words] * bool(words) + ["nothing fetched early"] * bool(decisions.offload and decisions.prefetch_bytes == 0)
    given = "" if policy in SMALLEST else " and these algorithms"
    note = f"nothing fits in {limits} with policy '{policy}'{given}; this is its smallest plan"
    note += f": {', '.join(how)}" if how else ""
    fitting = fitting_options(program, costs, policy, budget)
    note += f"; what fits: {' or '.join(fitting)}" if fitting else ""
    decisions = replace(decisions, policy=policy, notes=(*decisions.notes, note))
    return decisions, replace(plan, decisions_digest=decisions.digest())


def fitting_options(program: Program, costs: CostTable, policy: str, budget: Budget) -> list[str]:
    """Options that alone make a plan of a refused `policy` that fits: memory-optimal algorithms, or policy dyn."""
    if policy in SMALLEST:  # it has tried all there is
        return []
    least = replace(budget, algorithms=MEMORY_OPTIMAL)
    found = []
    if budget.algorithms != MEMORY_OPTIMAL and _fits(program, costs, policy, least):
        found.append(f"--algorithms {MEMORY_OPTIMAL}")
    # dyn ends with one of these two, the second where the host has no room; to search through the rest takes longer
    if any(_fits(program, costs, last, least) for last in ("all", "none")):
        found.append(f"--policy {DYN}")
    return found


def _fits(program: Program, costs: CostTable, policy: str, budget: Budget) -> bool:
    try:
        make_plan(program, costs, policy, budget)
    except BudgetError:
        return False
    return True
