"""What is saved is read back equal: Program, Decisions, CostTable and Plan through text of JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vdnn.layers import Program, Update, lower
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.decisions import Algorithm, Decisions
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import (
    STEP_KINDS,
    Alloc,
    CopyIn,
    CopyOut,
    Feed,
    Fetch,
    Free,
    Launch,
    Plan,
    Record,
    Wait,
)
from vdnn.memory.policy import Budget, make_plan
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.profile import load_profile, model_costs


def through_text(value: Any) -> Any:
    """`value` as a file would give it back."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("mode", ["train", "eval", "first", "last"])
@pytest.mark.parametrize("network", ["lenet", "googlenet", "resnet18"])
def test_what_a_plan_is_made_of_and_the_plan(network: str, mode: str) -> None:
    program = lower(build(network), 2, mode, update=Update(momentum=0.9, nesterov=True), mean=None)
    costs = model_costs(program, load_profile("titan-x-maxwell"))
    decisions, plan = make_plan(program, costs, "all", Budget(join="layer", prefetch_bytes=1 << 20))
    planned = apply_decisions(program, decisions)
    assert Program.from_json(through_text(program.to_json())) == program
    assert Program.from_json(through_text(planned.to_json())) == planned
    assert Decisions.from_json(through_text(decisions.to_json())) == decisions
    assert CostTable.from_json(through_text(costs.to_json())) == costs
    again = Plan.from_json(through_text(plan.to_json()))
    assert again == plan
    assert all(type(a) is type(b) for a, b in zip(again.steps, plan.steps, strict=True))
    # the copies serve as well as the originals
    verify(Program.from_json(through_text(planned.to_json())), again)


def test_every_kind_of_step() -> None:
    steps = (
        Alloc("a", 256, 1024),
        Feed("a", "in", 256),
        Record(3, "in"),
        Wait(3, "compute"),
        Launch("op", "compute"),
        CopyOut("a", 512, "out"),
        Free("a", "out"),
        CopyIn("a", "in"),
        Fetch("a", "out", 512),
    )
    assert {type(step).__name__ for step in steps} == set(STEP_KINDS)
    plan = Plan("name", 3, "eval", "p", "d", {"w": 0, "v": 256}, 512, 4096, 1024, steps, 768)
    data = plan.to_json()
    assert data["steps"][0] == ["Alloc", "a", 256, 1024]
    assert data["steps"][1] == ["Feed", "a", "in", 256]
    assert (data["stage_bytes"], plan.pinned_bytes) == (768, 1024 + 768)
    assert data["steps"][5] == ["CopyOut", "a", 512, "out"]
    assert Plan.from_json(through_text(data)) == plan


def test_decisions_with_every_field() -> None:
    decisions = Decisions(
        "dyn",
        offload=("data", "conv1"),
        algorithms={"conv1.forward": Algorithm("FFT", 123), "conv1.wgrad": Algorithm("GEMM")},
        allocation="network",
        join="layer",
        prefetch_bytes=0,
        notes=("one", "two"),
    )
    assert Decisions.from_json(through_text(decisions.to_json())) == decisions
    assert Decisions.from_json(through_text(Decisions("none").to_json())) == Decisions("none")


def test_a_cost_table_with_every_field() -> None:
    table = CostTable(
        {"a": (Candidate("X", 1.5, 64, deterministic=False), Candidate("Y", 2.25)), "b": (Candidate("default", 0.1),)},
        CopyRates(10.5, 9.25, 12.0, latency_us=3.5),
        "measured on nothing",
    )
    assert CostTable.from_json(through_text(table.to_json())) == table


def test_a_digest_tells_programs_and_decisions_apart() -> None:
    program = lower(build("lenet"), 2)
    assert program.digest() == lower(build("lenet"), 2).digest()
    assert Program.from_json(through_text(program.to_json())).digest() == program.digest()
    others = [
        lower(build("lenet"), 3),
        lower(build("lenet"), 2, "eval"),
        lower(build("lenet", dropout=0.25), 2),
        lower(build("lenet"), 2, update=Update(momentum=0.9)),
        lower(build("lenet"), 2, mean=(0.25,)),
        lower(build("lenet"), 2, ahead=True),
    ]
    assert len({program.digest(), *(other.digest() for other in others)}) == 7
    decisions = Decisions("all", offload=("data", "conv1"))
    changed = [
        replace(decisions, offload=("conv1", "data")),
        replace(decisions, join="layer"),
        replace(decisions, prefetch_bytes=0),
        replace(decisions, algorithms={"conv1.forward": Algorithm("FFT", 1)}),
        replace(decisions, algorithms={"conv1.forward": Algorithm("FFT", 2)}),
    ]
    assert len({decisions.digest(), *(other.digest() for other in changed)}) == 6


def test_a_plan_names_what_it_was_made_from() -> None:
    program = lower(build("lenet"), 2)
    costs = model_costs(program, load_profile("h200"))
    decisions, plan = make_plan(program, costs, "conv", Budget())
    assert plan.program_digest == apply_decisions(program, decisions).digest()
    assert plan.decisions_digest == decisions.digest()
    assert (plan.name, plan.batch, plan.mode) == ("lenet", 2, "train")
