"""The verifier against a machine that runs plans on bytes: random valid plans, and the same plans with one fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builder import random_plan, random_program
from plan_faults import CONTENT_FAULTS, ORDER_FAULTS
from plan_machine import harmless, sound

from vdnn.errors import PlanError
from vdnn.layers import Program
from vdnn.memory.plan import Plan
from vdnn.memory.verify import verify

SEEDS = range(18)


def accepts(program: Program, plan: Plan) -> bool:
    try:
        verify(program, plan)
    except PlanError:
        return False
    return True


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_no_valid_plan_is_refused(seed: int) -> None:
    random = Random(seed)
    program = random_program(random, layers=random.randint(1, 6))
    plan = random_plan(program, random)
    assert sound(program, plan)
    assert harmless(program, plan)
    verify(program, plan)


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_a_plan_of_another_order_is_refused_exactly_if_it_is_unsound(fault: str) -> None:
    seen: Counter[bool] = Counter()
    for seed in SEEDS:
        random = Random(f"{fault} {seed}")
        program = random_program(random, layers=4)
        plan = random_plan(program, random)
        steps = ORDER_FAULTS[fault](list(plan.steps), random)
        if steps is None:
            continue
        faulty = replace(plan, steps=tuple(steps))
        valid = sound(program, faulty)
        assert accepts(program, faulty) == valid, f"{fault}, seed {seed}"
        # what no race can touch, no order of the streams may change
        assert harmless(program, faulty) or not valid
        seen[valid] += 1
    assert seen[False] >= 3, "the fault is too tame to test anything"


@pytest.mark.parametrize("fault", CONTENT_FAULTS)
def test_a_plan_of_another_content_is_refused_if_it_computes_another_thing(fault: str) -> None:
    harmful = 0
    for seed in SEEDS:
        random = Random(f"{fault} {seed}")
        program = random_program(random, layers=4)
        plan = random_plan(program, random)
        steps = CONTENT_FAULTS[fault](list(plan.steps), random)
        if steps is None:
            continue
        faulty = replace(plan, steps=tuple(steps))
        if not harmless(program, faulty):
            harmful += 1
            assert not accepts(program, faulty), f"{fault}, seed {seed}"
        elif accepts(program, faulty):
            assert sound(program, faulty), f"{fault}, seed {seed}"
    assert harmful >= 3, "the fault is too tame to test anything"
