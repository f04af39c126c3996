"""Policies: pure functions from a Program, a CostTable and a Budget to Decisions.

    decisions, plan = make_plan(program, costs, "dyn", Budget(device_bytes=12 * GIB))

| policy | what leaves for the host | bytes |
| base   | nothing | network-wide allocation, the vDNN paper's baseline |
| none   | nothing | from first to last use |
| all    | the input of every layer that extracts features, if backward reads it again | from first to last use |
| conv   | the input of every convolution | from first to last use |
| dyn    | the paper's search (MICRO'16, section III-C): the fastest choice that fits | from first to last use |

Inputs of fully connected layers never leave. A new policy is one function and one row in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vdnn.errors import BudgetError
from vdnn.layers.op import Program
from vdnn.memory.costs import Candidate, CostTable, Division
from vdnn.memory.decisions import Algorithm, Decisions, LayoutChoice, Slice
from vdnn.memory.ease import MANY_OPS
from vdnn.memory.liveness import storage_uses
from vdnn.memory.passes import BY_IMAGE, apply_decisions, batch_of
from vdnn.memory.plan import Plan
from vdnn.memory.planner import persistent_places, plan_program
from vdnn.memory.refine import refine
from vdnn.memory.schedule import live_bytes
from vdnn.memory.slices import quickest
from vdnn.units import format_bytes

MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL = "memory-optimal", "performance-optimal"
FEATURE_KINDS = ("conv", "pool", "lrn", "batchnorm")
"""Layers whose input backward may read again; ReLU works in place and reads its output, sums read nothing."""
SPARES, ROOM_SPARES, FEW_SPARES = (0.5, 1, 2, 3), (0.1, 0.2), (1, 2)
"""Room that dyn tries to leave beside workspaces for copies in flight, in largest offloaded maps, and in shares of all
the room there is; for programs of more than MANY_OPS, which take longer to plan, only FEW_SPARES maps."""
STEPS = 5
"""Attempts at algorithms that fit, as placement takes more than what is live; in the last, every layer's smallest."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use, and the choices that the user made for every policy.

    Args:
        device_bytes, host_bytes: limits of the two slabs; None for no limit.
        workspace_bytes: most workspace of any one op.
        algorithms: "memory-optimal" (least workspace) or "performance-optimal" (fastest).
        join, prefetch_bytes, guard_bytes: as in Decisions.
        shared: places and end of the persistent section, where another plan of the same slab has fixed them.
        paper: whether dyn is the paper's search and nothing more.
        slices: whether convolutions may run in slices of the batch, where a faster algorithm then has room.
        layouts: as in Decisions: what has been decided before the program was made.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    workspace_bytes: int | None = None
    algorithms: str = PERFORMANCE_OPTIMAL
    join: str = "reuse"
    prefetch_bytes: int | None = None
    guard_bytes: int = 0
    shared: tuple[Mapping[str, int], int] | None = None
    paper: bool = False
    slices: bool = False
    layouts: Mapping[str, LayoutChoice] = field(default_factory=dict)

    def persistent(self, program: Program) -> tuple[Mapping[str, int], int]:
        """Places and end of the persistent section for `program`."""
        return self.shared if self.shared is not None else persistent_places(program)


Policy = Callable[[Program, CostTable, Budget], Decisions]


def offloadable(program: Program, kinds: Iterable[str]) -> tuple[str, ...]:
    """Storages read in forward by layers of these `kinds` and again in backward, in forward order.

    A map that only the classifier reads is not among them.
    """
    uses = storage_uses(program)
    wanted = set(kinds)
    found: dict[str, None] = {}
    for op in program.ops:
        if op.phase != "forward" or op.kind.split(".")[0] not in wanted:
            continue
        for tensor in op.reads.values():
            storage = program.storage(tensor)
            use = uses.get(storage)
            if use is not None and use.backward_first is not None and program.tensors[storage].role == "act":
                found[storage] = None
    return tuple(found)


def choose(program: Program, pick: Callable[[str], Candidate]) -> dict[str, Algorithm]:
    """The picked candidate of every op; "default" is what an op without a choice has, and needs no mention."""
    found: dict[str, Algorithm] = _choices(program, pick)["algorithms"]
    return found


def _choices(program: Program, pick: Callable[[str], Candidate | Division]) -> dict[str, Any]:
    """The fields `algorithms` and `slices` of Decisions, by what is picked for every op."""
    picked = {op.name: pick(op.name) for op in program.ops}
    whole = {name: found for name, found in picked.items() if isinstance(found, Candidate)}
    slices = {
        name: tuple(Slice(part.images, _algorithm(part.candidate)) for part in found.parts)
        for name, found in picked.items()
        if isinstance(found, Division)
    }
    return {
        "algorithms": {name: _algorithm(found) for name, found in whole.items() if found.algorithm != "default"},
        "slices": slices,
    }


def _algorithm(candidate: Candidate) -> Algorithm:
    return Algorithm(candidate.algorithm, candidate.workspace_bytes)


def _within(
    program: Program, costs: CostTable, budget: Budget, room: Callable[[str], int | None]
) -> Callable[[str], Candidate | Division]:
    """Picks the fastest way to run an op with the workspace that `room` gives it."""
    batches = {op.name: batch_of(op, program) for op in program.ops if op.kind in BY_IMAGE}

    def pick(op: str) -> Candidate | Division:
        if op in costs.given:
            return costs.given[op]
        limit = room(op)
        if not budget.slices or op not in batches:
            return costs.fastest(op, limit)
        return quickest(costs, op, batches[op], limit)

    return pick


def base(program: Program, costs: CostTable, budget: Budget) -> Decisions:
    """Nothing moves and nothing is reused but gradient buffers: the baseline."""
    return replace(_static("base", program, costs, budget, ()), allocation="network")


def none(program: Program, costs: CostTable, budget: Budget) -> Decisions:
    """Layer-wise allocation without offloading."""
    return _static("none", program, costs, budget, ())


def conv(program: Program, costs: CostTable, budget: Budget) -> Decisions:
    """Offload the inputs of convolutions."""
    return _static("conv", program, costs, budget, offloadable(program, ("conv",)))


def all_(program: Program, costs: CostTable, budget: Budget) -> Decisions:
    """Offload the inputs of all feature-extraction layers."""
    return _static("all", program, costs, budget, offloadable(program, FEATURE_KINDS))


def dyn(program: Program, costs: CostTable, budget: Budget) -> Decisions:
    """The first of none, conv, all with the fastest algorithms that fits; then conv, all, none with slower ones.

    MICRO'16, section III-C: first all(m) must fit at all, then the candidates are tried from the fastest; last, layers
    whose fastest algorithm would overflow the budget step down to a smaller one, greedily. Beyond the paper (unless
    `budget.paper`), less is offloaded where there is room, and copies are paced: see vdnn.memory.refine.
    """
    decisions, story = _search(program, costs, budget)
    notes = (story, *_over_limit(decisions.algorithms, budget.workspace_bytes))
    chosen = replace(decisions, policy="dyn", notes=notes)
    if budget.paper or budget.device_bytes is None or not chosen.offload:
        return _tell_slices(chosen)
    persistent = budget.persistent(program)
    options = [chosen]
    if budget.algorithms == PERFORMANCE_OPTIMAL:
        for spare in _spares(program, chosen, budget.device_bytes - persistent[1]):  # less workspace, more for copies
            for slices in {budget.slices, False}:
                option = _step_down(program, costs, replace(budget, slices=slices), chosen, spare)
                options += [option] if option is not None and option not in options else []
    return _tell_slices(refine(program, costs, options, budget.device_bytes, persistent))


def _spares(program: Program, decisions: Decisions, room: int) -> list[int]:
    """Bytes to leave free beside workspaces, to be tried."""
    largest = max(program.tensors[storage].nbytes for storage in decisions.offload)
    if len(program.ops) > MANY_OPS:
        return [share * largest for share in FEW_SPARES]
    return [int(share * largest) for share in SPARES] + [int(share * room) for share in ROOM_SPARES]


POLICIES: Mapping[str, Policy] = {"base": base, "none": none, "all": all_, "conv": conv, "dyn": dyn}


def make_plan(program: Program, costs: CostTable, policy: str, budget: Budget) -> tuple[Decisions, Plan]:
    """Decide and plan; a BudgetError says the smallest budget of this policy and of the smallest one."""
    decisions = POLICIES[policy](program, costs, budget)
    try:
        plan = plan_program(program, decisions, budget.device_bytes, *budget.persistent(program))
    except BudgetError as error:
        raise _explained(error, program, costs, decisions, budget) from None
    if budget.host_bytes is not None and plan.host_bytes > budget.host_bytes:
        less = {"all": "'conv' or 'none'"}.get(policy, "'none'")
        raise BudgetError(
            f"policy '{policy}' offloads {format_bytes(plan.host_bytes)} ({plan.host_bytes:,} bytes) to host memory, "
            f"host limit {format_bytes(budget.host_bytes)} ({budget.host_bytes:,} bytes); raise the host limit, or use "
            f"policy {less}{_needs_of_none(program, costs, budget)}",
            layer=program.name,
            needed_bytes=plan.host_bytes,
            budget_bytes=budget.host_bytes,
            smallest_bytes=None,
        )
    return decisions, plan


def fits_whole(program: Program, costs: CostTable, policy: str, budget: Budget) -> bool:
    """Whether `policy` fits and keeps everything on the device; of dyn: whether its first attempt, none, does."""
    decisions = POLICIES["none" if policy == "dyn" else policy](program, costs, budget)
    return not decisions.offload and _fits(program, decisions, budget)


def smallest_plan(program: Program, decisions: Decisions, budget: Budget) -> tuple[Decisions, Plan]:
    """The plan of `decisions` that needs the fewest device bytes, and the decisions as it takes them.

    Nothing is fetched before it is due, unless planning for a byte less finds room where something is.
    """
    places = budget.persistent(program)
    least = replace(decisions, prefetch_bytes=0)
    plan = plan_program(program, least, None, *places)
    while decisions.offload:
        try:
            plan = plan_program(program, decisions, plan.slab_bytes - 1, *places)
        except BudgetError:
            break
        least = decisions
    return least, plan


def smallest_budget(program: Program, costs: CostTable, budget: Budget, decisions: Decisions | None = None) -> int:
    """Bytes of the smallest device budget under `decisions`, by default under all with memory-optimal algorithms."""
    if decisions is None:
        decisions = all_(program, costs, Budget(algorithms=MEMORY_OPTIMAL))
    return smallest_plan(program, decisions, budget)[1].slab_bytes


def _static(name: str, program: Program, costs: CostTable, budget: Budget, offload: tuple[str, ...]) -> Decisions:
    if budget.algorithms == MEMORY_OPTIMAL:
        choices = _choices(program, lambda op: costs.given.get(op) or costs.smallest(op))
    else:
        choices = _choices(program, _within(program, costs, budget, lambda op: budget.workspace_bytes))
    return Decisions(
        name,
        offload,
        **choices,
        layouts=budget.layouts,
        join=budget.join,
        prefetch_bytes=budget.prefetch_bytes,
        guard_bytes=budget.guard_bytes,
        notes=_over_limit(choices["algorithms"], budget.workspace_bytes),
    )


def _over_limit(algorithms: Mapping[str, Algorithm], limit_bytes: int | None) -> tuple[str, ...]:
    """A sentence if some op has no algorithm within the workspace limit, and so takes the smallest it has."""
    over = [(a.workspace_bytes, op) for op, a in algorithms.items() if a.workspace_bytes > (limit_bytes or 0)]
    if limit_bytes is None or not over:
        return ()
    most, op = max(over)
    return (
        f"workspace limit {format_bytes(limit_bytes)}: {len(over)} op(s) have no algorithm that needs so little and "
        f"take the smallest they have, at most {format_bytes(most)} ({most:,} bytes) in op '{op}'",
    )


def _fits(program: Program, decisions: Decisions, budget: Budget) -> bool:
    persistent = budget.persistent(program)
    if budget.device_bytes is not None and decisions.allocation == "layer":
        # no placement can be smaller than what is live at once: most refusals need no placement
        live = max(live_bytes(apply_decisions(program, decisions), decisions.offload, decisions.guard_bytes))
        if persistent[1] + live > budget.device_bytes:
            return False
    try:
        plan = plan_program(program, decisions, budget.device_bytes, *persistent)
    except BudgetError:
        return False
    return budget.host_bytes is None or plan.host_bytes <= budget.host_bytes


def _search(program: Program, costs: CostTable, budget: Budget) -> tuple[Decisions, str]:
    """The paper's choice, and in words how it came about."""
    tried: list[str] = []
    if budget.algorithms == MEMORY_OPTIMAL:  # the algorithms are given: only what is offloaded is left to choose
        for name in ("none", "conv", "all"):
            decisions = POLICIES[name](program, costs, budget)
            if name == "all" or _fits(program, decisions, budget):
                return decisions, _story(name, "memory-optimal algorithms", tried)
            tried.append(f"{name} with memory-optimal algorithms")
    for name in ("none", "conv", "all"):
        decisions = POLICIES[name](program, costs, budget)
        if _fits(program, decisions, budget):
            return decisions, _story(name, "the fastest algorithms", tried)
        tried.append(f"{name} with the fastest algorithms")
    for name in ("conv", "all", "none"):  # none: where the host has no room for the others
        stepped = _step_down(program, costs, budget, POLICIES[name](program, costs, budget))
        if stepped is not None:
            return stepped, _story(name, "algorithms chosen to fit", tried)
        tried.append(f"{name} with algorithms chosen to fit")
    last = all_(program, costs, replace(budget, algorithms=MEMORY_OPTIMAL))
    return last, _story("all", "memory-optimal algorithms", tried)


def _step_down(
    program: Program, costs: CostTable, budget: Budget, decisions: Decisions, spare_bytes: int = 0
) -> Decisions | None:
    """`decisions` with, for every convolution, the fastest algorithm whose workspace fits beside what is live then.

    If `budget.slices`, the whole batch competes with slices of it, each by the fastest algorithm that fits.

    Args:
        spare_bytes: left free by every workspace that can be chosen so.
    """
    if budget.device_bytes is None:
        return None
    live = live_bytes(program, decisions.offload, decisions.guard_bytes)
    position = {op.name: i for i, op in enumerate(program.ops)}
    persistent = budget.persistent(program)
    room = budget.device_bytes - persistent[1]
    if max(live) > room:
        return None
    for attempt in range(STEPS):
        limit = room if attempt < STEPS - 1 else 0

        def beside(op: str, limit: int = limit) -> int:
            most = limit - spare_bytes - live[position[op]]
            return most if budget.workspace_bytes is None else min(most, budget.workspace_bytes)

        stepped = replace(decisions, **_choices(program, _within(program, costs, budget, beside)))
        try:
            plan = plan_program(program, stepped, budget.device_bytes, *persistent)
        except BudgetError as error:
            room -= error.needed_bytes - budget.device_bytes
            continue
        return stepped if budget.host_bytes is None or plan.host_bytes <= budget.host_bytes else None
    return None


def _tell_slices(decisions: Decisions) -> Decisions:
    if not decisions.slices:
        return decisions
    count = len(decisions.slices)
    note = f"{count} convolution{'s run' if count > 1 else ' runs'} in slices of the batch: faster algorithms then fit"
    return replace(decisions, notes=(*decisions.notes, note))


def _story(chosen: str, how: str, tried: list[str]) -> str:
    before = f"; did not fit: {', '.join(tried)}" if tried else ""
    return f"dyn took '{chosen}' with {how}{before}"


def _needs_of_none(program: Program, costs: CostTable, budget: Budget) -> str:
    kept = none(program, costs, replace(budget, algorithms=MEMORY_OPTIMAL))
    needed = smallest_budget(program, costs, budget, kept)
    return f", which with memory-optimal algorithms takes {format_bytes(needed)} ({needed:,} bytes) on the device"


def _images(program: Program) -> str:
    """How many are in the program at once, and what to change."""
    if program.batch == 1:
        return "1 image at once; raise memory.limit"
    fewer = "lower evaluate.batch_size"
    if program.mode != "eval":
        fewer = "raise train.accumulate, which cuts a step into slices, or lower train.batch_size"
    return f"{program.batch} images at once; raise memory.limit, or {fewer}"


def _explained(
    error: BudgetError, program: Program, costs: CostTable, decisions: Decisions, budget: Budget
) -> BudgetError:
    """`error` with the smallest budgets that work under the same host limit, of this policy and of all there are."""
    least = replace(budget, algorithms=MEMORY_OPTIMAL)
    options = [
        (f"with policy '{decisions.policy}' and these algorithms", decisions),
        ("with policy 'all' and memory-optimal algorithms", all_(program, costs, least)),
        ("with policy 'none' and memory-optimal algorithms", none(program, costs, least)),
    ]
    works: list[tuple[int, str]] = []
    for words, option in options:
        _, plan = smallest_plan(program, option, budget)
        fits_host = budget.host_bytes is None or plan.host_bytes <= budget.host_bytes
        if fits_host and (not works or plan.slab_bytes < works[-1][0]):
            works.append((plan.slab_bytes, words))
    advice = "; ".join(f"{words}: {format_bytes(nbytes)} ({nbytes:,} bytes)" for nbytes, words in works)
    found = BudgetError(
        f"{error}; smallest budget that works {advice}, with {_images(program)}",
        layer=error.layer,
        needed_bytes=error.needed_bytes,
        budget_bytes=error.budget_bytes,
        smallest_bytes=works[-1][0],
    )
    found.own_bytes = works[0][0]
    return found
