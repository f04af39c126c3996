"""Evaluations whose maps overflow: of finite weights, at the end of the first of two epochs of five steps."""

from __future__ import annotations

import csv
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_trainer import Silent, make, trained

from vdnn.errors import NotFiniteError
from vdnn.runtime.checkpoint import latest, load
from vdnn.runtime.trainer import Trainer

HUGE = {"fp32": 3e38, "tf32": 3e38, "bf16": 3e38, "fp16": 1e6}
"""Weights that float32 can hold, and whose products the precision cannot."""
STEPS = "schedule={name: constant}"


class Overflow(Silent):
    """Makes the weights of conv1 huge for the evaluation after step `at`, and for it alone."""

    def __init__(self, at: int, huge: float):
        super().__init__(self.before)
        self.at, self.huge, self.words = at, huge, list[str]()
        self.made: Trainer | None = None
        self._kept: dict[str, Any] = {}

    def before(self, info: Any) -> None:
        if info.step == self.at and self.made is not None:
            self._kept = {name: np.copy(value) for name, value in self.made.tensors().items()}
            weight = np.full_like(self._kept["conv1.weight"], self.huge)
            self.made.kept.write({**self._kept, "conv1.weight": weight})

    def note(self, text: str) -> None:
        self.words.append(text)

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        super().evaluated(step, epoch, loss, accuracy)
        if step == self.at and self.made is not None:
            self.made.kept.write(self._kept)


def run(folder: Path, precision: str, at: int) -> tuple[Trainer, Overflow]:
    listener = Overflow(at, HUGE[precision])
    made = listener.made = make(folder, f"precision={precision}", STEPS, listener=listener)
    return made, listener


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as stream:
        return [row for row in csv.DictReader(stream) if row["split"] == "test"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_fp16_it_is_told_and_training_goes_on(tmp_path: Path) -> None:
    whole, _, expected = trained(tmp_path / "whole", "precision=fp16", STEPS)
    made, listener = run(tmp_path / "half", "fp16", 5)
    result = made.run()
    tensors = made.tensors()
    made.backend.close()
    assert result.steps == 10
    assert isfinite(result.loss)
    assert all(expected[name].tobytes() == tensors[name].tobytes() for name in expected)
    assert made.scaling == whole.scaling  # no step was skipped for it
    (words,) = (text for text in listener.words if "evaluation after" in text)
    assert words.startswith("note: evaluation after step 5: NaN or infinity first in layer 'conv1' (op 'conv1.")
    assert words.endswith("beyond the range of fp16; bf16 has a larger one; training goes on")
    first, last = rows(tmp_path / "half")
    assert (first["step"], last["step"]) == ("5", "10")
    assert not isfinite(float(first["loss"]))
    assert float(first["accuracy"]) == 0
    assert last == rows(tmp_path / "whole")[1]
    names = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("whole", "half")]
    assert names[0] == names[1]
    assert "step-00000005" in names[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_fp16_it_may_be_the_last_one(tmp_path: Path) -> None:
    """It is evaluated once, and the run ends as any other; its checkpoint is the newest."""
    made, listener = run(tmp_path, "fp16", 10)
    result = made.run()
    made.backend.close()
    assert not isfinite(result.loss)
    assert result.accuracy == 0
    assert [step for step, *_ in listener.tests] == [5, 10]
    assert listener.words[-1].endswith("bf16 has a larger one; the weights are finite")
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    assert load(newest)[1]["step"] == 10


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_others_it_is_an_error_that_names_what_was_set_aside(tmp_path: Path, precision: str) -> None:
    made, listener = run(tmp_path, precision, 5)
    with pytest.raises(NotFiniteError, match="evaluation after step 5: NaN or infinity first in layer '") as caught:
        made.run()
    made.backend.close()
    aside = tmp_path / "checkpoints" / "aside-step-00000005"
    assert str(caught.value).endswith(f". That of step 5 was set aside as '{aside}'")
    assert caught.value.exit_code == 4
    assert aside.is_dir()
    assert latest(tmp_path / "checkpoints") is None
    assert not listener.tests
    assert not rows(tmp_path)
