"""Convolutions in slices of the batch: what they compute, that no policy changes it, and faults in plans of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from random import Random

import numpy as np
import pytest
from fault_tools import FAULTS
from plan_lab import Case, Lab, Machine, Outcome, reference
from test_fault_injection import changes, faulty
from test_lower_random import random_graph

from vdnn.errors import PlanError
from vdnn.layers import Op, Program, TensorSpec, lower
from vdnn.memory.clock import simulate
from vdnn.memory.decisions import Algorithm, Decisions, Slice
from vdnn.memory.passes import BY_IMAGE, apply_decisions
from vdnn.memory.plan import STREAMS, Launch
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, smallest_plan
from vdnn.memory.report import make_report
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.executor import Executor
from vdnn.runtime.measure import blank_feeds, measure_costs
from vdnn.runtime.prepare import backend_costs
from vdnn.runtime.profile import load_profile

Slices = Mapping[str, tuple[Slice, ...]]
BY_PIXEL = ("GEMM", "GEMM_TILE")
"""Algorithms of the CPU that take one image at a time, whatever the batch."""


def random_slices(lab: Lab, random: Random, share: float = 1.0, only: tuple[str, ...] = ()) -> Slices:
    """A random division for `share` of the convolutions, each slice by a random algorithm, or one of `only`."""
    found = {}
    for op in lab.program.ops:
        if op.kind not in BY_IMAGE or random.random() >= share:
            continue
        rows, left = [], lab.program.batch
        while left:
            images = random.randint(1, left)
            options = lab.costs.slices(op.name, images).candidates
            chosen = random.choice([c for c in options if not only or c.algorithm in only])
            rows.append(Slice(images, Algorithm(chosen.algorithm, chosen.workspace_bytes)))
            left -= images
        found[op.name] = tuple(rows)
    return found


def decided(lab: Lab, policy: str, slices: Slices) -> Decisions:
    """The policy with `slices` for some ops, and for all others an algorithm of the least workspace or of BY_PIXEL."""
    decisions = POLICIES[policy](lab.program, lab.costs, Budget(algorithms=MEMORY_OPTIMAL))
    pixels = {
        op: Algorithm(c.algorithm, c.workspace_bytes)
        for op, options in lab.costs.candidates.items()
        for c in options
        if c.algorithm in BY_PIXEL
    }
    decisions = replace(decisions, algorithms={**decisions.algorithms, **pixels})
    whole = {op: algorithm for op, algorithm in decisions.algorithms.items() if op not in slices}
    return replace(decisions, algorithms=whole, slices=slices)


def case_of(lab: Lab, policy: str, slices: Slices, *, tight: bool = False) -> Case:
    decisions = decided(lab, policy, slices)
    plan = smallest_plan(lab.program, decisions, Budget())[1] if tight else plan_program(lab.program, decisions)
    planned = apply_decisions(lab.program, decisions)
    verify(planned, plan)
    return Case(f"{policy}{' tight' if tight else ''}, {len(slices)} ops in slices", planned, plan)


def same_to_rounding(case: Case, got: Outcome, wanted: Outcome) -> None:
    """Losses and every weight, momentum and statistic agree to 5e-5 of their size."""
    pairs = list(zip(got.fetched, wanted.fetched, strict=True))
    for name in case.program.persistent:
        spec, at = case.program.tensors[name], case.plan.persistent[name]
        if spec.dtype == "float32":
            pairs.append(tuple(o.kept[at : at + spec.nbytes].view(np.float32) for o in (got, wanted)))
    for one, other in pairs:
        if one.dtype == np.float32:
            assert np.linalg.norm(one - other) <= 5e-5 * np.linalg.norm(other)


SMALL = {
    "lenet": ("lenet", 5, {"image_size": 30}),
    "googlenet": ("googlenet", 3, {"image_size": 47, "narrow": 2, "classes": 10}),
    "resnet18": ("resnet18", 3, {"image_size": 64, "narrow": 4, "classes": 10}),
}


@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
def test_equal_slices_give_equal_bits_under_every_policy(small: tuple[str, int, dict[str, int]]) -> None:
    network, batch, options = small
    lab = Lab(network, batch, steps=3, **options)
    slices = random_slices(lab, Random(network), share=0.8)
    cases = [
        case_of(lab, policy, slices, tight=tight) for policy in ("base", "none", "all", "conv") for tight in (0, 1)
    ]
    expected = reference(lab, cases[0])
    for i, order in enumerate((None, *permutations(STREAMS))):
        machine = Machine(lab, cases, order)
        for case in cases if network == "lenet" else cases[i % 3 :: 3]:
            assert machine.run(case, case.plan).equals(expected), f"{case.name}, order {order}"
        machine.close()
    whole = case_of(lab, "none", {})
    same_to_rounding(whole, expected, reference(lab, whole))


@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
def test_slices_of_algorithms_that_go_image_by_image_give_the_same_bits(small: tuple[str, int, dict[str, int]]) -> None:
    network, batch, options = small
    lab = Lab(network, batch, **options)
    whole = case_of(lab, "none", {})
    assert {op.attrs["algorithm"] for op in whole.program.ops if op.kind in BY_IMAGE} <= set(BY_PIXEL)
    expected = reference(lab, whole)
    sliced = case_of(lab, "none", random_slices(lab, Random(1), only=BY_PIXEL))
    assert len(sliced.program.ops) > len(whole.program.ops)
    assert reference(lab, sliced).equals(expected)


def test_random_networks_in_random_slices() -> None:
    """All their convolutions take one image at a time: every bit is that of the whole batch."""
    divided = 0
    for seed in range(60):
        random = Random(seed)
        lab = Lab(random_graph(seed), random.randint(2, 5))
        slices = random_slices(lab, random, share=0.7)
        divided += sum(len(rows) > 1 for rows in slices.values())
        case = case_of(lab, random.choice(("none", "all", "conv")), slices, tight=random.random() < 0.5)
        case.program.validate()
        machine = Machine(lab, [case], random.choice(list(permutations(STREAMS))))
        assert machine.run(case, case.plan).equals(reference(lab, case_of(lab, "none", {}))), f"seed {seed}"
        machine.close()
    assert divided > 100


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over garbage
def test_every_fault_that_changes_what_is_computed_is_caught() -> None:
    random = Random(11)
    lab = Lab("lenet", 4, image_size=30)
    slices = random_slices(lab, random)
    cases = [case_of(lab, policy, slices, tight=True) for policy in ("none", "all", "conv")]
    expected = reference(lab, cases[0])
    machines = [Machine(lab, cases, order) for order in permutations(STREAMS)]
    count: Counter[str] = Counter()
    for name in [*FAULTS] * 4 + ["swap near launches", "swap launches"] * 20:
        case = random.choice(cases)
        plan = faulty(case, name, random)
        if plan is None:
            continue
        count["faults"] += 1
        try:
            verify(case.program, plan)
        except PlanError:
            count["refused"] += 1
            if count["refused"] % 4 == 0:
                count["sampled"] += 1
                count["harmful"] += changes(machines, case, plan, expected) is not None
            continue
        how = changes(machines, case, plan, expected)
        assert how is None, f"{name} in {case.name} passes the verifier: {how}"
    for machine in machines:
        machine.close()
    assert count["faults"] >= 150
    assert count["refused"] >= 0.6 * count["faults"]
    assert count["harmful"] >= 0.6 * count["sampled"]


def swapped(case: Case, a: str, b: str) -> Case:
    """The plan with two launches exchanged."""
    other = {a: b, b: a}
    steps = [s._replace(op=other.get(s.op, s.op)) if isinstance(s, Launch) else s for s in case.plan.steps]
    return case._replace(plan=replace(case.plan, steps=tuple(steps)))


def test_slices_of_a_filter_gradient_keep_their_order_and_others_need_not() -> None:
    lab = Lab("lenet", 4)
    half = (Slice(2, Algorithm("GEMM_TILE", 2**20)),) * 2
    case = case_of(lab, "none", {"conv2.forward": half, "conv2.wgrad": half})
    wrong = swapped(case, "conv2.wgrad[0:2]", "conv2.wgrad[2:4]")
    text = r"op 'conv2.wgrad\[2:4\]' reads 'conv2.weight.grad'.*should hold what op 'conv2.wgrad\[0:2\]' wrote"
    with pytest.raises(PlanError, match=text):
        verify(case.program, wrong.plan)
    # images of y do not depend on each other; without workspaces, which have places of their own, order is free
    alone = case_of(lab, "none", {"conv2.forward": (Slice(2, Algorithm("GEMM_TILE")),) * 2})
    verify(alone.program, swapped(alone, "conv2.forward[0:2]", "conv2.forward[2:4]").plan)
    reader = next(op.name for op in alone.program.ops if "conv2" in op.reads.values())
    with pytest.raises(PlanError, match=r"images 2 to 3 of 'conv2' should hold what op 'conv2.forward\[2:4\]' wrote"):
        verify(alone.program, swapped(alone, "conv2.forward[2:4]", reader).plan)


def test_a_slice_is_a_view_of_its_images_and_sums_are_added_to() -> None:
    lab = Lab("googlenet", 3, image_size=47, narrow=2, classes=10)
    rows = (Slice(1, Algorithm("GEMM", 64)), Slice(2, Algorithm("GEMM")))
    ops = {op.name: op for op in lab.program.ops}
    branches = (op for op in ops.values() if op.kind == "conv.forward" and lab.program.tensors[op.writes["y"]].channel)
    layer = next(branches).layer  # it fills channels of a concatenation
    chosen = {f"{layer}.{what}": rows for what in ("forward", "wgrad")}
    planned = apply_decisions(lab.program, Decisions("hand", slices=chosen))
    parts = [op for op in planned.ops if op.slice_of is not None]
    assert [op.name for op in parts] == [f"{layer}.{w}[{s}]" for w in ("forward", "wgrad") for s in ("0:1", "1:3")]
    assert [op.accumulate for op in parts] == [(), (), (), ("dw",)]
    whole = planned.tensors[ops[f"{layer}.forward"].writes["y"]]
    y = planned.tensors[parts[1].writes["y"]]
    assert (y.view_of, y.channel, y.image, y.slice_of) == (whole.storage, whole.channel, 1, whole.name)
    assert y.shape == (2, *whole.shape[1:])
    assert ("workspace" in parts[0].writes, "workspace" in parts[1].writes) == (True, False)
    assert Program.from_json(planned.to_json()) == planned
    for argument in ("w", "b"):
        assert parts[0].reads[argument] == parts[1].reads[argument] == ops[f"{layer}.forward"].reads[argument]


@pytest.mark.parametrize(
    ("op", "sizes"),
    [("conv1.forward", (2, 1)), ("conv1.forward", (4, 0)), ("conv1.bgrad", (2, 2)), ("conv1.wgrad", ())],
)
def test_slices_that_are_none_are_refused(op: str, sizes: tuple[int, ...]) -> None:
    program = lower(build("lenet"), 4)
    decisions = Decisions("hand", slices={op: tuple(Slice(n, Algorithm("GEMM_TILE")) for n in sizes)})
    with pytest.raises(PlanError, match=f"op '{op}'.*expected slices of 1 image or more"):
        apply_decisions(program, decisions)


def test_a_slice_of_another_value_of_the_same_bytes_is_refused() -> None:
    shape = (4, 2, 2, 2)
    tensors = [
        TensorSpec("x", "act", shape),
        TensorSpec("y", "act", shape, view_of="x"),
        TensorSpec("x[2:4]", "act", (2, *shape[1:]), view_of="x", image=2, slice_of="x"),
        TensorSpec("y[0:2]", "act", (2, *shape[1:]), view_of="x", slice_of="y"),
        TensorSpec("z", "act", shape),
    ]

    def checked(*ops: tuple[str, str]) -> None:
        made = tuple(Op(f"op{i}", "k", "l", "forward", {"x": a}, {"y": b}) for i, (a, b) in enumerate(ops))
        Program("p", 4, "train", {t.name: t for t in tensors}, made, (), ("x",), (), "z", "z").validate()

    checked(("x", "y[0:2]"), ("x[2:4]", "z"), ("y[0:2]", "z"))
    for last in ("x", "y"):
        with pytest.raises(Exception, match=f"op 'op1' reads '{last}', whose bytes hold another value"):
            checked(("x", "y[0:2]"), (last, "z"))
    with pytest.raises(Exception, match=r"reads 'x\[2:4\]', whose bytes hold another value"):
        checked(("x", "y"), ("x[2:4]", "z"))


def test_decisions_with_slices_go_through_json() -> None:
    rows = (Slice(3, Algorithm("FFT", 64)), Slice(1, Algorithm("GEMM")))
    decisions = Decisions("dyn", slices={"conv1.forward": rows})
    assert Decisions.from_json(decisions.to_json()) == decisions
    assert decisions.digest() != Decisions("dyn").digest()


def test_the_clock_the_simulation_and_the_report_agree_on_slices() -> None:
    backend = SimulatedBackend(load_profile("titan-x-maxwell"))
    program = lower(build("vgg16", image_size=64), 8)
    costs = backend_costs(backend, program)
    forward = {c.algorithm: c for c in costs.slices("conv2_2.forward", 4).candidates}
    half = Slice(4, Algorithm("FFT", forward["FFT"].workspace_bytes))
    decisions = POLICIES["none"](program, costs, Budget(algorithms=MEMORY_OPTIMAL))
    whole = {op: a for op, a in decisions.algorithms.items() if op != "conv2_2.forward"}
    decisions = replace(decisions, algorithms=whole, slices={"conv2_2.forward": (half, half)})
    planned, plan = apply_decisions(program, decisions), plan_program(program, decisions)
    timing = simulate(plan, planned, costs)
    spans = {s.op: t for s, t in zip(plan.steps, timing.spans, strict=True) if isinstance(s, Launch)}
    for part in ("conv2_2.forward[0:4]", "conv2_2.forward[4:8]"):
        assert spans[part][1] - spans[part][0] == pytest.approx(forward["FFT"].time_ms)
    backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
    Executor(backend, plan, planned).run(blank_feeds(planned))
    assert backend.elapsed_ms == pytest.approx(timing.total_ms)
    (row,) = (row for row in make_report(plan, planned, decisions, costs).layers if row.layer == "conv2_2")
    assert row.algorithms["conv.forward"] == "2 x 4 images with FFT"
    assert row.workspace_bytes >= half.algorithm.workspace_bytes


def test_slices_are_measured_one_by_one() -> None:
    lab = Lab("lenet", 4)
    case = case_of(
        lab, "none", {"conv2.wgrad": (Slice(3, Algorithm("GEMM_TILE", 2**20)), Slice(1, Algorithm("GEMM_TILE", 2**20)))}
    )
    backend = CpuBackend()
    backend.open(case.plan.slab_bytes, case.plan.host_bytes, case.plan.stage_bytes)
    costs = measure_costs(backend, case.plan, case.program, lab.feeds[0], lab.costs)
    backend.close()
    parts = [op for op in case.program.ops if op.slice_of is not None]
    assert len(parts) == 2
    before, after = ([table.run_ms(op, case.program) for op in parts] for table in (lab.costs, costs))
    assert min(after) > 0
    assert before != after
