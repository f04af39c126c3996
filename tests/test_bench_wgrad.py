"""The script that measures filter gradients by products of rows, on the host: rows, parts, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_cuda_search
from cuda_on_host import HostKernels
from host_cublas import HostCublas
from test_cuda_search import KEY, Device, device
from test_cuda_tap_search import Library, tick

from vdnn.bench import gpu_wgrad
from vdnn.runtime.backends.cuda.search import Search
from vdnn.runtime.backends.cuda.taps import TapPlans

__all__ = ["device"]  # a fixture

CASE = "8:16:6:24:3"


class Probe:
    """A probe on host memory, whose clock products move on."""

    def __init__(self, device: Device) -> None:
        self.stream, self.kernels = device.cuda.Stream(non_blocking=True), HostKernels()
        self.allocate, self.free = device.malloc, device.cuda.runtime.free
        self.filled: list[int] = []

    def facts(self) -> dict[str, Any]:
        return {"gpu": "host", "registers": {"tap_sums": 32, "relu_forward": 16}}

    def fill(self, address: int, nbytes: int) -> None:
        self.filled.append(nbytes)

    def replayed_ms(self, work: Any) -> float:
        before = test_cuda_search.clock.at_ms
        work()
        return test_cuda_search.clock.at_ms - before


def lab_of(device: Device, blas: HostCublas) -> gpu_wgrad.Lab:
    probe = Probe(device)
    library: Any = SimpleNamespace(plans=lambda problem, **options: [Library(problem, time_ms=4.5)], handle=None)
    search = Search(library, {**KEY, "layout": "NHWC"}, 2**30, probe.stream, precision="tf32")
    return gpu_wgrad.Lab(probe, TapPlans(blas.cublas, probe.kernels, probe.stream), search)


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results go."""
    monkeypatch.setenv("OUT", str(tmp_path))


def test_rows_tell_time_speed_and_parts(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blas = HostCublas(cuts=True)
    blas.on_product = tick(0.5)
    assert gpu_wgrad.main([CASE, "--shares", "2", "3"], lab_of(device, blas)) == 0
    assert not device.memory
    rows = json.loads((tmp_path / "gpu_wgrad.json").read_text())["results"]["rows"]
    assert [row["algorithm"] for row in rows] == ["IMPLICIT_GEMM", "TAPS_2", "TAPS_3"]
    assert [row["time_ms"] for row in rows] == pytest.approx([4.5, 4.5, 4.5])
    operations = 2 * 8 * 24 * 36 * 16 * 9
    assert rows[1]["tflops"] == pytest.approx(operations / 4.5e-3 / 1e12)
    assert rows[1]["parts"] == {"rows": 0.0, "products": pytest.approx(4.5), "sums": 0.0}
    assert 0 < rows[1]["error"] < 4e-3
    said = capsys.readouterr().out
    assert "cuDNN takes 1.00 times as long" in said
    assert "{'tap_sums': 32}" in said


def test_wrong_results_are_told(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    blas = HostCublas()
    multiply = blas.multiply
    blas.multiply = lambda *args: multiply(*args[:5], args[5] - 4, *args[6:])  # type: ignore[method-assign]
    blas.on_product = tick(0.5)
    assert gpu_wgrad.main([CASE, "--shares", "2", "--cudnn", "none"], lab_of(device, blas)) == 1
    assert "error " in capsys.readouterr().out
    assert gpu_wgrad.main([CASE, "--seconds", "0"], lab_of(device, blas)) == 0
    assert f"out of time for {CASE}" in capsys.readouterr().out


def test_cases_are_those_of_the_training_networks() -> None:
    for case in gpu_wgrad.CASES:
        problem = gpu_wgrad.problem_of(case)
        assert problem.y[2:] == problem.x[2:]
        assert TapPlans(None, None, None).plans(problem), case  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["1:2"], "expected images, channels, size"), (["--shares", "3y"], "expected a number of shares")],
)
def test_words_that_make_no_sense_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_wgrad.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
