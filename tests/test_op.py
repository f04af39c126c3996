"""Program: validation of reads, and digests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from vdnn.errors import ProgramError
from vdnn.layers import Op, Program, TensorSpec, Update, lower
from vdnn.networks import build


def program_of(tensors: list[TensorSpec], ops: list[tuple[list[str], list[str]]]) -> Program:
    """A program of ops (reads, writes) over `tensors`; "x" is fed."""
    made = tuple(
        Op(f"op{i}", "kind", "layer", "forward", dict(enumerate_names(reads)), dict(enumerate_names(writes)))
        for i, (reads, writes) in enumerate(ops)
    )
    return Program("p", 1, "train", {t.name: t for t in tensors}, made, (), ("x",), (), "loss", "correct")


def enumerate_names(tensors: list[str]) -> list[tuple[str, str]]:
    return [(f"arg{i}", tensor) for i, tensor in enumerate(tensors)]


def act(name: str, channels: int = 4, view_of: str | None = None, channel: int = 0) -> TensorSpec:
    return TensorSpec(name, "act", (1, channels, 2, 2), view_of=view_of, channel=channel)


X = act("x")
HALVES = [act("whole"), act("left", 2, "whole"), act("right", 2, "whole", 2)]


@pytest.mark.parametrize(
    ("tensors", "ops"),
    [
        ([X, act("y", view_of="x")], [(["x"], ["y"]), (["y"], ["y"])]),
        ([X, *HALVES], [(["x"], ["left"]), (["x"], ["right"]), (["whole"], ["x"]), (["left"], ["x"])]),
        ([X, *HALVES], [(["x"], ["whole"]), (["left"], ["x"]), (["right"], ["right"]), (["left"], ["x"])]),
    ],
    ids=["in place", "whole of its parts", "parts of a whole"],
)
def test_valid_programs(tensors: list[TensorSpec], ops: list[tuple[list[str], list[str]]]) -> None:
    program_of(tensors, ops).validate()


@pytest.mark.parametrize(
    ("tensors", "ops", "text"),
    [
        ([X], [(["z"], ["x"])], "op 'op0' reads unknown tensor 'z'"),
        ([X, act("y")], [(["y"], ["x"])], "op 'op0' reads 'y'"),
        ([X, act("y", view_of="x")], [(["x"], ["y"]), (["x"], ["y"])], "op 'op1' reads 'x'"),
        ([X, *HALVES], [(["x"], ["left"]), (["whole"], ["x"])], "op 'op1' reads 'whole'"),
        ([X, *HALVES], [(["x"], ["left"]), (["right"], ["x"])], "op 'op1' reads 'right'"),
        (
            [X, *HALVES, act("relu", view_of="whole")],
            [(["x"], ["left"]), (["x"], ["right"]), (["whole"], ["relu"]), (["left"], ["x"])],
            "op 'op3' reads 'left'",
        ),
        (
            [X, *HALVES, act("relu", view_of="whole")],
            [(["x"], ["left"]), (["x"], ["right"]), (["whole"], ["relu"]), (["whole"], ["x"])],
            "op 'op3' reads 'whole'",
        ),
        ([X, *HALVES], [(["x"], ["whole"]), (["left"], ["left"]), (["whole"], ["x"])], "op 'op2' reads 'whole'"),
    ],
)
def test_reads_of_missing_or_overwritten_bytes(
    tensors: list[TensorSpec], ops: list[tuple[list[str], list[str]]], text: str
) -> None:
    with pytest.raises(ProgramError, match=text):
        program_of(tensors, ops).validate()


def test_a_lowered_program_with_one_view_too_many_is_refused() -> None:
    good = lower(build("lenet"), 2)
    good.validate()
    over_relu = replace(good.tensors["drop3"], view_of="fc3")  # backward of relu3 reads its y
    with pytest.raises(
        ProgramError, match=r"op 'relu3.backward' reads 'relu3', whose bytes hold another value by then"
    ):
        replace(good, tensors={**good.tensors, "drop3": over_relu}).validate()


# ---- digests


def test_digest_changes_with_everything_that_is_computed() -> None:
    net = build("lenet")
    programs = [
        lower(net, 2),
        lower(net, 3),
        lower(net, 2, "eval"),
        lower(net, 2, "first"),
        lower(net, 2, update=Update(momentum=0.9)),
        lower(net, 2, update=Update(weight_decay=0.1)),
        lower(net, 2, std=(0.1,)),
        lower(net, 2, dtype="float64"),
        lower(build("lenet", dropout=0.25), 2),
    ]
    assert len({program.digest() for program in programs}) == len(programs)
    assert lower(build("lenet"), 2).digest() == programs[0].digest()


def test_digest_is_equal_in_another_process() -> None:
    code = (
        "from vdnn.layers import lower; from vdnn.networks import build; print(lower(build('googlenet'), 2).digest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.strip()) == 64
