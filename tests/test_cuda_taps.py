"""Filter gradients by products of rows: vdnn's kernels and a cuBLAS on the host, against float64 by definition."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, fenced
from host_cublas import HostCublas
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda import search, tap_steps
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.tap_steps import CUBLAS_BYTES, Form
from vdnn.runtime.backends.cuda.taps import TapPlans

Array = NDArray[Any]
STREAM: Any = SimpleNamespace(ptr=7)


def problem_of(
    n: int, c: int, h: int, w: int, k: int, window: tuple[int, int], of: tuple[int, int] = (0, 0), **changes: Any
) -> ConvProblem:
    """x and dy are some channels of `of` in NHWC; 0 for all there are."""
    pads = ((window[0] - 1) // 2, (window[1] - 1) // 2)
    strides = [None if not whole else (h * w * whole, 1, w * whole, whole) for whole in of]
    problem = ConvProblem(
        *("wgrad", (n, c, h, w), (k, c, *window), (n, k, h, w)),
        padding=pads,
        x_strides=strides[0],
        y_strides=strides[1],
        layout="NHWC",
    )
    return replace(problem, **changes)


def by_definition(problem: ConvProblem, x: Array, dy: Array) -> Array:
    """dw (K, R, S, C) in float64 of x (N, H, W, C) and dy (N, H, W, K), number by number over taps and pixels."""
    (k, c, r_size, s_size), (h, w), (pad_v, pad_h) = problem.w, problem.x[2:], problem.padding
    dw = np.zeros((k, r_size, s_size, c))
    for r, s, p, q in product(range(r_size), range(s_size), range(h), range(w)):
        row, column = p + r - pad_v, q + s - pad_h
        if 0 <= row < h and 0 <= column < w:
            dw[:, r, s] += dy[:, p, q].astype(float).T @ x[:, row, column].astype(float)
    return dw


@dataclass
class Case:
    """Operands of a problem in memory of their own: what lies between channels, and the workspace, is NaN."""

    problem: ConvProblem
    seed: int = 3
    shift: int = 0

    def __post_init__(self) -> None:
        rng, sizes = np.random.default_rng(self.seed), self.problem.strides()
        self.rooms: dict[str, Array] = {}
        self.arrays: dict[str, Array] = {}
        for role, (n, c, h, w) in {"x": self.problem.x, "y": self.problem.y}.items():
            whole = sizes[role][3]
            room = fenced(4 * (n * h * w * whole + self.shift))[4 * self.shift :].view(np.float32)
            images = room.reshape(n, h, w, whole)[..., :c]
            images[...] = rng.standard_normal(images.shape)
            self.rooms[role], self.arrays[role] = room, images
        k, c, r, s = self.problem.w
        self.rooms["w"] = fenced(4 * (k * r * s * c + self.shift))[4 * self.shift :].view(np.float32)
        self.arrays["w"] = self.rooms["w"].reshape(k, r, s, c)
        self.arrays["w"][...] = self.old = rng.standard_normal((k, r, s, c)).astype(np.float32)

    @property
    def expected(self) -> Array:
        return by_definition(self.problem, self.arrays["x"], self.arrays["y"])

    def run(self, shares: int, accumulate: bool = False, **options: Any) -> Array:
        """dw as it is then."""
        blas, kernels = HostCublas(**options), HostKernels()
        plan = TapPlans(blas.cublas, kernels, STREAM).plan(self.problem, f"TAPS_{shares}")
        workspace = fenced(plan.workspace_bytes)
        behind = workspace[plan.form.cublas :].copy()
        blas.memory = workspace[: plan.form.cublas]
        x, dy, dw = (self.rooms[role].ctypes.data for role in "xyw")
        before = [self.rooms[role].copy() for role in "xy"]
        plan.run(None, x, dy, dw, workspace.ctypes.data, accumulate)
        for role, held in zip("xy", before, strict=True):
            np.testing.assert_array_equal(self.rooms[role], held)
        np.testing.assert_array_equal(workspace[plan.form.cublas :], behind)
        assert set(kernels.launched) <= {"tap_rows", "tap_sums"} | {n for n in kernels.launched if "transform" in n}
        return self.arrays["w"]


def check(case: Case, shares: int, accumulate: bool = False) -> None:
    wanted = case.expected + (case.old if accumulate else 0)
    found = case.run(shares, accumulate)
    size = np.sqrt(np.mean(case.expected**2))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * size)


# ---- against float64


WINDOWS = [(1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (5, 1), (3, 5)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_tap_agrees_with_the_definition(window: tuple[int, int], accumulate: bool) -> None:
    """An image no larger than the window has taps of one row, and of one column."""
    check(Case(problem_of(4, 8, 4, 5, 12, window)), 3, accumulate)


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shares", [1, 2, 5])
def test_any_number_of_images(images: int, shares: int) -> None:
    check(Case(problem_of(images, 12, 6, 7, 8, (3, 3))), shares)


@pytest.mark.parametrize(("channels", "filters"), [(12, 20), (3, 5), (1, 1), (33, 7), (4, 130)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_ragged_channels(channels: int, filters: int, accumulate: bool) -> None:
    check(Case(problem_of(5, channels, 5, 4, filters, (3, 3))), 2, accumulate)


@pytest.mark.parametrize("images", [3, 8])
@pytest.mark.parametrize("of", [(16, 0), (0, 24), (13, 21)])
def test_channels_of_larger_tensors(images: int, of: tuple[int, int]) -> None:
    """Between them lies NaN, which shows where it is read."""
    check(Case(problem_of(images, 8, 5, 6, 16, (3, 3), of)), 2)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (2, 2), (17, 3)])
def test_small_and_narrow_images(size: tuple[int, int]) -> None:
    window = tuple(3 if pixels > 1 else 1 for pixels in size)
    check(Case(problem_of(6, 8, *size, 8, window)), 4)  # type: ignore[arg-type]


def test_addresses_that_are_not_on_16_bytes() -> None:
    check(Case(problem_of(4, 8, 5, 6, 8, (3, 3), alignment=4), shift=1), 2)


@pytest.mark.parametrize("shares", [15, 16, 17, 40])
def test_many_shares_some_of_them_beyond_the_end(shares: int) -> None:
    check(Case(problem_of(4, 8, 3, 3, 8, (3, 3))), shares)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_partial_sums_of_some_taps_at_a_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(4, 8, 6, 6, 8, (5, 3))
    monkeypatch.setattr(tap_steps, "PARTIAL_BYTES", most * 4 * 3 * 8 * 8)
    assert Form.of(problem, 3).taps == most
    check(Case(problem), 3, accumulate=True)


def test_shares_are_added_in_float32_and_operands_are_tf32() -> None:
    case = Case(problem_of(8, 16, 12, 12, 16, (3, 3)))
    exact = case.expected
    found = case.run(6, cuts=True)
    assert 2e-4 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < search.TOLERANCE["tf32"]


# ---- what is asked of the GPU


def test_nothing_waits_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes kernels and products on the stream given, and nothing else."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    case = Case(problem_of(4, 8, 6, 6, 8, (3, 3)))
    blas, kernels = HostCublas(), HostKernels()
    streams: list[Any] = []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda n, b, a, stream: (streams.append(stream), launch(n, b, a, stream)))
    plan = TapPlans(blas.cublas, kernels, STREAM).plan(case.problem, "TAPS_2")
    assert (plan.algorithm, plan.deterministic, plan.notes) == ("TAPS_2", True, ("TENSOR_CORE",))
    workspace = fenced(plan.workspace_bytes)
    pointers = [case.rooms[role].ctypes.data for role in "xyw"]
    results = []
    for _ in range(2):
        plan.run(None, *pointers, workspace.ctypes.data, False)  # type: ignore[call-arg]
        results.append(case.arrays["w"].copy())
        workspace[...] = 0xFF
    np.testing.assert_array_equal(*results)
    assert streams
    assert all(stream is STREAM for stream in streams)
    assert blas.calls == 18 * ["cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmStridedBatchedEx"]
    assert set(blas.workspaces) == {(workspace.ctypes.data + plan.form.cublas, CUBLAS_BYTES)}
    assert blas.workspaces[0][0] % 256 == 0


def test_a_workspace_has_no_room_that_is_not_used() -> None:
    problem = problem_of(8, 64, 14, 14, 96, (3, 3))
    form = Form.of(problem, 4)
    rows = 4 * (64 + 96) * 8 * 196
    sums = 4 * 3 * 4 * 64 * 96
    columns = 4 * 96 * 14 * 8
    assert rows + sums + columns < form.nbytes - CUBLAS_BYTES < 1.1 * (rows + sums + columns)
