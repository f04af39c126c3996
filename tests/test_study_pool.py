"""The study's pools: reference kernels on the host, results compared with loops, and the measuring around them."""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_on_host import HostKernels
from host_cupy import HostCupy
from test_cuda_compile import FROM_CUPY, compiled

from vdnn.bench import study_pool_gpu, study_pool_methods
from vdnn.bench.study import run, tiles_of
from vdnn.bench.study_cases import PoolCase
from vdnn.bench.study_clock import FEWEST, MOST, Clock
from vdnn.bench.study_files import Recorder, read_rows
from vdnn.bench.study_kernels import ReferenceKernels, reference_source
from vdnn.bench.study_pool_gpu import Bench, measure, measure_case, pooled, spread
from vdnn.bench.study_pool_methods import cudnn_of, ours_of, references_of
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.source import OPTIONS, signatures

ODD = PoolCase("ODD", 2, 5, 8, 3, 2, "test", "none")
"""The last windows lie partly outside; channels and images fill no block."""
FULL = PoolCase("FULL", 64, 16, 6, 2, 2, "test", "none")
CASES = (ODD, FULL)


def windows(case: PoolCase):
    """Output, and the pixels of its window, for one plane."""
    for p, q in product(range(case.y[2]), range(case.y[3])):
        rows = range(p * case.stride, min(p * case.stride + case.window, case.size))
        columns = range(q * case.stride, min(q * case.stride + case.window, case.size))
        yield (p, q), [(h, w) for h in rows for w in columns]


def looped(case: PoolCase, x, dy):
    """y and dx by loops, of planes (planes, H, W) and (planes, P, Q)."""
    y, dx = np.zeros((len(x), *case.y[2:]), np.float32), np.zeros(x.shape)
    for plane, (output, pixels) in product(range(len(x)), list(windows(case))):
        best = max(pixels, key=lambda pixel: x[plane][pixel])
        y[plane][output] = x[plane][best]
        dx[plane][best] += dy[plane][output]
    return y, dx


@pytest.mark.parametrize("case", [ODD, PoolCase("R", 1, 3, 7, 3, 2, "", ""), PoolCase("S", 1, 2, 6, 2, 2, "", "")])
def test_what_results_are_compared_with_is_what_loops_find(case):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, case.size, case.size)).astype(np.float32)
    dy = rng.standard_normal((4, *case.y[2:])).astype(np.float32)
    y, places = pooled(x, case.y, case.window, case.stride)
    wanted, gradient = looped(case, x, dy)
    assert np.array_equal(y, wanted)
    assert np.allclose(spread(places, dy, case.size, case.size), gradient, atol=1e-6)


class Graphs:
    """Adds captures to the streams of HostCupy: what is captured has run already."""

    def __init__(self, cupy):
        self.launched, self.cupy = 0, cupy

    def stream(self, stream):
        stream.begin_capture = lambda: None
        stream.end_capture = lambda: SimpleNamespace(launch=self._launch)
        return stream

    def _launch(self, stream):
        self.launched += 1


@pytest.fixture
def bench(monkeypatch):
    """The host in place of the GPU, with vdnn's kernels for float32."""
    return make_bench(monkeypatch, "float32")


def make_bench(monkeypatch, dtype):
    cupy = HostCupy(HostKernels(dtype=dtype))
    cupy.cuda.runtime.memsetAsync = lambda address, value, nbytes, stream: ctypes.memset(address, value, nbytes)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    probe = Probe(dtype)
    probe.graphs = Graphs(cupy)
    probe.stream = probe.graphs.stream(probe.stream)
    return Bench(probe, Clock(probe, cache_bytes=1))


def references(monkeypatch, falling=False):
    """The reference kernels on the host."""
    text = reference_source("study_pool.cu")
    host = HostKernels(text=text, falling=falling)
    return SimpleNamespace(launch=host.launch, threads=128, names=list(signatures(text)), host=host)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("falling", [False, True])
def test_reference_kernels_give_what_loops_give(case, falling, bench, monkeypatch):
    kernels = references(monkeypatch, falling)
    rows = measure_case(case, list(references_of(case, kernels, bench.probe.stream)), bench, lambda text: None)
    assert [(row["method"], row["layout"], row["direction"]) for row in rows] == [
        ("caffe", "NCHW", "forward"),
        ("caffe", "NCHW", "backward"),
        ("convnet", "CHWN", "forward"),
        ("convnet", "CHWN", "backward"),
    ]
    assert [row.get("failed") for row in rows] == [None] * 4
    x, y = 4 * np.prod(case.x), 4 * np.prod(case.y)
    assert [row["nbytes"] for row in rows] == [x + y, x + 2 * y, x + y, 2 * x + 2 * y]
    assert all(row["gbps"] == pytest.approx(row["nbytes"] / row["time_us"] / 1e3) for row in rows)


def test_images_a_thread_follow_the_batch(bench, monkeypatch):
    for n, images in ((128, 4), (64, 2), (32, 1), (96, 1)):
        kernels = references(monkeypatch)
        case = PoolCase("N", n, 16, 4, 2, 2, "", "")
        measure_case(case, list(references_of(case, kernels, bench.probe.stream)), bench, lambda text: None)
        assert {name for name in kernels.host.launched if "convnet" in name} == {
            f"convnet_{direction}_{images}" for direction in ("forward", "backward")
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ours_are_measured_in_every_layout(dtype, monkeypatch):
    bench = make_bench(monkeypatch, dtype)
    methods = ours_of(FULL, bench.probe.kernels, bench.probe.stream, tiles_of)
    rows = measure_case(FULL, list(methods), bench, lambda text: None)
    assert [row.get("failed") for row in rows] == [None] * len(rows)
    assert {(row["layout"], row["direction"], row["variant"]) for row in rows} == {
        (layout, direction, variant)
        for layout in ("NCHW", "NHWC", "CHWN")
        for direction in ("forward", "backward")
        for variant in ("values", "indices")
    }
    tiles = {row["tile"] for row in rows if (row["layout"], row["direction"]) == ("CHWN", "forward")}
    assert len(tiles) > 1
    assert all(tile.startswith("TILE_") for tile in tiles)


class HostPool:
    """In place of CudnnPool: loops over windows that lie inside, on host memory."""

    def __init__(self, handle, x, y, *, window, stride, mode, layout, dtype):
        self.x, self.y, self.window, self.stride = x, y, window, stride
        self.layout, self.mode, self.dtype = layout, mode, dtype

    def view(self, address, shape):
        order = MEMORY_ORDERS[self.layout]
        count = int(np.prod(shape))
        flat = np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)
        return flat.reshape([shape[axis] for axis in order]).transpose([order.index(axis) for axis in range(4)])

    def windows(self):
        for p, q in product(range(self.y[2]), range(self.y[3])):
            rows, columns = (slice(at * self.stride, at * self.stride + self.window) for at in (p, q))
            yield p, q, rows, columns

    def forward(self, x, y):
        source, target = self.view(x, self.x), self.view(y, self.y)
        for p, q, rows, columns in self.windows():
            target[:, :, p, q] = source[:, :, rows, columns].max((2, 3))

    def backward(self, y, dy, x, dx):
        source, made, given, target = (
            self.view(at, shape) for at, shape in ((x, self.x), (y, self.y), (dy, self.y), (dx, self.x))
        )
        target[...] = 0
        for p, q, rows, columns in self.windows():
            hit = source[:, :, rows, columns] == made[:, :, p, q][:, :, None, None]
            target[:, :, rows, columns] += hit * given[:, :, p, q][:, :, None, None]


def test_cudnn_is_measured_with_the_outputs_that_it_has(bench, monkeypatch):
    monkeypatch.setattr(study_pool_methods, "CudnnPool", HostPool)
    assert ODD.whole_windows[2] < ODD.y[2]
    rows = measure_case(ODD, list(cudnn_of(ODD, None, "float32")), bench, lambda text: None)
    assert [row.get("failed") for row in rows] == [None] * 6
    assert [(row["layout"], row["direction"], row["variant"]) for row in rows[:3]] == [
        ("NCHW", "forward", "max"),
        ("NCHW", "backward", "max"),
        ("NCHW", "backward", "deterministic max"),
    ]
    x, y = 4 * np.prod(ODD.x), 4 * np.prod(ODD.whole_windows)
    assert [row["nbytes"] for row in rows[:2]] == [x + y, 2 * x + 2 * y]


def test_a_wrong_result_has_no_time(bench, monkeypatch):
    kernels = references(monkeypatch)
    launch = kernels.launch

    def wrong(name, blocks, args, stream):
        if name != "caffe_forward":
            launch(name, blocks, args, stream)

    kernels.launch = wrong
    said = []
    rows = measure_case(ODD, list(references_of(ODD, kernels, bench.probe.stream)), bench, said.append)
    assert [row["time_us"] is None for row in rows] == [True, True, False, False]
    assert "sampled numbers are wrong" in rows[0]["failed"]
    assert said[0].startswith("FAILED ODD forward NCHW float32 caffe")


def test_pools_are_kept_and_not_measured_twice(tmp_path, bench, monkeypatch):
    kernels = references(monkeypatch)
    asked = []

    def methods(case):
        asked.append(case.name)
        return references_of(case, kernels, bench.probe.stream)

    monkeypatch.setattr(study_pool_gpu, "pools", lambda: {"ODD": ODD, "FULL": FULL})
    recorder = Recorder(tmp_path, "pooling", "test")
    assert measure(recorder, bench, methods, float("inf"), lambda text: None) == (0, 0)
    assert asked == ["ODD", "FULL"]
    again = Recorder(tmp_path, "pooling", "test")
    assert len(again.rows) == 8
    assert measure(again, bench, methods, float("-inf"), lambda text: None) == (0, 0)
    assert asked == ["ODD", "FULL"]
    assert measure(Recorder(tmp_path / "..", "other", "test"), bench, methods, float("-inf")) == (2, 0)


def test_the_program_measures_all_ways_in_both_dtypes(tmp_path, monkeypatch):
    closed = []

    class Handle:
        def set_stream(self, pointer):
            self.stream = pointer

        def close(self):
            closed.append(self)

    class Pool(HostPool):  # in bfloat16 a stand-in of cuDNN would have to round: it writes nothing
        def view(self, address, shape):
            return super().view(address, shape) if self.dtype == "float32" else np.zeros(shape, np.float32)

    monkeypatch.setattr("vdnn.bench.study_kernels.ReferenceKernels", lambda name: references(monkeypatch))
    monkeypatch.setattr("vdnn.runtime.backends.cuda.cudnn.Handle", Handle)
    monkeypatch.setattr("vdnn.runtime.backends.cuda.probe.Probe", lambda dtype: make_bench(monkeypatch, dtype).probe)
    monkeypatch.setattr("vdnn.bench.study_clock.Clock", lambda probe: Clock(probe, cache_bytes=1))
    monkeypatch.setattr(study_pool_methods, "CudnnPool", Pool)
    monkeypatch.setattr(study_pool_gpu, "pools", lambda: {"FULL": FULL})
    said = []
    assert run(("pooling",), tmp_path, 60, said.append) == 1, said
    rows = read_rows("pooling", tmp_path).rows
    wrong = {(row["dtype"], row["method"], row["direction"]) for row in rows if row["time_us"] is None}
    assert wrong == {("bfloat16", "cudnn", "forward")}
    assert {(row["dtype"], row["method"]) for row in rows} == {
        *(("float32", method) for method in ("caffe", "convnet", "cudnn", "ours")),
        *(("bfloat16", method) for method in ("cudnn", "ours")),
    }
    assert len(closed) == 2
    assert said[-1].startswith(f"pooling: {len(rows)} rows in study_pooling.json, 2 failed")


def test_operands_fill_the_cache_several_times(bench):
    clock = Clock(bench.probe, cache_bytes=60 * 2**20)
    assert clock.count(2**40) == FEWEST
    assert clock.count(1) == MOST
    count = clock.count(10 * 2**20)
    assert count * 10 * 2**20 >= 3 * 60 * 2**20


def test_a_copy_is_the_fastest_of_several_distances_and_of_our_kernel(bench):
    half, distances = 2**26, []

    class Memory:
        stream = None

        def copy(self, target: int, source: int, nbytes: int) -> None:
            distances.append(target - source)

    class Slow(Clock):
        """Slow at the natural distance."""

        def time_us(self, calls):
            calls[0]()
            return 100.0 if distances[-1] == half else 60.0

    clock = Slow(Memory(), cache_bytes=1)
    assert clock.copy_us([0, 2 * half], 2 * half) == pytest.approx(60, rel=0.01)
    assert len(set(distances)) > 1
    clock.memory.kernels = type("Kernels", (), {"dtype": "float32", "launch": lambda *_: distances.append(0)})()
    clock.time_us = lambda calls: (calls[0](), 30.0 if not distances[-1] else 60.0)[1]
    assert clock.copy_us([0, 2 * half], 2 * half) == 30.0


def test_a_graph_holds_every_copy_equally_often(bench):
    seen = []
    bench.clock.time_us([lambda i=i: seen.append(i) for i in range(3)])
    assert seen[0] == 0  # before the capture
    assert sorted(set(seen[1:])) == [0, 1, 2]
    assert {seen[1:].count(i) for i in range(3)} == {3}
    assert bench.probe.graphs.launched == 8


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_reference_kernels_compile_without_a_word(architecture):
    text = reference_source("study_pool.cu")
    cubin, log = compiled(text, *OPTIONS, *FROM_CUPY, f"-arch={architecture}")
    assert log.strip() == ""
    for name in signatures(text):
        assert f".text.{name}\0".encode() in cubin


def test_reference_kernels_are_loaded_when_they_are_made(monkeypatch):
    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    kernels = ReferenceKernels("study_pool.cu")
    assert kernels.threads == 128
    with pytest.raises(Exception, match="expected from 1"):
        kernels.launch("caffe_forward", 0, [], None)
    kernels.launch("caffe_forward", 3, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1], cupy.cuda.Stream(non_blocking=True))
    assert cupy.launches[-1][1:4] == ("caffe_forward", (3,), (128,))
