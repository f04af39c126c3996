"""Where convolutions run in slices: what dyn gains by them, what a record keeps, and what people see."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from vdnn.cli.main import main
from vdnn.layers import Op, Program, TensorSpec, Update
from vdnn.memory.clock import simulate
from vdnn.memory.costs import Candidate, CostTable, Options
from vdnn.memory.passes import BY_IMAGE, slice_op
from vdnn.memory.policy import MEMORY_OPTIMAL, Budget
from vdnn.memory.slices import sizes_of, step_of
from vdnn.networks import build
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.products import unplaced_problem
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.config import load_config
from vdnn.runtime.planset import Algorithms, Key, Planned, PlanSet, Recipe, build_plans
from vdnn.runtime.prepare import backend_costs, make_budget
from vdnn.runtime.profile import load_profile
from vdnn.runtime.state_file import _is_choice
from vdnn.units import MIB

RECIPE = Recipe(Update(momentum=0.9))
GRAPH = build("vgg16", image_size=64, classes=10)
KEY = ("train", 64)
LIMIT = 500 * MIB


def costs_of(program: Program) -> CostTable:
    return backend_costs(SimulatedBackend(load_profile("h200")), program)


def planned(
    budget: Budget,
    policy: str = "dyn",
    keys: Iterable[Key] = (KEY,),
    recorded: Algorithms | None = None,
    costs: Callable[[Program], CostTable] = costs_of,
) -> PlanSet:
    return build_plans(GRAPH, keys, costs, policy, budget, RECIPE, recorded)


def step_ms(found: Planned) -> float:
    return simulate(found.plan, found.program, found.costs).total_ms


@cache
def sliced() -> PlanSet:
    return planned(Budget(LIMIT, slices=True))


def test_dyn_runs_in_slices_what_has_no_room_as_a_whole() -> None:
    found, whole = sliced()[KEY], planned(Budget(LIMIT))[KEY]
    assert found.plan.slab_bytes <= LIMIT
    assert found.decisions.slices
    assert not whole.decisions.slices
    assert step_ms(found) < 0.98 * step_ms(whole)
    assert any("run in slices of the batch" in note for note in found.decisions.notes)
    for op, rows in found.decisions.slices.items():
        assert op not in found.decisions.algorithms
        assert sum(row.images for row in rows) == 64
        # the same algorithm needs more for the whole batch than its slices have
        of_batch = {c.algorithm: c.workspace_bytes for c in found.costs.candidates[op]}
        assert any(of_batch[row.algorithm.name] > row.algorithm.workspace_bytes for row in rows)


@pytest.mark.parametrize(
    ("network", "shares"),
    [("vgg16", (1.1, 1.3, 1.6, 2.0, 3.0)), ("alexnet", (1.1, 1.3, 1.6, 2.0)), ("googlenet", (1.5,))],
)
def test_slices_make_no_plan_slower(network: str, shares: tuple[float, ...]) -> None:
    graph = build(network, classes=10)
    batch = 32
    costs = costs_of(RECIPE.lower(graph, ("train", batch)))
    needed = build_plans(graph, [("train", batch)], lambda _: costs, "all", Budget(algorithms=MEMORY_OPTIMAL), RECIPE)
    for share in shares:
        limit = int(share * needed.slab_bytes)
        times = {}
        for slices in (False, True):
            plans = build_plans(graph, [("train", batch)], lambda _: costs, "dyn", Budget(limit, slices=slices), RECIPE)
            assert plans.slab_bytes <= limit
            times[slices] = step_ms(plans["train", batch])
        assert times[True] <= 1.02 * times[False], f"{network}, {share} times the least"


def test_a_workspace_limit_is_kept_by_slices_of_any_policy() -> None:
    limit = 8 * MIB
    whole, found = (planned(Budget(None, None, limit, slices=slices), "all")[KEY] for slices in (False, True))
    assert found.decisions.slices
    assert step_ms(found) < step_ms(whole)
    spaces = [spec for name, spec in found.program.tensors.items() if name.endswith(".workspace")]
    assert max(spec.nbytes for spec in spaces) <= limit


def test_a_record_keeps_slices() -> None:
    record = sliced().algorithms()
    assert _is_choice(json.loads(json.dumps(record)))
    slices = sliced()[KEY].decisions.slices
    name, rows = next(iter(slices.items()))
    assert record["train/64"][name] == f"{len(rows)} x {rows[0].images} images with {rows[0].algorithm.name}"
    for policy, budget in (("dyn", Budget(4 * LIMIT)), ("all", Budget()), ("none", Budget(algorithms=MEMORY_OPTIMAL))):
        again = planned(budget, policy, recorded=record)
        assert again.algorithms() == record, policy
        assert again[KEY].decisions.slices == slices
        assert not again.notes
    # and what was recorded whole is not divided
    whole = planned(Budget(2 * LIMIT)).algorithms()
    assert planned(Budget(2 * LIMIT, slices=True), recorded=whole).algorithms() == whole


def test_slices_that_are_no_choice_any_more_are_told() -> None:
    record = dict(sliced().algorithms()["train/64"])
    name, words = next((op, words) for op, words in record.items() if " images with " in words)
    for gone in (words.replace("with ", "with OLD_"), words.replace(" x ", "0 x "), words + ", 1 x 9 images with FFT"):
        again = planned(Budget(LIMIT, slices=True), recorded={"train/64": {**record, name: gone}})
        assert again.notes == (
            f"train/64: op '{name}' ran with {gone} before, which is not available here: results may round otherwise",
        )


def test_slices_are_asked_for_only_where_they_can_help() -> None:
    asked: list[tuple[str, int]] = []

    def watched(program: Program) -> CostTable:
        table = costs_of(program)
        assert table.slices is not None
        known = table.slices

        def slices(op: str, images: int) -> Options:
            if images < program.batch:
                asked.append((op, images))
            return known(op, images)

        return replace(table, slices=slices)

    planned(Budget(None, slices=True), costs=watched)
    planned(Budget(LIMIT), costs=watched)
    assert asked == []
    found = planned(Budget(LIMIT, slices=True), costs=watched)[KEY]
    assert {op for op, _ in asked} >= set(found.decisions.slices)
    assert min(images for _, images in asked) >= 2


def test_costs_of_slices_are_those_of_a_smaller_batch() -> None:
    """Up to the reads of a filter gradient that is added to."""
    program, half = (RECIPE.lower(GRAPH, ("train", n)) for n in (64, 32))
    table, expected = costs_of(program), costs_of(half)
    assert table.slices is not None
    for op in program.ops:
        if op.kind in BY_IMAGE:
            options = table.slices(op.name, 32)
            assert options.complete
            for found, wanted in zip(options.candidates, expected.candidates[op.name], strict=True):
                assert (found.algorithm, found.workspace_bytes) == (wanted.algorithm, wanted.workspace_bytes)
                assert wanted.time_ms <= found.time_ms <= 1.05 * wanted.time_ms


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["memory.paper_search=true"], False),
        *((["memory.policy=" + policy], False) for policy in ("base", "none", "all", "conv")),
        (["memory.slices=false"], False),
        (["memory.policy=all", "memory.slices=true"], True),
        (["memory.paper_search=true", "memory.slices=true"], True),
    ],
)
def test_the_key_is_true_for_dyn_alone_unless_it_is_given(overrides: list[str], expected: bool) -> None:
    backend = SimulatedBackend(load_profile("h200"))
    assert make_budget(load_config("lenet", ["memory.slices=null", *overrides]), backend).slices is expected


def test_the_plan_of_vgg19_shows_its_slices_and_is_shorter_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "vgg19", "-b", "256", "--profile", "h200", "--memory-limit", "12GiB"]

    def shown(*options: str) -> Any:
        assert main([*command, *options]) == 0
        return capsys.readouterr().out

    with_slices, without = (json.loads(shown("--json", "-o", f"memory.slices={on}")) for on in ("true", "false"))
    assert with_slices["fits"]
    assert without["fits"]
    assert with_slices["predicted_step_ms"] < 0.9 * without["predicted_step_ms"]
    assert json.loads(shown("--json"))["predicted_step_ms"] == with_slices["predicted_step_ms"]
    texts = [text for row in with_slices["layers"] for text in row["algorithms"].values() if " images with " in text]
    assert len(texts) >= 5
    assert not any(" images with " in text for row in without["layers"] for text in row["algorithms"].values())
    table = re.sub(r"[\s│]+", " ", shown("--layers"))  # a long cell takes two lines
    assert all(text in table for text in texts)
    assert f"{len(texts)} convolutions run in slices of the batch" in table


def test_views_of_slices_are_told_apart_from_wholes() -> None:
    found = sliced()[KEY]
    parts = [op for op in found.program.ops if op.slice_of is not None]
    assert {op.slice_of for op in parts} == set(found.decisions.slices)
    views: list[TensorSpec] = [
        found.program.tensors[tensor] for op in parts for tensor in (*op.reads.values(), *op.writes.values())
    ]
    assert {view.slice_of is None for view in views if view.role in ("act", "grad")} == {False}
    found.program.validate()


@pytest.mark.parametrize(("batch", "image_size"), [(50, 35), (12, 33), (9, 35), (8, 32)])
def test_a_slice_is_asked_for_as_the_worst_aligned_of_all_places_it_may_have(batch: int, image_size: int) -> None:
    """Images of 3 x 35 x 35 numbers lie at all multiples of 4 bytes; engines that load 16 at once cannot have them."""
    program = RECIPE.lower(build("vgg16", image_size=image_size), ("train", batch))
    seen: dict[int, ConvProblem] = {}

    class Watcher(SimulatedBackend):
        def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
            if op.slice_of == "conv1_1.wgrad":
                problem = unplaced_problem(op, program)
                seen[problem.x[0]] = problem
            return super().candidates(op, program)

    costs = backend_costs(Watcher(load_profile("h200")), program)
    assert costs.slices is not None
    (op,) = (op for op in program.ops if op.name == "conv1_1.wgrad")
    for images in sizes_of(batch, 5)[1:]:
        costs.slices(op.name, images)
        for first in range(0, batch - images + 1, step_of(batch)):
            tensors = dict(program.tensors)
            part = slice_op(op, tensors, first, images)
            problem = unplaced_problem(part, replace(program, tensors=tensors))
            assert seen[images].alignment <= problem.alignment
            assert replace(seen[images], alignment=16) == replace(problem, alignment=16)
