"""The script that measures networks under every layout: rows, what is gone on with, the last table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vdnn.bench import gpu_layouts
from vdnn.bench.harness import Outcome, train


def on_cpu(network: str, options: Any, steps: int) -> Outcome:
    """A few real steps; chwn fails."""
    if "memory.layout=chwn" in options:
        raise RuntimeError("no such kernel")
    small = [option for option in options if not option.startswith(("device", "data.train_images"))]
    return train(network, [*small, "device=cpu", "data.train_images=8", "memory.limit=null"], 2)


def test_rows_are_kept_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_layouts.main(["lenet:4:fp32"], on_cpu) == 0
    rows = json.loads((tmp_path / "gpu_layouts.json").read_text())["results"]["rows"]
    assert [row["layout"] for row in rows] == ["nchw", "nhwc", "chwn", "auto"]
    assert rows[2]["error"] == "RuntimeError: no such kernel"
    assert rows[1]["layouts"] == "NHWC"
    assert rows[3]["step_ms"] > 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:2] == ["lenet:4", "fp32"]
    auto = rows[3]
    best, told = min(row["step_ms"] for row in rows[:2]), auto["predicted_ms"] / auto["step_ms"]
    expected = [auto["step_ms"], auto["step_ms"] / best, auto["step_ms"], told, auto["parts_ms"] / auto["step_ms"]]
    assert [float(word) for word in last.split()[-5:]] == pytest.approx(expected, abs=1e-3)
    asked: list[Any] = []

    def noted(network: str, options: Any, steps: int) -> Outcome:
        asked.append([option for option in options if option.startswith("memory.layout")])
        return on_cpu(network, [*options, "memory.layout=nchw"], steps)

    assert gpu_layouts.main(["lenet:4:fp32"], noted) == 0
    assert asked == [["memory.layout=chwn"]], "only what failed is tried again"
    assert gpu_layouts.main(["lenet:4:fp32", "lenet:8:fp32", "--minutes", "0"], noted) == 0
    assert len(asked) == 1


def test_chwn_is_measured_where_it_makes_sense() -> None:
    assert gpu_layouts.layouts_of("alexnet", "bf16") == ("nchw", "nhwc", "auto")
    assert gpu_layouts.layouts_of("lenet", "bf16") == gpu_layouts.layouts_of("alexnet", "fp32")
    keys = list(gpu_layouts.wanted(["alexnet:8:bf16", "lenet:8:bf16"], ["chwn", "auto"]))
    assert [(key["network"], key["layout"]) for key in keys] == [
        ("alexnet", "auto"),
        ("lenet", "chwn"),
        ("lenet", "auto"),
    ]
    for wrong in ("lenet:8", "nothing:8:fp32", "lenet:x:fp32", "lenet:8:fp64"):
        with pytest.raises(SystemExit):
            gpu_layouts.main([wrong], on_cpu)


def test_layouts_are_compared_by_the_clock_of_the_gpu_and_predictions_by_that_of_the_host() -> None:
    def row(layout: str, step_ms: float, replayed_ms: float) -> dict[str, Any]:
        times = {"step_ms": step_ms, "replayed_ms": replayed_ms, "predicted_ms": 0.9, "parts_ms": 0.3}
        return {"network": "lenet", "batch": 8, "precision": "bf16", "layout": layout, **times}

    rows = [row("nchw", 1.0, 0.5), row("nhwc", 1.2, 0.4), row("auto", 1.8, 0.6)]
    words = gpu_layouts.summary(rows)[1].split()
    assert words == ["lenet:8", "bf16", "nhwc", "0.400", "0.600", "1.500", "1.800", "0.500", "0.500"]
