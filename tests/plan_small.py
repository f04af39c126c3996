"""A small program, a valid plan of it, and edits of its steps.

    steps = both(drop(OUT), put(Z, Launch("left", "compute")))(list(STEPS))

The program: images → left and right half of "cat" → z → loss; g from cat and z; w from g. "cat" is copied out and in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vdnn.layers import Op, Program, TensorSpec
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Wait

Steps = list[Any]
Edit = Callable[[Steps], Steps]


def op(name: str, reads: tuple[str, ...], writes: tuple[str, ...], accumulate: bool = False) -> Op:
    arguments = {f"y{i}": tensor for i, tensor in enumerate(writes)}
    reading = {f"x{i}": tensor for i, tensor in enumerate(reads)}
    return Op(name, "test.op", "layer", "forward", reading, arguments, {}, tuple(arguments) if accumulate else ())


TENSORS = (
    TensorSpec("w", "weight", (4,)),
    TensorSpec("images", "input", (2, 4, 2, 2), "uint8"),
    TensorSpec("cat", "act", (2, 8, 2, 2)),
    TensorSpec("left", "act", (2, 4, 2, 2), view_of="cat"),
    TensorSpec("right", "act", (2, 4, 2, 2), view_of="cat", channel=4),
    TensorSpec("z", "act", (2, 8, 2, 2)),
    TensorSpec("z2", "act", (2, 8, 2, 2), view_of="z"),
    TensorSpec("losses", "loss", (2,)),
    TensorSpec("g", "wgrad", (4,)),
)
PROGRAM = Program(
    name="small",
    batch=2,
    mode="train",
    tensors={spec.name: spec for spec in TENSORS},
    ops=(
        op("left", ("images",), ("left",)),
        op("right", ("images",), ("right",)),
        op("z", ("cat", "w"), ("z",)),
        op("z2", ("z",), ("z2",)),
        op("loss", ("z2",), ("losses",)),
        op("back", ("cat", "z2"), ("g",)),
        op("update", ("g",), ("w",), accumulate=True),
    ),
    persistent=("w",),
    feeds=("images",),
    fetches=("losses",),
    loss="losses",
    correct="losses",
)
STEPS = (
    Alloc("images", 256, 32),
    Feed("images", "in"),
    Record(0, "in"),
    Alloc("cat", 512, 256),
    Wait(0, "compute"),
    Launch("left", "compute"),
    Launch("right", "compute"),
    Record(1, "compute"),
    Free("images", "compute"),
    Wait(1, "out"),
    CopyOut("cat", 0, "out"),
    Record(2, "out"),
    Alloc("z", 768, 256),
    Launch("z", "compute"),
    Launch("z2", "compute"),
    Wait(2, "compute"),
    Free("cat", "compute"),
    Alloc("losses", 512, 8),
    Launch("loss", "compute"),
    Record(3, "compute"),
    Wait(3, "out"),
    Fetch("losses", "out", 32),
    Free("losses", "out"),
    Alloc("cat", 1024, 300),
    Wait(2, "in"),
    CopyIn("cat", "in"),
    Record(4, "in"),
    Alloc("g", 256, 16),
    Wait(4, "compute"),
    Launch("back", "compute"),
    Free("cat", "compute"),
    Free("z", "compute"),
    Launch("update", "compute"),
    Free("g", "compute"),
)
PLAN = Plan("small", 2, "train", PROGRAM.digest(), "", {"w": 0, "other": 256}, 256, 2048, 256, STEPS, 40)


def find(steps: Any, step: Any) -> int:
    """Index of the first step equal to `step`, kind included."""
    return next(i for i, other in enumerate(steps) if type(other) is type(step) and other == step)


def drop(*steps: Any) -> Edit:
    return lambda all_steps: [s for s in all_steps if not any(type(s) is type(d) and s == d for d in steps)]


def put(step: Any, *new: Any, after: bool = False) -> Edit:
    """`new` before (or after) `step`."""

    def edit(steps: Steps) -> Steps:
        at = find(steps, step) + after
        return [*steps[:at], *new, *steps[at:]]

    return edit


def turn(old: Any, new: Any) -> Edit:
    """`new` instead of the first `old`."""

    def edit(steps: Steps) -> Steps:
        at = find(steps, old)
        return [*steps[:at], new, *steps[at + 1 :]]

    return edit


def both(*edits: Edit) -> Edit:
    def edit(steps: Steps) -> Steps:
        for one in edits:
            steps = one(steps)
        return steps

    return edit


LEFT, RIGHT, Z, Z2 = (Launch(name, "compute") for name in ("left", "right", "z", "z2"))
LOSS, BACK, UPDATE = (Launch(name, "compute") for name in ("loss", "back", "update"))
OUT, IN, FEED, FETCH = CopyOut("cat", 0, "out"), CopyIn("cat", "in"), Feed("images", "in"), Fetch("losses", "out", 32)
FREE_IMAGES, FREE_CAT, FREE_LOSSES = Free("images", "compute"), Free("cat", "compute"), Free("losses", "out")
IMAGES, CAT, LOSSES, G = STEPS[0], STEPS[3], STEPS[17], STEPS[27]
