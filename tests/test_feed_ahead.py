"""Images that are fed during the run before theirs: where the plan feeds them, what it waits for, who holds which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from plan_lab import Case, Lab, Machine, reference
from plan_small import FEED, FREE_IMAGES, IMAGES, LEFT, PLAN, PROGRAM, RIGHT, STEPS, both, drop, put

from vdnn.errors import PlanError, ProgramError
from vdnn.layers import lower
from vdnn.memory.clock import simulate
from vdnn.memory.decisions import Decisions
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import STREAMS, Alloc, Feed, Fetch, Launch, Record, Wait
from vdnn.memory.planner import persistent_places, plan_program
from vdnn.memory.policy import Budget, make_plan
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.backends.cpu.backend import CpuBackend
from vdnn.runtime.executor import Executor
from vdnn.runtime.held import Held, is_frozen
from vdnn.runtime.prepare import backend_costs

NORMALIZE = Launch("data.normalize", "compute")


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab("lenet", 3, steps=3)


def images_feed(steps: Sequence[Any]) -> int:
    """Index of the one step that feeds images."""
    (index,) = (i for i, step in enumerate(steps) if isinstance(step, Feed) and step.tensor == "images")
    return index


# ---- the plan


@pytest.mark.parametrize("join", ["reuse", "layer"])
@pytest.mark.parametrize("policy", ["base", "none", "all", "conv", "dyn"])
def test_the_images_of_the_next_run_come_as_soon_as_those_of_this_one_have_been_read(
    lab: Lab, policy: str, join: str
) -> None:
    steps = list(lab.case(policy, join=join).plan.steps)
    fed = images_feed(steps)
    read = steps.index(NORMALIZE)
    assert steps[fed].stream == "in"
    assert read < fed < next(i for i, s in enumerate(steps) if isinstance(s, Launch) and i > read)
    assert not any(isinstance(s, Wait) and s.stream == "compute" for s in steps[:read]), "the first op waits for a feed"


def test_a_step_is_shorter_by_the_upload_that_it_no_longer_waits_for() -> None:
    graph, backend = build("alexnet"), CpuBackend()
    times = {}
    for ahead in (False, True):
        program = lower(graph, 2, ahead=ahead)
        costs = backend_costs(backend, program)
        timing = simulate(plan_program(program, Decisions("none")), program, costs)
        times[ahead] = timing.total_ms
    upload_ms = program.tensors["images"].nbytes / (costs.rates.h2d_gbps * 1e6)
    assert times[True] <= times[False] - upload_ms


@pytest.mark.parametrize("mode", ["train", "eval", "middle"])
def test_every_feed_and_fetch_has_a_place_of_its_own_in_the_stage(mode: str) -> None:
    program = lower(build("googlenet"), 2, mode, ahead=mode != "eval")
    plan = plan_program(program, Decisions("none"))
    places = sorted(
        (step.stage_offset, step.stage_offset + program.tensors[step.tensor].nbytes)
        for step in plan.steps
        if isinstance(step, Feed | Fetch)
    )
    assert len(places) == len(program.feeds) + len(program.fetches)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert all(start % 256 == 0 for start, _ in places)
    assert places[0][0] == 0
    assert 0 <= plan.stage_bytes - places[-1][1] < 256
    assert (plan.host_bytes, plan.pinned_bytes) == (0, plan.stage_bytes)


def test_the_place_is_large_enough_for_every_plan_of_the_slab() -> None:
    graph = build("lenet")
    small, large = (lower(graph, batch, ahead=True) for batch in (2, 5))
    for programs in ((small, large), (large, small)):
        places, end = persistent_places(*programs)
        after = min(place for name, place in [*places.items(), ("end", end)] if place > places["images"])
        assert after - places["images"] >= large.tensors["images"].nbytes == 5 * 28 * 28


def test_only_a_persistent_feed_that_is_read_can_be_fed_ahead() -> None:
    for change in ({"ahead": ("w",)}, {"ahead": ("images",)}):
        with pytest.raises(ProgramError, match=r"is fed ahead, but is no persistent feed"):
            verify(replace(PROGRAM, **change), PLAN)
    unread = replace(PROGRAM, ops=(), fetches=(), persistent=("w", "images"), ahead=("images",))
    with pytest.raises(PlanError, match="no op reads it"):
        plan_program(unread, Decisions("none"))


def test_a_program_with_feeds_ahead_survives_json(lab: Lab) -> None:
    assert lab.program.ahead == ("images",)
    assert type(lab.program).from_json(lab.program.to_json()) == lab.program


# ---- the verifier

AHEAD = replace(PROGRAM, persistent=("w", "images"), ahead=("images",))
READ = Record(9, "compute")
GOOD = both(
    drop(FEED, IMAGES, FREE_IMAGES, Record(0, "in"), Wait(0, "compute")),
    put(RIGHT, READ, Wait(9, "in"), FEED, after=True),
)(list(STEPS))
"""The small plan with its images fed ahead, once both of their readers are done."""

FAULTS = {
    "no wait": (drop(Wait(9, "in")), "Feed writes 'images' on stream 'in', but step"),
    "waits for the first reader only": (
        both(drop(READ), put(LEFT, READ, after=True)),
        "Feed writes 'images' on stream 'in', but step 3 Launch(op='right'",
    ),
    "before the last reader": (
        both(drop(FEED, Wait(9, "in"), READ), put(LEFT, READ, Wait(9, "in"), FEED, after=True)),
        "op 'right' reads 'images': 'images' should hold what the last run left, but holds the feed of 'images'",
    ),
    "before all readers": (
        both(drop(FEED), put(LEFT, FEED)),
        "op 'left' reads 'images': 'images' should hold what the last run left, but holds the feed of 'images'",
    ),
    "never": (drop(FEED), "feed 'images' is in no step"),
    "twice": (put(FEED, FEED), "feed 'images' is done a second time"),
    "allocated": (put(LEFT, Alloc("images", 512, 32)), "'images' is persistent: it is never allocated"),
}


def plan_of(steps: list[Any]) -> Any:
    return replace(PLAN, steps=tuple(steps), persistent={"w": 0, "images": 256}, persistent_bytes=512, slab_bytes=2304)


def moved(steps: list[Any]) -> list[Any]:
    """The steps with all places behind the longer persistent section."""
    return [s._replace(offset=s.offset + 256) if isinstance(s, Alloc) else s for s in steps]


def test_a_feed_ahead_may_come_at_any_time_after_the_last_reader() -> None:
    verify(AHEAD, plan_of(moved(GOOD)))
    last = both(drop(FEED), lambda steps: [*steps, FEED])(list(GOOD))
    verify(AHEAD, plan_of(moved(last)))


@pytest.mark.parametrize(("edit", "message"), FAULTS.values(), ids=FAULTS)
def test_a_feed_ahead_at_the_wrong_time_is_refused(edit: Any, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        verify(AHEAD, plan_of(moved(edit(list(GOOD)))))


def without_wait(case: Case) -> Any:
    """The plan of `case` without the wait before its feed ahead."""
    steps = list(case.plan.steps)
    wait = images_feed(steps) - 1
    assert isinstance(steps[wait], Wait)
    return replace(case.plan, steps=tuple(steps[:wait] + steps[wait + 1 :]))


@pytest.mark.parametrize("policy", ["none", "all"])
def test_without_its_wait_it_is_refused_and_gives_other_bits_where_uploads_come_first(lab: Lab, policy: str) -> None:
    case = lab.case(policy, tight=True)
    faulty = without_wait(case)
    with pytest.raises(PlanError, match="Feed writes 'images'"):
        verify(case.program, faulty)
    expected = reference(lab, case)
    for order in permutations(STREAMS):
        machine = Machine(lab, [case], order)
        assert machine.run(case, case.plan).equals(expected)
        if order.index("in") < order.index("compute"):
            assert not machine.run(case, faulty).equals(expected), order
        machine.close()


# ---- who holds what


class Counting(CpuBackend):
    """A backend that notes which images are uploaded outside of the plan's own feed ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[np.ndarray] = []
        self.fails = False

    def feed(self, array: Any, value: Any, stage_offset: int, stream: str) -> None:
        if value.dtype == np.uint8 and value.ndim == 4:
            self.uploads.append(value)
        super().feed(array, value, stage_offset, stream)

    def feed_ahead(self, array: Any, value: Any, stage_offset: int, stream: str) -> None:
        if self.fails:
            raise KeyboardInterrupt
        super().feed(array, value, stage_offset, stream)


@pytest.fixture
def run(lab: Lab) -> Iterator[Any]:
    """run(number, next number) of one plan; returns the bytes of the losses. `run.backend` counts uploads."""
    case = lab.case("none")
    backend = Counting()
    backend.open(case.plan.slab_bytes, case.plan.host_bytes, case.plan.stage_bytes)

    class Run:
        def __init__(self) -> None:
            self.backend, self.case = backend, case
            self.executor = Executor(backend, case.plan, case.program)

        def __call__(self, number: int, following: int | None = None) -> bytes:
            start(backend, lab, case)
            ahead = {} if following is None else {"images": lab.feeds[following]["images"]}
            return self.executor.run(lab.feeds[number], ahead)[case.program.loss].tobytes()

    yield Run()
    backend.close()


def start(backend: CpuBackend, lab: Lab, case: Case) -> None:
    """The first weights again; the images stay."""
    for name, value in lab.first_values(case.program).items():
        if name != "images":
            spec = case.program.tensors[name]
            backend.write(backend.view(spec, spec, case.plan.persistent[name]), value)


def test_images_are_uploaded_before_a_run_only_if_they_are_not_there(lab: Lab, run: Any) -> None:
    first, second, third = (run(i) for i in range(3))
    assert len({first, second, third}) == 3
    del run.backend.uploads[:]
    assert [run(0, 1), run(1, 2), run(2)] == [first, second, third]
    assert [id(value) for value in run.backend.uploads] == [id(lab.feeds[0]["images"])]
    assert [run(2), run(2), run(0)] == [third, third, first]  # without a next run the same images come again
    assert [id(value) for value in run.backend.uploads[1:]] == [id(lab.feeds[0]["images"])]


def test_another_batch_than_was_announced_is_uploaded(run: Any) -> None:
    first, third = run(0), run(2)
    assert [run(0, 1), run(2)] == [first, third]


def test_an_announced_view_is_known_by_its_memory(lab: Lab, run: Any) -> None:
    second = run(1)
    images = lab.feeds[1]["images"]
    run.executor.run(lab.feeds[0], {"images": images[:]})
    del run.backend.uploads[:]
    assert run(1) == second
    assert run.backend.uploads == []


def test_images_that_can_be_written_are_never_trusted(lab: Lab, run: Any) -> None:
    feeds = {**lab.feeds[0], "images": lab.feeds[0]["images"].copy()}
    first, second = run(0), run(1)
    for number, expected in ((0, first), (1, second)):
        feeds["images"][...] = lab.feeds[number]["images"]
        feeds["labels"] = lab.feeds[number]["labels"]
        feeds["step"] = lab.feeds[number]["step"]
        start(run.backend, lab, run.case)
        assert run.executor.run(feeds)[run.case.program.loss].tobytes() == expected
    message = r"feed 'images' of the next run: expected memory that cannot be written.*setflags\(write=False\)"
    with pytest.raises(PlanError, match=message):
        run.executor.run(lab.feeds[0], {"images": feeds["images"]})
    with pytest.raises(PlanError, match=r"feed 'images': expected \(3, 1, 28, 28\) uint8, got \(2, 1, 28, 28\)"):
        run.executor.run(lab.feeds[0], {"images": lab.feeds[1]["images"][:2]})


def test_after_a_run_that_did_not_end_nothing_is_taken_for_granted(lab: Lab, run: Any) -> None:
    second = run(1)
    run(0, 1)
    run.backend.fails = True
    with pytest.raises(KeyboardInterrupt):
        run.executor.run(lab.feeds[1], {"images": lab.feeds[2]["images"]})
    run.backend.fails = False
    run.backend.sync()
    other = Executor(run.backend, run.case.plan, run.case.program)
    start(run.backend, lab, run.case)
    assert other.run(lab.feeds[1])[run.case.program.loss].tobytes() == second


def test_after_an_upload_that_did_not_end_nothing_is_taken_for_granted(lab: Lab, run: Any) -> None:
    second = run(1)
    run(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        sync = run.backend.sync

        def interrupted() -> None:
            sync()
            raise KeyboardInterrupt

        patch.setattr(run.backend, "sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.executor.run(lab.feeds[2])
    assert run(1) == second


def test_a_run_again_for_diagnosis_sees_the_batch_it_is_given(lab: Lab, run: Any) -> None:
    run(0, 1)
    seen = []

    def look(op: Any, arrays: Any) -> None:
        if op.kind == "input.normalize":
            seen.append(arrays["x"].copy())

    Executor(run.backend, run.case.plan, run.case.program, inspect=look).run(lab.feeds[0])
    assert np.array_equal(seen[0], lab.feeds[0]["images"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over garbage
def test_a_plan_that_keeps_the_place_for_others_leaves_the_images_there(lab: Lab, run: Any) -> None:
    """As evaluation does between two steps; one that does not keep it makes them unknown."""
    second = run(1)
    program = lower(lab.graph, 3, "eval")
    costs = backend_costs(run.backend, program)
    places = run.case.plan.persistent, run.case.plan.persistent_bytes
    decisions, shared = make_plan(program, costs, "none", Budget(shared=places))
    own = make_plan(program, costs, "none", Budget())[1]
    planned = apply_decisions(program, decisions)
    verify(planned, shared)
    run(0, 1)
    Executor(run.backend, shared, planned).run(lab.feeds[2])
    del run.backend.uploads[:]
    assert run(1) == second
    assert run.backend.uploads == []
    run(0, 1)
    Executor(run.backend, own, planned).run(lab.feeds[2])
    del run.backend.uploads[:]
    assert run(1) == second
    assert len(run.backend.uploads) == 1


def test_held_knows_memory_not_names_alone() -> None:
    held, images = Held(), np.ones((2, 3, 4), np.uint8)
    held.note("images", 256, images)
    assert not held.has("images", 256, images), "an array that can be written"
    images.setflags(write=False)
    held.note("images", 256, images)
    assert held.has("images", 256, images[:])
    for name, offset, value in (
        ("labels", 256, images),
        ("images", 512, images),
        ("images", 256, images[:1]),
        ("images", 256, images[::-1]),
        ("images", 256, images.copy()),
        ("images", 256, images.view(np.int8)),
    ):
        assert not held.has(name, offset, value), (name, offset)
    held.keep({"images": 256, "step": 0})
    assert held.has("images", 256, images)
    held.keep({"step": 0})
    assert not held.has("images", 256, images)


def test_memory_is_frozen_only_if_no_array_above_it_can_be_written() -> None:
    owner = np.zeros(8, np.uint8)
    view = owner[2:]
    view.setflags(write=False)
    assert not is_frozen(view)
    owner.setflags(write=False)
    assert is_frozen(view)
    assert is_frozen(np.frombuffer(b"bytes", np.uint8))
    writable = np.frombuffer(bytearray(8), np.uint8)
    writable.setflags(write=False)
    assert not is_frozen(writable), "the bytearray below it can be written"
