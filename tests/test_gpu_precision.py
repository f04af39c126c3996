"""Training in bf16 and fp16 on a GPU: losses of the CPU's emulation, equal bits under every policy, skipped steps.

    python -m pytest -m gpu tests/test_gpu_precision.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_gpu import NETWORKS, own_cache, same, train, trainer, without_capture
from test_gpu_layouts import EVERY, NHWC, RATES, alexnet

from vdnn.cli.main import main as vdnn
from vdnn.cli.train import main

__all__ = ["alexnet", "own_cache"]  # fixtures for every test here

pytestmark = pytest.mark.gpu

AGREEMENT = {"bf16": (4e-3, 1e-2), "fp16": (6e-4, 3e-3)}
"""Relative difference of the first loss, and of five: on a CPU the two layouts, which differ in the order of sums
alone, part from each other and from fp32 by up to 1.6e-3 and 6e-3 in bf16, 2e-4 and 1.4e-3 in fp16."""
STEPS = 5
SCALE = 1024.0
"""Of an fp16 loss that is compared: at the first scale AlexNet's filter gradients pass 65,504, which cuDNN stores in
fp16 and the CPU in fp32, so that one skips the step and the other does not."""


@pytest.mark.parametrize("precision", AGREEMENT)
@pytest.mark.parametrize("network", EVERY)
def test_five_losses_agree_with_the_cpu(tmp_path: Path, network: str, precision: str) -> None:
    outcomes = {}
    for device in ("cpu", "cuda"):
        layout = NHWC if device == "cuda" else "memory.layout=nchw"
        options = (f"precision={precision}", f"optimizer.lr={RATES[network]}", layout)
        with trainer(tmp_path / device, network, device, *options) as made:
            if made.scaling is not None:
                made.scaling.scale = SCALE
            outcomes[device] = train(made, STEPS)
            assert made.scaling is None or made.scaling.skipped == 0
            assert made.backend.caps.precision == precision
            assert made.prepared.plans.layout == ("NHWC" if device == "cuda" else "NCHW")
            assert {array.dtype.name for array in made.tensors().values()} == {"float32"}
    first, later = AGREEMENT[precision]
    assert outcomes["cuda"][0] == pytest.approx(outcomes["cpu"][0], rel=first)
    assert outcomes["cuda"] == pytest.approx(outcomes["cpu"], rel=later)


@pytest.mark.parametrize("precision", AGREEMENT)
@pytest.mark.parametrize("network", ["lenet", "resnet18", "googlenet"])
def test_policies_and_capture_change_no_bit(tmp_path: Path, network: str, precision: str) -> None:
    """With one update for all in each: policies that offload would else update by layer."""
    outcomes = []
    for i, (policy, captured) in enumerate((("none", True), ("all", True), ("none", False))):
        options = (NHWC, f"precision={precision}", f"memory.policy={policy}", "memory.update=together")
        with trainer(tmp_path / str(i), network, "cuda", *options) as made:
            if not captured:
                without_capture(made)
            outcomes.append((train(made, 3), made.tensors()))
    (losses, tensors), *rest = outcomes
    for others, found in rest:
        assert others == losses
        assert same(found, tensors)


def test_both_layouts_agree(tmp_path: Path) -> None:
    outcomes = []
    for layout in ("nchw", "nhwc"):
        options = ("precision=bf16", f"memory.layout={layout}")
        with trainer(tmp_path / layout, "lenet", "cuda", *options) as made:
            outcomes.append(train(made, STEPS))
    assert outcomes[1] == pytest.approx(outcomes[0], rel=AGREEMENT["bf16"][1])


def test_poisoned_bytes_are_never_read(tmp_path: Path) -> None:
    outcomes = []
    for poison in ("true", "false"):
        options = (NHWC, "precision=bf16", f"debug.poison={poison}", "memory.policy=all")
        with trainer(tmp_path / poison, "googlenet", "cuda", *options) as made:
            outcomes.append(train(made, 3))
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0]).all()


@pytest.mark.parametrize("precision", AGREEMENT)
def test_parts_of_a_step_agree_with_the_whole(tmp_path: Path, precision: str) -> None:
    outcomes = []
    for accumulate in (1, 2):
        options = (NHWC, f"precision={precision}", f"train.accumulate={accumulate}")
        with trainer(tmp_path / str(accumulate), "lenet", "cuda", *options) as made:
            outcomes.append(train(made, STEPS))
    assert outcomes[1] == pytest.approx(outcomes[0], rel=AGREEMENT[precision][1])


def test_a_skipped_step_changes_no_weight_and_no_momentum(tmp_path: Path) -> None:
    """Captured or not: the scale comes with the record of the step."""
    with trainer(tmp_path, "lenet", "cuda", NHWC, "precision=fp16") as made:
        train(made, 2)
        before, scaling = made.tensors(), made.scaling
        assert scaling is not None
        assert (scaling.scale, scaling.good_steps) == (65536, 2)
        scaling.scale = 2.0**30
        train(made, 1)
        assert (scaling.scale, scaling.skipped) == (2.0**29, 1)
        assert same(made.tensors(), before)
        scaling.scale = 1024.0
        train(made, 1)
        assert scaling.skipped == 1
        assert not same(made.tensors(), before)


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_a_checkpoint_goes_on_in_another_precision(tmp_path: Path, before: str, after: str) -> None:
    with trainer(tmp_path / before, "lenet", "cuda", NHWC, f"precision={before}") as made:
        train(made, 2)
        tensors, path = made.tensors(), made.checkpoint()
    with trainer(tmp_path / after, "lenet", "cuda", NHWC, f"precision={after}", checkpoint=path) as made:
        assert same(made.tensors(), tensors)
        assert np.isfinite(train(made, 2)).all()


@pytest.mark.parametrize("precision", AGREEMENT)
def test_the_command_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    options = ["--device", "cuda", "--precision", precision, "--memory-limit", "8GiB"]
    assert main(["lenet", *options, "--epochs", "1", "--output", str(tmp_path / "run")]) == 0
    words = capsys.readouterr().out
    assert float(words.rpartition("test accuracy ")[2].split("%")[0]) > 85
    assert vdnn(["plan", "lenet", *options]) == 0
    assert "note: layouts: the quickest are " in capsys.readouterr().err


def test_every_network_here_has_a_rate() -> None:
    assert set(EVERY) == set(RATES) == set(NETWORKS)
