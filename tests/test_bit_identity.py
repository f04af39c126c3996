"""A policy changes where bytes live and when, never a result: losses and weights after five steps, bit for bit.

The reference runs the ops in program order with every tensor in an array of its own: no plan, no slab, no streams.
"""

from __future__ import annotations

from itertools import permutations, product

import pytest
from plan_lab import Lab, Machine, reference

from vdnn.memory.plan import STREAMS, CopyOut
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL

POLICIES = ("base", "none", "all", "conv")
ORDERS = (None, *permutations(STREAMS))
"""Threads, then every adversarial order."""


@pytest.mark.parametrize("algorithms", [MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL])
@pytest.mark.parametrize(
    ("network", "batch", "options"),
    [
        ("lenet", 3, {}),
        ("googlenet", 1, {"image_size": 47, "narrow": 2, "classes": 10}),
        ("resnet18", 2, {"image_size": 64, "narrow": 4, "classes": 10}),
    ],
    ids=["lenet", "googlenet", "resnet18"],
)
def test_losses_and_weights_are_the_same_under_every_policy_limit_and_order(
    network: str, batch: int, options: dict[str, int], algorithms: str
) -> None:
    lab = Lab(network, batch, steps=5, **options)
    cases = [lab.case(policy, algorithms=algorithms, tight=tight) for policy, tight in product(POLICIES, (False, True))]
    expected = reference(lab, cases[0])
    assert len({outcome.tobytes() for outcome in expected.fetched}) > 5, "five equal steps would prove nothing"
    runs = product(range(len(cases)), range(len(ORDERS)))
    if network != "lenet":  # the larger networks: each case by threads and under two of the six orders
        runs = ((i, j) for i, j in runs if j == 0 or (i + j) % 3 == 0)
    machines = [Machine(lab, cases, order) for order in ORDERS]
    for i, j in runs:
        assert machines[j].run(cases[i], cases[i].plan).equals(expected), f"{cases[i].name}, order {ORDERS[j]}"
    for machine in machines:
        machine.close()


def test_the_plans_compared_are_different_plans() -> None:
    lab = Lab("lenet", 3)
    plans = {
        (policy, tight): lab.case(policy, algorithms=MEMORY_OPTIMAL, tight=tight).plan
        for policy, tight in product(POLICIES, (False, True))
    }
    slabs = {policy: plan.slab_bytes for (policy, tight), plan in plans.items() if tight}
    assert slabs["base"] > slabs["none"] > slabs["conv"] > slabs["all"]
    copies = {policy: sum(isinstance(step, CopyOut) for step in plans[policy, True].steps) for policy in POLICIES}
    assert copies["base"] == copies["none"] == 0 < copies["conv"] < copies["all"]
    assert plans["all", True].slab_bytes < plans["all", False].slab_bytes
