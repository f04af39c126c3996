"""Less workspace where computation waits for bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_pace import chain

from vdnn.layers import Update, lower
from vdnn.memory.clock import simulate
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.decisions import Algorithm
from vdnn.memory.ease import ease
from vdnn.memory.liveness import storage_uses
from vdnn.memory.pace import pace
from vdnn.memory.passes import apply_decisions
from vdnn.memory.planner import persistent_places, plan_program
from vdnn.memory.policy import POLICIES, Budget
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.profile import load_profile, model_costs


def waiting_case(small_ms: float):
    """Convolutions that copies of 1.2 ms hold up, each with a fast algorithm that takes two maps of workspace."""
    program = chain(8)
    nbytes = storage_uses(program)["conv1"].nbytes
    options = (Candidate("FAST", 1.0, 2 * nbytes), Candidate("SMALL", small_ms, 0))
    rates = CopyRates(nbytes / 1.2e6, nbytes / 1.2e6, 2 * nbytes / 1.2e6, 0.0)
    table = {op.name: options if op.kind.startswith("conv.") else (Candidate("default", 0.1),) for op in program.ops}
    costs = CostTable(table, rates, "made up")
    plain = POLICIES["conv"](program, costs, Budget())
    room = plan_program(program, replace(plain, prefetch_bytes=0)).slab_bytes
    return program, costs, plain, room


@pytest.mark.parametrize(("small_ms", "worth"), [(1.1, True), (40.0, False)])
def test_an_op_that_waits_takes_the_smaller_algorithm_if_the_step_is_quicker(small_ms: float, worth: bool) -> None:
    program, costs, plain, limit = waiting_case(small_ms)
    persistent = persistent_places(program)
    room = limit - persistent[1]
    paced = replace(pace(apply_decisions(program, plain), costs, plain, room), pace_bytes=room)
    eased = ease(program, costs, paced, limit, persistent)
    times = []
    for decisions in (paced, eased):
        planned = apply_decisions(program, decisions)
        plan = plan_program(program, decisions, limit, *persistent)
        verify(planned, plan)
        assert plan.slab_bytes <= limit
        times.append(simulate(plan, planned, costs).total_ms)
    changed = {op for op, algorithm in paced.algorithms.items() if eased.algorithms[op] != algorithm}
    assert bool(changed) == worth
    assert {eased.algorithms[op] for op in changed} <= {Algorithm("SMALL", 0)}
    assert times[1] < times[0] if worth else eased == paced


def test_where_nothing_waits_nothing_changes() -> None:
    program = lower(build("lenet"), 8, update=Update(momentum=0.9))
    costs = model_costs(program, load_profile("h200"))
    kept = POLICIES["none"](program, costs, Budget())
    assert ease(program, costs, kept, 2**30, persistent_places(program)) == kept
