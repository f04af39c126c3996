"""What vdnn.bench.gpu_softmax does around the GPU, on the host: methods that agree, rows, choices, and the summary."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from host_cupy import HostCupy
from test_cuda_compile import FROM_CUPY, compiled

from vdnn.bench import gpu_softmax
from vdnn.bench.cudnn_softmax import SIGNATURES, CudnnSoftmax
from vdnn.bench.gpu_softmax import Bench, cases, measure_case, methods_with, summary
from vdnn.bench.softmax_methods import COLUMNS, ROWS, Method, SoftmaxCase, ours_of, references_of
from vdnn.bench.study_clock import Clock
from vdnn.bench.study_kernels import reference_source
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.source import OPTIONS, signatures

REFERENCE = "study_softmax.cu"


def make_bench(monkeypatch: pytest.MonkeyPatch, *own: SoftmaxCase) -> Bench:
    """The host in place of the GPU; what is captured has run already."""
    dtype = own[0].dtype
    cupy = HostCupy(HostKernels(dtype=dtype))
    cupy.cuda.runtime.memsetAsync = lambda address, value, nbytes, stream: ctypes.memset(address, value, nbytes)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    probe = Probe(dtype)
    probe.stream.begin_capture = lambda: None
    probe.stream.end_capture = lambda: SimpleNamespace(launch=lambda stream: None)
    return Bench(probe, Clock(probe, cache_bytes=1), own)


@pytest.fixture(scope="module")
def references() -> SimpleNamespace:
    """The reference kernels on the host."""
    host = HostKernels(text=reference_source(REFERENCE))
    return SimpleNamespace(launch=host.launch, threads=256)


class FakeCudnn:
    """cuDNN's softmax by NumPy, on host memory, with the handle's part of the binding."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.pointer = 1
        self.api = self
        self.shapes: list[tuple[Any, ...]] = []

    def bind(self, found: Any) -> None:
        assert found == SIGNATURES

    def create(self, owner: object, create: str, destroy: str, *args: int) -> int:
        return 7

    def call(self, name: str, *args: Any, about: object = "", algorithm: str = "") -> None:
        self.calls.append((name, args))
        if name == "cudnnSetTensor4dDescriptorEx":
            self.shapes.append(args[2:])
            return
        shape, strides = self.shapes[-1][:4], self.shapes[-1][4:]
        n, k = (shape[0], shape[1]) if shape[0] > 1 else (shape[3], shape[1])
        by_columns = shape[0] == 1
        assert strides == ((k * n, n, n, 1) if by_columns else (k, 1, 1, 1))

        def at(address: int) -> Any:
            array = np.ctypeslib.as_array((ctypes.c_float * (n * k)).from_address(address))
            return array.reshape(k, n).T if by_columns else array.reshape(n, k)

        if name == "cudnnSoftmaxForward":
            x, y = at(args[5]), at(args[8])
            y[...] = np.exp(x - x.max(axis=1, keepdims=True))
            y /= y.sum(axis=1, keepdims=True)
        else:
            assert name == "cudnnSoftmaxBackward"
            y, dy, dx = at(args[5]), at(args[7]), at(args[10])
            dx[...] = y * (dy - (y * dy).sum(axis=1, keepdims=True))


SMALL = [SoftmaxCase("a", 6, 10), SoftmaxCase("b", 3, 300), SoftmaxCase("c", 40, 20, COLUMNS)]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.words)
def test_every_method_is_right_and_measured(
    case: SoftmaxCase, monkeypatch: pytest.MonkeyPatch, references: SimpleNamespace
) -> None:
    bench = make_bench(monkeypatch, case)
    methods = list(methods_with(bench.probe, FakeCudnn(), references)(case))
    rows = measure_case(case, methods, bench, lambda text: None)
    assert [row.get("failed") for row in rows] == [None] * len(rows)
    names = [row["method"] for row in rows]
    if case.order == ROWS:
        whole = ["cudnn sequence", "cudnn sequence, its backward", "ours", "ours, loss and gradient", "fused train"]
        assert names == ["caffe", "cudnn", *whole]
    else:
        assert names == ["convnet", "cudnn", "ours"]
    for row in rows:
        assert (row["n"], row["k"], row["order"], row["dtype"]) == (case.n, case.k, case.order, "float32")
        assert row["nbytes"] == 8 * case.n * case.k
        assert row["gbps"] == pytest.approx(row["nbytes"] / row["time_us"] / 1e3)
        assert row["share"] == pytest.approx(row["copy_us"] / row["time_us"])
    bench.close()


@pytest.mark.parametrize("order", [ROWS, COLUMNS])
def test_ours_in_16_bits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SoftmaxCase("d", 5, 1000, order, "bfloat16")
    bench = make_bench(monkeypatch, case)
    rows = measure_case(case, list(ours_of(case, bench.probe.kernels, bench.probe.stream)), bench, lambda text: None)
    assert [row.get("failed") for row in rows] == [None] * len(rows)
    assert [row["method"] for row in rows] == (["ours", "fused train"] if order == ROWS else ["ours"])


@pytest.mark.parametrize("case", SMALL[1:], ids=lambda case: case.words)
@pytest.mark.parametrize("falling", [False, True])
def test_five_kernels_in_any_order_of_threads(
    case: SoftmaxCase, falling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostKernels(text=reference_source(REFERENCE), falling=falling)
    bench = make_bench(monkeypatch, case)
    kernels = SimpleNamespace(launch=host.launch, threads=256)
    (row,) = measure_case(
        case, list(references_of(case, kernels, bench.probe.copy, bench.probe.stream)), bench, lambda text: None
    )
    assert row.get("failed") is None
    assert host.launched[:5] == ["largest", "subtract", "exponential", "total", "divide"]


def test_a_wrong_result_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case, told = SMALL[0], []
    bench = make_bench(monkeypatch, case)

    def wrong(at: Any) -> None:
        y = (ctypes.c_float * 60).from_address(at["y"])
        y[:] = [0.1] * 60

    methods = [Method("ours", wrong), Method("fused train", lambda at: None, whole=True), Method("cudnn", wrong)]
    rows = measure_case(case, methods, bench, told.append)
    assert [row["time_us"] for row in rows] == [None] * 3
    assert "sampled numbers are wrong" in rows[0]["failed"]
    assert "losses" in rows[1]["failed"]
    assert "sampled numbers are wrong" in rows[2]["inaccurate"]
    assert "failed" not in rows[2]
    assert [text.startswith("FAILED") for text in told] == [True, True, False]
    assert "inaccurate: " in told[2]


@pytest.mark.parametrize(
    ("method", "verdict", "code"),
    [("cudnn", "inaccurate", 0), ("caffe", "failed", 0), ("ours", "failed", 1), ("fused train", "failed", 1)],
)
def test_only_ours_can_fail_the_bench(
    method: str, verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    row = {
        "case": "a",
        "dtype": "float32",
        "order": ROWS,
        "method": method,
        "nbytes": 1,
        "time_us": None,
        verdict: "so",
    }
    bench = make_bench(monkeypatch, SMALL[0])
    monkeypatch.setenv("OUT", str(tmp_path))
    handle = SimpleNamespace(set_stream=lambda ptr: None, close=lambda: None)
    monkeypatch.setattr("vdnn.runtime.backends.cuda.cudnn.Handle", lambda: handle)
    monkeypatch.setattr("vdnn.bench.study_kernels.ReferenceKernels", lambda name: None)
    monkeypatch.setattr("vdnn.runtime.backends.cuda.probe.Probe", lambda dtype: bench.probe)
    sys.modules["cupy"].cuda.runtime.memGetInfo = lambda: (2**40, 2**40)
    monkeypatch.setattr(gpu_softmax, "cases", lambda: [SMALL[0]])
    monkeypatch.setattr(gpu_softmax, "Clock", lambda probe: Clock(probe, cache_bytes=1))
    monkeypatch.setattr(gpu_softmax, "measure_case", lambda *args: [row])
    monkeypatch.setattr(gpu_softmax, "methods_with", lambda *args: lambda case: [])
    assert gpu_softmax.main([]) == code


def test_a_slow_method_is_launched_a_few_times_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    case, seen = SMALL[0], []
    bench = make_bench(monkeypatch, case)
    monkeypatch.setattr(gpu_softmax, "SLOW_US", 500.0)  # the host says 1000 of everything
    assert bench.time_us([lambda i=i: seen.append(i) for i in range(2)]) == 1000
    assert seen == [0, 0, 1, 0]


def test_cases_are_the_classifiers_large_ones_and_a_sweep() -> None:
    found = list(cases())
    assert len({case.words for case in found}) == len(found)
    assert {case.name for case in found} >= {f"CLASS{i}" for i in range(1, 6)}
    large = [case for case in found if case.order == ROWS and 2 * case.nbytes >= 256 * 2**20]
    assert {case.dtype for case in large} == {"float32", "bfloat16"}
    assert {case.n for case in large} >= {32, 64, 512, 4096}
    assert max(case.k for case in found if case.order == COLUMNS) == 10**6
    assert all(case.nbytes <= 2**27 for case in found if case.order == COLUMNS)


def test_the_summary_names_the_least_share_and_the_ratio() -> None:
    row = {"case": "sweep", "dtype": "float32", "order": ROWS, "method": "ours", "nbytes": 2**29}
    rows = [{**row, "n": n, "k": k, "share": share, "time_us": 5.0} for n, k, share in ((32, 7, 0.9), (64, 9, 0.8))]
    rows.append({**row, "n": 1, "k": 1, "time_us": None})
    whole = {**row, "case": "CLASS3", "nbytes": 8}
    times = {"fused train": 3.0, "cudnn sequence": 9.0, "cudnn sequence, its backward": 7.5}
    rows += [{**whole, "method": name, "time_us": time} for name, time in times.items()]
    lines = summary(rows)
    assert "80.0% of a copy or more (64x9)" in lines[0]
    assert "CLASS3: fused 3.00 us, 2.50x as fast" in lines[1]
    assert len(lines) == 2


def test_reference_kernels_compile_without_a_word() -> None:
    text = reference_source(REFERENCE)
    cubin, log = compiled(text, *OPTIONS, *FROM_CUPY, "-arch=sm_90")
    assert log.strip() == ""
    for name in signatures(text):
        assert f".text.{name}\0".encode() in cubin


def test_cudnn_takes_rows_as_images_and_columns_as_channels_of_pixels() -> None:
    handle = FakeCudnn()
    rows, columns = (CudnnSoftmax(handle, 4, 9, by_columns=by) for by in (False, True))  # type: ignore[arg-type]
    assert [shape[:4] for shape in handle.shapes] == [(4, 9, 1, 1), (1, 9, 1, 4)]
    assert (rows._how, columns._how) == ((1, 0), (1, 1))
    assert {name: len(codes) for name, codes in SIGNATURES.items()} == {
        "cudnnSoftmaxForward": 9,
        "cudnnSoftmaxBackward": 11,
    }
