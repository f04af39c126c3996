"""vdnn doctor without a GPU: what it says of pieces and rates, and what the survey measures on a GPU made of clocks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from host_cupy import HostCupy

from vdnn.cli import doctor
from vdnn.errors import BackendUnavailable, BudgetError
from vdnn.memory.costs import CopyRates
from vdnn.runtime.backend import Caps
from vdnn.runtime.backends.cuda import survey as survey_module
from vdnn.runtime.backends.cuda.survey import Piece, Survey, find_pieces, take_survey
from vdnn.runtime.driver import Driver
from vdnn.units import GIB, MIB

RATES = CopyRates(50.0, 40.0, 80.0)
H200 = Survey("NVIDIA H200", "9.0", "580.1", 140 * GIB, 139 * GIB, GIB, RATES, 6.0, 4000.0, 45000.0)
CAPS = Caps(
    "cuda", True, False, "NVIDIA H200", 139 * GIB, CopyRates(49.0, 48.0, 77.0), "measured", True, False, 512 * MIB
)
ALL = [Piece(name, True, "1.0") for name in ("CuPy", "cuDNN", "cuBLAS", "NVRTC", "CUDA version")]
NO_NVML = Piece("NVML", False, "not installed", needed=False)


# ---- words


def test_all_pieces_here():
    assert doctor.verdict_lines(Driver(1, "one"), [*ALL, NO_NVML]) == ["CUDA: all pieces are here"]
    assert doctor.piece_lines([ALL[0], NO_NVML]) == ["CuPy: 1.0", "NVML: not usable: not installed"]


@pytest.mark.parametrize(
    ("gpus", "lost", "named", "not_named"),
    [
        (0, (), ["nvidia-smi", "driver"], ["pip install"]),
        (1, ("CuPy",), ["CuPy: pip install 'vdnn[cuda13]'", "vdnn[cuda12]"], ["cuDNN", "nvidia-smi"]),
        (1, ("cuDNN",), ["cuDNN: pip install"], ["CuPy", "nvidia-smi"]),
        (0, ("CuPy", "cuDNN"), ["nvidia-smi", "CuPy, cuDNN: pip install 'vdnn[cuda13]'"], ["NVML"]),
    ],
)
def test_what_is_missing_is_named_with_the_next_step(gpus, lost, named, not_named):
    pieces = [Piece(p.name, p.name not in lost, p.text) for p in ALL] + [NO_NVML]
    (line,) = doctor.verdict_lines(Driver(gpus, "found"), pieces)
    assert line.startswith("CUDA: not usable here")
    for text in named:
        assert text in line
    for text in not_named:
        assert text not in line


def test_a_gpu_in_words():
    lines = dict(line.split(": ", 1) for line in doctor.survey_lines(H200, CAPS))
    assert lines["GPU 0"] == "NVIDIA H200, compute capability 9.0, driver 580.1"
    assert lines["GPU memory"] == "140.0 GiB, 139.0 GiB free"
    assert lines["GPU context"].startswith("512.0 MiB")
    assert "to the host 50.0 GB/s, from it 40.0 GB/s, both at once 80.0 GB/s" in lines["pinned copies"]
    assert "plans count on 49, 48 and 77" in lines["pinned copies"]
    assert "60 GiB on the host take 11 s" in lines["pinning"]  # 64.4 GB at 6 GB/s
    # 45,000 GFLOP/s over 50 GB/s are 900 operations a byte
    assert "at least 900 operations per byte" in lines["offloading"]


def test_the_number_of_filters_is_that_at_which_copy_and_convolution_take_equally_long():
    n, c, h, w = 32, 64, 56, 56
    words = doctor.filter_words(RATES, 45000.0)
    forward, backward = 200, 125
    assert f"at least {forward} filters" in words
    assert f"with {backward};" in words
    copy_ms = 4 * n * c * h * w / 50e6
    conv_ms = 2 * n * forward * h * w * c * 3 * 3 / 45000e6
    assert conv_ms == pytest.approx(copy_ms)
    back_ms, both_ms = 4 * n * c * h * w / 40e6, 2 * 2 * n * backward * h * w * c * 3 * 3 / 45000e6
    assert both_ms == pytest.approx(back_ms)


@pytest.mark.parametrize("failure", [BudgetError, RuntimeError])
def test_a_gpu_that_fails_is_a_line_and_no_traceback(monkeypatch, failure):
    def fail(*arguments, **options):
        if failure is BudgetError:
            raise BudgetError("cannot pin", layer="host slab", needed_bytes=1, budget_bytes=0, smallest_bytes=None)
        raise RuntimeError("cudaErrorUnknown")

    monkeypatch.setattr(doctor, "open_device", lambda device: (SimpleNamespace(caps=CAPS), "there is one"))
    monkeypatch.setattr(doctor, "take_survey", fail)
    lines = doctor.device_lines()
    assert lines[0] == "device auto: cuda (there is one)"
    assert len(lines) == 2
    assert "cannot be measured" in lines[1]
    assert ("cannot pin" if failure is BudgetError else "cudaErrorUnknown") in lines[1]
    monkeypatch.setattr(doctor, "open_device", fail)
    (line,) = doctor.device_lines()
    assert line.startswith("device auto: none")
    assert "--device cpu" in line


def test_the_whole_page_with_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "open_device", lambda device: (SimpleNamespace(caps=CAPS), "there is one"))
    monkeypatch.setattr(doctor, "take_survey", lambda: H200)
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver(1, "the NVIDIA driver finds 1 GPU(s)"))
    monkeypatch.setattr(doctor, "find_pieces", lambda: ALL)
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    for start in (
        "GPU: the NVIDIA driver finds 1",
        "CUDA: all",
        "device auto: cuda",
        "GPU 0: NVIDIA H200",
        "offloading:",
    ):
        assert f"\n{start}" in out


# ---- pieces


def by_name(pieces: list[Piece]) -> dict[str, Piece]:
    return {piece.name: piece for piece in pieces}


def raising(text: str) -> Any:
    def load() -> Any:
        raise BackendUnavailable(text)

    return load


def test_missing_libraries_are_pieces_and_no_errors(monkeypatch):
    monkeypatch.setattr(survey_module, "load_cupy", raising("no CuPy; pip install it"))
    monkeypatch.setattr(survey_module, "load_cudnn", raising("no cuDNN; pip install it"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    pieces = by_name(find_pieces())
    assert set(pieces) == {"CuPy", "cuDNN", "NVML"}
    assert not any(piece.found for piece in pieces.values())
    assert pieces["CuPy"].text == "no CuPy; pip install it"
    assert "pip install nvidia-ml-py" in pieces["NVML"].text
    assert not pieces["NVML"].needed


def libraries(monkeypatch: Any, *, cudnn_major: int, nvrtc: str | None) -> dict[str, Piece]:
    cublas = SimpleNamespace(version_text="13.1.0", path="/lib/libcublas.so.13")
    cudnn = SimpleNamespace(
        version_text="9.19.1", cuda_major=cudnn_major, path="/lib/libcudnn.so.9", cublas=cublas, nvrtc_path=nvrtc
    )
    cupy = SimpleNamespace(__version__="14.0", cuda=SimpleNamespace(runtime=SimpleNamespace()))
    cupy.cuda.runtime.runtimeGetVersion = lambda: 13020
    monkeypatch.setattr(survey_module, "load_cupy", lambda: cupy)
    monkeypatch.setattr(survey_module, "load_cudnn", lambda: cudnn)
    return by_name(find_pieces())


def test_what_is_installed_is_told_with_path_and_version(monkeypatch):
    pieces = libraries(monkeypatch, cudnn_major=13, nvrtc="/lib/libnvrtc.so.13")
    assert pieces["CuPy"].text == "14.0 for CUDA 13.2"
    assert pieces["cuDNN"].text == "9.19.1 for CUDA 13, /lib/libcudnn.so.9 (the only copy)"
    assert pieces["cuBLAS"].text == "13.1.0, /lib/libcublas.so.13"
    assert all(pieces[name].found for name in ("CuPy", "cuDNN", "cuBLAS", "NVRTC", "CUDA version"))


def test_two_cuda_versions_or_no_compiler_are_found(monkeypatch):
    pieces = libraries(monkeypatch, cudnn_major=12, nvrtc=None)
    assert not pieces["CUDA version"].found
    assert "CuPy is for CUDA 13, cuDNN for CUDA 12" in pieces["CUDA version"].text
    assert "pip install 'vdnn[cuda13]'" in pieces["CUDA version"].text
    assert not pieces["NVRTC"].found
    assert "pip install" in pieces["NVRTC"].text


# ---- rates


class ClockCupy(HostCupy):
    """A GPU whose streams are clocks: copies take their bytes at given GB/s, and nothing is copied."""

    GBPS = {1: 40.0, 2: 50.0, 3: 2000.0}  # by kind: from the host, to the host, within

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[int, float] = {}
        self.registered: set[int] = set()
        runtime = self.cuda.runtime
        runtime.memcpyAsync = self.copy
        runtime.memcpy = lambda *arguments: None
        runtime.hostRegister = lambda address, size, flags: self.registered.add(address)
        runtime.hostUnregister = self.registered.remove
        runtime.CUDARuntimeError = RuntimeError
        runtime.memGetInfo = lambda: (30 * GIB, 40 * GIB)
        runtime.getDeviceProperties = lambda device: {"name": b"GPU of clocks", "major": 9, "minor": 0}
        runtime.driverGetVersion = lambda: 13000
        self.cuda.Stream = lambda non_blocking: ClockStream(self)
        self.cuda.Event = ClockEvent
        self.cuda.get_elapsed_time = lambda start, end: end.ms - start.ms

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.now[stream] += nbytes / self.GBPS[kind] / 1e6


class ClockStream:
    def __init__(self, cupy: ClockCupy) -> None:
        self.cupy, self.ptr = cupy, len(cupy.now)
        cupy.now[self.ptr] = 0.0

    def wait_event(self, event: Any) -> None:
        self.cupy.now[self.ptr] = max(self.cupy.now[self.ptr], event.ms)

    def synchronize(self) -> None:
        latest = max(self.cupy.now.values())
        self.cupy.now = dict.fromkeys(self.cupy.now, latest)


class ClockEvent:
    def record(self, stream: ClockStream) -> None:
        self.ms = stream.cupy.now[stream.ptr]


def clock_gpu(monkeypatch: Any) -> ClockCupy:
    cupy = ClockCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(survey_module, "measure_gemm", lambda cupy, device: 45000.0)
    return cupy


def test_the_survey_measures_what_the_clocks_say_and_gives_all_back(monkeypatch):
    cupy = clock_gpu(monkeypatch)
    found = take_survey(4 * MIB)
    assert (found.gpu, found.compute_capability, found.driver) == ("GPU of clocks", "9.0", "up to CUDA 13.0")
    assert (found.memory_bytes, found.free_bytes) == (40 * GIB, 30 * GIB)
    assert found.rates.d2h_gbps == pytest.approx(50)
    assert found.rates.h2d_gbps == pytest.approx(40)
    assert found.rates.both_gbps == pytest.approx(80)  # until the slower direction is done
    assert found.device_copy_gbps == pytest.approx(4000)  # read and write
    assert found.pinning_gbps > 0
    assert not cupy.memory
    assert not cupy.registered


def test_a_survey_that_fails_gives_all_back(monkeypatch):
    cupy = clock_gpu(monkeypatch)

    def fail(*arguments: Any) -> float:
        raise RuntimeError("no")

    monkeypatch.setattr(survey_module, "measure_gemm", fail)
    with pytest.raises(RuntimeError, match="no"):
        take_survey(4 * MIB)
    assert not cupy.memory
    assert not cupy.registered
