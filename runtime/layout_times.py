"""What layers and transforms take in each layout: by the cost table, or measured where nothing has been measured yet.

    times = layout_times(backend, graph, ("train", 64), costs_of, recipe, progress=print)

A step is measured in each layout on blank data, and every transform of every shape, if that is a matter of seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from vdnn.errors import BudgetError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate, CostTable
from vdnn.memory.decisions import Decisions, LayoutChoice
from vdnn.memory.layout import (
    LAYOUTS,
    LayoutTimes,
    layer_times,
    transform_program,
    transform_times,
)
from vdnn.memory.layout_search import LEAST_GAIN, LEAST_GAIN_BY_CLOCK, choose_known, search_layouts, single_layouts
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import Budget, make_plan
from vdnn.runtime.backend import Backend
from vdnn.runtime.layout_meter import LayoutMeter, bounds
from vdnn.runtime.measure import RUNS, blank_feeds, measure_costs
from vdnn.runtime.planset import Key, Recipe
from vdnn.units import format_bytes, format_ms

Choices = dict[str, LayoutChoice]
Costs = Callable[[Program], CostTable]
MEASURE_BELOW_MS = 30_000.0
"""Most expected time of a measurement."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a measurement of steps has to keep to.

    Args:
        limit_bytes: most bytes of the device; None for all that it has.
        deterministic: whether equal commands have to make equal choices, so that nothing may be measured.
    """

    limit_bytes: int | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Quickest:
    """Layouts by layer and graph.input, the times they were chosen by, and single layouts in the order of theirs."""

    choices: Choices
    times: LayoutTimes
    singles: tuple[str, ...]


def choose_quickest(
    backend: Backend,
    graph: Graph,
    key: Key,
    costs_of: Costs,
    recipe: Recipe,
    conditions: Conditions,
    progress: Progress | None = None,
) -> Quickest:
    """The layouts with the least time of layers and transforms; arguments as `layout_times` takes them.

    A backend that measures every op by itself measures what the choice rests on, and no more. Either way a mix has to
    gain more than what may be noise.
    """
    if not backend.caps.measured_costs:
        times = layout_times(backend, graph, key, costs_of, recipe, conditions, progress)
        found, times = choose_known(graph, times, LEAST_GAIN_BY_CLOCK if times.measured else LEAST_GAIN)
        return Quickest(found, times, single_layouts(graph, times))
    if progress is not None:
        progress("layouts: measuring layers and transforms in the layouts that may be the quickest, once for this GPU")
    programs, transforms = _programs(graph, key, recipe)
    meter = LayoutMeter(programs, transforms, costs_of)
    known = bounds(programs, transforms, backend.caps)
    found, times = search_layouts(graph, known, meter.layer_ms, meter.transform_ms)
    if progress is not None:
        counts = Counter(choice.layout for choice in found.values()).most_common()
        words = (
            f"{counts[0][0]} for all layers" if len(counts) == 1 else ", ".join(f"{n} in {one}" for one, n in counts)
        )
        progress(f"layouts: the quickest are {words}; 'vdnn layouts explain' says why")
    return Quickest(found, times, single_layouts(graph, times))


def layout_times(
    backend: Backend,
    graph: Graph,
    key: Key,
    costs_of: Costs,
    recipe: Recipe,
    conditions: Conditions,
    progress: Progress | None = None,
) -> LayoutTimes:
    """Times of a training step in ms.

    Args:
        backend: closed, or one that has no data.
        graph: as it is lowered (vdnn.layers.rewrite).
        costs_of: the CostTable of a program.
        progress: told in words before a measurement, or why there is none.
    """
    programs, transforms = _programs(graph, key, recipe)
    costs = {layout: costs_of(program) for layout, program in programs.items()}
    moves = costs_of(transforms)
    measured = _measures(backend, [(programs[layout], costs[layout]) for layout in LAYOUTS], conditions, progress)
    if measured:
        costs = {layout: _measured(backend, programs[layout], costs[layout], conditions) for layout in LAYOUTS}
        moves = _measured_transforms(backend, transforms, moves)
    layers = {layout: layer_times(programs[layout], costs[layout]) for layout in LAYOUTS}
    source = costs[LAYOUTS[0]].source
    return LayoutTimes(layers, transform_times(graph, transforms, moves), source=source, measured=measured)


def _programs(graph: Graph, key: Key, recipe: Recipe) -> tuple[dict[str, Program], Program]:
    """The program with each layout everywhere, and all transforms."""
    plain = replace(recipe, pool_indices=False, fuse=False, layouts={})  # the graph has them already
    programs = {layout: replace(plain, layout=layout).lower(graph, key) for layout in LAYOUTS}
    return programs, transform_program(graph, key[1], key[0], recipe.dtype)


def step_costs(
    backend: Backend,
    program: Program,
    costs: CostTable,
    conditions: Conditions,
    progress: Progress | None = None,
) -> CostTable:
    """`costs` of one program, measured under the same conditions, but deterministic or not: nothing is chosen."""
    conditions = replace(conditions, deterministic=False)
    measures = _measures(backend, [(program, costs)], conditions, progress)
    return _measured(backend, program, costs, conditions) if measures else costs


def _measures(
    backend: Backend,
    steps: Sequence[tuple[Program, CostTable]],
    conditions: Conditions,
    progress: Progress | None,
) -> bool:
    """Whether to measure steps with these costs, which is said."""
    if not backend.caps.has_data or backend.caps.measured_costs:
        return False
    why_not = _why_not(steps, conditions)
    if why_not is not None:
        if progress is not None:
            progress(f"layouts: not measured, {why_not}; times are {backend.caps.cost_source}")
        return False
    expected_ms = RUNS * sum(sum(layer_times(*step).values()) for step in steps)
    measures = expected_ms < MEASURE_BELOW_MS
    if progress is not None:
        took = f"{RUNS * len(steps)} steps on blank data, about {format_ms(expected_ms)}"
        instead = f"too long; times are {backend.caps.cost_source}"
        progress(f"layouts: measuring {took}" if measures else f"layouts: to measure {took}, is {instead}")
    return measures


def _why_not(steps: Sequence[tuple[Program, CostTable]], conditions: Conditions) -> str | None:
    """What keeps these steps from being measured, in words."""
    if conditions.deterministic:
        return "for with deterministic: true equal commands choose equal layouts"
    for step in steps:
        try:
            make_plan(*step, "none", Budget(device_bytes=conditions.limit_bytes))
        except BudgetError:
            assert conditions.limit_bytes is not None
            return f"for a step with everything on the device does not fit in {format_bytes(conditions.limit_bytes)}"
    return None


def _measured(backend: Backend, program: Program, costs: CostTable, conditions: Conditions) -> CostTable:
    """`costs` with times of a few steps of `program`, everything on the device."""
    decisions, plan = make_plan(program, costs, "none", Budget(device_bytes=conditions.limit_bytes))
    planned = apply_decisions(program, decisions)
    return _run(backend, plan, planned, blank_feeds(planned), costs)


def _measured_transforms(backend: Backend, program: Program, costs: CostTable) -> CostTable:
    """`costs` of transforms with times of a few runs, those of one shape measured once."""
    table: dict[str, tuple[Candidate, ...]] = {}
    known: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
    source = costs.source
    for layer in dict.fromkeys(op.layer for op in program.ops):
        ops = tuple(op for op in program.ops if op.layer == layer)
        keys = {op.name: _key(op, program) for op in ops}
        if not set(keys.values()) <= set(known):
            names = dict.fromkeys(name for op in ops for name in (op.reads["x"], op.writes["y"]))
            tensors = {name: program.tensors[name] for name in names}
            part = replace(program, tensors=tensors, ops=ops, persistent=tuple(names))
            found = _run(backend, plan_program(part, Decisions("none")), part, {}, costs)
            known |= {keys[op.name]: found.candidates[op.name] for op in ops}
            source = found.source
        table |= {name: known[key] for name, key in keys.items()}
    return replace(costs, candidates=table, source=source)


def _key(op: Op, program: Program) -> tuple[object, ...]:
    x, y = program.tensors[op.reads["x"]], program.tensors[op.writes["y"]]
    return x.shape, x.layout, y.layout


def _run(
    backend: Backend, plan: Plan, program: Program, feeds: Mapping[str, NDArray[Any]], costs: CostTable
) -> CostTable:
    backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
    try:
        return measure_costs(backend, plan, program, feeds, costs)
    finally:
        backend.close()
