"""The verifier on the planner's plans of real networks: no alarm, every fault that matters caught, and fast."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from time import perf_counter

import pytest
from plan_builder import random_plan, shrunk
from plan_faults import CONTENT_FAULTS, ORDER_FAULTS
from plan_machine import harmless

from vdnn.errors import PlanError
from vdnn.layers import Program, Update, lower
from vdnn.memory.decisions import Decisions
from vdnn.memory.plan import Plan
from vdnn.memory.planner import plan_program
from vdnn.memory.verify import verify
from vdnn.networks import build

FAULTS = {**ORDER_FAULTS, **CONTENT_FAULTS}
OPTIONS = ({}, {"allocation": "network"}, {"offload": True}, {"offload": True, "join": "layer"})


def program_of(network: str, mode: str = "train", fuse: bool = False) -> Program:
    return lower(build(network), 2, mode, update=Update(momentum=0.9), fuse=fuse, update_together=fuse)


def is_map(program: Program, name: str) -> bool:
    return program.tensors[name].role == "act" and program.tensors[name].view_of is None


def planned(program: Program, *, offload: bool = False, **options: str) -> Plan:
    used: dict[bool, set[str]] = {True: set(), False: set()}  # in forward?
    for op in program.ops:
        used[op.phase == "forward"] |= {program.storage(tensor) for tensor in (*op.reads.values(), *op.writes.values())}
    maps = tuple(name for name in program.tensors if name in used[True] & used[False] and is_map(program, name))
    return plan_program(program, Decisions("test", offload=maps if offload else (), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["train", "eval", "first", "last"])
@pytest.mark.parametrize("network", ["lenet", "alexnet", "googlenet", "googlenet_bn", "resnet18"])
def test_no_plan_of_the_planner_is_refused(network: str, mode: str, options: dict[str, str]) -> None:
    for fuse in (False, True):
        program = program_of(network, mode, fuse)
        verify(program, planned(program, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("network", "rounds", "fuse"),
    [("lenet", 12, False), ("googlenet", 4, False), ("resnet18", 4, False), ("lenet", 6, True), ("resnet18", 4, True)],
)
def test_every_fault_that_changes_what_is_computed_is_caught(network: str, rounds: int, fuse: bool) -> None:
    random = Random(network)
    program = shrunk(program_of(network, fuse=fuse), random)
    plans = [planned(program, offload=True), planned(program, offload=True, join="layer"), random_plan(program, random)]
    for plan in plans:
        verify(program, plan)
    verdicts: Counter[bool] = Counter()
    for i in range(rounds):
        for name, fault in FAULTS.items():
            plan = plans[i % len(plans)]
            steps = fault(list(plan.steps), random)
            if steps is None:
                continue
            faulty = replace(plan, steps=tuple(steps))
            try:
                verify(program, faulty)
            except PlanError:
                verdicts[False] += 1
                continue
            assert harmless(program, faulty), f"{name}, round {i}"
            verdicts[True] += 1
    assert verdicts.total() >= 27 * rounds  # 540 in all
    assert verdicts[False] > verdicts[True]


@pytest.mark.parametrize(("network", "limit_ms"), [("alexnet", 50), ("vgg416", 1500)])
def test_it_takes_no_time_to_speak_of(network: str, limit_ms: float) -> None:
    program = program_of(network)
    plan = planned(program, offload=True, join="layer")
    times_ms = []
    for _ in range(3):
        start = perf_counter()
        verify(program, plan)
        times_ms.append(1000 * (perf_counter() - start))
    assert min(times_ms) < limit_ms
