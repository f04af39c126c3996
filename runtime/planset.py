"""All plans of a run: training steps and their parts, evaluation, last partial batches, in one slab.

    plans = build_plans(graph, [("train", 64)], costs_of, "dyn", Budget(12 * GIB), Recipe(Update(momentum=0.9)))
    plans["train", 64].plan.slab_bytes <= plans.slab_bytes

Every plan puts the persistent storages at the same offsets, so that each continues where another ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vdnn.errors import BudgetError
from vdnn.layers.graph import Graph
from vdnn.layers.lower import Update, lower
from vdnn.layers.op import Program
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.memory.costs import Candidate, CostTable, Division, Part
from vdnn.memory.decisions import Decisions, LayoutChoice
from vdnn.memory.passes import BY_IMAGE, apply_decisions, batch_of
from vdnn.memory.plan import Plan
from vdnn.memory.planner import persistent_places
from vdnn.memory.policy import PERFORMANCE_OPTIMAL, Budget, fits_whole, make_plan
from vdnn.memory.slices import describe, parse
from vdnn.memory.verify import verify

Key = tuple[str, int]
"""(mode, images): ("train", 64), ("eval", 16), ("first", 32)."""
MIXED = "MIXED"
"""What stands for the layout in the names of plans whose layers have their own."""
LAYOUTS_OF_RUN = "layouts"
"""Under this name the layouts of layers are recorded beside the algorithms of plans."""
Algorithms = Mapping[str, Mapping[str, str]]
"""Chosen algorithm, or slices in the words of vdnn.memory.slices, by op, by plan (see `plan_name`)."""
Instead = Callable[[Program, CostTable, str, Budget], tuple[Decisions, Plan]]
"""What is planned for a program, its costs, a policy and a budget in which that policy does not fit."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One verified plan with what it was made from; `program` has its algorithms.

    Args:
        refusal: why this plan stands in for one that does not fit; None if it is the one asked for.
    """

    program: Program
    decisions: Decisions
    plan: Plan
    costs: CostTable
    refusal: BudgetError | None = None


@dataclass(frozen=True, slots=True)
class PlanSet:
    """Plans by key; slabs large enough for each; notes on what an earlier run had and this one has not."""

    plans: Mapping[Key, Planned]
    persistent: Program
    notes: tuple[str, ...] = ()
    layout: str = "NCHW"
    dtype: str = "float32"
    layouts: Mapping[str, LayoutChoice] = field(default_factory=dict)

    def __getitem__(self, key: Key) -> Planned:
        return self.plans[key]

    @property
    def slab_bytes(self) -> int:
        """Of the device slab."""
        return max(p.plan.slab_bytes for p in self.plans.values())

    @property
    def host_bytes(self) -> int:
        """Of the host slab."""
        return max(p.plan.host_bytes for p in self.plans.values())

    @property
    def stage_bytes(self) -> int:
        """Of the stage that feeds and fetches pass through."""
        return max(p.plan.stage_bytes for p in self.plans.values())

    @property
    def refusal(self) -> BudgetError | None:
        """That of the plan that needs most; None if all fit."""
        return largest([p.refusal for p in self.plans.values() if p.refusal is not None])

    def algorithms(self) -> dict[str, dict[str, str]]:
        """The choices of every plan, and the layouts of layers where they have their own, for a checkpoint."""
        found = {
            plan_name(key, self.layout, self.dtype): {
                **{op: chosen.name for op, chosen in p.decisions.algorithms.items()},
                **{
                    op: describe((row.images, row.algorithm.name) for row in rows)
                    for op, rows in p.decisions.slices.items()
                },
            }
            for key, p in self.plans.items()
        }
        return found | ({LAYOUTS_OF_RUN: _names(self.layouts)} if self.layouts else {})


def _names(layouts: Mapping[str, LayoutChoice]) -> dict[str, str]:
    return {layer: choice.layout for layer, choice in layouts.items()}


def plan_name(key: Key, layout: str, dtype: str = "float32") -> str:
    """The name under which algorithms are recorded: "train/64"; with a layout or dtype that are not the usual ones
    "train/64/NHWC", "train/64/NHWC/bfloat16"."""
    unusual = [word for word, usual in ((layout, "NCHW"), (dtype, "float32")) if word != usual]
    return "/".join((key[0], str(key[1]), *unusual))


def layout_of_plan(name: str, dtype: str) -> str | None:
    """The layout in the name of a plan of this dtype; None if the name is not of such a plan, or of mixed layouts."""
    parts = name.split("/")
    layouts = (layout for layout in MEMORY_ORDERS if len(parts) > 1 and parts[1].isdigit())
    return next((one for one in layouts if plan_name((parts[0], int(parts[1])), one, dtype) == name), None)


def largest(refusals: Sequence[BudgetError]) -> BudgetError | None:
    """The refusal whose plan needs most: the budget to name."""
    return max(refusals, key=lambda error: error.own_bytes or error.needed_bytes, default=None)


def slice_sizes(images: int, micro: int) -> list[int]:
    """`images` cut into slices of `micro`, the last with what is left."""
    return [micro] * (images // micro) + ([images % micro] if images % micro else [])


def step_parts(images: int, micro: int) -> list[Key]:
    """The plans that together do one training step of `images` images in slices of at most `micro`."""
    sizes = slice_sizes(images, micro)
    if len(sizes) == 1:
        return [("train", sizes[0])]
    modes = ["first", *["middle"] * (len(sizes) - 2), "last"]
    return list(zip(modes, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How programs of a run are lowered: the optimiser, the normalisation of images, and options of
    vdnn.layers.lower.lower.

    Args:
        update_together: None: where the policy offloads nothing and that fits; `build_plans` finds out.
        layouts: of layers that have their own, as vdnn.runtime.layouts chooses them.
    """

    update: Update
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pool_indices: bool = False
    layout: str = "NCHW"
    layouts: Mapping[str, LayoutChoice] = field(default_factory=dict)
    dtype: str = "float32"
    pad_channels: int = 1
    fuse: bool = False
    update_together: bool | None = False

    @property
    def layout_name(self) -> str:
        """What algorithms are recorded under."""
        return MIXED if self.layouts else self.layout

    def lower(self, graph: Graph, key: Key) -> Program:
        """The program of `graph` for one key; what trains gets its images a run ahead."""
        mode, images = key
        ahead = mode != "eval"
        return lower(
            graph,
            images,
            mode,
            update=self.update,
            mean=self.mean,
            std=self.std,
            ahead=ahead,
            pool_indices=self.pool_indices,
            layout=self.layout,
            layouts=_names(self.layouts),
            dtype=self.dtype,
            pad_channels=self.pad_channels,
            fuse=self.fuse,
            update_together=bool(self.update_together),
        )


def build_plans(
    graph: Graph,
    keys: Iterable[Key],
    costs_of: Callable[[Program], CostTable],
    policy: str,
    budget: Budget,
    recipe: Recipe,
    recorded: Algorithms | None = None,
    instead: Instead | None = None,
) -> PlanSet:
    """Plan and verify every key; BudgetError if one does not fit, unless `instead` makes another plan of it.

    Args:
        costs_of: the CostTable of a program.
        recorded: algorithms of an earlier run of the same plans, which are kept.
        instead: plans what does not fit, for looking at.
    """
    keys, budget = tuple(dict.fromkeys(keys)), replace(budget, layouts=recipe.layouts)
    if recipe.update_together is None:
        together = replace(recipe, update_together=True)
        updates = {key: together.lower(graph, key) for key in keys}
        room = replace(budget, shared=persistent_places(_whole(updates), *updates.values()))
        steps = [program for key, program in updates.items() if key[0] != "eval"]
        roomy = all(fits_whole(program, costs_of(program), policy, room) for program in steps)
        recipe = together if roomy else replace(recipe, update_together=False)
    programs = {key: recipe.lower(graph, key) for key in keys}
    whole = _whole(programs)
    shared = replace(budget, shared=persistent_places(whole, *programs.values()))
    plans: dict[Key, Planned] = {}
    notes: list[str] = []
    refusals: list[BudgetError] = []
    for key, program in programs.items():
        costs = costs_of(program)
        kept = (recorded or {}).get(plan_name(key, recipe.layout_name, recipe.dtype))
        if kept:
            costs, lost = _only(program, costs, kept)
            notes += [f"{key[0]}/{key[1]}: {sentence}" for sentence in lost]
        name = policy if key[0] != "eval" else "dyn" if budget.algorithms == PERFORMANCE_OPTIMAL else "none"
        refusal: BudgetError | None = None
        try:
            decisions, plan = make_plan(program, costs, name, shared)
        except BudgetError as error:
            error.evaluated_images = key[1] if key[0] == "eval" else None
            if instead is None:
                refusals.append(error)
                continue
            refusal = error
            decisions, plan = instead(program, costs, name, shared)
        planned = apply_decisions(program, decisions)
        verify(planned, plan)
        plans[key] = Planned(planned, decisions, plan, costs, refusal)
    worst = largest(refusals)
    if worst is not None:
        raise worst
    return PlanSet(plans, whole, tuple(notes), recipe.layout_name, recipe.dtype, recipe.layouts)


def _whole(programs: Mapping[Key, Program]) -> Program:
    """The one with every persistent storage there is: weight gradients persist only in parts of a step."""
    return min(programs.values(), key=lambda program: -len(program.persistent))


def _only(program: Program, costs: CostTable, kept: Mapping[str, str]) -> tuple[CostTable, list[str]]:
    """`costs` with what was recorded as the only choice of each op, and what is no choice any more."""
    table, given = dict(costs.candidates), dict(costs.given)
    lost = []
    batches = {op.name: batch_of(op, program) for op in program.ops if op.kind in BY_IMAGE}
    for op, words in kept.items():
        found = _recorded(costs, op, words, batches.get(op, 0))
        if found is None:
            lost.append(f"op '{op}' ran with {words} before, which is not available here: results may round otherwise")
            continue
        given[op] = found
        if isinstance(found, Candidate):
            table[op] = (found,)
    return replace(costs, candidates=table, given=given), lost


def _recorded(costs: CostTable, op: str, words: str, batch: int) -> Candidate | Division | None:
    """The choice of `op` that `words` name; None if it is not among its costs."""
    rows = parse(words, batch) if costs.slices is not None else None
    if rows is None or costs.slices is None:
        return next((c for c in costs.candidates.get(op, ()) if c.algorithm == words), None)
    parts: list[Part] = []
    for images, algorithm in rows:
        options = costs.slices(op, images).candidates
        parts += [Part(images, c) for c in options if c.algorithm == algorithm][:1]
    return Division(tuple(parts)) if len(parts) == len(rows) else None
