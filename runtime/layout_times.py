"""What layers and transforms take in each layout: by the cost table, or measured where nothing has been measured yet.

    times = layout_times(backend, graph, ("train", 64), costs_of, recipe, progress=print)

A step is measured in each layout on blank data, and every transform of every shape, if that is a matter of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate, CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.layout import LAYOUTS, LayoutTimes, layer_times, transform_program, transform_times
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import Budget, make_plan
from vdnn.runtime.backend import Backend
from vdnn.runtime.measure import RUNS, blank_feeds, measure_costs
from vdnn.runtime.planset import Key, Recipe
from vdnn.units import format_ms

Costs = Callable[[Program], CostTable]
MEASURE_BELOW_MS = 30_000.0
"""Most expected time of a measurement."""


def layout_times(
    backend: Backend,
    graph: Graph,
    key: Key,
    costs_of: Costs,
    recipe: Recipe,
    progress: Callable[[str], None] | None = None,
) -> LayoutTimes:
    """Times of a training step in ms.

    Args:
        backend: closed, or one that has no data.
        graph: as it is lowered (vdnn.layers.rewrite).
        costs_of: the CostTable of a program.
        progress: told in words before a measurement, or why there is none.
    """
    plain = replace(recipe, pool_indices=False, fuse=False, layouts={})  # the graph has them already
    programs = {layout: replace(plain, layout=layout).lower(graph, key) for layout in LAYOUTS}
    costs = {layout: costs_of(program) for layout, program in programs.items()}
    transforms = transform_program(graph, key[1], key[0], recipe.dtype)
    moves = costs_of(transforms)
    if _measures(backend, [(programs[layout], costs[layout]) for layout in LAYOUTS], progress):
        costs = {layout: _measured(backend, programs[layout], costs[layout]) for layout in LAYOUTS}
        moves = _measured_transforms(backend, transforms, moves)
    layers = {layout: layer_times(programs[layout], costs[layout]) for layout in LAYOUTS}
    return LayoutTimes(layers, transform_times(graph, transforms, moves))


def step_costs(
    backend: Backend, program: Program, costs: CostTable, progress: Callable[[str], None] | None = None
) -> CostTable:
    """`costs` of one program, measured under the same conditions."""
    return _measured(backend, program, costs) if _measures(backend, [(program, costs)], progress) else costs


def _measures(
    backend: Backend, steps: Sequence[tuple[Program, CostTable]], progress: Callable[[str], None] | None
) -> bool:
    """Whether to measure steps with these costs, which is said."""
    if not backend.caps.has_data or backend.caps.measured_costs:
        return False
    expected_ms = RUNS * sum(sum(layer_times(*step).values()) for step in steps)
    measures = expected_ms < MEASURE_BELOW_MS
    if progress is not None:
        took = f"{RUNS * len(steps)} steps on blank data, about {format_ms(expected_ms)}"
        instead = f"too long; times are {backend.caps.cost_source}"
        progress(f"layouts: measuring {took}" if measures else f"layouts: to measure {took}, is {instead}")
    return measures


def _measured(backend: Backend, program: Program, costs: CostTable) -> CostTable:
    """`costs` with times of a few steps of `program`, everything on the device."""
    decisions, plan = make_plan(program, costs, "none", Budget())
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
