"""The verifier against seeded faults: what it lets pass computes the same bits under every adversarial stream order.

Plans of the planner, of networks with all their layers and forks (small images, fewer filters), under every policy in
the fewest bytes, so that bytes are used again and copies matter. Of what it refuses a sample is run too: most of that
must change what is computed, or the faults would be too tame to prove anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from fault_tools import FAULTS
from plan_lab import Case, Lab, Machine, Outcome, reference

from vdnn.errors import PlanError, VdnnError
from vdnn.memory.plan import STREAMS, Plan
from vdnn.memory.verify import verify

PLANS = (
    ("none", "reuse", True),
    ("all", "reuse", True),
    ("all", "layer", True),
    ("conv", "reuse", False),
    ("conv", "layer", True),
    ("dyn", "layer", True),
)
"""Policy, join, and whether in the fewest bytes."""
SAMPLED = 4
"""One refused plan in so many is run."""


def changes(machines: list[Machine], case: Case, plan: Plan, expected: Outcome) -> str | None:
    """The stream order under which `plan` gives other bits than `expected`, fails or hangs; None if there is none."""
    for machine in machines:
        try:
            if not machine.run(case, plan).equals(expected):
                return f"other bits in order {machine.order}"
        except (VdnnError, KeyError) as error:
            return f"{type(error).__name__} in order {machine.order}: {error}"
    return None


def faulty(case: Case, name: str, random: Random) -> Plan | None:
    """The plan of `case` with the fault, if that changes it."""
    steps = FAULTS[name](list(case.plan.steps), random)
    if steps is None or tuple(steps) == case.plan.steps:
        return None
    return replace(case.plan, steps=tuple(steps))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over garbage
@pytest.mark.parametrize(
    ("lab", "rounds", "at_least"),
    [
        (("lenet", 2, {"image_size": 30}), 8, 450),
        (("googlenet", 1, {"image_size": 47, "narrow": 2, "classes": 10}), 4, 220),
        (("resnet18", 2, {"image_size": 64, "narrow": 4, "classes": 10}), 4, 220),
    ],
    ids=["lenet", "googlenet", "resnet18"],
)
def test_every_fault_that_changes_what_is_computed_is_caught(
    lab: tuple[str, int, dict[str, int]], rounds: int, at_least: int
) -> None:
    network, batch, options = lab
    bench = Lab(network, batch, **options)
    cases = [bench.case(policy, join=join, tight=tight) for policy, join, tight in PLANS]
    expected = [reference(bench, case) for case in cases]
    machines = [Machine(bench, cases, order) for order in permutations(STREAMS)]
    for case, outcome in zip(cases, expected, strict=True):
        verify(case.program, case.plan)
        assert changes(machines, case, case.plan, outcome) is None, case.name
    random = Random(network)
    count: Counter[str] = Counter()
    for _ in range(rounds):
        for name in FAULTS:
            for number in random.sample(range(len(cases)), len(cases)):
                plan = faulty(cases[number], name, random)
                if plan is not None:
                    break
            else:
                continue
            count["faults"] += 1
            try:
                verify(cases[number].program, plan)
            except PlanError:
                count["refused"] += 1
                if count["refused"] % SAMPLED == 0:
                    count["sampled"] += 1
                    count["harmful"] += changes(machines, cases[number], plan, expected[number]) is not None
                continue
            how = changes(machines, cases[number], plan, expected[number])
            assert how is None, f"{name} in {cases[number].name} passes the verifier: {how}"
    for machine in machines:
        machine.close()
    print(f"{network}: {dict(count)}")
    assert count["faults"] >= at_least
    assert count["refused"] >= 0.7 * count["faults"]
    assert count["harmful"] >= 0.6 * count["sampled"]
