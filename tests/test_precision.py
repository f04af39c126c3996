"""precision = bf16 and fp16 from the command line to the step: bytes, layouts, plans, and LeNet's losses on the CPU."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripts import refused, script
from test_layouts import losses

from vdnn.cli.main import main
from vdnn.cli.options import unmet_precision, unmodelled_layout
from vdnn.errors import CheckpointError
from vdnn.layers import lower
from vdnn.memory.slices import describe
from vdnn.networks import build
from vdnn.runtime.config import load_config
from vdnn.runtime.prepare import make_recipe, prepare
from vdnn.runtime.state_file import read_state, write_state

MODELLED = ("--profile", "h200")


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---- what a configuration asks for


@pytest.mark.parametrize(
    ("precision", "layout", "device", "taken", "dtype", "multiple"),
    [
        ("fp32", "auto", "cuda", "NCHW", "float32", 1),
        ("fp32", "nhwc", "cuda", "NHWC", "float32", 1),
        ("bf16", "chwn", "cpu", "CHWN", "bfloat16", 1),
        ("tf32", "auto", "cuda", "NHWC", "float32", 4),
        ("tf32", "nchw", "cuda", "NCHW", "float32", 1),
        ("bf16", "auto", "cuda", "NHWC", "bfloat16", 8),
        ("bf16", "auto", "simulated", "NHWC", "bfloat16", 8),
        ("bf16", "auto", "cpu", "NCHW", "bfloat16", 1),
        ("bf16", "nhwc", "cpu", "NHWC", "bfloat16", 8),
        ("fp16", "auto", "cuda", "NHWC", "float16", 8),
        ("fp16", "nchw", "cuda", "NCHW", "float16", 1),
    ],
)
def test_what_programs_are_lowered_with(
    precision: str, layout: str, device: str, taken: str, dtype: str, multiple: int
) -> None:
    config = load_config("alexnet", [f"precision={precision}", f"memory.layout={layout}"])
    recipe = make_recipe(config, device=device)
    assert (recipe.layout, recipe.dtype, recipe.pad_channels) == (taken, dtype, multiple)
    program = recipe.lower(build("alexnet"), ("train", 2))
    assert program.tensors["data"].shape[1] == (3 if multiple == 1 else 4 * 4 * 3)  # with conv1's stride
    assert program.tensors["data"].dtype == dtype
    assert program.tensors["conv1"].layout == taken


def test_it_is_told_what_a_device_makes_of_it() -> None:
    cuda, cpu, modelled = (
        SimpleNamespace(name=name, simulated=name == "simulated", precision=precision)
        for name, precision in (("cuda", "bf16"), ("cpu", "bf16"), ("simulated", "fp32"))
    )
    config: Any = load_config("alexnet", ["precision=bf16"])
    assert unmet_precision(config, cuda) is None
    assert "emulated on device cpu: stored in bf16, computed in fp32" in str(unmet_precision(config, cpu))
    assert "times are modelled in fp32, bytes are as asked for" in str(unmet_precision(config, modelled))
    assert "layout nhwc (taken for precision bf16; --layout nchw" in str(unmodelled_layout(config, modelled))
    assert unmodelled_layout(config, cpu) is None
    assert unmodelled_layout(load_config("alexnet"), modelled) is None


# ---- bytes


def test_maps_gradients_and_what_is_offloaded_take_half(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("vgg16", *MODELLED, "-b", 64, "--algorithms", "memory-optimal", "--layout", "nchw")
    wide, narrow = (plan(capsys, *options, "--policy", "base", "--precision", p) for p in ("fp32", "bf16"))
    before, after = wide["by_category"], narrow["by_category"]
    assert after["feature_maps"] == before["feature_maps"] / 2  # float32 probabilities are not among them
    assert after["gradient_maps"] == before["gradient_maps"] / 2
    assert after["weights"] == before["weights"]
    wide, narrow = (plan(capsys, *options, "--policy", "all", "--precision", p) for p in ("fp32", "bf16"))
    assert narrow["offloaded_bytes"] == wide["offloaded_bytes"] / 2 > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_plan_fits_where_fp32_does_not(capsys: pytest.CaptureFixture[str], precision: str) -> None:
    options = ("vgg16", *MODELLED, "-b", 128, "--memory-limit", "5GiB", "--policy", "none")
    options = (*options, "--algorithms", "memory-optimal")
    assert plan(capsys, *options, "--precision", precision)["fits"]
    assert main(["plan", *map(str, options), "--json"]) == 3


# ---- plans


@pytest.mark.parametrize("policy", ["base", "none", "all", "conv", "dyn"])
@pytest.mark.parametrize("network", ["resnet18", "googlenet_bn"])
def test_every_policy_plans_programs_in_bf16(network: str, policy: str) -> None:
    """All plans are verified as they are made."""
    options = ("device=simulated", f"memory.policy={policy}", "train.batch_size=8", "train.accumulate=2")
    prepared = prepare(load_config(network, [*options, "precision=bf16", "memory.limit=4GiB", "train.epochs=1"]))
    assert set(prepared.plans.plans) == {("first", 4), ("last", 4), ("eval", 4)}
    for planned in prepared.plans.plans.values():
        kinds = [op.kind for op in planned.program.ops]
        filters = [t for op in planned.program.ops if op.kind.startswith("filter.") for t in op.writes.values()]
        assert len(filters) == kinds.count("conv.forward") + kinds.count("linear.forward")
        assert planned.program.tensors["data"].shape[1:] == (16, 115, 115)  # 2 * 2 * 3 channels and 4 of zeros
    assert all(name.endswith("/NHWC/bfloat16") for name in prepared.plans.algorithms())


# ---- steps


@pytest.mark.parametrize(("precision", "first", "later"), [("bf16", 2e-3, 2e-2), ("fp16", 3e-4, 3e-3)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_five_losses_are_those_of_fp32_within_rounding(
    tmp_path: Path, precision: str, layout: str, first: float, later: float
) -> None:
    """A score has errors of some 2^-8 (2^-11) of itself, which partly cancel in a mean of 16 losses."""
    exact = losses(tmp_path / "fp32", "lenet")
    found = losses(tmp_path / precision, "lenet", f"precision={precision}", f"memory.layout={layout}")
    assert 0 < abs(found[0] / exact[0] - 1) < first
    np.testing.assert_allclose(found, exact, rtol=later)
    assert min(abs(a / b - 1) for a, b in pairwise(exact)) > later / 10  # they do move


def test_policies_and_parts_give_equal_bits_in_bf16(tmp_path: Path) -> None:
    options = ("precision=bf16", "train.accumulate=2", "memory.layout=nhwc")
    first = losses(tmp_path / "none", "lenet", *options, "memory.policy=none")
    for policy in ("all", "dyn"):
        order = "debug.stream_order=[in, out, compute]"
        again = losses(tmp_path / policy, "lenet", *options, f"memory.policy={policy}", "debug.poison=true", order)
        assert again == first, policy


def test_slices_of_a_batch_sum_in_fp32(tmp_path: Path) -> None:
    options, parts = ("precision=bf16", "memory.policy=dyn"), describe([(9, "GEMM_BATCH"), (7, "GEMM_TILE")])
    ops = ("conv1.forward", "conv2.forward", "conv1.wgrad", "conv2.wgrad", "conv2.dgrad")
    recorded = {"train/16/bfloat16": dict.fromkeys(ops, parts)}
    sliced = losses(tmp_path / "sliced", "lenet", *options, recorded=recorded)
    np.testing.assert_allclose(sliced, losses(tmp_path / "whole", "lenet", *options), rtol=2e-3)


def test_the_command_trains_in_bf16_and_says_how(tmp_path: Path) -> None:
    options = ("lenet", "--precision", "bf16", "--iterations", "60", "--output", "run")
    ended = script("vdnn-train", *options, cwd=tmp_path)
    assert ended.code == 0, ended.error
    assert "bf16 computed in fp32 and rounded" in ended.out
    assert "precision bf16 is emulated on device cpu" in ended.out + ended.error
    accuracy = float(ended.out.rpartition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 80
    refused(script("vdnn-train", "lenet", "--precision", "fp8", cwd=tmp_path), 2, "expected fp32, tf32, bf16 or fp16")


def test_a_loss_scale_that_cannot_be_is_refused(tmp_path: Path) -> None:
    state: Any = {
        **dict.fromkeys(("step", "epoch", "position", "seed"), 1),
        **{name: {} for name in ("schedule", "algorithms", "config")},
        "network": "lenet",
    }
    for scale in (None, {"scale": 4.0, "good_steps": 1, "skipped": 0}):
        write_state(tmp_path / "state.json", {**state, "loss_scale": scale}, "", 0)
        assert read_state(tmp_path / "state.json")[1]["loss_scale"] == scale
    write_state(tmp_path / "state.json", state, "", 0)  # as before there was one
    assert "loss_scale" not in read_state(tmp_path / "state.json")[1]
    write_state(tmp_path / "state.json", {**state, "loss_scale": {"scale": 0.0}}, "", 0)
    with pytest.raises(CheckpointError, match=r"expected state\.loss_scale as scale, good_steps and skipped"):
        read_state(tmp_path / "state.json")


def test_weights_are_read_as_float32_in_all_modes() -> None:
    for mode in ("train", "first", "middle", "last", "eval"):
        program = lower(build("resnet18"), 2, mode, dtype="bfloat16")
        kept = {program.tensors[name].dtype for name in program.persistent}
        assert kept == {"float32", "uint8"}
