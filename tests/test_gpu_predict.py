"""Predictions: the study on the CPU, and on a GPU what it is about: a step takes as long as its parts add up to.

python -m pytest -m gpu tests/test_gpu_predict.py
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from vdnn.bench.gpu_predict import Case, line, main, within
from vdnn.networks import build
from vdnn.runtime.config import load_config
from vdnn.runtime.devices import open_device
from vdnn.runtime.prepare import make_recipe


def test_cases_in_words() -> None:
    assert Case.parse("alexnet") == Case("alexnet")
    assert Case.parse("vgg19:256:dyn:12GiB:bf16") == Case("vgg19", 256, "dyn", "12GiB", "bf16")
    assert Case.parse("vgg19::all") == Case("vgg19", None, "all")
    assert Case.parse("vgg19:8:::tf32") == Case("vgg19", 8, precision="tf32")
    for text in ("many:x", "lenet:4:none:null:fp32:more"):
        with pytest.raises(ValueError, match=f"case '{text}': expected NETWORK:BATCH:POLICY:LIMIT:PRECISION"):
            Case.parse(text)


@pytest.mark.parametrize(
    ("measured", "good"), [(100.0, True), (109.0, True), (112.0, False), (91.5, True), (90.0, False)]
)
def test_within_a_tenth_of_what_was_measured(measured: float, good: bool) -> None:
    found = {"predicted_ms": 100.0, "measured_ms": measured, "ratio": measured / 100}
    assert within(found) == good
    assert f"ratio {measured / 100:.3f}" in line("a", found)
    assert not within({"failed": "it"})


def test_a_failed_case_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    words = ["unknown:4", "lenet:8:all", "--device", "cpu", "--steps", "2", "-o", "memory.layout=chwn"]
    assert main(words) == 1
    kept = json.loads((tmp_path / "gpu_predict.json").read_text())
    assert kept["facts"]["command"].endswith("lenet:8:all -o memory.layout=chwn")
    found: dict[str, Any] = kept["results"]
    assert "unknown" in found["unknown:4"]["failed"]
    row = found["lenet:8:all"]
    assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
    assert sum(row["kinds"].values()) == pytest.approx(row["compute_ms"])
    assert row["batch_size"] == 8
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("unknown:4: failed: ")
    assert out[1].startswith("lenet:8:all: predicted ")
    assert out[-1].startswith("within 10%: ")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["resnet18:64", "alexnet:128:all:null:bf16", "googlenet:64:dyn:4GiB:tf32"])
def test_steps_take_as_long_as_predicted(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main([case, "--verbose"]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_op_of_a_network_is_measured_once(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load_config("googlenet", ["device=cuda", f"precision={precision}", "memory.limit=null"])
    graph = build(config.network.name, **config.network.options)
    seconds, times = [], []
    for _ in range(2):
        backend: Any = open_device(
            "cuda", None, memory_limit=None, precision=precision, layout=config.layout_on("cuda")
        )[0]
        program = make_recipe(config).lower(graph, ("train", 64))
        own = [op for op in program.ops if op.kind not in ("conv.forward", "conv.dgrad", "conv.wgrad")]
        started = perf_counter()
        times.append({op.name: backend.candidates(op, program)[0].time_ms for op in own})
        seconds.append(perf_counter() - started)
        backend.close()
    assert all(0.0005 < time_ms < 20 for time_ms in times[0].values())
    assert times[1] == pytest.approx(times[0], rel=1e-3)
    assert seconds[0] < 30
    assert seconds[1] < 1
