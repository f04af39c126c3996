"""All plans of a run: training steps and their parts, evaluation, last partial batches, in one slab.

    plans = build_plans(graph, shapes, costs_of, "dyn", budget, lowering)
    plans["train", 64].plan.slab_bytes <= plans.slab_bytes

Every plan puts the persistent storages at the same offsets, so that each continues where another ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from vdnn.errors import BudgetError
from vdnn.layers.graph import Graph
from vdnn.layers.lower import Update, lower
from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.planner import persistent_places
from vdnn.memory.policy import PERFORMANCE_OPTIMAL, Budget, make_plan
from vdnn.memory.verify import verify

Key = tuple[str, int]
"""(mode, images): ("train", 64), ("eval", 16), ("first", 32)."""
Algorithms = Mapping[str, Mapping[str, str]]
"""Chosen algorithm by op, by plan ("train/64")."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One verified plan with what it was made from; `program` has its algorithms."""

    program: Program
    decisions: Decisions
    plan: Plan
    costs: CostTable


@dataclass(frozen=True, slots=True)
class PlanSet:
    """Plans by key; slabs large enough for each; notes on what an earlier run had and this one has not."""

    plans: Mapping[Key, Planned]
    persistent: Program
    notes: tuple[str, ...] = ()

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

    def algorithms(self) -> dict[str, dict[str, str]]:
        """The choices of every plan, for a checkpoint."""
        return {
            f"{mode}/{images}": {op: a.name for op, a in p.decisions.algorithms.items()}
            for (mode, images), p in self.plans.items()
        }


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
    """How programs of a run are lowered: the optimiser and the normalisation of images."""

    update: Update
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def lower(self, graph: Graph, key: Key) -> Program:
        """The program of `graph` for one key."""
        mode, images = key
        return lower(graph, images, mode, update=self.update, mean=self.mean, std=self.std)


def build_plans(
    graph: Graph,
    keys: Iterable[Key],
    costs_of: Callable[[Program], CostTable],
    policy: str,
    budget: Budget,
    recipe: Recipe,
    recorded: Algorithms | None = None,
) -> PlanSet:
    """Plan and verify every key; BudgetError if one does not fit.

    Args:
        costs_of: the CostTable of a program.
        recorded: algorithms of an earlier run of the same plans, which are kept.
    """
    programs = {key: recipe.lower(graph, key) for key in dict.fromkeys(keys)}
    # weight gradients persist only in parts of a step, so such a program has every persistent storage there is
    whole = min(programs.values(), key=lambda program: -len(program.persistent))
    shared = persistent_places(whole)
    plans: dict[Key, Planned] = {}
    notes: list[str] = []
    refused: list[BudgetError] = []
    for key, program in programs.items():
        costs = costs_of(program)
        kept = (recorded or {}).get(f"{key[0]}/{key[1]}")
        if kept:
            costs, lost = _only(costs, kept)
            notes += [f"{key[0]}/{key[1]}: {sentence}" for sentence in lost]
        name = policy if key[0] != "eval" else "dyn" if budget.algorithms == PERFORMANCE_OPTIMAL else "none"
        try:
            decisions, plan = make_plan(program, costs, name, replace(budget, shared=shared))
        except BudgetError as error:
            refused.append(error)  # the budget to name is that of the plan that needs most
            continue
        planned = apply_decisions(program, decisions)
        verify(planned, plan)
        plans[key] = Planned(planned, decisions, plan, costs)
    if refused:
        raise max(refused, key=lambda error: error.smallest_bytes or error.needed_bytes)
    return PlanSet(plans, whole, tuple(notes))


def _only(costs: CostTable, kept: Mapping[str, str]) -> tuple[CostTable, list[str]]:
    """`costs` with the recorded algorithm as the only candidate of each op, and what is no candidate any more."""
    table, lost = dict(costs.candidates), []
    for op, algorithm in kept.items():
        same = tuple(c for c in table.get(op, ()) if c.algorithm == algorithm)
        if same:
            table[op] = same
        else:
            lost.append(
                f"op '{op}' ran with {algorithm} before, which is not available here: results may round otherwise"
            )
    return replace(costs, candidates=table), lost
