"""Measured costs: every op of a plan timed where it will run, in the pool's own memory.

    costs = measure_costs(backend, plan, program, feeds, planned.costs)
    simulate(plan, program, costs).total_ms

Only the algorithm that is chosen is run; other candidates keep their proportion to it. Waiting for each op makes it
look slower than it is in a step, so the ops are then scaled to what whole steps take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.lower import IMAGES, LABELS, STEP
from vdnn.layers.op import Op, Program
from vdnn.memory.clock import simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.plan import Plan
from vdnn.runtime.backend import Backend
from vdnn.runtime.executor import Executor
from vdnn.runtime.step import new_step

ROUNDS, WHOLE_ROUNDS = 3, 5
RUNS = ROUNDS + 1 + WHOLE_ROUNDS
"""Of a plan, to measure it."""


def measure_costs(
    backend: Backend, plan: Plan, program: Program, feeds: Mapping[str, NDArray[Any]], costs: CostTable
) -> CostTable:
    """`costs` with measured times, the median of a few runs after one to warm up.

    The runs compute on whatever the slab holds and leave it changed: measure before weights are written.
    """
    seen: dict[str, list[float]] = {op.name: [] for op in program.ops}
    last = 0.0

    def note(op: Op, arrays: Mapping[str, Any]) -> None:
        nonlocal last
        now = perf_counter()
        seen[op.name].append((now - last) * 1000)
        last = perf_counter()

    executor = Executor(backend, plan, program, inspect=note)
    for _ in range(ROUNDS + 1):
        last = perf_counter()
        executor.run(feeds)
    single = {name: median(times[1:]) for name, times in seen.items()}
    separate = _scaled(costs, program, single, 1.0, backend.caps.name)
    whole = Executor(backend, plan, program)
    totals = []
    for _ in range(WHOLE_ROUNDS):
        started = perf_counter()
        whole.run(feeds)
        totals.append((perf_counter() - started) * 1000)
    factor = median(totals) / simulate(plan, program, separate).total_ms
    return _scaled(costs, program, single, factor, backend.caps.name)


def _scaled(
    costs: CostTable, program: Program, measured_ms: Mapping[str, float], factor: float, where: str
) -> CostTable:
    table = dict(costs.candidates)
    for op in program.ops:
        ratio = factor * measured_ms[op.name] / costs.run_ms(op, program)
        table[op.name] = tuple(replace(c, time_ms=c.time_ms * ratio) for c in costs.of(op, program))
    return replace(costs, candidates=table, source=f"measured on this {where}")


def blank_feeds(program: Program) -> dict[str, NDArray[Any]]:
    """Black images, which cannot be written, label 0 and a step that changes nothing."""
    images = np.zeros(program.tensors[IMAGES].shape, np.uint8)
    images.setflags(write=False)
    return {
        IMAGES: images,
        LABELS: np.zeros(program.tensors[LABELS].shape, np.int32),
        STEP: new_step(0.0, 0.0, 0, 0),
    }
