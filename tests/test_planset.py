"""All plans of a run: how steps are cut, one place for what persists, and algorithms that a resumed run keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from vdnn.errors import BudgetError
from vdnn.layers import Program, Update
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Algorithm
from vdnn.memory.plan import Alloc
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL, Budget
from vdnn.networks import build
from vdnn.runtime.config import load_config
from vdnn.runtime.planset import Algorithms, Key, PlanSet, Recipe, build_plans, slice_sizes, step_parts
from vdnn.runtime.prepare import prepare
from vdnn.runtime.profile import load_profile, model_costs
from vdnn.units import format_bytes

RECIPE = Recipe(Update(momentum=0.9, weight_decay=5e-4), mean=(0.1,), std=(0.3,))
ACCUMULATED = (*step_parts(64, 22), *step_parts(10, 22), ("eval", 22), ("eval", 7))


def costs_of(program: Program) -> CostTable:
    return model_costs(program, load_profile("titan-x-maxwell"))


def update_kinds(policy: str, budget: Budget, keys: Iterable[Key] = (("train", 64), ("eval", 22))) -> dict[str, int]:
    """How many update ops of each kind there are where the recipe leaves it open, in all plans."""
    recipe = replace(RECIPE, update_together=None)
    plans = build_plans(build("lenet"), keys, costs_of, policy, budget, recipe)
    ops = [op for planned in plans.plans.values() for op in planned.program.ops]
    return Counter(op.kind for op in ops if op.phase == "update")


@pytest.mark.parametrize(("policy", "together"), [("base", 1), ("none", 1), ("conv", 0), ("all", 0), ("dyn", 1)])
def test_weights_are_updated_together_where_nothing_is_offloaded(policy: str, together: int) -> None:
    kinds = update_kinds(policy, Budget(2**30))
    assert kinds == ({"sgd.update_all": 1} if together else {"sgd.update": 8})


def test_weights_are_updated_one_by_one_where_there_is_no_room_for_all_gradients() -> None:
    apart = planned([("train", 64)], "none", Budget(algorithms=MEMORY_OPTIMAL)).slab_bytes
    roomy = Budget(2 * apart, algorithms=MEMORY_OPTIMAL)
    tight = Budget(apart + 2**17, algorithms=MEMORY_OPTIMAL)  # less than the gradients of all weights
    assert update_kinds("dyn", roomy, [("train", 64)]) == {"sgd.update_all": 1}
    assert update_kinds("dyn", tight, [("train", 64)]) == {"sgd.update": 8}


def test_parts_of_a_step_are_updated_together_in_the_last() -> None:
    assert update_kinds("none", Budget(2**30), step_parts(64, 22)) == {"sgd.update_all": 1}


def test_weights_are_updated_one_by_one_where_parts_leave_no_room_for_all_gradients() -> None:
    def slab_bytes(update: str, limit: int) -> int:
        sizes = ["train.batch_size=7", "train.accumulate=3", "memory.policy=dyn", f"memory.limit={limit}"]
        return prepare(load_config("lenet", ["device=cpu", *sizes, f"memory.update={update}"])).plans.slab_bytes

    with pytest.raises(BudgetError) as refused:
        slab_bytes("layer", 1)
    least = refused.value.smallest_bytes
    assert least is not None
    with pytest.raises(BudgetError):
        slab_bytes("together", least)
    assert slab_bytes("auto", least) <= least


@pytest.mark.parametrize(
    ("name", "policy"), [("lenet", "none"), ("lenet", "conv"), ("cifar10", "all"), ("cifar10", "none")]
)
def test_the_budget_that_a_refusal_names_for_the_policy_is_enough_for_every_part(name: str, policy: str) -> None:
    sizes = ["train.batch_size=7", "train.accumulate=3", "evaluate.batch_size=16", f"memory.policy={policy}"]
    images = ["device=cpu", "data={source: synthetic, train_images: 64, test_images: 16}"]
    with pytest.raises(BudgetError) as refused:
        prepare(load_config(name, [*images, *sizes, "memory.limit=1"]))
    least = refused.value.own_bytes
    assert least is not None
    assert f"with policy '{policy}' and these algorithms: {format_bytes(least)} ({least:,} bytes)" in str(refused.value)
    assert prepare(load_config(name, [*images, *sizes, f"memory.limit={least}"])).plans.slab_bytes <= least


def planned(
    keys: Iterable[Key], policy: str = "all", budget: Budget | None = None, recorded: Algorithms | None = None
) -> PlanSet:
    return build_plans(build("lenet"), keys, costs_of, policy, budget or Budget(), RECIPE, recorded)


@pytest.mark.parametrize(
    ("images", "micro", "sizes"),
    [
        (64, 22, [22, 22, 20]),  # 64 / 3, rounded up
        (64, 64, [64]),
        (64, 16, [16, 16, 16, 16]),
        (65, 16, [16, 16, 16, 16, 1]),
        (7, 22, [7]),
        (1, 1, [1]),
    ],
)
def test_slices_are_equal_but_the_last(images: int, micro: int, sizes: list[int]) -> None:
    assert slice_sizes(images, micro) == sizes


def test_the_parts_of_a_step() -> None:
    assert step_parts(64, 22) == [("first", 22), ("middle", 22), ("last", 20)]
    assert step_parts(64, 16) == [("first", 16), ("middle", 16), ("middle", 16), ("last", 16)]
    assert step_parts(64, 32) == [("first", 32), ("last", 32)]
    assert step_parts(64, 64) == step_parts(64, 100) == [("train", 64)]


def test_persistent_storages_lie_at_the_same_place_in_every_plan() -> None:
    plans = planned(ACCUMULATED)
    assert list(plans.plans) == [
        ("first", 22),
        ("middle", 22),
        ("last", 20),
        ("train", 10),
        ("eval", 22),
        ("eval", 7),
    ]
    places = plans["last", 20].plan.persistent
    ends = plans["last", 20].plan.persistent_bytes
    for key, one in plans.plans.items():
        assert dict(one.plan.persistent) == dict(places), key
        assert one.plan.persistent_bytes == ends
        assert set(one.program.persistent) <= set(places), key
        # what only other plans keep is not written over by this one
        assert all(step.offset >= ends for step in one.plan.steps if isinstance(step, Alloc))
        assert one.plan.slab_bytes <= plans.slab_bytes
        assert one.plan.host_bytes <= plans.host_bytes
    assert plans.slab_bytes in {one.plan.slab_bytes for one in plans.plans.values()}
    # the gradients are summed over the parts of a step; a whole step and an evaluation keep none
    assert "conv1.weight.grad" in plans["first", 22].program.persistent
    assert "conv1.weight.grad" not in plans["train", 10].program.persistent
    assert set(plans.persistent.persistent) == set(places)


def test_a_set_without_parts_keeps_no_weight_gradients() -> None:
    plans = planned([("train", 10), ("eval", 7)])
    assert not [name for name in plans["train", 10].plan.persistent if name.endswith(".grad")]
    assert "conv1.weight.momentum" in plans["eval", 7].plan.persistent  # where training left it


def test_a_key_asked_for_twice_is_planned_once() -> None:
    assert list(planned([("train", 4), ("eval", 4), ("train", 4)]).plans) == [("train", 4), ("eval", 4)]


def test_evaluation_offloads_nothing() -> None:
    plans = planned(ACCUMULATED)
    assert plans["first", 22].plan.host_bytes > 0
    assert plans["eval", 22].plan.host_bytes == 0
    assert plans["eval", 22].plan.slab_bytes < plans["train", 10].plan.slab_bytes + plans.slab_bytes


def test_recorded_algorithms_are_kept() -> None:
    fast, slow = planned(ACCUMULATED), planned(ACCUMULATED, budget=Budget(algorithms=MEMORY_OPTIMAL))
    assert fast.algorithms() != slow.algorithms()
    record = slow.algorithms()
    assert set(record) == {"first/22", "middle/22", "last/20", "train/10", "eval/22", "eval/7"}
    for policy in ("none", "all", "conv", "dyn"):
        again = planned(ACCUMULATED, policy, Budget(algorithms=PERFORMANCE_OPTIMAL), recorded=record)
        assert again.algorithms() == record, policy
    assert planned(ACCUMULATED, recorded={}).algorithms() == fast.algorithms()


def test_one_recorded_algorithm_is_kept_and_the_others_are_chosen() -> None:
    free = planned([("train", 8)])
    chosen = free["train", 8].decisions.algorithms
    op = next(name for name, algorithm in chosen.items() if algorithm.name != "FFT_TILING" and "conv2.forward" in name)
    again = planned([("train", 8)], recorded={"train/8": {op: "FFT_TILING"}})["train", 8].decisions.algorithms
    assert again[op].name == "FFT_TILING"
    assert again[op].workspace_bytes > 0
    assert {n: a for n, a in again.items() if n != op} == {n: a for n, a in chosen.items() if n != op}
    assert all(isinstance(a, Algorithm) for a in again.values())


def test_one_plan_that_does_not_fit_is_an_error() -> None:
    small = planned([("train", 8)]).slab_bytes
    assert planned([("train", 8), ("eval", 8)], budget=Budget(small)).slab_bytes <= small
    with pytest.raises(BudgetError, match="512 images at once"):
        planned([("train", 8), ("eval", 512)], budget=Budget(small))


def test_the_recipe_reaches_the_program() -> None:
    program = planned([("train", 4)])["train", 4].program
    normalise = program.ops[0]
    assert (normalise.attrs["mean"], normalise.attrs["std"]) == ([0.1], [0.3])
    update = next(op for op in program.ops if op.name == "conv1.weight.update")
    assert (update.attrs["momentum"], update.attrs["weight_decay"]) == (0.9, 5e-4)
