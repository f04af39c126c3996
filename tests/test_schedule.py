"""When storages come, go, leave and return: a chain worked by hand, forks, and recounts from the steps of plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from vdnn.errors import PlanError
from vdnn.layers import Concat, Conv, Flatten, Graph, Linear, Pool, Program, SoftmaxLoss, Update, lower
from vdnn.memory.clock import simulate
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.liveness import storage_uses
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import FEATURE_KINDS, offloadable
from vdnn.memory.schedule import live_bytes, make_schedule
from vdnn.networks import build

ROOMY = 1 << 40


def chain() -> Program:
    """conv - pool - conv - conv on one image of 3x12x12, then the classifier.

    Forward: 0 data, 1 conv1, 2 pool1, 3 conv2, 4 conv3, 5 fc, 6 loss. Backward: 7 loss, 8-12 fc, 13-17 conv3,
    18-22 conv2, 23 pool1, 24-27 conv1; a convolution's are bgrad, wgrad, dgrad and two updates.
    """
    g = Graph("chain", (3, 12, 12), 4)
    x = g.add("pool1", Pool("max", 2), g.add("conv1", Conv(8, 3, padding=1), g.input))
    x = g.add("conv3", Conv(4, 3, padding=1), g.add("conv2", Conv(8, 3, padding=1), x))
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(4), g.add("flat", Flatten(), x)))
    return lower(g, 1)


def fork() -> Program:
    """conv1 feeds two convolutions and a pool, which are concatenated."""
    g = Graph("fork", (3, 8, 8), 4)
    x = g.add("conv1", Conv(4, 3, padding=1), g.input)
    branches = [
        g.add("left", Conv(4, 1), x),
        g.add("pool", Pool("max", 3, stride=1, padding=1), x),
        g.add("right", Conv(4, 3, padding=1), x),
    ]
    x = g.add("last", Conv(4, 3, padding=1), g.add("all", Concat(), branches))
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(4), g.add("flat", Flatten(), x)))
    return lower(g, 2)


def offload_all(program: Program, **options: object) -> Decisions:
    return Decisions("all", offload=offloadable(program, FEATURE_KINDS), **options)  # type: ignore[arg-type]


@dataclass
class Seen:
    """What the steps of a plan do with one storage; moments count launches: 3 is after the third, before the fourth."""

    allocs: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)
    ins: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    nbytes: int = 0


def watch(plan: Plan) -> dict[str, Seen]:
    """By storage, from the steps alone."""
    seen: dict[str, Seen] = {}
    launched = 0
    for step in plan.steps:
        match step:
            case Launch():
                launched += 1
            case Alloc():
                one = seen.setdefault(step.storage, Seen())
                one.allocs.append(launched)
                one.nbytes = step.nbytes
            case CopyOut():
                seen[step.storage].outs.append(launched)
            case CopyIn():
                seen[step.storage].ins.append(launched)
            case Free():
                seen[step.storage].frees.append(launched)
            case _:
                pass
    return seen


def touching(program: Program) -> dict[str, list[tuple[int, str]]]:
    """By storage, (op, phase) of every op that reads or writes it, from the program alone."""
    found: dict[str, list[tuple[int, str]]] = {}
    for i, op in enumerate(program.ops):
        for tensor in {program.storage(t) for t in (*op.reads.values(), *op.writes.values())}:
            found.setdefault(tensor, []).append((i, op.phase))
    return found


def live_by_launch(plan: Plan) -> tuple[list[int], int]:
    """Bytes allocated at every launch, and the most at any step, the persistent section aside."""
    live = most = 0
    sizes: dict[str, int] = {}
    levels = []
    for step in plan.steps:
        if isinstance(step, Alloc):
            sizes[step.storage] = step.nbytes
            live += step.nbytes
            most = max(most, live)
        elif isinstance(step, Free):
            live -= sizes.pop(step.storage)
        elif isinstance(step, Launch):
            levels.append(live)
    return levels, most


def fetched_and_unused(plan: Plan, program: Program) -> list[int]:
    """At every launch, the bytes that have been fetched, but that neither this op nor an earlier one has used since."""
    reads = {op.name: {program.storage(t) for t in op.reads.values()} for op in program.ops}
    waiting: dict[str, int] = {}
    levels = []
    for step in plan.steps:
        if isinstance(step, CopyIn):
            waiting[step.storage] = -(-program.tensors[step.storage].nbytes // 256) * 256
        elif isinstance(step, Launch):
            for storage in reads[step.op]:
                waiting.pop(storage, None)
            levels.append(sum(waiting.values()))
    return levels


# ---- the chain, by hand


@pytest.mark.parametrize("name", ["fc", "conv3.grad", "conv1.weight", "nothing"])
def test_what_has_no_time_to_be_away_cannot_be_offloaded(name: str) -> None:
    with pytest.raises(PlanError, match=f"storage '{name}' cannot be offloaded"):
        plan_program(chain(), Decisions("hand", offload=("conv1", name)))


def test_uses_of_the_chain() -> None:
    uses = storage_uses(chain())
    by_hand = {
        # first, last, last in forward, first in backward
        "images": (-1, 0, 0, None),
        "labels": (-1, 7, 6, 7),
        "data": (0, 25, 1, 25),
        "conv1": (1, 23, 2, 23),
        "pool1": (2, 23, 3, 19),
        "conv2": (3, 14, 4, 14),
        "conv3": (4, 9, 5, 9),
        "fc": (5, 6, 6, None),
        "loss.loss": (6, 28, 6, None),  # fetched after the last op
        "conv3.grad": (10, 15, None, 10),
        "conv1.weight.grad": (25, 26, None, 25),
    }
    for name, expected in by_hand.items():
        use = uses[name]
        assert (use.first, use.last, use.forward_last, use.backward_first) == expected, name
    assert uses["data"].nbytes == 1792  # 3 * 12 * 12 * 4 = 1728, aligned
    assert not {"conv1.weight", "step"} & set(uses)  # they persist


def test_the_chain_offloads_inputs_of_feature_layers_only() -> None:
    assert offloadable(chain(), ("conv",)) == ("data", "pool1", "conv2")
    # conv3 is read by the classifier alone
    assert offloadable(chain(), FEATURE_KINDS) == ("data", "conv1", "pool1", "conv2")


def test_the_search_window_of_the_paper_on_the_chain() -> None:
    program = chain()
    seen = watch(plan_program(program, offload_all(program, prefetch_bytes=ROOMY)))
    # as a layer's backward begins, the search goes back to the input of the nearest convolution before it:
    # from loss and fc to conv3 and its input conv2, from conv3 to conv2 and its input pool1; from conv2 it passes
    # pool1, whose input conv1 is away; from pool1 it comes to conv1 and its input, the images
    assert {name: one.ins for name, one in seen.items() if one.ins} == {
        "conv2": [7],
        "pool1": [13],
        "conv1": [18],
        "data": [23],
    }


def test_the_window_ends_behind_the_nearest_convolution() -> None:
    g = Graph("convolutions", (3, 8, 8), 4)
    x = g.input
    for i in range(1, 5):
        x = g.add(f"conv{i}", Conv(3, 3, padding=1, bias=False), x)
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(4, bias=False), g.add("flat", Flatten(), x)))
    program = lower(g, 1)
    begin = {op.layer: i for i, op in reversed(list(enumerate(program.ops))) if op.phase == "backward"}
    seen = watch(plan_program(program, offload_all(program, prefetch_bytes=ROOMY)))
    # one layer ahead and no more: the input of conv4 with loss, of conv3 with conv4, ...; none with fc
    expected = {"conv3": begin["loss"], "conv2": begin["conv4"], "conv1": begin["conv3"], "data": begin["conv2"]}
    assert {name: one.ins for name, one in seen.items() if one.ins} == {n: [i] for n, i in expected.items()}


def test_without_a_bound_given_the_largest_storage_is_the_bound() -> None:
    program = chain()
    seen = watch(plan_program(program, offload_all(program)))
    # conv1 (4,608 B, the largest) beside pool1 (1,280 B), not used yet as conv2 begins, would be too much
    assert {name: one.ins for name, one in seen.items() if one.ins} == {
        "conv2": [7],
        "pool1": [13],
        "conv1": [23],
        "data": [23],
    }


def test_a_bound_of_nothing_fetches_each_storage_for_its_first_reader() -> None:
    program = chain()
    plan = plan_program(program, offload_all(program, prefetch_bytes=0))
    assert {name: one.ins for name, one in watch(plan).items() if one.ins} == {
        "conv2": [14],
        "pool1": [19],
        "conv1": [23],
        "data": [25],
    }
    assert max(fetched_and_unused(plan, program)) == 0


def test_a_prefetch_waits_for_room() -> None:
    program = chain()
    decisions = offload_all(program, prefetch_bytes=ROOMY)
    tight = max(live_bytes(program, decisions.offload))
    schedule = make_schedule(program, decisions, tight)
    assert schedule.ideal_bytes == tight  # at pool1: conv1, pool1 and both gradients, as conv1's maps fill it
    actions = [a for a in schedule.actions if isinstance(a, (CopyIn, Launch))]
    order = [a.storage if isinstance(a, CopyIn) else a.op for a in actions]
    # data would lie beside conv1 while pool1.backward runs, which is where no byte is left
    assert order.index("data") == order.index("conv1.wgrad") - 1
    # early ones fit
    assert order.index("conv2") < order.index("loss.backward")


def test_live_bytes_of_the_chain() -> None:
    live = live_bytes(chain(), ("data", "conv1", "pool1", "conv2"))
    assert live[0] == 512 + 256 + 1792  # images, labels, data
    assert live[1] == 256 + 1792 + 4608  # labels, data, conv1
    assert live[2] == 256 + 4608 + 1280  # conv1 and pool1; data has left
    assert live[23] == 512 + 4608 + 1280 + 1280 + 4608  # losses; conv1, pool1 and their gradients


# ---- forks


def test_a_forked_map_leaves_after_its_last_reader_and_returns_once() -> None:
    program = fork()
    order = [op.name for op in program.ops]
    seen = watch(plan_program(program, offload_all(program, prefetch_bytes=0)))["conv1"]
    assert seen.outs == [order.index("right.forward") + 1]  # after left, pool and right
    assert seen.frees[0] == seen.outs[0]
    # backward goes right, pool, left: the first reader is right's filter gradient, and it stays for the others
    assert seen.ins == [order.index("right.wgrad")]
    assert len(seen.allocs) == 2
    assert seen.frees[1] == order.index("left.wgrad") + 1


def test_a_concatenation_is_one_storage_with_one_count() -> None:
    program = fork()
    seen = watch(plan_program(program, offload_all(program, prefetch_bytes=0)))
    order = [op.name for op in program.ops]
    assert "left" not in seen  # its output is a range of channels of "all"
    assert seen["all"].allocs[0] == order.index("left.forward")
    assert seen["all"].outs == [order.index("last.forward") + 1]
    # the pool's backward reads its own output, among the channels of "all"
    assert seen["all"].frees[1] == order.index("pool.backward") + 1


# ---- recounts


@pytest.fixture(scope="module", params=["chain", "fork", "googlenet", "resnet18", "vgg16"])
def program(request: pytest.FixtureRequest) -> Program:
    own = {"chain": chain, "fork": fork}
    if request.param in own:
        return own[request.param]()
    return lower(build(request.param), 2, update=Update(momentum=0.9))


@pytest.mark.parametrize("offload", [False, True])
def test_bytes_come_with_the_first_use_and_go_with_the_last(program: Program, offload: bool) -> None:
    decisions = offload_all(program, prefetch_bytes=0) if offload else Decisions("none")
    seen, uses = watch(plan_program(program, decisions)), touching(program)
    feeds, fetches = ({program.storage(t) for t in names} for names in (program.feeds, program.fetches))
    for storage, one in seen.items():
        ops = [i for i, _ in uses[storage]]
        first = 0 if storage in feeds else ops[0]
        last = len(program.ops) if storage in fetches else ops[-1] + 1
        assert (one.allocs[0], one.frees[-1]) == (first, last), storage
        if storage in decisions.offload:
            leaves = max(i for i, phase in uses[storage] if phase == "forward") + 1
            returns = min(i for i, phase in uses[storage] if phase != "forward")
            assert (one.outs, one.ins) == ([leaves], [returns]), storage
            assert (one.allocs, one.frees) == ([first, returns], [leaves, last]), storage
        else:
            assert (len(one.allocs), one.outs, one.ins, len(one.frees)) == (1, [], [], 1), storage
    assert set(seen) == set(uses) - set(program.persistent)


@pytest.mark.parametrize("join", ["reuse", "layer"])
def test_a_prefetched_storage_is_back_before_its_first_reader(program: Program, join: str) -> None:
    decisions = offload_all(program, join=join)
    seen, uses = watch(plan_program(program, decisions)), touching(program)
    early = 0
    for storage in decisions.offload:
        first_reader = min(i for i, phase in uses[storage] if phase != "forward")
        assert len(seen[storage].outs) == len(seen[storage].ins) == 1
        assert seen[storage].ins[0] <= first_reader
        assert seen[storage].outs[0] <= seen[storage].ins[0]
        early += seen[storage].ins[0] < first_reader
    assert early > 0


@pytest.mark.parametrize("share", [0, 0.25, 1, 3, None])
def test_never_more_fetched_and_unused_bytes_than_the_bound(program: Program, share: float | None) -> None:
    base = offload_all(program)
    largest = max(-(-program.tensors[name].nbytes // 256) * 256 for name in base.offload)
    bound = None if share is None else int(share * largest)
    plan = plan_program(program, offload_all(program, prefetch_bytes=bound))
    levels = fetched_and_unused(plan, program)
    assert max(levels) <= (largest if bound is None else bound)
    if share is None or share >= 1:
        assert max(levels) > 0


@pytest.mark.parametrize("slack", [0, 0.05, 0.5])
def test_the_budget_is_kept_and_the_count_of_live_bytes_is_right(program: Program, slack: float) -> None:
    decisions = offload_all(program, prefetch_bytes=ROOMY)
    least = plan_program(program, offload_all(program, prefetch_bytes=0))
    budget = int(least.slab_bytes + slack * (least.slab_bytes - least.persistent_bytes))
    plan = plan_program(program, decisions, budget)
    assert plan.slab_bytes <= budget
    tops = [step.offset + step.nbytes for step in plan.steps if isinstance(step, Alloc)]
    assert max(tops) == plan.slab_bytes
    levels, most = live_by_launch(plan)
    assert most <= plan.slab_bytes - plan.persistent_bytes
    schedule = make_schedule(program, decisions)
    levels, most = live_by_launch(plan_program(program, decisions))
    assert schedule.ideal_bytes == most
    assert len(levels) == len(program.ops)


def test_live_bytes_agree_with_the_steps(program: Program) -> None:
    decisions = offload_all(program, prefetch_bytes=0)
    assert live_by_launch(plan_program(program, decisions))[0] == live_bytes(program, decisions.offload)[:-1]
    assert live_by_launch(plan_program(program, Decisions("none")))[0] == live_bytes(program, ())[:-1]


def test_host_places_do_not_overlap(program: Program) -> None:
    plan = plan_program(program, offload_all(program))
    places = sorted(
        (s.host_offset, s.host_offset + program.tensors[s.storage].nbytes) for s in plan.steps if isinstance(s, CopyOut)
    )
    assert all(a[1] <= b[0] for a, b in pairwise(places))
    assert places[-1][1] <= plan.host_bytes


@pytest.mark.parametrize("mode", ["train", "eval", "first", "middle", "last"])
def test_every_op_feed_and_fetch_is_in_the_plan_once_and_in_order(mode: str) -> None:
    program = lower(build("googlenet"), 2, mode, update=Update(momentum=0.9))
    plan = plan_program(program, offload_all(program))
    assert [s.op for s in plan.steps if isinstance(s, Launch)] == [op.name for op in program.ops]
    assert sorted(s.tensor for s in plan.steps if isinstance(s, Feed)) == sorted(program.feeds)
    assert sorted(s.tensor for s in plan.steps if isinstance(s, Fetch)) == sorted(program.fetches)


# ---- joins


def unit_costs(program: Program) -> CostTable:
    """Every op takes 1 ms; copies take long beside that, and are not slowed by one another."""
    table = {op.name: (Candidate("default", 1.0),) for op in program.ops}
    return CostTable(table, CopyRates(1e-3, 1e-3, 1e3, latency_us=0), "made up")


@pytest.mark.parametrize("join", ["reuse", "layer"])
def test_with_join_layer_no_layer_starts_beside_a_copy_of_another(program: Program, join: str) -> None:
    decisions = offload_all(program, join=join)
    plan = plan_program(program, decisions)
    planned = apply_decisions(program, decisions)
    spans = simulate(plan, planned, unit_costs(planned)).spans
    layer_of = {op.name: (op.layer, op.phase == "forward") for op in program.ops}
    overlaps = 0
    for i, step in enumerate(plan.steps):
        if not isinstance(step, (CopyOut, CopyIn)):
            continue
        around = [j for j in range(i, len(plan.steps)) if isinstance(plan.steps[j], Launch)]
        before = [j for j in range(i) if isinstance(plan.steps[j], Launch)]
        # a copy-out goes with the layer launched before it, a copy-in with the one launched after it
        own = before[-1] if isinstance(step, CopyOut) else around[0]
        others = [j for j in around if layer_of[plan.steps[j].op] != layer_of[plan.steps[own].op]]  # type: ignore[union-attr]
        overlaps += any(spans[j][0] < spans[i][1] for j in others)  # type: ignore[index]
    assert (overlaps == 0) == (join == "layer")
