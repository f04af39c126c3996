"""Runs whose layers have layouts of their own: plans, losses, checkpoints, what is measured and what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from scripts import script
from small_run import SMALL, train
from test_layouts import losses, newest

from vdnn.memory.costs import CostTable
from vdnn.networks import build
from vdnn.runtime import prepare as prepare_module
from vdnn.runtime.backends.cpu.backend import CpuBackend
from vdnn.runtime.checkpoint import load_state
from vdnn.runtime.config import load_config
from vdnn.runtime.devices import open_device
from vdnn.runtime.layouts import choose_layouts
from vdnn.runtime.prepare import backend_costs, make_recipe, prepare
from vdnn.runtime.tensor_file import read_tensors

# ---- runs


@pytest.mark.parametrize("network", ["lenet", "googlenet", "resnet18"])
def test_losses_of_a_run_agree(tmp_path: Path, network: str) -> None:
    plain = losses(tmp_path / "nchw", network)
    mixed = losses(tmp_path / "study", network, "memory.layout=study", "memory.layout_channels=65")
    np.testing.assert_allclose(mixed, plain, rtol=1e-4)


def test_policies_give_equal_bits(tmp_path: Path) -> None:
    options = ("memory.layout=study", "memory.layout_channels=2", "train.accumulate=2")
    first = losses(tmp_path / "none", "lenet", *options, "memory.policy=none")
    for policy in ("base", "all", "conv", "dyn"):
        order = "debug.stream_order=[in, out, compute]"
        again = losses(tmp_path / policy, "lenet", *options, f"memory.policy={policy}", "debug.poison=true", order)
        assert again == first, policy


def test_every_plan_of_a_run_has_the_layouts_of_its_largest_part() -> None:
    options = ["device=cpu", "data.source=synthetic", "train.batch_size=16", "train.accumulate=2", "memory.limit=null"]
    options += ["data.train_images=20", "data.test_images=3", "memory.layout=study", "memory.layout_images=8"]
    options += ["memory.layout_channels=1"]
    prepared = prepare(load_config("lenet", options))
    layouts = {key: planned.program.tensors["conv1.weight"].layout for key, planned in prepared.plans.plans.items()}
    assert len(layouts) > 3
    assert set(layouts.values()) == {"CHWN"}
    recorded = prepared.plans.algorithms()
    assert recorded.pop("layouts")["conv1"] == "CHWN"
    assert all(name.split("/")[2] == "MIXED" for name in recorded)
    report = prepared.report()
    assert (
        "layouts of layers: 5 in CHWN, 2 transforms (1 forward, 1 backward) ('vdnn layouts explain' says why)"
        in report.notes
    )
    assert {row.layer: row.time_ms > 0 for row in report.layers}["flat"]


def test_times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shortest` with a machine on which convolutions are quick in CHWN, pools in NCHW, and transforms cost nothing."""

    def costs(backend: Any, program: Any, deterministic: bool = False) -> CostTable:
        table = estimated(backend, program, deterministic)
        found = {}
        for op in program.ops:
            name = next(iter(op.writes.values()))
            quick = {"conv": "CHWN", "pool": "NCHW"}.get(op.kind.split(".")[0])
            slow = 100.0 if quick is not None and program.tensors[name].layout != quick else 1e-3
            found[op.name] = tuple(c.__class__(c.algorithm, slow, c.workspace_bytes) for c in table.candidates[op.name])
        return CostTable(found, table.rates, table.source, table.slices)

    estimated = prepare_module.backend_costs
    monkeypatch.setattr(prepare_module, "backend_costs", costs)
    options = ["device=simulated", "data.source=synthetic", "memory.layout=shortest", "memory.limit=null"]
    prepared = prepare(load_config("lenet", options))
    tensors = prepared.plans["train", prepared.config.train.batch_size].program.tensors
    assert [tensors[name].layout for name in ("conv1", "pool1", "conv2", "pool2")] == ["CHWN", "NCHW"] * 2
    assert {"conv1_to_nchw", "pool1_to_chwn", "conv2_to_nchw"} <= set(tensors)


def test_the_cpu_measures_what_is_quick(tmp_path: Path) -> None:
    """A run that is resumed keeps the layouts that were measured for it."""
    said: list[str] = []
    options = ["device=cpu", "data.source=synthetic", "train.batch_size=4", "memory.layout=shortest"]
    config = load_config("lenet", [*options, "data.train_images=8", "data.test_images=2"])
    prepared = prepare(config, progress=said.append)
    assert any(text.startswith("layouts: measuring 27 steps on blank data") for text in said)
    choices = prepared.plans.layouts
    assert sorted(choices) == ["conv1", "conv2", "data", "pool1", "pool2"]
    assert all(re.match(r"[\d.]+ ms; [\d.]+ in ", choice.reason) for choice in choices.values())
    if len({choice.layout for choice in choices.values()}) == 1:
        assert all("no mix of layouts gains 10%" in choice.reason for choice in choices.values())
    other = {name: "NHWC" if choice.layout != "NHWC" else "CHWN" for name, choice in choices.items()}
    again = prepare(config, {"layouts": other}, said.append)
    assert {name: choice.layout for name, choice in again.plans.layouts.items()} == other
    assert again.plans["train", 4].program.tensors["conv1.weight"].layout == other["conv1"]
    assert sum(text.startswith("layouts: ") for text in said) == 1


def test_the_cpu_measures_nothing_that_takes_long() -> None:
    said: list[str] = []
    config = load_config(
        "vgg16", ["device=cpu", "data.source=synthetic", "memory.layout=shortest", "train.batch_size=64"]
    )
    graph, (backend, _) = build("vgg16"), open_device("cpu")
    recipe = make_recipe(config, device="cpu")
    found = choose_layouts(
        config, graph, [("train", 64)], lambda p: backend_costs(backend, p), recipe, backend, None, said.append
    )
    reasons = {choice.reason.partition("; in NCHW")[0] for choice in found.choices.values()}
    assert reasons == {"not measured; the same estimate in every layout"}
    assert len(said) == 1
    assert "too long; times are estimated from nominal CPU rates" in said[0]


def test_a_deterministic_run_measures_nothing() -> None:
    """Times by the clock differ from run to run, and with them layouts and bits."""
    said: list[str] = []
    options = ["device=cpu", "data.source=synthetic", "train.batch_size=4", "memory.layout=shortest"]
    config = load_config("lenet", [*options, "deterministic=true"])
    prepared = prepare(config, progress=said.append)
    assert prepared.plans.layouts["conv1"].reason.startswith("not measured")
    assert any("not measured, for with deterministic: true" in text for text in said)
    assert {choice.layout for choice in prepared.plans.layouts.values()} == {"NCHW"}


def test_what_is_measured_keeps_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = CpuBackend.open

    def noting(self: Any, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        opened.append(slab_bytes)
        real(self, slab_bytes, host_bytes, stage_bytes)

    monkeypatch.setattr(CpuBackend, "open", noting)
    options = ["device=cpu", "data.source=synthetic", "memory.layout=shortest"]
    said: list[str] = []
    prepare(load_config("lenet", [*options, "memory.limit=5420000"]), progress=said.append)
    assert not opened
    assert any("does not fit in 5.2 MiB; times are estimated from nominal CPU rates" in text for text in said)
    prepare(load_config("lenet", [*options, "memory.limit=16MiB"]), progress=said.append)
    assert opened
    assert max(opened) <= 16 * 2**20


def test_a_run_goes_on_in_its_layouts(tmp_path: Path) -> None:
    options = (*SMALL, "--epochs", "1", "-o", "schedule={name: constant}", "-o", "memory.layout_channels=2")
    first = train(tmp_path, *options, "--iterations", "9", "--layout", "study", "--output", "run")
    assert first.code == 0, first.error
    recorded = load_state(newest(tmp_path / "run"))["algorithms"]["layouts"]
    assert recorded["conv1"] == "CHWN"
    assert recorded["conv2"] == "NCHW"
    copytree(tmp_path / "run", tmp_path / "plain")
    kept = {}
    for output, layout in (("run", "study"), ("plain", "nchw")):
        ended = train(tmp_path, *options, "--layout", layout, "--resume", newest(tmp_path / output))
        assert ended.code == 0, ended.error
        kept[output] = read_tensors(newest(tmp_path / output) / "weights.safetensors")
    assert load_state(newest(tmp_path / "run"))["algorithms"]["layouts"] == recorded
    assert "layouts" not in load_state(newest(tmp_path / "plain"))["algorithms"]
    for name, wanted in kept["plain"].items():
        np.testing.assert_allclose(kept["run"][name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


# ---- the command line


def test_the_table_says_why(tmp_path: Path) -> None:
    command = ("vdnn", "layouts", "explain", "alexnet", "-b", 64, "--layout", "study")
    ended = script(*command, "--device", "simulated", cwd=tmp_path)
    assert ended.code == 0, ended.error
    assert "CHWN if C < 32 or N >= 128, else NCHW; thresholds: the study's for a GTX Titan Black" in ended.out
    assert "C = 64 >= 32 and N = 64 < 128" in ended.out
    assert "2 transforms (1 forward, 1 backward), " in ended.out
    assert "CHWN if C < 32" not in ended.error
    planned = script("vdnn", "plan", "alexnet", "-b", 64, "--layout", "STUDY", "--device", "simulated", cwd=tmp_path)
    assert "2 transforms (1 forward, 1 backward)" in " ".join((planned.out + planned.error).split())
    assert ended.error.count("note: profiles know NCHW") == 1
    ended = script(*command, "--device", "cpu", "--json", "-o", "memory.layout_channels=65", cwd=tmp_path)
    data = json.loads(ended.out)
    assert data["chosen"].endswith(
        "memory.layout_channels of the configuration, the other the study's for a GTX Titan Black, as recalled"
    )
    rows = {row["layer"]: row for row in data["layers"]}
    assert [rows[name]["layout"] for name in ("data", "conv1", "conv2", "conv3")] == ["CHWN"] * 3 + ["NCHW"]
    assert rows["pool2_to_nchw"]["transform"]
    assert (rows["conv2"]["channels"], rows["conv2"]["images"]) == (64, 64)
    assert min(row["time_ms"] for row in rows.values()) > 0


def test_a_layer_has_one_time(tmp_path: Path) -> None:
    """That of the choice: nothing is measured again for the table."""
    ended = script("vdnn", "layouts", "explain", "lenet", "-b", 4, "--layout", "Shortest", "--json", cwd=tmp_path)
    assert ended.code == 0, ended.error
    data = json.loads(ended.out)
    assert data["source"] == "measured on this cpu"
    assert ended.error.count("measuring") == 1
    rows = [row for row in data["layers"] if row["reason"][0].isdigit()]
    assert len(rows) == 5
    for row in rows:
        assert row["reason"].startswith(f"{row['time_ms']:.3f} ms; ")


def test_thresholds_that_nothing_reads_are_said() -> None:
    config = load_config("lenet", ["memory.layout=nchw", "memory.layout_images=5"])
    assert "memory.layout_images is not read by memory.layout nchw" in config.unused()
    assert load_config("lenet", ["memory.layout=study", "memory.layout_images=5"]).unused() == (
        load_config("lenet").unused()
    )
