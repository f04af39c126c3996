"""The loss scale of fp16: when it moves, what a skipped step leaves alone, and what a checkpoint keeps of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from small_run import SMALL, train
from test_trainer import Silent, make, trained

from vdnn.errors import NotFiniteError
from vdnn.runtime import loss_scale
from vdnn.runtime.checkpoint import latest, load, load_state
from vdnn.runtime.loss_scale import LossScale
from vdnn.runtime.trainer import Trainer

FP16 = "precision=fp16"
HUGE = 2.0**30
"""A scale at which the first gradient of a loss, some 1 / batch, is beyond 65,504, the largest float16."""


def step(made: Trainer, number: int = 0) -> float:
    """One step over fixed images; its loss."""
    indices = np.arange(7) + number
    split = made.prepared.source.train
    loss, _ = made.train_step(split.images(indices), split.labels(indices), 0.02)
    made.step += 1
    return loss


# ---- when it moves


def test_it_halves_at_once_and_doubles_after_two_thousand_good_steps() -> None:
    scaling = LossScale()
    assert (scaling.scale, scaling.good_steps, scaling.skipped) == (65536.0, 0, 0)
    for _ in range(1999):
        scaling.count(finite=True)
    assert scaling.scale == 65536
    scaling.count(finite=True)
    assert (scaling.scale, scaling.good_steps) == (131072, 0)
    for _ in range(1999):
        scaling.count(finite=True)
    scaling.count(finite=False)
    assert (scaling.scale, scaling.good_steps, scaling.skipped) == (65536, 0, 1)
    for _ in range(1999):
        scaling.count(finite=True)
    assert scaling.scale == 65536  # the count began anew
    for _ in range(16):
        scaling.count(finite=False)
    assert (scaling.scale, scaling.exhausted, scaling.skipped) == (1.0, False, 17)
    scaling.count(finite=False)
    assert scaling.exhausted


def test_it_stays_where_float32_is_exact() -> None:
    scaling = LossScale(2.0**32, 1999)
    scaling.count(finite=True)
    assert scaling.scale == 2.0**32


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"scale": 2.0**33},
        {"scale": True},
        {"scale": float("nan")},
        {"good_steps": -1},
        {"skipped": 1.0},
        {"good_steps": True},
        {"more": 1},
    ],
)
def test_what_is_no_loss_scale_is_known(change: dict[str, Any]) -> None:
    right = LossScale(8.0, 3, 2).to_json()
    assert LossScale.is_json(json.loads(json.dumps(right)))
    assert LossScale.from_json(right) == LossScale(8.0, 3, 2)
    assert not LossScale.is_json({**right, **change})
    assert not LossScale.is_json([1.0, 0, 0])


# ---- steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skipped_step_changes_no_weight_and_no_momentum(tmp_path: Path, accumulate: int) -> None:
    made = make(tmp_path, FP16, f"train.accumulate={accumulate}")
    try:
        step(made)
        before, scaling = made.tensors(), made.scaling
        assert scaling is not None
        assert any(array.any() for name, array in before.items() if name.endswith("momentum"))
        assert (scaling.scale, scaling.good_steps) == (65536, 1)
        scaling.scale = HUGE
        loss = step(made, 1)
        assert 0 < loss < 10
        assert (scaling.scale, scaling.good_steps, scaling.skipped) == (HUGE / 2, 0, 1)
        after = made.tensors()
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
        scaling.scale = 1024.0
        step(made, 2)
        after = made.tensors()
        assert all((before[name] != after[name]).any() for name in before)
    finally:
        made.backend.close()


def test_one_weight_gradient_that_is_not_finite_holds_back_all(tmp_path: Path) -> None:
    """The last layer's gradient is updated first and finite; an earlier layer's, computed from it, is not."""
    made = make(tmp_path, FP16)
    try:
        step(made)
        before = made.tensors()
        weights = {name: array.copy() for name, array in before.items()}
        weights["fc3.weight"] *= np.float32(1e-3)
        weights["fc4.weight"] *= np.float32(1e3 / np.abs(weights["fc4.weight"]).max())
        made.kept.write(weights)
        scaling = made.scaling
        assert scaling is not None
        step(made, 1)
        assert scaling.skipped == 1
        after = made.tensors()
        assert all(weights[name].tobytes() == after[name].tobytes() for name in weights)
    finally:
        made.backend.close()


def test_the_scale_changes_no_result_where_nothing_is_lost(tmp_path: Path) -> None:
    """Powers of two change exponents alone, as long as no number is too small for float16."""
    ends = {}
    for scale in (2.0**12, 2.0**14):
        made = make(tmp_path / f"{scale:g}", FP16)
        assert made.scaling is not None
        made.scaling.scale = scale
        losses = [step(made, number) for number in range(3)]
        ends[scale] = losses, made.tensors()
        made.backend.close()
    (first, weights), (second, others) = ends.values()
    np.testing.assert_allclose(second, first, rtol=1e-4)
    for name, array in weights.items():
        np.testing.assert_allclose(others[name], array, rtol=0, atol=2e-3 * np.abs(array).max())


def test_a_scale_that_falls_under_one_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, FP16)
    monkeypatch.setattr(loss_scale, "LEAST_SCALE", HUGE)
    try:
        assert made.scaling is not None
        made.scaling.scale = HUGE
        with pytest.raises(NotFiniteError, match=r"step 0: NaN or infinity first in layer '\w+'") as caught:
            step(made)
        assert caught.value.exit_code == 4
    finally:
        made.backend.close()


def test_a_loss_that_is_not_finite_is_the_error_it_is_in_every_precision(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        made = make(tmp_path / precision, f"precision={precision}")
        try:
            weights = made.tensors()
            weights["conv1.weight"][...] = 3e38
            made.kept.write(weights)
            with pytest.raises(NotFiniteError, match="NaN or infinity first in layer 'conv1'") as caught:
                step(made)
            assert ("beyond the range of fp16" in str(caught.value)) == (precision == "fp16")
        finally:
            made.backend.close()


def test_only_fp16_has_one(tmp_path: Path) -> None:
    for precision in ("fp32", "tf32", "bf16"):
        made = make(tmp_path / precision, f"precision={precision}")
        assert made.scaling is None
        made.backend.close()


# ---- checkpoints, and what is shown


def test_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    """Half of it is done after 4 steps, of which one is skipped."""

    def unsettle(made: Trainer, at: int) -> Silent:
        def on_step(info: Any) -> None:
            assert made.scaling is not None
            if info.step == at:
                made.scaling.scale = HUGE

        return Silent(on_step)

    folders = {name: tmp_path / name for name in ("whole", "half")}
    ends = {}
    for name, folder in folders.items():
        stop = ["train.iterations=4"] if name == "half" else []
        made = make(folder, FP16, "schedule={name: constant}", *stop)
        made.listener = unsettle(made, 2)
        made.run()
        ends[name] = made.tensors(), made.scaling
        made.backend.close()
    path = latest(folders["half"] / "checkpoints")
    assert path is not None
    kept = load_state(path)["loss_scale"]
    assert kept == {"scale": HUGE / 4, "good_steps": 0, "skipped": 2}
    made, _, tensors = trained(folders["half"], FP16, "schedule={name: constant}", checkpoint=path)
    weights, scaling = ends["whole"]
    assert made.scaling == scaling
    assert all(weights[name].tobytes() == tensors[name].tobytes() for name in weights)


def test_the_scale_and_skipped_steps_are_shown(tmp_path: Path) -> None:
    ended = train(tmp_path, *SMALL, "--precision", "fp16", "--epochs", 1, "--output", "run")
    assert ended.code == 0, ended.error
    assert "loss scale 65536 (0 steps skipped)" in ended.out
    with (tmp_path / "run" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["loss_scale"], row["skipped_steps"]) for row in rows] == [("65536", "0"), ("", "")]
    ended = train(tmp_path, *SMALL, "--epochs", 1, "--output", "other")
    assert "loss scale" not in ended.out


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_a_checkpoint_of_one_precision_goes_on_in_another(tmp_path: Path, before: str, after: str) -> None:
    """What is kept is float32 in all of them; three steps on, the weights are where they get without a change too."""
    options = (*SMALL, "-o", "schedule={name: constant}")
    assert train(tmp_path, *options, "--precision", before, "--iterations", 9, "--output", before).code == 0
    first, state = load(newest(tmp_path / before))
    assert {array.dtype.name for array in first.values()} == {"float32"}
    assert (state["loss_scale"] is None) is (before != "fp16")
    copytree(tmp_path / before, tmp_path / "other")  # a resumed run goes on in the folder of its checkpoint
    ends = []
    for folder, precision in ((before, before), ("other", after)):
        resume = newest(tmp_path / folder)
        ended = train(tmp_path, *options, "--precision", precision, "--iterations", 12, "--resume", resume)
        assert ended.code == 0, ended.error
        words = f"precision was {before}, now {precision}: it goes on from the same float32 weights and momentum"
        assert (words in ended.out + ended.error) is (precision != before)
        tensors, state = load(newest(tmp_path / folder))
        assert (state["step"], state["config"]["precision"]) == (12, precision)
        ends.append(tensors)
    same, changed = ends
    for name in (name for name in first if name.endswith("weight")):
        moved = np.linalg.norm(same[name] - first[name])
        assert 0 < np.linalg.norm(changed[name] - same[name]) < 0.1 * moved, name


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))
