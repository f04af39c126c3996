"""Faults that belong to no single step: of the plan's sizes and places, of what it leaves, of the program itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from plan_small import PLAN, PROGRAM, STEPS, op

from vdnn.errors import PlanError, ProgramError
from vdnn.layers import TensorSpec
from vdnn.memory.plan import Alloc, Launch, Plan
from vdnn.memory.verify import verify

PLANS = {
    "name": (replace(PLAN, name="other"), "name is 'other', expected the program's, 'small'"),
    "batch": (replace(PLAN, batch=3), "batch is 3, expected the program's, 2"),
    "mode": (replace(PLAN, mode="eval"), "mode is 'eval', expected the program's, 'train'"),
    "slab below the persistent section": (replace(PLAN, slab_bytes=255), "256 B, 255 B, 256 B and 40 B"),
    "negative host": (replace(PLAN, host_bytes=-1), "256 B, 2048 B, -1 B and 40 B"),
    "negative stage": (replace(PLAN, stage_bytes=-1), "256 B, 2048 B, 256 B and -1 B"),
    "no place": (replace(PLAN, persistent={}), "persistent storage 'w' has no place in the persistent section"),
    "unaligned place": (replace(PLAN, persistent={"w": 16}), "'w' lies at 16 B, no multiple of 256 B"),
    "place before the slab": (replace(PLAN, persistent={"w": -256}), "'w' lies at -256 B, before the slab"),
    "place beyond the section": (
        replace(PLAN, persistent={"w": 256}),
        "'w' ends at 272 B, beyond the persistent section",
    ),
    "another plan's storage beyond the section": (
        replace(PLAN, persistent={"w": 0, "other": 512}),
        "'other' ends at 512 B",
    ),
    "another plan's storage over ours": (
        replace(PLAN, persistent={"w": 0, "other": 0}),
        "'other' lies at 0 B, over 'w'",
    ),
}


@pytest.mark.parametrize(("plan", "message"), PLANS.values(), ids=PLANS)
def test_a_fault_of_the_whole_plan_is_named(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        verify(PROGRAM, plan)
    assert error.value.step is None


def test_places_of_persistent_storages_may_not_overlap() -> None:
    program = replace(PROGRAM, tensors={**PROGRAM.tensors, "v": TensorSpec("v", "state", (65,))}, persistent=("v", "w"))
    verify(program, replace(PLAN, persistent={"v": 0, "w": 512}, persistent_bytes=768, steps=_moved(STEPS, 512)))
    message = re.escape("persistent storage 'w' lies at 256 B, over 'v', which ends at 260 B")
    with pytest.raises(PlanError, match=message):
        verify(program, replace(PLAN, persistent={"v": 0, "w": 256}, persistent_bytes=768, steps=_moved(STEPS, 512)))


def _moved(steps: Any, by: int) -> tuple[Any, ...]:
    return tuple(step._replace(offset=step.offset + by) if isinstance(step, Alloc) else step for step in steps)


def test_a_persistent_storage_must_end_as_the_program_leaves_it() -> None:
    ops = (op("one", (), ("w",)), op("two", (), ("w",)))
    program = replace(PROGRAM, ops=ops, feeds=(), fetches=())
    one, two = (Launch(name, "compute") for name in ("one", "two"))
    verify(program, replace(PLAN, steps=(one, two)))
    message = re.escape(
        "persistent 'w' should end as what op 'two' wrote, but ends as what op 'one' wrote, since step 1"
    )
    with pytest.raises(PlanError, match=message):
        verify(program, replace(PLAN, steps=(two, one)))


PROGRAMS = {
    "unknown tensor": ({"ops": (op("z", ("q",), ("z",)),)}, "program 'small' names the unknown tensor 'q'"),
    "two ops of one name": ({"ops": PROGRAM.ops[:1] * 2}, "program 'small' has two ops named 'left'"),
    "read of what nothing wrote": (
        {"ops": (PROGRAM.ops[0], PROGRAM.ops[2])},
        "op 'z' reads 'cat' before anything has written channels 4 to 7 of 'cat'",
    ),
    "fetch of what nothing wrote": ({"ops": ()}, "the host reads 'losses' before anything has written 'losses'"),
    "persistent view": ({"persistent": ("w", "left")}, "program 'small' keeps 'left', which is no storage"),
}


@pytest.mark.parametrize(("change", "message"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_without_meaning_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        verify(replace(PROGRAM, **change), PLAN)


@pytest.mark.parametrize(
    "view",
    [
        TensorSpec("bad", "act", (2, 4, 2, 2), view_of="cat", channel=5),
        TensorSpec("bad", "act", (2, 8, 2, 2), view_of="cat", channel=1),
        TensorSpec("bad", "act", (2, 4, 2, 1), view_of="cat"),
        TensorSpec("bad", "act", (1, 4, 2, 2), view_of="cat", image=2),
        TensorSpec("bad", "act", (2, 4, 2, 2), view_of="cat", image=-1),
        TensorSpec("bad", "act", (0, 8, 2, 2), view_of="cat", image=1),
        TensorSpec("bad", "act", (2, 4, 2, 2), "float16", view_of="cat"),
        TensorSpec("bad", "act", (2, 4, 2, 2), layout="NHWC", view_of="cat"),
        TensorSpec("bad", "act", (2, 4, 2, 2), view_of="left"),
        TensorSpec("bad", "act", (2, 4, 2, 2), view_of="q"),
    ],
)
def test_a_view_that_is_no_range_of_its_storage_is_refused(view: TensorSpec) -> None:
    with pytest.raises(ProgramError, match=r"tensor 'bad'.* is (no range of images and channels of|a view of)"):
        verify(replace(PROGRAM, tensors={**PROGRAM.tensors, "bad": view}), PLAN)
