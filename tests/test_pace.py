"""Pacing: how long bytes stay and how early they come back, by hand and on real networks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vdnn.layers import Conv, Flatten, Graph, Linear, SoftmaxLoss, Update, lower
from vdnn.memory.clock import simulate
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import storage_uses
from vdnn.memory.pace import pace
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Free, Launch
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import Budget, all_, dyn, make_plan
from vdnn.memory.schedule import live_bytes
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.profile import load_profile, model_costs


def chain(layers: int = 6):
    """Equal convolutions without bias: every map has the same bytes."""
    graph = Graph("chain", (8, 16, 16), 10)
    x = graph.input
    for i in range(layers):
        x = graph.add(f"conv{i}", Conv(8, 3, padding=1, bias=False), x)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10, bias=False), graph.add("flat", Flatten(), x)))
    return lower(graph, 2, update=Update())


def table(program, gbps: float) -> CostTable:
    """Every op takes 1 ms."""
    rates = CopyRates(gbps, gbps, 2 * gbps, 0.0)
    return CostTable({op.name: (Candidate("default", 1.0),) for op in program.ops}, rates, "made up")


def test_bytes_stay_until_their_copy_is_over_and_return_just_in_time():
    program = chain()
    storage = storage_uses(program)["conv1"]
    decisions = Decisions("all", offload=("conv0", "conv1", "conv2"))
    index = {op.name: i for i, op in enumerate(program.ops)}
    paced = pace(program, table(program, storage.nbytes / 2.5e6), decisions)  # a copy takes 2.5 ops
    # ops run at 1 ms each from op 0; conv0's last reader is conv1, the third op (2 to 3 ms); copies queue up and are
    # over at 5.5, 8 and 10.5 ms: the bytes are still there beside the ops that begin before that
    assert program.ops[2].name == "conv1.forward"
    assert {name: index[op] for name, op in paced.hold.items()} == {"conv0": 5, "conv1": 7, "conv2": 10}
    needed = {name: storage_uses(program)[name].backward_first for name in decisions.offload}
    # the last one needed is fetched 2.5 ms before its use, the others before that where uses are closer than copies
    assert needed["conv0"] - index[paced.fetch["conv0"]] == 3
    for sooner, later in (("conv2", "conv1"), ("conv1", "conv0")):
        assert index[paced.fetch[sooner]] <= index[paced.fetch[later]]


def test_where_the_next_op_has_no_room_the_oldest_copy_gives_its_bytes_back_first():
    program = chain(8)
    nbytes = storage_uses(program)["conv1"].nbytes
    decisions = Decisions("all", offload=tuple(f"conv{i}" for i in range(7)))
    costs = table(program, nbytes / 2.5e6)
    live = live_bytes(program, decisions.offload)
    index = {op.name: i for i, op in enumerate(program.ops)}
    readers = {f"conv{i}": index[f"conv{i + 1}.forward"] for i in range(7)}
    turn = next(i for i, op in enumerate(program.ops) if op.phase == "backward")
    most = max(live[:turn])
    held_before = -1
    for spare in (0, 1, 2, 3):
        hold = pace(program, costs, decisions, most + spare * nbytes).hold
        held = [sum(readers[n] < i <= index[hold[n]] for n in readers) for i in range(turn)]
        assert all(live[i] + count * nbytes <= most + spare * nbytes for i, count in enumerate(held))
        assert sum(held) > held_before, "more room, and copies wait no longer"
        held_before = sum(held)
        assert all(index[hold[f"conv{i}"]] <= index[hold[f"conv{i + 1}"]] for i in range(6))


def test_bytes_held_for_a_copy_are_given_back_by_the_computation_that_goes_on_without_them():
    program = chain(8)
    costs = table(program, storage_uses(program)["conv1"].nbytes / 2.5e6)
    plan = plan_program(program, pace(program, costs, all_(program, costs, Budget())))
    streams = {step.storage: step.stream for step in reversed(plan.steps) if isinstance(step, Free)}
    # on "out" the point would stand behind the copies that have been queued since
    assert streams["conv1"] == "compute"
    plain = plan_program(program, all_(program, costs, Budget()))
    assert next(s.stream for s in plain.steps if isinstance(s, Free) and s.storage == "conv1") == "out"


def test_a_paced_plan_is_valid_and_no_slower_and_keeps_to_its_bytes():
    program = chain(8)
    costs = table(program, storage_uses(program)["conv1"].nbytes / 1.5e6)
    plain = all_(program, costs, Budget())
    plan = plan_program(program, plain)
    room = plan.slab_bytes + 4 * storage_uses(program)["conv1"].nbytes
    paced = pace(program, costs, plain)
    other = plan_program(program, paced, room)
    verify(program, other)
    assert other.slab_bytes <= room
    assert simulate(other, program, costs).total_ms < simulate(plan, program, costs).total_ms


def test_without_room_pacing_changes_nothing():
    program = chain(8)
    costs = table(program, storage_uses(program)["conv1"].nbytes / 1.5e6)
    plain = replace(all_(program, costs, Budget()), prefetch_bytes=0)
    smallest = plan_program(program, plain).slab_bytes
    paced = replace(pace(program, costs, plain), prefetch_bytes=None)
    plan = plan_program(program, paced, smallest)
    verify(program, plan)
    assert plan.slab_bytes == smallest


@pytest.mark.parametrize(("network", "batch", "gib"), [("vgg19", 128, 8.0)])
def test_dyn_paces_copies_and_gains_by_it(network, batch, gib):
    program = lower(build(network), batch, update=Update(momentum=0.9))
    costs = model_costs(program, load_profile("titan-x-maxwell"))
    times = {}
    for label, prefetch in (("paced", None), ("window", 2**40)):
        decisions, plan = make_plan(program, costs, "dyn", Budget(int(gib * 2**30), prefetch_bytes=prefetch))
        planned = apply_decisions(program, decisions)
        verify(planned, plan)
        assert bool(decisions.fetch) == (label == "paced")
        times[label] = simulate(plan, planned, costs).total_ms
    assert times["paced"] < times["window"]


def test_streams_that_join_at_layers_are_not_paced():
    program = chain()
    costs = table(program, 1.0)
    limit = plan_program(program, all_(program, costs, Budget())).slab_bytes
    assert not dyn(program, costs, Budget(limit, join="layer")).fetch


def test_a_storage_is_away_between_its_two_stays():
    program = chain(8)
    costs = table(program, storage_uses(program)["conv1"].nbytes / 1.5e6)
    plan = plan_program(program, pace(program, costs, all_(program, costs, Budget())))
    for name in ("conv2", "conv3"):
        kinds = [
            type(step) for step in plan.steps if not isinstance(step, Launch) and getattr(step, "storage", "") == name
        ]
        assert kinds == [Alloc, CopyOut, Free, Alloc, CopyIn, Free]
