"""The clock against times worked out by hand: streams, waits, copies alone and copies that share the link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vdnn.layers import Op, Program, TensorSpec, Update, lower
from vdnn.memory.clock import StreamClock, op_times, simulate
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Step, Wait
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, make_plan
from vdnn.networks import build
from vdnn.runtime.profile import load_profile, model_costs

MB = 1_000_000
RATES = CopyRates(d2h_gbps=10.0, h2d_gbps=5.0, both_gbps=8.0, latency_us=0.0)
"""1 GB/s is 1 MB/ms: 10 MB take 1 ms out, 2 ms in, and 2.5 ms either way while both directions run."""
TENSORS = {name: TensorSpec(name, "act", (10 * MB,), "uint8") for name in ("a", "b")}
TIMES = {"one": 1.0, "two": 2.0, "three": 3.0}
COSTS = CostTable({name: (Candidate("default", ms),) for name, ms in TIMES.items()}, RATES, "made up")
PROGRAM = Program(
    "hand",
    1,
    "train",
    TENSORS,
    tuple(Op(name, "test.op", "layer", "forward", {"x": "a"}, {"y": "b"}) for name in TIMES),
    (),
    ("a",),
    ("b",),
    "",
    "",
)
ALLOC = (Alloc("a", 0, 10 * MB), Alloc("b", 10 * MB, 10 * MB))


def plan_of(*steps: Step) -> Plan:
    return Plan("hand", 1, "train", "", "", {}, 0, 20 * MB, 20 * MB, (*ALLOC, *steps))


def spans_of(*steps: Step, costs: CostTable = COSTS) -> tuple[float, list[tuple[float, float]]]:
    """Total, and (start, end) of the steps that take time."""
    timing = simulate(plan_of(*steps), PROGRAM, costs)
    return timing.total_ms, [span for span in timing.spans if span is not None]


def test_a_stream_runs_its_steps_one_after_the_other() -> None:
    total, spans = spans_of(Launch("one", "compute"), Launch("three", "compute"), Launch("two", "compute"))
    assert spans == [(0, 1), (1, 4), (4, 6)]
    assert total == 6


def test_streams_run_beside_each_other() -> None:
    total, spans = spans_of(Launch("three", "compute"), CopyOut("a", 0, "out"))
    assert spans == [(0, 3), (0, 1)]
    assert total == 3


def test_a_wait_holds_a_stream_until_the_record() -> None:
    total, spans = spans_of(
        Launch("two", "compute"),
        Record(0, "compute"),
        Launch("three", "compute"),
        Wait(0, "out"),
        CopyOut("a", 0, "out"),
    )
    assert spans == [(0, 2), (2, 5), (2, 3)]
    assert total == 5


def test_a_wait_for_what_is_over_takes_no_time() -> None:
    total, spans = spans_of(
        CopyOut("a", 0, "out"),
        Record(0, "out"),
        Launch("three", "compute"),
        Wait(0, "compute"),
        Launch("one", "compute"),
    )
    assert spans == [(0, 1), (0, 3), (3, 4)]
    assert total == 4


def test_a_chain_of_waits_adds_up() -> None:
    total, spans = spans_of(
        Launch("one", "compute"),
        Record(0, "compute"),
        Wait(0, "out"),
        CopyOut("a", 0, "out"),  # 1 to 2
        Record(1, "out"),
        Wait(1, "in"),
        CopyIn("a", "in"),  # 2 to 4
        Record(2, "in"),
        Wait(2, "compute"),
        Launch("two", "compute"),  # 4 to 6
    )
    assert spans == [(0, 1), (1, 2), (2, 4), (4, 6)]
    assert total == 6


def test_alloc_and_free_take_no_time() -> None:
    assert spans_of(Free("a", "compute"), Alloc("a", 0, 10 * MB), Free("a", "out"))[0] == 0


def test_copies_each_way_alone() -> None:
    assert spans_of(CopyOut("a", 0, "out"))[0] == 1
    assert spans_of(Feed("a", "in"))[0] == 2
    assert spans_of(Fetch("b", "out"))[0] == 1


def test_copies_start_after_the_latency() -> None:
    slow = CostTable(COSTS.candidates, CopyRates(10.0, 5.0, 8.0, latency_us=250.0), "made up")
    total, spans = spans_of(CopyOut("a", 0, "out"), CopyOut("b", 10 * MB, "out"), costs=slow)
    assert spans == [(0, 1.25), (1.25, 2.5)]
    assert total == 2.5


def test_two_copies_at_once_share_the_link() -> None:
    # out: 0 to 1. in: at 4 MB/ms until 1 (4 MB), the other 6 MB at 5 MB/ms: 2.2
    total, spans = spans_of(CopyOut("a", 0, "out"), Feed("b", "in"))
    assert spans[0] == (0, 1)
    assert spans[1] == pytest.approx((0, 2.2))
    assert total == pytest.approx(2.2)


def test_a_copy_is_slowed_while_the_other_runs_and_not_before() -> None:
    # in: 0 to 2. out begins at 1: until 2 at 4 MB/ms (4 MB), the other 6 MB at 10 MB/ms: 2.6
    _, spans = spans_of(
        Feed("b", "in"), Launch("one", "compute"), Record(0, "compute"), Wait(0, "out"), CopyOut("a", 0, "out")
    )
    assert spans[2] == pytest.approx((1, 2.6))


def test_a_copy_between_two_of_the_other_way() -> None:
    # out twice: 0 to 1 and, after a wait, 2 to 3. in from 0: 4 MB until 1, 5 MB until 2, the last 1 MB at 4 MB/ms: 2.25
    _, spans = spans_of(
        CopyOut("a", 0, "out"),
        Launch("two", "compute"),
        Record(0, "compute"),
        Wait(0, "out"),
        CopyOut("b", 10 * MB, "out"),
        Feed("b", "in"),
    )
    assert spans[2] == (2, 3)
    assert spans[3] == pytest.approx((0, 2.25))


def test_a_wide_link_slows_nothing() -> None:
    wide = CostTable(COSTS.candidates, CopyRates(10.0, 5.0, 100.0, latency_us=0.0), "made up")
    total, spans = spans_of(CopyOut("a", 0, "out"), Feed("b", "in"), costs=wide)
    assert spans == [(0, 1), (0, 2)]
    assert total == 2


SLOWED = CopyRates(10.0, 5.0, 8.0, latency_us=0.0, product_slowdown=1.2, stream_slowdown=1.5)
"""Beside copies one way a streaming kernel takes 1.25 times as long, both ways 1.5 times; a product 1.1 and 1.2."""


def test_kernels_are_slowed_while_copies_run() -> None:
    slowed = CostTable(COSTS.candidates, SLOWED, "made up")
    # out 0 to 1: 0.8 of 3 ms is done by then
    total, spans = spans_of(CopyOut("a", 0, "out"), Launch("three", "compute"), costs=slowed)
    assert spans[1] == pytest.approx((0, 3.2))
    assert total == pytest.approx(3.2)
    # out 0 to 1 and in 0 to 2.2: 2 / 3 until 1, 0.96 more until 2.2, the other 1.3733 alone
    _, spans = spans_of(CopyOut("a", 0, "out"), Feed("b", "in"), Launch("three", "compute"), costs=slowed)
    assert spans[2] == pytest.approx((0, 2.2 + 3 - 2 / 3 - 0.96))
    # two kernels beside one copy, and one after it
    _, spans = spans_of(
        Feed("b", "in"),
        Launch("one", "compute"),  # 0 to 1.25
        Launch("two", "compute"),  # 0.6 until 2, the other 1.4 alone
        Launch("one", "compute"),
        costs=slowed,
    )
    assert spans[1:] == [pytest.approx(span) for span in ((0, 1.25), (1.25, 3.4), (3.4, 4.4))]


def test_a_kernel_is_slowed_only_while_the_copy_runs() -> None:
    slowed = CostTable(COSTS.candidates, SLOWED, "made up")
    _, spans = spans_of(
        Feed("a", "in"),
        Record(0, "in"),
        Wait(0, "out"),
        CopyOut("a", 0, "out"),  # 2 to 3, after the feed
        Launch("three", "compute"),
        costs=slowed,
    )
    # 1.6 until 2, beside the feed; 0.8 until 3, beside the copy out; 0.6 alone
    assert spans[2] == pytest.approx((0, 3.6))


def test_what_a_copy_costs_kernels_before_it_in_the_plan_is_owed_to_the_next() -> None:
    slowed = CostTable(COSTS.candidates, SLOWED, "made up")
    steps = (Launch("one", "compute"), Launch("three", "compute"), CopyOut("a", 0, "out"), Feed("b", "in"))
    # out 0 to 1, beside the first kernel; in 0 to 2.2, beside both
    _, spans = spans_of(*steps, Launch("one", "compute"), costs=slowed)
    assert spans[:2] == [(0, 1), (1, 4)]
    assert spans[4] == pytest.approx((4, 5 + 0.25 * (1 + 2.2)))
    # what no kernel has paid when the streams join is part of the total
    assert spans_of(*steps, costs=slowed)[0] == pytest.approx(4 + 0.25 * (1 + 2.2))


def test_products_have_a_slowdown_of_their_own() -> None:
    ops = tuple(replace(op, kind="conv.wgrad") for op in PROGRAM.ops)
    costs = CostTable(COSTS.candidates, SLOWED, "made up")
    timing = simulate(plan_of(CopyOut("a", 0, "out"), Launch("three", "compute")), replace(PROGRAM, ops=ops), costs)
    assert timing.total_ms == pytest.approx(1 + 3 - 1 / 1.1)
    assert timing.compute_ms == timing.total_ms
    assert timing.compute_idle_ms == 0


def test_slowdowns_cost_little_time_to_compute() -> None:
    program = lower(build("vgg416"), 32, update=Update(momentum=0.9))
    costs = model_costs(program, load_profile("h200"))
    decisions, plan = make_plan(program, costs, "all", Budget())
    planned = apply_decisions(program, decisions)
    plain = simulate(plan, planned, costs)
    slowed = simulate(plan, planned, replace(costs, rates=replace(costs.rates, stream_slowdown=1.3)))
    assert plain.compute_ms < slowed.compute_ms < 1.3 * plain.compute_ms
    clock, steps = StreamClock(replace(costs.rates, stream_slowdown=1.3)), 20_000
    for _ in range(steps):
        clock.copy("out", MB, "out")
    looked = CountingList(clock.copies["out"])
    clock.copies["out"] = looked
    for _ in range(steps):
        clock.run("compute", 0.1, 1.3)
    assert looked.reads < 10 * steps, "every kernel looks at every copy"


class CountingList(list[tuple[float, float]]):
    """A list that counts its reads."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_a_join_brings_all_streams_to_the_latest() -> None:
    clock = StreamClock(RATES)
    clock.run("compute", 3)
    clock.run("in", 5)
    assert clock.join() == 5
    assert clock.run("out", 1) == (5, 6)


def test_sums_by_kind() -> None:
    timing = simulate(
        plan_of(Feed("a", "in"), CopyOut("a", 0, "out"), Launch("three", "compute"), Launch("one", "compute")),
        PROGRAM,
        COSTS,
    )
    assert timing.compute_ms == 4
    assert timing.in_ms == pytest.approx(2)  # listed first, it had the link to itself
    assert timing.out_ms == pytest.approx(2.2)  # 8 MB at 4 MB/ms until the feed is over at 2, the other 2 MB at 10
    assert timing.compute_idle_ms == timing.total_ms - 4


def test_an_algorithm_has_its_own_time() -> None:
    program = lower(build("lenet"), 2)
    costs = model_costs(program, load_profile("h200"))
    for algorithms in (MEMORY_OPTIMAL, "performance-optimal"):
        decisions = POLICIES["none"](program, costs, Budget(algorithms=algorithms))
        times = op_times(apply_decisions(program, decisions), costs)
        for op, chosen in decisions.algorithms.items():
            rows = {c.algorithm: c.time_ms for c in costs.candidates[op]}
            assert times[op] == rows[chosen.name]


@pytest.mark.parametrize("join", ["reuse", "layer"])
@pytest.mark.parametrize("policy", ["none", "all", "conv", "base"])
@pytest.mark.parametrize("name", ["alexnet", "googlenet", "resnet18"])
def test_a_step_takes_as_long_as_its_busiest_stream_at_least(name: str, policy: str, join: str) -> None:
    program = lower(build(name), 32, update=Update(momentum=0.9))
    costs = model_costs(program, load_profile("titan-x-maxwell"))
    decisions, plan = make_plan(program, costs, policy, Budget(join=join))
    planned = apply_decisions(program, decisions)
    timing = simulate(plan, planned, costs)
    kernels = sum(op_times(planned, costs).values())
    assert timing.compute_ms == pytest.approx(kernels)
    assert timing.total_ms >= max(kernels, timing.out_ms, timing.in_ms) * (1 - 1e-12)
    assert timing.total_ms <= (kernels + timing.out_ms + timing.in_ms) * (1 + 1e-12)
    # a copy takes its bytes over the link's best rate at least, and a latency
    nbytes = sum(program.tensors[s.storage].nbytes for s in plan.steps if isinstance(s, CopyOut))
    assert timing.out_ms >= nbytes / (costs.rates.d2h_gbps * 1e6)
    # on each stream one step after the other
    last: dict[str, float] = {}
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if span is not None:
            stream = step.stream  # type: ignore[union-attr]
            assert last.get(stream, 0.0) <= span[0] <= span[1]
            last[stream] = span[1]


def test_joins_at_every_layer_cost_time() -> None:
    program = lower(build("vgg16"), 32)
    costs = model_costs(program, load_profile("titan-x-maxwell"))
    totals = {}
    for policy, join in (("none", "reuse"), ("all", "reuse"), ("all", "layer")):
        decisions, plan = make_plan(program, costs, policy, Budget(join=join))
        totals[policy, join] = simulate(plan, apply_decisions(program, decisions), costs).total_ms
    assert totals["none", "reuse"] <= totals["all", "reuse"] <= totals["all", "layer"]
    assert totals["none", "reuse"] < totals["all", "layer"]
