"""Filter gradients whose products run at the same time: results whatever runs first, as work and as a graph, over a
CUDA that does everything as late as it may.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, fenced
from host_cublas import HostCublas
from lazy_cuda import LazyCuda
from test_cuda_taps import Case, problem_of

from vdnn.runtime.backends.cuda.tap_lanes import LANES, Lanes
from vdnn.runtime.backends.cuda.tap_steps import CUBLAS_BYTES, Form
from vdnn.runtime.backends.cuda.taps import TapPlans, shares_of

NAMES = ("main", "first", "second")
PROBLEM = problem_of(4, 8, 5, 6, 12, (3, 3))


class Late:
    """Kernels and products that are queued on their streams."""

    def __init__(self, order: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
        self.cuda, names = LazyCuda(order), iter(NAMES)
        stand_in = SimpleNamespace(Event=self.cuda.Event, Stream=lambda non_blocking: self.cuda.Stream(next(names)))
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=stand_in))
        self.stream: Any = stand_in.Stream(non_blocking=True)
        self.blas, self.kernels = HostCublas(), HostKernels()
        self.ran: list[str] = []
        self._current: Any = None
        self._multiply, self._launch = self.blas.multiply, self.kernels.launch
        patch.setattr(self.blas, "multiply", self.multiply)
        patch.setattr(self.kernels, "launch", self.launch)
        patch.setattr(self.blas.cublas, "bind", self.bind)
        self.workspaces: dict[str, set[tuple[int, int]]] = {}
        self.taps = TapPlans(self.blas.cublas, self.kernels, self.stream, Lanes(self.stream))

    def bind(self, stream: Any, workspace: int, nbytes: int) -> None:
        self._current = stream
        self.workspaces.setdefault(stream.name, set()).add((workspace, nbytes))

    def multiply(self, *args: Any) -> int:
        stream = self._current
        stream.add(lambda: (self.ran.append(stream.name), self._multiply(*args)))
        return 0

    def launch(self, name: str, blocks: int, args: Any, stream: Any) -> None:
        stream.add(lambda: (self.ran.append(name), self._launch(name, blocks, args, None)))


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", list(permutations(NAMES)))
def test_results_are_right_whatever_runs_first(
    order: tuple[str, ...], captured: bool, patch: pytest.MonkeyPatch
) -> None:
    case, late = Case(PROBLEM), Late(order, patch)
    plan = late.taps.plan(PROBLEM, "TAPS_3x2")
    workspace = fenced(plan.workspace_bytes)
    late.blas.memory = workspace[: plan.form.cublas]
    pointers = [case.rooms[role].ctypes.data for role in "xyw"]
    for adds in (False, True):
        if captured:
            late.stream.begin_capture()
        plan.run(None, *pointers, workspace.ctypes.data, adds)  # type: ignore[call-arg]
        if captured:
            late.stream.end_capture().launch(late.stream)
        late.stream.synchronize()
        times = 2 if adds else 1
        np.testing.assert_allclose(case.arrays["w"], times * case.expected, rtol=1e-5, atol=1e-4)
    assert not any(stream.queue for stream in late.cuda.streams.values()), "the stream waits for all others"
    assert {name: late.ran.count(name) for name in NAMES} == dict.fromkeys(NAMES, 2 * 3)


def test_each_lane_has_a_workspace_of_its_own(patch: pytest.MonkeyPatch) -> None:
    case, late = Case(PROBLEM), Late(NAMES, patch)
    plan = late.taps.plan(PROBLEM, "TAPS_3x2")
    assert plan.algorithm == "TAPS_3x2"
    assert plan.form.nbytes - plan.form.cublas == 3 * CUBLAS_BYTES
    workspace = fenced(plan.workspace_bytes)
    start = workspace.ctypes.data + plan.form.cublas
    plan.run(None, *(case.rooms[role].ctypes.data for role in "xyw"), workspace.ctypes.data, False)  # type: ignore[call-arg]
    found = [next(iter(late.workspaces[name])) for name in NAMES]
    assert sorted(found) == [(start + n * CUBLAS_BYTES, CUBLAS_BYTES) for n in range(LANES)]
    assert all(len(of_lane) == 1 for of_lane in late.workspaces.values())


@pytest.mark.parametrize(
    ("window", "beside", "at_a_time"), [((5, 3), 3, [3, 2]), ((7, 1), 3, [3, 3, 1]), ((2, 2), 0, [])]
)
def test_taps_one_above_the_other_come_together(
    window: tuple[int, int], beside: int, at_a_time: list[int], patch: pytest.MonkeyPatch
) -> None:
    late = Late(NAMES, patch)
    if not beside:
        with pytest.raises(ValueError, match="has no algorithm"):
            late.taps.plan(problem_of(4, 8, 9, 6, 12, window), "TAPS_2x2")
        return
    case = Case(problem_of(4, 8, 9, 6, 12, window))
    plan = late.taps.plan(case.problem, f"TAPS_{beside}x2")
    workspace = fenced(plan.workspace_bytes)
    plan.run(None, *(case.rooms[role].ctypes.data for role in "xyw"), workspace.ctypes.data, False)  # type: ignore[call-arg]
    late.stream.synchronize()
    np.testing.assert_allclose(case.arrays["w"], case.expected, rtol=1e-5, atol=1e-4)
    products = [name in NAMES for name in late.ran]
    runs = "".join("p" if is_product else " " for is_product in products).split()
    assert [len(run) for run in runs] == window[1] * at_a_time


def test_they_are_plans_of_filters_with_taps_above_each_other(patch: pytest.MonkeyPatch) -> None:
    late = Late(NAMES, patch)
    problem = problem_of(256, 256, 14, 14, 192, (3, 3))
    labels = [plan.algorithm for plan in late.taps.plans(problem)]
    assert labels == ["TAPS_32", "TAPS_64", "TAPS_3x11", "TAPS_3x22"]  # 4 tiles each: 128 and 132
    assert shares_of(problem, 3) == (11, 22)
    flat = problem_of(256, 256, 14, 14, 192, (1, 3))
    assert [plan.algorithm for plan in late.taps.plans(flat)] == ["TAPS_32", "TAPS_64"]
    for label in ("TAPS_4x8", "TAPS_0x8", "TAPS_x8", "TAPS_3x"):
        with pytest.raises(ValueError, match="has no algorithm"):
            late.taps.plan(problem, label)
    alone = TapPlans(late.blas.cublas, late.kernels, late.stream)
    with pytest.raises(ValueError, match="has no algorithm"):
        alone.plan(problem, "TAPS_3x11")
    assert alone.plan(problem, "TAPS_1x11").algorithm == "TAPS_11"
    assert Form.of(problem, 11, 3).taps == 3
