"""No valid plan is refused: the planner's plans of every network, policy, choice of algorithms, join and mode."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from vdnn.layers import Program, Update, lower
from vdnn.memory.costs import CostTable
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL, POLICIES, Budget, make_plan, smallest_budget
from vdnn.memory.verify import verify
from vdnn.networks import NETWORKS, build
from vdnn.runtime.profile import load_profile, model_costs

CHOICES = tuple(product((MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL), ("reuse", "layer")))
DEEP = ("vgg116", "vgg216", "vgg316", "vgg416", "resnet50", "resnet101", "resnet152", "googlenet_bn")
"""Networks with so many layers that a plan takes a good part of a second: the choices take turns."""
MODES = ("eval", "first", "middle", "last")


@cache
def program_of(network: str, mode: str) -> tuple[Program, CostTable]:
    program = lower(build(network), 2, mode, update=Update(momentum=0.9))
    return program, model_costs(program, load_profile("titan-x-maxwell"))


def check(network: str, mode: str, policy: str, budget: Budget) -> None:
    program, costs = program_of(network, mode)
    decisions, plan = make_plan(program, costs, policy, budget)
    verify(apply_decisions(program, decisions), plan)


@pytest.mark.parametrize("mode", ["train", *MODES])
@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in DEEP])
def test_no_plan_is_refused(network: str, mode: str) -> None:
    for policy, (algorithms, join) in product(POLICIES, CHOICES):
        check(network, mode, policy, Budget(algorithms=algorithms, join=join))
    check(network, mode, "conv", Budget(prefetch_bytes=0))


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in DEEP])
def test_no_plan_in_the_fewest_bytes_is_refused(network: str) -> None:
    program, costs = program_of(network, "train")
    for policy, (algorithms, join) in product(("all", "conv", "dyn"), CHOICES):
        budget = Budget(algorithms=algorithms, join=join)
        own = None if policy == "dyn" else POLICIES[policy](program, costs, budget)
        check(network, "train", policy, replace(budget, device_bytes=smallest_budget(program, costs, budget, own)))


@pytest.mark.parametrize("network", DEEP)
def test_no_plan_of_a_deep_network_is_refused(network: str) -> None:
    first = DEEP.index(network)
    for turn, policy in enumerate(POLICIES, start=first):
        algorithms, join = CHOICES[turn % len(CHOICES)]
        check(network, "train", policy, Budget(algorithms=algorithms, join=join))
    check(network, MODES[first % len(MODES)], "all", Budget(join="layer"))
