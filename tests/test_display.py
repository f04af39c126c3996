"""Plain lines and rows of metrics, against means taken by hand; a clock that the test turns."""

from __future__ import annotations

import csv
import io

import pytest

from vdnn.cli import display
from vdnn.cli.display import Display
from vdnn.runtime.listener import StepInfo
from vdnn.runtime.run_folder import Metrics

LOSSES, IMAGES = (1.0, 2.0, 3.0, 5.0, 4.0, 8.0, 6.0), (10, 10, 5, 10, 10, 5, 10)
"""Two epochs of three steps, the last of 5 images, and one step of a third: a run that stops inside it."""


@pytest.fixture(params=[0.1, 3.0])
def shown(request, tmp_path, monkeypatch):
    """Lines and rows of these steps, each taking so many seconds of the clock."""
    now = [0.0]
    monkeypatch.setattr(display, "monotonic", lambda: now[0])
    stream, metrics = io.StringIO(), Metrics(tmp_path / "metrics.csv")
    metrics.start()
    with Display(stream, metrics, 3) as made:
        for i, (loss, images) in enumerate(zip(LOSSES, IMAGES, strict=True)):
            now[0] += request.param
            made.step(StepInfo(i + 1, 30, i // 3, loss, 0.2 * (i % 2), 0.5, images, 40.0, 10.0))
    with metrics.path.open(newline="") as file:
        return request.param, stream.getvalue().splitlines(), list(csv.DictReader(file))


def test_there_is_a_row_for_every_epoch_whatever_the_clock_says(shown):
    _, _, rows = shown
    assert [(row["step"], row["epoch"], row["images"]) for row in rows] == [
        ("3", "1", "25"),
        ("6", "2", "25"),
        ("7", "3", "10"),
    ]
    # (10 + 20 + 15) / 25, (50 + 40 + 40) / 25; of 10 images at 0.2 are right 2, of 5 one
    assert [float(row["loss"]) for row in rows] == [1.8, 5.2, 6.0]
    assert [float(row["accuracy"]) for row in rows] == [2 / 25, 3 / 25, 0.0]
    assert [float(row["images_per_s"]) for row in rows] == pytest.approx([25 / 0.15, 25 / 0.15, 10 / 0.05], abs=0.1)


def test_a_line_says_over_which_steps_it_is(shown):
    second_per_step, lines, _ = shown
    if second_per_step < 1:
        assert [line.split("(")[1].split(")")[0] for line in lines] == ["whole epoch", "whole epoch"]
        return
    assert [(line.split()[2], line.split("(")[1].split(")")[0]) for line in lines] == [
        ("2/30", "last 2 steps"),
        ("3/30", "whole epoch"),
        ("5/30", "last 2 steps"),
        ("6/30", "whole epoch"),
    ]
    assert [line.split("loss ")[1].split()[0] for line in lines] == ["1.5000", "1.8000", "4.5000", "5.2000"]


def test_a_part_of_an_epoch_is_not_called_a_whole_one(tmp_path):
    stream, metrics = io.StringIO(), Metrics(tmp_path / "metrics.csv")
    metrics.start()
    with Display(stream, metrics, 3) as made:  # resumed after the first step
        for step in (2, 3):
            made.step(StepInfo(step, 30, 0, 1.0, 0.5, 0.5, 10, 40.0, 10.0))
    assert "(2 steps of the epoch)" in stream.getvalue()
    assert metrics.path.read_text().splitlines()[1].startswith("3,1,train,1.000000,0.500000,0.5,20,")
