"""What is named as the smallest budget works: under host limits, in parts of a step, with larger evaluation batches."""

from __future__ import annotations

import pytest
from scripts import refused, script

from vdnn.errors import BudgetError
from vdnn.layers import Update, lower
from vdnn.memory.policy import Budget, make_plan, none
from vdnn.networks import build
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.config import load_config
from vdnn.runtime.devices import open_device
from vdnn.runtime.dry_plan import plan_run
from vdnn.runtime.prepare import backend_costs, make_budget, prepare

TOO_SMALL = 2**20


@pytest.mark.parametrize("host_bytes", [None, 0, 100_000])
@pytest.mark.parametrize("policy", ["base", "none", "conv", "all", "dyn"])
def test_the_smallest_budget_works_under_the_same_host_limit(policy, host_bytes):
    program = lower(build("lenet"), 16, update=Update(momentum=0.9))
    costs = backend_costs(CpuBackend(), program)
    with pytest.raises(BudgetError) as caught:
        make_plan(program, costs, policy, Budget(TOO_SMALL, host_bytes))
    named = caught.value.smallest_bytes
    assert named is not None
    for working in ("dyn", "none"):
        try:
            _, plan = make_plan(program, costs, working, Budget(named, host_bytes, algorithms="memory-optimal"))
        except BudgetError:
            continue
        assert plan.slab_bytes <= named
        return
    pytest.fail(f"nothing plans in the {named} bytes that were named")


def test_the_largest_need_of_all_plans_is_named():
    overrides = ["evaluate.batch_size=500", "device=cpu"]
    with pytest.raises(BudgetError) as caught:
        prepare(load_config("lenet", [*overrides, f"memory.limit={TOO_SMALL}"]))
    named = caught.value.smallest_bytes
    prepared = prepare(load_config("lenet", [*overrides, f"memory.limit={named}"]))
    assert prepared.plans.slab_bytes <= named


@pytest.mark.parametrize(("policy", "advised"), [("conv", "'none'"), ("all", "'conv' or 'none'")])
def test_a_host_limit_is_answered_with_policies_that_move_less(policy, advised):
    program = lower(build("lenet"), 16, update=Update(momentum=0.9))
    with pytest.raises(BudgetError, match=rf"raise the host limit, or use policy {advised}, which"):
        make_plan(program, backend_costs(CpuBackend(), program), policy, Budget(None, 0))


def test_a_workspace_limit_that_no_algorithm_keeps_is_said():
    program = lower(build("lenet"), 16, update=Update(momentum=0.9))
    costs = backend_costs(CpuBackend(), program)
    assert "workspace limit 0 B" in none(program, costs, Budget(workspace_bytes=0)).notes[0]
    assert none(program, costs, Budget(workspace_bytes=2**30)).notes == ()


@pytest.mark.parametrize(("batch", "accumulate"), [(10, 3), (65, 8), (64, 1)])
def test_a_dry_plan_needs_what_training_will(batch, accumulate):
    config = load_config("lenet", [f"train.batch_size={batch}", f"train.accumulate={accumulate}", "memory.limit=1GiB"])
    prepared = prepare(config)
    backend, _ = open_device("cpu")
    parts = plan_run(config, prepared.graph, backend, make_budget(config, backend)).parts
    full = [prepared.plans[key] for key in prepared.steps.full]
    assert [part.plan.slab_bytes for part in parts] == [planned.plan.slab_bytes for planned in full]
    assert [part.program.batch for part in parts] == [key[1] for key in prepared.steps.full]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_dry_plan_judges_evaluation_too(fraction):
    overrides = ["evaluate.batch_size=500", "train.batch_size=4", "device=cpu"]
    needed = prepare(load_config("lenet", [*overrides, "memory.limit=1GiB"])).plans["eval", 500].plan.slab_bytes
    limit = int(needed * fraction)
    config = load_config("lenet", [*overrides, f"memory.limit={limit}"])
    backend, _ = open_device("cpu")
    dry = plan_run(config, build("lenet"), backend, make_budget(config, backend))
    assert max(part.plan.slab_bytes for part in dry.parts) < limit
    assert "evaluation in batches of 500 images needs more than the step" in dry.notes()[0]
    assert (dry.plans.refusal is None) == (fraction == 1.0)
    if dry.plans.refusal is not None:
        with pytest.raises(BudgetError) as caught:
            prepare(config)
        assert str(caught.value) == str(dry.plans.refusal)


def test_train_says_that_it_is_evaluation_in_the_words_of_plan(tmp_path):
    options = ("lenet", "--device", "cpu", "-b", 1, "-o", "evaluate.batch_size=100", "--memory-limit", "7MB")
    planned = script("vdnn", "plan", *options, cwd=tmp_path)
    (sentence,) = (line for line in planned.out.splitlines() if line.startswith("evaluation in batches of 100 images"))
    assert "and does not fit: " in sentence
    assert sentence.endswith("; evaluate.batch_size sets it")
    data = ("-o", "data={source: synthetic, train_images: 10, test_images: 100}")
    refused(script("vdnn-train", *options, *data, cwd=tmp_path), 3, f"vdnn-train: {sentence}: ")
    step = ("lenet", "--device", "cpu", "-b", 100, "-o", "evaluate.batch_size=1", "--memory-limit", "7MB", *data)
    assert "evaluat" not in script("vdnn-train", *step, cwd=tmp_path).error
