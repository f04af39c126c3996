"""Predictions: the study on the CPU, and on a GPU what it is about: a step takes as long as its parts add up to.

python -m pytest -m gpu tests/test_gpu_predict.py
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from vdnn.bench import gpu_predict
from vdnn.bench.gpu_predict import Case, line, main, within
from vdnn.errors import ConfigError
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
        with pytest.raises(ConfigError, match=f"case '{text}': expected NETWORK:BATCH:POLICY:LIMIT:PRECISION"):
            Case.parse(text)


@pytest.mark.parametrize(
    ("measured", "good"), [(100.0, True), (109.0, True), (112.0, False), (91.5, True), (90.0, False)]
)
def test_within_a_tenth_of_what_was_measured(measured: float, good: bool) -> None:
    found = {"predicted_ms": 100.0, "parts_ms": 80.0, "measured_ms": measured, "ratio": measured / 100}
    assert within(found) == good
    assert f"ratio {measured / 100:.3f}; parts add up to 80.0 ms" in line("a", found)
    assert not within({"failed": "it"})


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu_predict.json").read_text())["results"]
    return found


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def test_a_failed_case_does_not_stop_the_others(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lenet:8:none:1KiB", "lenet:8:all", "--device", "cpu", "--steps", "2", "-o", "memory.layout=chwn"]
    assert main(words) == 1
    facts = json.loads((out / "gpu_predict.json").read_text())["facts"]
    assert facts["command"].endswith("lenet:8:all --device cpu --steps 2 -o memory.layout=chwn")
    failed, row = kept(out).values()
    assert failed["failed"].startswith("policy 'none' needs "), "no name of a class"
    assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
    assert sum(row["kinds"].values()) == pytest.approx(row["compute_ms"])
    assert row["batch_size"] == 8
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("lenet:8:none:1KiB: failed: ")
    assert said[1].startswith("lenet:8:all: predicted ")
    assert said[-1].startswith("within 10%: ")


def measured(case: Case, *rest: Any) -> dict[str, Any]:
    return {"predicted_ms": 1.0, "parts_ms": 1.0, "measured_ms": 1.0, "ratio": 1.0}


def failing(case: Case, *rest: Any) -> dict[str, Any]:
    raise RuntimeError("out of memory")


def test_cases_are_kept_as_they_come_beside_earlier_ones(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(case: Case, *rest: Any) -> dict[str, Any]:
        if case.network == "alexnet":
            raise KeyboardInterrupt
        return measured(case)

    monkeypatch.setattr(gpu_predict, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(["lenet:8", "alexnet:8", "--device", "cpu"])
    assert list(kept(out)) == ["lenet:8 --device cpu"]
    monkeypatch.setattr(gpu_predict, "measure", failing)
    assert main(["lenet:8", "vgg16:8", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "lenet:8: failed: RuntimeError: out of memory; gpu_predict.json keeps what was measured earlier\n" in said
    found = kept(out)
    assert found["lenet:8 --device cpu"]["measured_ms"] == 1.0
    assert found["vgg16:8 --device cpu"]["failed"] == "RuntimeError: out of memory"
    assert {"commit", "date"} <= found["lenet:8 --device cpu"].keys()
    monkeypatch.setattr(gpu_predict, "measure", measured)
    assert main(["vgg16:8", "--device", "cpu"]) == 0
    assert main(["vgg16:8", "--device", "cpu", "-o", "memory.fuse=false"]) == 0
    found = kept(out)
    assert found["vgg16:8 --device cpu"]["measured_ms"] == 1.0
    assert list(found)[2] == "vgg16:8 --device cpu -o memory.fuse=false"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["unknown:4"], "no configuration named 'unknown'"),
        (["lenet:many"], "case 'lenet:many': expected NETWORK:BATCH"),
        (["lenet:8:never"], "policy"),
        (["lenet:8:none:much"], "limit"),
        (["lenet:8", "-o", "no.such=1"], "no"),
        (["lenet:8", "-o", "device=simulated"], "device: --device says cpu, -o simulated"),
        (["lenet:8", "-o", "precision=bf16"], "precision: the case says fp32, -o bf16"),
        (["lenet:8", "-o", "train={batch_size: 4}"], "train.batch_size: the case says 8, -o 4"),
    ],
)
def test_what_cannot_be_tried_is_said_first_and_writes_nothing(
    words: list[str], said: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_predict, "measure", lambda *given: pytest.fail("measured"))
    assert main(["lenet:4", *words, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_files_that_are_no_predictions_of_this_gpu_stay(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_predict, "measure", measured)
    out.mkdir()
    path = out / "gpu_predict.json"
    for text in ("{", "[]", '{"facts": {}, "results": [1]}', '{"facts": {"gpu": "another"}, "results": {}}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        assert main(["lenet:8", "--device", "cpu"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert path.read_bytes() == text.encode("latin-1")
    path.unlink()
    out.rmdir()
    out.write_text("a file")
    assert main(["lenet:8", "--device", "cpu"]) == 2
    assert "cannot be written" in capsys.readouterr().err


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
