"""The search over convolution algorithms, with plans and a device of the tests: what is tried, left out, kept."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_cupy import HostCupy

from vdnn.layers import Concat, Conv, Flatten, Graph, Linear, SoftmaxLoss, lower
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import products as products_module
from vdnn.runtime.backends.cuda import search
from vdnn.runtime.backends.cuda import trial as trial_module
from vdnn.runtime.backends.cuda.cudnn import CudnnError
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.products import Products, unplaced_problem
from vdnn.runtime.backends.cuda.search import Measured, Search, shortlist, trial_order
from vdnn.runtime.backends.cuda.trial import Trial, relative_difference

KEY = {"gpu": "made up", "driver": 13000, "cudnn": 91900, "layout": "NCHW"}
PROBLEM = ConvProblem("forward", (2, 3, 6, 6), (4, 3, 1, 1), (2, 4, 6, 6))
SLICED = ConvProblem("forward", (2, 3, 6, 6), (4, 3, 1, 1), (2, 4, 6, 6), y_strides=(9 * 36, 36, 6, 1), alignment=4)
CACHE_BYTES = 4096


def open_search(limit_bytes: int, **options: Any) -> Search:
    return Search(None, KEY, limit_bytes, None, **options)  # type: ignore[arg-type]


# ---- the table


def test_a_table_serves_every_limit_if_nothing_was_left_out():
    assert Measured((), None).serves(2**40)
    assert Measured((), 100).serves(100)
    assert not Measured((), 100).serves(101)


def test_the_table_is_kept_between_runs_under_a_complete_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = open_search(2**30)
    first.known["some convolution"] = Measured((Candidate("GEMM", 1.5, 4096, False),), 2**30, {"FFT": "too good"})
    first._save()
    again = open_search(2**30)
    assert again.known == first.known
    for changed in ({"cudnn": 92000}, {"driver": 12000}, {"gpu": "another"}, {"layout": "NHWC"}):
        assert Search(None, {**KEY, **changed}, 2**30, None).known == {}  # type: ignore[arg-type]
    assert open_search(2**30, precision="tf32").known == {}
    monkeypatch.setattr(search, "METHOD", search.METHOD + 1)
    assert open_search(2**30).known == {}


def test_a_damaged_or_older_table_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = open_search(1).path
    path.parent.mkdir(parents=True)
    for text in ("{", '{"problems": {"some convolution": [{"algorithm": "GEMM"}]}}', '{"problems": []}', "\0"):
        path.write_text(text)
        assert open_search(1).known == {}
    assert search.cache_folder().is_dir()
    kept = open_search(1)
    kept.known["p"] = Measured((Candidate("A", 1.25, 1023),), None)
    kept.ops["o"] = 2.75
    kept._save()
    whole = path.read_text()
    assert (list(open_search(1).known), list(open_search(1).ops)) == (["p"], ["o"])
    for number in ("1.25", "1023", "2.75"):
        for other in ("NaN", "-1", "Infinity", "1" + "0" * 400):
            assert whole.count(number) == 1
            path.write_text(whole.replace(number, other))
            damaged = open_search(1)
            assert (damaged.known, damaged.ops) == ({}, {}), f"{other} for {number}"


def test_measuring_again_replaces_what_a_low_limit_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    low, high = open_search(10), open_search(1000)
    small, large = Candidate("SMALL", 2.0, 0), Candidate("LARGE", 1.0, 500)
    low._measure = lambda problem: Measured((small,), 10)  # type: ignore[method-assign]
    high._measure = lambda problem: Measured((large, small), None)  # type: ignore[method-assign]
    assert low.candidates(PROBLEM) == (small,)
    high._load()
    assert high.candidates(PROBLEM) == (large, small)
    low._load()
    assert low.candidates(PROBLEM) == (large, small)


def test_the_key_of_a_problem_tells_everything_apart():
    changes: list[dict[str, Any]] = [
        {"direction": "wgrad"},
        {"x": (4, 3, 6, 6)},
        {"w": (4, 3, 3, 3)},
        {"y": (2, 4, 3, 3)},
        {"stride": (2, 1)},
        {"padding": (0, 1)},
        {"dilation": (1, 2)},
        {"groups": 2},
        {"x_strides": (500, 36, 6, 1)},
        {"y_strides": (500, 36, 6, 1)},
        {"alignment": 4},
    ]
    assert len({str(PROBLEM), *(str(replace(PROBLEM, **change)) for change in changes)}) == len(changes) + 1
    dense = replace(PROBLEM, x_strides=(108, 36, 6, 1), y_strides=(144, 36, 6, 1))
    assert str(dense) == str(PROBLEM)


def test_a_channel_slice_states_its_strides_and_alignment():
    graph = Graph("fork", (3, 7, 7), 10)
    one = graph.add("one", Conv(5, 1), graph.input)
    two = graph.add("two", Conv(4, 1), graph.input)
    joined = graph.add("join", Concat(), (one, two))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), graph.add("flat", Flatten(), joined)))
    program = lower(graph, 2, "eval")
    problems = {op.layer: unplaced_problem(op, program) for op in program.ops if op.kind == "conv.forward"}
    assert problems["two"].y_strides == problems["one"].y_strides == (9 * 49, 49, 7, 1)
    assert problems["one"].alignment == 16
    assert problems["two"].alignment == 4  # begins 5 * 49 floats in


# ---- what is tried


@dataclass
class Plan:
    """A plan that multiplies on the host, as well or badly as told."""

    algorithm: str
    workspace_bytes: int = 0
    deterministic: bool = True
    notes: tuple[str, ...] = ()
    time_ms: float = 1.0
    error: float = 0.0
    wobble: float = 0.0
    fails: bool = False
    writes: bool = True
    wrong: bool = False
    problem: ConvProblem = PROBLEM
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)

    def run(self, handle: Any, a: int, b: int, out: int, workspace: int, accumulate: bool) -> None:
        if self.fails:
            raise CudnnError(3000, "CUDNN_STATUS_NOT_SUPPORTED", "cudnnConvolutionForward")
        self.runs.append((a, b, out, workspace))
        clock.at_ms += self.time_ms
        if not self.writes:
            return
        n, c, h, w = self.problem.x
        k = self.problem.w[0]
        x, weights = array(a, n * c * h * w).reshape(n, c, h, w), array(b, k * c).reshape(k, c)
        step = self.problem.strides()["y"][0]
        y = array(out, n * step).reshape(n, step)[:, : k * h * w]
        y[...] = np.einsum("nchw,kc->nkhw", x.astype(float), weights).reshape(n, -1)
        y *= 1 + self.error + self.wobble * len(self.runs)
        y[0, k * h * w // 2] += self.wrong  # neither in the first plane of the first image nor in the last of the last


def array(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


clock = SimpleNamespace(at_ms=0.0)


class Device(HostCupy):
    """Host memory with a clock that plans move on."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0
        runtime = self.cuda.runtime
        runtime.memsetAsync = self.memset
        runtime.getDeviceProperties = lambda device: {"name": b"host", "l2CacheSize": CACHE_BYTES}
        self.cuda.Event = Event
        self.cuda.get_elapsed_time = lambda start, end: end.ms - start.ms

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)
        self.flushes += value == 0


class Event:
    """A point of the clock."""

    ms = 0.0

    def record(self, stream: Any) -> None:
        self.ms = clock.at_ms

    def synchronize(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Device:
    made = Device()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial_module, "BUSY_BYTES", 3 * CACHE_BYTES)
    return made


def search_of(device: Device, plans: list[Plan], limit_bytes: int = 2**30, **options: Any) -> tuple[Search, list[str]]:
    said: list[str] = []
    stand_in: Any = SimpleNamespace(plans=lambda problem, **options: plans, handle=None)
    stream = device.cuda.Stream(non_blocking=True)
    return Search(stand_in, KEY, limit_bytes, stream, note=said.append, **options), said


def test_the_fastest_right_candidate_comes_first_and_its_clock_is_the_devices(device):
    plans = [Plan("IMPLICIT_GEMM", time_ms=3), Plan("FFT", 640, time_ms=2), Plan("graph:eng1", 64, time_ms=1)]
    made, said = search_of(device, plans)
    found = made.candidates(PROBLEM)
    assert found == (
        Candidate("graph:eng1", 1.0, 64),
        Candidate("FFT", 2.0, 640),
        Candidate("IMPLICIT_GEMM", 3.0, 0),
    )
    assert len(said) == 1
    assert "3 algorithms, fastest graph:eng1 1 ms" in said[0]
    assert made.candidates(PROBLEM) == found
    assert len(said) == 1  # not measured again
    assert not device.memory  # all given back
    assert device.flushes > 0


def test_an_operand_starts_where_no_other_ends_and_the_workspace_behind_all(device):
    plan = Plan("GEMM", 640)
    search_of(device, [plan])[0].candidates(PROBLEM)
    (places,) = set(plan.runs)
    sizes = (2 * 3 * 36 * 4, 4 * 3 * 4, 2 * 4 * 36 * 4, 640)
    spans = sorted(zip(places, sizes, strict=True))
    assert all(place % 512 == 0 for place in places)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))


def test_what_fails_differs_or_writes_nothing_is_left_out_and_named(device):
    plans = [
        Plan("IMPLICIT_GEMM"),
        Plan("FFT", fails=True),
        Plan("WINOGRAD", time_ms=0.1, error=3e-4),
        Plan("graph:eng7", time_ms=0.1, writes=False),
        Plan("graph:eng8", time_ms=0.9, error=1e-6),
    ]
    made, said = search_of(device, plans)
    assert [c.algorithm for c in made.candidates(PROBLEM)] == ["graph:eng8", "IMPLICIT_GEMM"]
    left_out = made.known[str(PROBLEM)].left_out
    assert set(left_out) == {"FFT", "WINOGRAD", "graph:eng7"}
    assert left_out["FFT"] == "CUDNN_STATUS_NOT_SUPPORTED"
    assert re.fullmatch(r"error \d\.\de-04 against float64", left_out["WINOGRAD"])
    assert all(label in said[0] for label in left_out)


def test_what_is_wrong_where_float64_does_not_look_differs_from_the_others(device):
    plans = [Plan("IMPLICIT_GEMM"), Plan("GEMM", wrong=True), Plan("FFT", 8)]
    made, _ = search_of(device, plans)
    assert [c.algorithm for c in made.candidates(PROBLEM)] == ["IMPLICIT_GEMM", "FFT"]
    assert made.known[str(PROBLEM)].left_out["GEMM"].startswith("differs from others by ")


def test_tf32_admits_what_fp32_does_not_and_says_which_is_which(device):
    plans = [
        Plan("IMPLICIT_GEMM", time_ms=3),
        Plan("ALGO+TF32", time_ms=1, error=4e-4, notes=("TENSOR_CORE",)),
        Plan("WORSE+TF32", time_ms=0.5, error=1e-2, notes=("TENSOR_CORE",)),
        Plan("graph:eng1", time_ms=2, error=1e-6, notes=("TENSOR_CORE",)),
    ]
    asked: list[dict[str, Any]] = []
    made, _ = search_of(device, plans, precision="tf32")
    made.products.plans = lambda problem, **options: asked.append(options) or plans  # type: ignore
    found = made.candidates(PROBLEM)
    assert [(c.algorithm, c.math) for c in found] == [
        ("ALGO+TF32", "tf32"),
        ("graph:eng1", "fp32"),
        ("IMPLICIT_GEMM", "fp32"),
    ]
    assert asked == [{"tensor_cores": True, "named_only": False, "most": 16}]
    assert [c.algorithm for c in search_of(device, plans)[0].candidates(PROBLEM)] == ["graph:eng1", "IMPLICIT_GEMM"]


def test_two_runs_that_differ_are_not_deterministic_whatever_the_label_says(device):
    plans = [Plan("IMPLICIT_GEMM"), Plan("ALGO_1", wobble=2e-6), Plan("ALGO_0", deterministic=False)]
    found = {c.algorithm: c.deterministic for c in search_of(device, plans)[0].candidates(PROBLEM)}
    assert found == {"IMPLICIT_GEMM": True, "ALGO_1": False, "ALGO_0": False}


def test_a_clearly_slower_plan_is_run_twice_and_the_others_six_times(device):
    fast, close, slow = Plan("GEMM", time_ms=1), Plan("A", 8, time_ms=1.4), Plan("B", 8, time_ms=1.6)
    search_of(device, [fast, close, slow])[0].candidates(PROBLEM)
    assert [len(plan.runs) for plan in (fast, close, slow)] == [6, 6, 2]


def test_a_reference_that_fails_or_gives_nan_leaves_it_to_the_next(device):
    plans = [Plan("IMPLICIT_GEMM", fails=True), Plan("ALGO", 8, writes=False), Plan("graph:eng1", 16)]
    assert [c.algorithm for c in search_of(device, plans)[0].candidates(PROBLEM)] == ["graph:eng1"]


def test_what_does_not_fit_is_left_for_a_higher_limit(device):
    plans = [Plan("IMPLICIT_GEMM"), Plan("FFT", 2**20, time_ms=0.5)]
    low, _ = search_of(device, plans, 2**19)
    assert [c.algorithm for c in low.candidates(PROBLEM)] == ["IMPLICIT_GEMM"]
    assert low.known[str(PROBLEM)].limit_bytes == 2**19
    high, _ = search_of(device, plans, 2**22)
    assert [c.algorithm for c in high.candidates(PROBLEM)] == ["FFT", "IMPLICIT_GEMM"]
    none, _ = search_of(device, plans, 100)
    none.known = {}
    assert none.candidates(PROBLEM) == ()


@pytest.mark.parametrize("room", [0, 2 * CACHE_BYTES])
def test_the_scratch_is_taken_only_where_the_limit_has_room(device, room):
    stream = device.cuda.Stream(non_blocking=True)
    needed = Trial(PROBLEM, None, stream, 640, 0).nbytes  # type: ignore[arg-type]
    trial = Trial(PROBLEM, None, stream, 640, needed + room)  # type: ignore[arg-type]
    assert trial.nbytes <= needed + room
    assert (trial.scratch_bytes > CACHE_BYTES) == bool(room)


def test_bytes_between_images_do_not_count(device):
    plans = [Plan("IMPLICIT_GEMM", problem=SLICED), Plan("GEMM", time_ms=0.5, problem=SLICED)]
    made, _ = search_of(device, plans)
    assert [c.algorithm for c in made.candidates(SLICED)] == ["GEMM", "IMPLICIT_GEMM"]


def test_the_difference_is_relative_and_a_nan_is_infinite():
    one = np.array([3.0, 4.0])
    assert relative_difference(one * 1.01, one) == pytest.approx(0.01)
    assert relative_difference(one * np.nan, one) == np.inf
    assert relative_difference(one, one * 0) == 1.0
    assert relative_difference(one * 0, one * 0) == 0.0


def test_the_short_list_has_eight_of_the_heuristic_those_without_workspace_and_much_smaller_ones():
    graph = [Plan(f"graph:eng{i}", 2**30) for i in range(20)]
    for rank, nbytes in {9: 2**30 - 1, 10: 2**29, 12: 2**29, 13: 0, 15: 2**28, 17: 500}.items():
        graph[rank].workspace_bytes = nbytes
    named = [Plan(name, 2**30) for name in ("FFT", "GEMM")]
    kept = [plan.algorithm for plan in shortlist([*named, *graph])]
    # 15 is smaller than 10, but no smaller than 13, which needs nothing
    assert kept == ["FFT", "GEMM", *(f"graph:eng{i}" for i in (*range(8), 10, 13, 17))]


def test_the_reference_is_exact_and_small_and_the_heuristic_comes_next():
    plans = [Plan("FFT", 9), Plan("GEMM"), Plan("GEMM+TF32", notes=("TENSOR_CORE",)), Plan("graph:a"), Plan("graph:b")]
    assert [p.algorithm for p in trial_order(plans)] == ["GEMM", "graph:a", "graph:b", "FFT", "GEMM+TF32"]
    assert trial_order([]) == []


# ---- both kinds of plans


def refuse(*arguments: Any, **options: Any) -> Any:
    raise CudnnError(3000, "CUDNN_STATUS_NOT_SUPPORTED", "made up")


def test_named_algorithms_and_graph_plans_are_candidates_and_either_may_be_missing(monkeypatch):
    made = Products(None, None)  # type: ignore[arg-type]
    lists = {name: getattr(products_module, name) for name in ("cudnn_conv", "cudnn_graph")}

    def give(name: str, *labels: str) -> None:
        plans = [Plan(label) for label in labels]
        monkeypatch.setattr(lists[name], "plans", (lambda h, p, **options: plans) if labels else refuse)

    give("cudnn_conv", "GEMM")
    give("cudnn_graph", "graph:eng1")
    assert [p.algorithm for p in made.plans(PROBLEM)] == ["GEMM", "graph:eng1"]
    assert [p.algorithm for p in made.plans(PROBLEM, named_only=True)] == ["GEMM"]
    give("cudnn_graph")
    assert [p.algorithm for p in made.plans(PROBLEM)] == ["GEMM"]
    give("cudnn_conv")
    with pytest.raises(CudnnError):
        made.plans(PROBLEM)
    give("cudnn_graph", "graph:eng1")
    assert [p.algorithm for p in made.plans(PROBLEM)] == ["graph:eng1"]


def test_a_label_alone_leads_to_its_plan_without_a_search(monkeypatch):
    made = Products(None, None)  # type: ignore[arg-type]
    asked: list[tuple[str, str]] = []
    for name in ("cudnn_conv", "cudnn_graph"):
        make = lambda handle, problem, label, name=name: asked.append((name, label)) or Plan(label)  # noqa: E731
        monkeypatch.setattr(getattr(products_module, name), "plan", make)
    for label in ("FFT", "FFT+TF32", "graph:eng7_k2=1", "FFT"):
        assert made._plan(PROBLEM, label).algorithm == label
    assert asked == [("cudnn_conv", "FFT"), ("cudnn_conv", "FFT+TF32"), ("cudnn_graph", "graph:eng7_k2=1")]


def test_the_operands_are_those_of_the_direction():
    assert {d: names[2] for d, names in OPERANDS.items()} == {"forward": "y", "dgrad": "x", "wgrad": "w"}
