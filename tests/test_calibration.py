"""Predictions compared with the first steps of a run: what is told, written, kept, and used by the next run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vdnn.cli import train as cli
from vdnn.runtime import calibration, files
from vdnn.runtime import trainer as trainer_module
from vdnn.runtime.calibration import (
    CALIBRATION,
    LEAST,
    MOST,
    Calibration,
    calibration_key,
    counted,
    keep_factor,
    known_factor,
)
from vdnn.runtime.config import load_config
from vdnn.runtime.forecast import compare, expected_step
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.rehearsal import predict
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

SECTIONS = ("device=cpu", "data={source: synthetic, train_images: 40, test_images: 4}", "evaluate.batch_size=4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepared_run(*overrides: str, measured: bool = True) -> Prepared:
    """A run whose ops pass for measured one by one, as on a GPU."""
    made = prepare(load_config("lenet", [*SECTIONS, "train={iterations: 14, batch_size: 4}", *overrides]))
    made.backend.caps = replace(made.backend.caps, measured_costs=measured, cost_source="measured on this one")
    return made


def quiet(text: str) -> None:
    raise AssertionError(text)


def compared(made: Prepared) -> Calibration | None:
    """What first steps of 900 ms show, and of 6 ms in the median of those that count."""
    parts_ms = made.predicted_step_ms()
    skipped, count = counted(parts_ms)
    return compare(made, parts_ms, [900.0] * skipped + [5.0] * (count // 2) + [7.0] * (count - count // 2))


@pytest.mark.parametrize(
    ("step_ms", "least", "expected"),
    [
        (1e-3, LEAST, (50, MOST)),
        (15.0, LEAST, (25, 100)),
        (100.0, LEAST, (3, 15)),
        (1e4, LEAST, (2, 10)),
        (1e4, 3, (2, 3)),
    ],
)
def test_many_short_steps_are_counted_and_few_long_ones(step_ms: float, least: int, expected: tuple[int, int]) -> None:
    assert counted(step_ms, least) == expected


def test_a_factor_is_the_median_of_the_first_steps_over_the_sum_of_the_parts() -> None:
    made = prepared_run()
    raw = made.predicted_step_ms()
    found = compared(made)
    assert found is not None
    assert found.factor == pytest.approx(6.0 / raw)
    assert found.to_json() == {
        "predicted_ms": raw,
        "measured_ms": 6.0,
        "steps": counted(raw)[1],
        "calibration": found.factor,
    }
    assert f"measured: 6.00 ms per step (median of {counted(raw)[1]}), " in found.words()
    assert f" {6.0 / raw:.2f} times the " in found.words()


def test_the_next_prediction_is_calibrated_and_says_so() -> None:
    made = prepared_run()
    raw = made.predicted_step_ms()
    assert expected_step(made) == (raw, "measured on this one")
    compared(made)
    step_ms, source = predict(prepared_run(), quiet)
    assert step_ms == pytest.approx(6.0)
    assert source == f"measured on this one; calibrated by {6.0 / raw:.2f} on an earlier run"
    # the factor is of the parts, not of the calibrated sum: it does not creep
    again = compared(prepared_run())
    assert again is not None
    assert again.factor == pytest.approx(6.0 / raw)


def test_the_start_of_a_run_shows_the_calibrated_time(capsys: Any) -> None:
    compared(prepared_run())
    cli.announce(prepared_run(), "given")
    assert "step about 6.00 ms (measured on this one; calibrated by " in capsys.readouterr().out


@pytest.mark.parametrize("more", [-1, 1])
def test_steps_are_compared_once(more: int) -> None:
    made = prepared_run()
    parts_ms = made.predicted_step_ms()
    assert compare(made, parts_ms, [5.0] * (sum(counted(parts_ms)) + more)) is None
    assert expected_step(made)[1] == "measured on this one"


def test_where_ops_are_not_measured_nothing_is_compared(cache: Path) -> None:
    compared(prepared_run())
    plain = prepared_run(measured=False)
    assert compared(plain) is None
    assert expected_step(plain) == (plain.predicted_step_ms(), "measured on this one")


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.batch_size=5",),
        ("train.accumulate=2",),
        ("memory.policy=all",),
        ("network.image_size=30",),
        ("memory.layout=nhwc",),
        ("memory.fuse=false",),
    ],
)
def test_a_factor_is_used_for_the_same_step_only(overrides: tuple[str, ...]) -> None:
    compared(prepared_run())
    assert "calibrated" in expected_step(prepared_run())[1]
    assert "calibrated" not in expected_step(prepared_run(*overrides))[1]


def test_device_and_precision_are_part_of_the_key() -> None:
    made = prepared_run()
    programs = [planned.program for planned in made.plans.plans.values()]
    key = calibration_key(made.backend.caps, "lenet", "none", programs)
    keep_factor(key, Calibration(2.0, 3.0, 10))
    assert known_factor(key) == 1.5
    caps = made.backend.caps
    for other in (replace(caps, description="another"), replace(caps, precision="tf32")):
        assert known_factor(calibration_key(other, "lenet", "none", programs)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"calibration": "x"}', '{"calibration": NaN}', "\0"])
def test_a_damaged_file_counts_as_none(cache: Path, text: str) -> None:
    made = prepared_run()
    compared(made)
    (path,) = (cache / "vdnn" / "calibration").iterdir()
    path.write_text(text, encoding="utf-8")
    assert expected_step(made) == (made.predicted_step_ms(), "measured on this one")
    compared(made)
    assert expected_step(made)[0] == pytest.approx(6.0)


def test_a_cache_that_cannot_be_written_stops_nothing(cache: Path) -> None:
    cache.write_text("", encoding="utf-8")
    made = prepared_run()
    assert compared(made) is not None
    assert expected_step(made)[1] == "measured on this one"


class Listener:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.steps = 0

    def note(self, text: str) -> None:
        """A sentence, after so many steps."""
        self.said.append((self.steps, text))

    def step(self, info: Any) -> None:
        """One more."""
        self.steps += 1

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """Nothing."""


def test_a_run_tells_after_its_first_steps_and_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr(trainer_module, "perf_counter", lambda: 0.001 * next(seconds))  # a step takes one reading: 1 ms
    monkeypatch.setattr(calibration, "COUNTED_MS", 0.0)
    made, listener = prepared_run(), Listener()
    raw = made.predicted_step_ms()
    folder = RunFolder.create(str(tmp_path / "run"))
    run = Trainer(made, folder, listener)
    run.start()
    run.run()
    made.backend.close()
    said = [(after, text) for after, text in listener.said if text.startswith("measured: ")]
    assert [after for after, _ in said] == [sum(counted(raw)) - 1]  # told before the step itself is
    data = json.loads((folder.path / CALIBRATION).read_text(encoding="utf-8"))
    assert data["measured_ms"] == pytest.approx(1.0)
    assert data["calibration"] == pytest.approx(1.0 / raw)
    assert expected_step(prepared_run())[0] == pytest.approx(1.0)


@pytest.mark.parametrize("home", ["~nosuch/x", ""])
def test_where_nobody_has_a_home_factors_are_kept_among_temporary_files(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(files, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = tmp_path / f"vdnn-{os.getuid()}" if home else tmp_path / "home" / ".cache" / "vdnn"
    assert files.user_cache() == expected
    made = prepared_run()
    compared(made)
    assert expected_step(made)[0] == pytest.approx(6.0)
    assert list((expected / "calibration").iterdir())
