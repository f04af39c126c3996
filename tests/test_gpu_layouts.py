"""Training in NHWC, CHWN and in a layout for each layer on a GPU: it agrees with the CPU and NCHW, captured or not.

    python -m pytest -m gpu tests/test_gpu_layouts.py

Skipped where there is no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu import NETWORKS, QUICK, own_cache, same, train, trainer, without_capture

from vdnn.cli.main import main as vdnn
from vdnn.cli.train import main
from vdnn.runtime import layout_sweep
from vdnn.runtime.init import init_parameters

__all__ = ["own_cache"]  # a fixture for every test here

pytestmark = pytest.mark.gpu

NHWC = "memory.layout=nhwc"
AGREEMENT, TF32_AGREEMENT = 1e-5, 2e-3
"""Relative difference of losses in the first steps: fp32 on two machines, and operands of 10 bits."""
STEPS = 5
RATES = {"lenet": "0.02", "resnet18": "0.00005", "googlenet": "0.00005", "alexnet": "0.00001"}
"""At which the two layouts agree on the CPU to 3e-6 over the steps compared; at 3e-4 (ResNet-18) and 1e-3 (AlexNet)
they part there by 2e-5 and 2e-2, and so they did on an H200 (AlexNet 1.3e-5)."""
ALEXNET = (*QUICK, "network.classes=10", "optimizer.lr=0.001", "train.batch_size=8")


@pytest.fixture(scope="module", autouse=True)
def alexnet() -> None:
    """One network more than in test_gpu."""
    NETWORKS.setdefault("alexnet", ALEXNET)


EVERY = ("lenet", "resnet18", "googlenet", "alexnet")


@pytest.mark.parametrize("network", EVERY)
def test_five_steps_agree_with_the_cpu(tmp_path: Path, network: str) -> None:
    outcomes = {}
    for device, layout in (("cpu", "memory.layout=nchw"), ("cuda", NHWC)):
        options = ("memory.policy=all", layout, f"optimizer.lr={RATES[network]}")
        with trainer(tmp_path / device, network, device, *options) as made:
            first = init_parameters(made.prepared.graph, made.config.train.seed)
            outcomes[device] = train(made, STEPS), made.tensors()
    (losses, tensors), (found, others) = outcomes["cpu"], outcomes["cuda"]
    assert len(set(losses)) == STEPS
    assert found == pytest.approx(losses, rel=AGREEMENT)
    for name in first:
        change = np.linalg.norm(tensors[name] - first[name])
        difference = np.linalg.norm(others[name] - tensors[name])
        assert difference <= 2e-3 * change + 1e-6 * np.sqrt(tensors[name].size), name


@pytest.mark.parametrize("network", EVERY)
def test_tf32_agrees_with_fp32(tmp_path: Path, network: str) -> None:
    outcomes = {}
    for precision in ("fp32", "tf32"):
        options = (NHWC, f"precision={precision}", f"optimizer.lr={RATES[network]}")
        with trainer(tmp_path / precision, network, "cuda", *options) as made:
            outcomes[precision] = train(made, STEPS)
            assert made.backend.caps.precision == precision
    assert outcomes["tf32"] == pytest.approx(outcomes["fp32"], rel=TF32_AGREEMENT)


@pytest.mark.parametrize("network", EVERY)
def test_policies_pools_and_capture_change_no_bit(tmp_path: Path, network: str) -> None:
    outcomes = []
    runs = ("none", "true", True), ("all", "true", True), ("all", "false", True), ("none", "true", False)
    for i, (policy, indices, captured) in enumerate(runs):
        options = (NHWC, f"memory.policy={policy}", f"memory.pool_indices={indices}")
        with trainer(tmp_path / str(i), network, "cuda", *options) as made:
            if not captured:
                without_capture(made)
            outcomes.append((train(made, 3), made.tensors()))
    (losses, tensors), *rest = outcomes
    for others, found in rest:
        assert others == losses
        assert same(found, tensors)


@pytest.mark.parametrize("network", ["lenet", "googlenet"])
def test_poisoned_bytes_are_never_read(tmp_path: Path, network: str) -> None:
    outcomes = []
    for poison in ("true", "false"):
        with trainer(tmp_path / poison, network, "cuda", NHWC, f"debug.poison={poison}", "memory.policy=all") as made:
            outcomes.append(train(made, 3))
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0]).all()


def test_parts_of_a_step_agree_with_the_whole(tmp_path: Path) -> None:
    outcomes = []
    for accumulate in (1, 2):
        options = (NHWC, f"train.accumulate={accumulate}")
        with trainer(tmp_path / str(accumulate), "lenet", "cuda", *options) as made:
            outcomes.append(train(made, STEPS))
    assert outcomes[1] == pytest.approx(outcomes[0], rel=AGREEMENT)


def test_a_checkpoint_goes_on_in_the_other_layout(tmp_path: Path) -> None:
    """From a run of either layout: what is read equals what was written, to the bit."""
    for name, other in (("nchw", "nhwc"), ("nhwc", "nchw")):
        with trainer(tmp_path / name, "lenet", "cuda", f"memory.layout={name}") as made:
            train(made, 2)
            tensors = made.tensors()
            path = made.checkpoint()
        with trainer(tmp_path / other, "lenet", "cuda", f"memory.layout={other}", checkpoint=path) as made:
            assert same(made.tensors(), tensors)
            assert np.isfinite(train(made, 2)).all()


# ---- CHWN, and a layout for each layer

MIXED = ("memory.layout=study", "memory.layout_channels=65", "memory.layout_images=1000000")
"""CHWN for convolutions of up to 64 channels, NCHW for the others."""
CHOICES = {"chwn": ("memory.layout=chwn",), "study": MIXED, "auto": ("memory.layout=auto",)}
CLOSE = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference of losses: sums in another order, operands of 10 bits, results of 8 and 11 bits."""


def layouts_in(made: Any) -> set[str]:
    tensors = made.prepared.plans[made.prepared.steps.full[0]].program.tensors
    return {spec.layout for spec in tensors.values() if spec.role in ("act", "grad") and len(spec.shape) == 4}


@pytest.mark.parametrize("layout", CHOICES)
@pytest.mark.parametrize("network", EVERY)
def test_every_layout_gives_the_losses_of_nchw(tmp_path: Path, network: str, layout: str) -> None:
    outcomes = {}
    rate = f"optimizer.lr={RATES[network]}"
    for name, options in (("nchw", ("memory.layout=nchw",)), (layout, CHOICES[layout])):
        with trainer(tmp_path / name, network, "cuda", *options, rate, "memory.policy=all") as made:
            outcomes[name] = train(made, STEPS)
            found = layouts_in(made)
            assert made.prepared.plans["train", made.config.train.batch_size].plan.host_bytes > 0
    assert found == {"chwn": {"CHWN"}, "study": {"CHWN", "NCHW"} if network != "lenet" else {"CHWN"}}.get(layout, found)
    assert outcomes[layout] == pytest.approx(outcomes["nchw"], rel=AGREEMENT)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("network", ["lenet", "resnet18"])
def test_other_precisions_agree_too(tmp_path: Path, network: str, precision: str) -> None:
    outcomes = {}
    common = (f"optimizer.lr={RATES[network]}", f"precision={precision}")
    for name, options in (("nchw", ("memory.layout=nchw",)), *CHOICES.items()):
        with trainer(tmp_path / name, network, "cuda", *options, *common) as made:
            outcomes[name] = train(made, 3)
    for name in CHOICES:
        assert outcomes[name] == pytest.approx(outcomes["nchw"], rel=CLOSE[precision]), name


@pytest.mark.parametrize("network", EVERY)
def test_policies_and_capture_change_no_bit_of_mixed_layouts(tmp_path: Path, network: str) -> None:
    outcomes = []
    for i, (policy, captured) in enumerate((("none", True), ("all", True), ("dyn", True), ("all", False))):
        with trainer(tmp_path / str(i), network, "cuda", *MIXED, f"memory.policy={policy}") as made:
            if not captured:
                without_capture(made)
            outcomes.append((train(made, 3), made.tensors()))
    (losses, tensors), *rest = outcomes
    for others, found in rest:
        assert others == losses
        assert same(found, tensors)


def test_poisoned_bytes_of_mixed_layouts_are_never_read(tmp_path: Path) -> None:
    outcomes = []
    for poison in ("true", "false"):
        options = (*MIXED, f"debug.poison={poison}", "memory.policy=all")
        with trainer(tmp_path / poison, "googlenet", "cuda", *options) as made:
            outcomes.append(train(made, 3))
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0]).all()


def test_auto_goes_on_in_the_layouts_of_its_checkpoint(tmp_path: Path) -> None:
    with trainer(tmp_path / "first", "lenet", "cuda", *MIXED) as made:
        train(made, 2)
        tensors, path = made.tensors(), made.checkpoint()
    with trainer(tmp_path / "second", "lenet", "cuda", "memory.layout=auto", checkpoint=path) as made:
        assert same(made.tensors(), tensors)
        assert np.isfinite(train(made, 2)).all()


def test_thresholds_are_found_and_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(layout_sweep, "SWEPT_CHANNELS", (16, 64))
    monkeypatch.setattr(layout_sweep, "SWEPT_IMAGES", (32, 128))
    assert vdnn(["layouts", "calibrate", "--device", "cuda", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["channels"], row["images"]) for row in data["by_channels"]] == [(16, 64), (64, 64)]
    assert all(row["nchw_ms"] > 0 and row["chwn_ms"] > 0 for row in (*data["by_channels"], *data["by_images"]))
    assert vdnn(["layouts", "explain", "alexnet", "-b", "32", "--layout", "study", "--device", "cuda"]) == 0
    assert "by 'vdnn layouts calibrate'" in capsys.readouterr().out


def test_the_table_of_auto_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert vdnn(["layouts", "explain", "lenet", "-b", "64", "--device", "cuda", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"] == "the least time of layers and transforms"
    assert all(row["time_ms"] > 0 for row in data["layers"])
    assert vdnn(["algos", "lenet", "-b", "64", "--layouts", "chwn", "--no-micro-batches", "--json"]) == 0
    algorithms = {
        row["algorithm"] for layer in json.loads(capsys.readouterr().out)["layers"] for row in layer["candidates"]
    }
    assert algorithms
    assert all(name.startswith("DIRECT_") for name in algorithms)


def test_the_command_trains_in_nhwc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layout", "nhwc", "--device", "cuda", "--precision", "tf32", "--epochs", "1", "--memory-limit", "8GiB"]
    assert main(["lenet", *options, "--output", str(tmp_path / "run")]) == 0
    words = capsys.readouterr().out
    assert float(words.rpartition("test accuracy ")[2].split("%")[0]) > 85
