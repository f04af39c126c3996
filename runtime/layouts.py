"""The layout of every layer of a run, chosen before its programs are made, and the table that says why.

    found = choose_layouts(config, graph, keys, costs_of, recipe, backend)       # .choices: empty for one everywhere
    program = with_choices(recipe, config, found.choices).lower(graph, keys[0])
    explain_layouts(program, costs_of(program), found, "NCHW everywhere")
    plans = plan_layouts(config, graph, keys, costs_of, recipe, backend, budget)

One choice serves every plan of a run, for they share the weights: it is made for the largest part of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vdnn.errors import BudgetError, ConfigError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Program
from vdnn.layers.rewrite import rewritten
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import LayoutChoice
from vdnn.memory.layout import LayoutTimes, Rule, layer_times, study_layouts
from vdnn.memory.policy import Budget
from vdnn.runtime.backend import Backend, Caps
from vdnn.runtime.config import Config
from vdnn.runtime.layout_sweep import known_rule
from vdnn.runtime.layout_times import Conditions, Costs, choose_quickest
from vdnn.runtime.planset import (
    LAYOUTS_OF_RUN,
    MIXED,
    Algorithms,
    Instead,
    Key,
    PlanSet,
    Recipe,
    build_plans,
    layout_of_plan,
    plan_name,
)
from vdnn.units import format_bytes

VECTORS = "vectors"
"""What stands for the layout of a layer that makes no images."""


@dataclass(frozen=True, slots=True)
class Found:
    """The layouts of a run.

    Args:
        choices: by layer, and graph.input, under a policy that gives each its own; else empty.
        times: they were chosen by; None where they were not chosen by time.
        singles: layouts that may stand in for `choices` in all layers, best first.
    """

    choices: Mapping[str, LayoutChoice] = field(default_factory=dict)
    times: LayoutTimes | None = None
    singles: tuple[str, ...] = ()


def choose_layouts(
    config: Config,
    graph: Graph,
    keys: Iterable[Key],
    costs_of: Costs,
    recipe: Recipe,
    backend: Backend,
    recorded: Algorithms | None = None,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """Choose layouts, measuring them if need be.

    Args:
        keys: of the plans to come; the choice is made for the largest that is no evaluation.
        costs_of: the CostTable of a program.
        backend: closed; it may be opened to measure, and is closed again.
        recorded: what an earlier run of the same plans has chosen, which is kept.
        progress: told in words what takes long.
    """
    policy = config.layout_policy_on(backend.caps.name)
    if policy is None:
        return Found()
    kept = _recorded(config, graph, recorded or {})
    if kept:
        return Found({name: LayoutChoice(layout, "as in the run that goes on") for name, layout in kept.items()})
    key = max(keys, key=lambda key: (key[0] != "eval", key[1]))
    graph = rewritten(graph, key[0], pool_indices=recipe.pool_indices, fuse=recipe.fuse)
    if policy == "study":
        rule = layout_rule(config, backend.caps)
        if progress is not None:
            progress(f"layouts: {rule}")
        return Found(study_layouts(graph, key[1], rule))
    quickest = choose_quickest(backend, graph, key, costs_of, recipe, conditions_of(config, backend.caps), progress)
    return Found(quickest.choices, quickest.times, quickest.singles)


def conditions_of(config: Config, caps: Caps) -> Conditions:
    """What a measurement for `config` has to keep to."""
    limit = config.memory.limit
    return Conditions(caps.memory_bytes if limit is None else limit, config.deterministic)


def plan_layouts(
    config: Config,
    graph: Graph,
    keys: Sequence[Key],
    costs_of: Costs,
    recipe: Recipe,
    backend: Backend,
    budget: Budget,
    recorded: Algorithms | None = None,
    instead: Instead | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlanSet:
    """All plans with the chosen layouts; where these do not fit, with the quickest single layout that does.

    Args:
        instead: plans what fits in no layout, as vdnn.runtime.planset.build_plans does. The others: as
            `choose_layouts` and `build_plans` take them.
    """
    found = choose_layouts(config, graph, keys, costs_of, recipe, backend, recorded, progress)

    def plans(choices: Mapping[str, LayoutChoice], instead: Instead | None = None) -> PlanSet:
        made = with_choices(recipe, config, choices)
        return build_plans(graph, keys, costs_of, config.memory.policy, budget, made, recorded, instead)

    if not found.singles:
        return plans(found.choices, instead)
    try:
        return plans(found.choices)
    except BudgetError as error:
        refusal = error
    for layout in found.singles:
        reason = f"in {layout} as all layers: the quickest layouts do not fit"
        single = {name: LayoutChoice(layout, reason) for name in found.choices}
        if {choice.layout for choice in found.choices.values()} == {layout}:
            continue
        try:
            planned = plans(single)
        except (BudgetError, ConfigError):  # ConfigError: no algorithm in this layout
            continue
        if progress is not None:
            limit = format_bytes(refusal.budget_bytes)
            progress(f"layouts: the quickest do not fit in {limit}; {layout} for all layers does and is taken")
        return planned
    if instead is None:
        raise refusal
    return plans(found.choices, instead)


def _recorded(config: Config, graph: Graph, recorded: Algorithms) -> Mapping[str, str]:
    """The layouts of a run that goes on; under memory.layout auto also where it had one layout everywhere, and only if
    it stored activations as this one does."""
    kept = recorded.get(LAYOUTS_OF_RUN)
    if config.memory.layout != "auto":
        return kept or {}
    ending = plan_name(("train", 1), MIXED, config.dtype).removeprefix("train/1")
    if kept:  # what was the quickest in another precision is not in this one
        return kept if any(name.endswith(ending) for name in recorded) else {}
    of_plans = {layout_of_plan(name, config.dtype) for name, chosen in recorded.items() if chosen}
    layout = of_plans.pop() if len(of_plans) == 1 else None
    if layout is None:
        return {}
    return {name: layout for name in (graph.input, *graph.nodes) if len(graph.shape(name)) == 3}


def with_choices(recipe: Recipe, config: Config, choices: Mapping[str, LayoutChoice]) -> Recipe:
    """`recipe` with these layouts; under memory.layout auto as if the one that all have had been asked for."""
    layouts = {choice.layout for choice in choices.values()}
    if config.memory.layout == "auto" and len(layouts) == 1:
        return replace(recipe, layout=layouts.pop(), layouts={})
    return replace(recipe, layouts=choices)


def layout_rule(config: Config, caps: Caps) -> Rule:
    """The study's rule with the thresholds of `config`, where it has some, else those found on this machine."""
    memory, study = config.memory, known_rule(caps) or Rule()
    given = {"layout_channels": memory.layout_channels, "layout_images": memory.layout_images}
    if all(value is None for value in given.values()):
        return study
    named = " and ".join(f"memory.{key}" for key, value in given.items() if value is not None)
    source = f"{named} of the configuration" + ("" if None not in given.values() else f", the other {study.source}")
    return Rule(memory.layout_channels or study.channels, memory.layout_images or study.images, source)


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layer in the table: C of what it reads and N; `transform` where it only moves images to its layout."""

    layer: str
    kind: str
    channels: int
    images: int
    layout: str
    time_ms: float
    reason: str
    transform: bool


def explain_layouts(program: Program, costs: CostTable, found: Found, usual: str) -> list[LayoutRow]:
    """A row for each layer of `program` that reads or makes images, in the order of forward.

    Args:
        costs: of `program`, for layers that were not chosen by time.
        found: why layers have their layout; `usual` is why the others have.
    """
    times, rows = layer_times(program, costs), {}
    for op in program.ops:
        read = [program.tensors[name] for name in op.reads.values()]
        images = [spec for spec in read if len(spec.shape) == 4 and spec.role in ("act", "input")]
        if op.phase != "forward" or op.layer in rows or not images:
            continue
        made = [program.tensors[name] for name in op.writes.values()]
        layout = next((spec.layout for spec in made if len(spec.shape) == 4), VECTORS)
        transform = op.kind == "layout.transform"
        choice = found.choices.get(op.layer)
        reason = choice.reason if choice is not None else usual if layout != VECTORS else "in logical order"
        reason = f"from {images[0].layout}" if transform else reason
        shape = images[0].shape
        kind = "transform" if transform else op.kind.split(".")[0]
        time_ms = times[op.layer]
        if found.times is not None and transform and layout != VECTORS:
            time_ms = found.times.transforms.get((op.reads["x"], images[0].layout, layout), time_ms)
        elif found.times is not None:  # what makes vectors goes by what it reads
            of_layout = found.times.layers[images[0].layout if layout == VECTORS else layout]
            time_ms = of_layout.get(op.layer, time_ms)
        rows[op.layer] = LayoutRow(op.layer, kind, shape[1], shape[0], layout, time_ms, reason, transform)
    return list(rows.values())
