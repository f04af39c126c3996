"""Whole steps before the first, where ops were measured one by one: what is predicted from them, what they leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vdnn.bench.harness import Silent
from vdnn.errors import NotFiniteError
from vdnn.runtime import calibration, rehearsal
from vdnn.runtime.calibration import COUNTED_MS, MOST, counted
from vdnn.runtime.config import load_config
from vdnn.runtime.data import epoch_order
from vdnn.runtime.forecast import compare
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.rehearsal import FEWEST, predict
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

SECTIONS = ("device=cpu", "data={source: synthetic, train_images: 30, test_images: 4}", "evaluate.batch_size=4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prepared_run(*overrides: str, network: str = "lenet", measured: bool = True) -> Prepared:
    """A run whose ops pass for measured one by one, as on a GPU."""
    made = prepare(load_config(network, [*SECTIONS, "train={iterations: 4, batch_size: 10}", *overrides]))
    made.backend.caps = replace(made.backend.caps, measured_costs=measured, cost_source="measured on this one")
    return made


class Steps:
    """Steps by the clock of `rehearsal`: those that do not count take long, the others 1, 2, 3, ... times what is
    expected."""

    def __init__(self, expected_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected_ms, self.now, self.seen = expected_ms, 0.0, list[tuple[Any, ...]]()
        self.skipped, self.count = counted(expected_ms, FEWEST)
        monkeypatch.setattr(rehearsal, "perf_counter", lambda: self.now)

    def __call__(self, *given: Any) -> tuple[float, float]:
        self.seen.append(given)
        number = len(self.seen) - self.skipped
        self.now += self.expected_ms / 1000 * (number if number > 0 else 10_000.0)
        return 2.3, 0.1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_median_of_whole_steps_is_predicted(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    made, said = prepared_run(f"train.accumulate={accumulate}"), list[str]()
    raw = made.predicted_step_ms()
    steps = Steps(raw, monkeypatch)
    step_ms, source = predict(made, said.append, steps)
    count = steps.count
    assert len(steps.seen) == count + steps.skipped
    assert step_ms == pytest.approx(raw * (count + 1) / 2)
    assert source == (
        f"measured on this one; rehearsed: whole steps take {(count + 1) / 2:.2f} times as long as their parts"
    )


def test_what_is_rehearsed_is_how_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared_run()
    steps = Steps(COUNTED_MS / FEWEST, monkeypatch)
    monkeypatch.setattr(rehearsal, "expected_step", lambda prepared: (steps.expected_ms, "guessed"))
    predict(made, lambda text: None, steps)
    split = made.source.train
    order = epoch_order(made.config.train.seed, 0, len(split)).reshape(3, 10)
    for number, (images, labels, rate, following) in enumerate(steps.seen):
        np.testing.assert_array_equal(images, split.images(order[number % 3]))
        np.testing.assert_array_equal(labels, split.labels(order[number % 3]))
        assert rate == 0.0
        if number + 1 < len(steps.seen):
            assert following is steps.seen[number + 1][0]
            assert not following.flags.writeable, "images that can be written are not fed ahead"
    assert following is None


@pytest.mark.parametrize(("times", "count"), [(1e-3, MOST), (0.02, 75), (0.4, FEWEST + 1), (0.9, FEWEST)])
def test_few_long_steps_or_many_short_ones(monkeypatch: pytest.MonkeyPatch, times: float, count: int) -> None:
    made, said = prepared_run(), list[str]()
    monkeypatch.setattr(rehearsal, "expected_step", lambda prepared: (1000 * times, "guessed"))
    steps = Steps(1000 * times, monkeypatch)
    predict(made, said.append, steps)
    assert steps.count == count
    whole = steps.skipped + count
    assert len(steps.seen) == whole
    announced = [f"rehearsing {whole} steps: about "] if whole * times > 2 else []
    assert [text[: text.index("about") + 6] for text in said] == announced


def test_what_is_known_or_takes_too_long_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> tuple[float, float]:
        raise AssertionError("a step was taken")

    made = prepared_run()
    monkeypatch.setattr(rehearsal, "MEASURE_BELOW_MS", 0.0)
    assert predict(made, print, refused) == (made.predicted_step_ms(), "measured on this one")
    monkeypatch.undo()
    assert predict(made, print) == (made.predicted_step_ms(), "measured on this one")


def test_what_an_earlier_run_has_shown_is_not_rehearsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared_run()
    parts_ms = made.predicted_step_ms()
    compare(made, parts_ms, [2 * parts_ms] * sum(counted(parts_ms)))
    steps = Steps(1.0, monkeypatch)
    assert predict(made, print, steps)[0] == pytest.approx(2 * made.predicted_step_ms())
    assert not steps.seen


def test_a_step_that_overflows_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflows(*given: Any) -> tuple[float, float]:
        raise NotFiniteError("NaN")

    made = prepared_run()
    assert predict(made, print, overflows) == (made.predicted_step_ms(), "measured on this one")


RUNS = {
    "lenet fp32": ("network.dropout=0.5",),
    "lenet fp16": ("network.dropout=0.5", "precision=fp16"),  # with a loss scale
    "resnet18": (
        "network.classes=5",
        "network.image_size=32",
        "train={iterations: 2, batch_size: 2}",
    ),  # with statistics
}


@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsal_changes_nothing_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ends, factors = [], []
    monkeypatch.setattr(calibration, "COUNTED_MS", 0.0)
    for measured in (True, False):
        made = prepared_run(*RUNS[name], network=name.partition(" ")[0], measured=measured)
        run = Trainer(made, RunFolder.create(str(tmp_path / f"{measured}")), Silent())
        run.start()
        factors.append("rehearsed" in run.predicted_from)
        begun = run.tensors()
        scale = run.scaling and run.scaling.to_json()
        result = run.run()
        ends.append((begun, scale, run.tensors(), result.loss))
        made.backend.close()
    assert factors == [True, False]
    (begun, scale, ended, loss), (other_begun, other_scale, other_ended, other_loss) = ends
    assert (loss, scale) == (other_loss, other_scale)
    for name in begun:
        np.testing.assert_array_equal(begun[name], other_begun[name], name)
        np.testing.assert_array_equal(ended[name], other_ended[name], name)
