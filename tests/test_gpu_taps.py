"""Filter gradients by products of rows on a GPU: every edge against float64, the same bits twice and captured, and what
lies beside the operands left alone.

    python -m pytest -m gpu tests/test_gpu_taps.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_cuda_taps import WINDOWS, Array, Case, problem_of

from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.taps import TapPlan, TapPlans

pytestmark = pytest.mark.gpu

ALIGN_BYTES = 256
ERROR = 2e-3
"""Of TF32, relative to float64: operands of 10 bits that may be cut off, 7e-4, and sums of few thousand products."""


class Gpu:
    """The GPU with a stream, kernels and cuBLAS."""

    def __init__(self) -> None:
        from vdnn.runtime.backends.cuda.cublas import Cublas
        from vdnn.runtime.backends.cuda.probe import Probe
        from vdnn.runtime.backends.cuda.tap_lanes import Lanes

        self.probe = Probe()
        lanes = Lanes(self.probe.stream)
        self.taps = TapPlans(Cublas(precision="tf32"), self.probe.kernels, self.probe.stream, lanes)

    def run(self, case: Case, plan: TapPlan, *, adds: bool = False, captured: bool = False) -> Array:
        """dw; all else but the workspace must be as before."""
        shift, places, content = 4 * case.shift, {}, bytearray()
        for role in "xyw":
            content += bytes(shift)
            places[role] = len(content)
            content += case.rooms[role].tobytes()
            content += b"\xff" * (ALIGN_BYTES + -len(content) % ALIGN_BYTES)
        places["workspace"] = len(content)
        content += b"\xff" * (plan.workspace_bytes + ALIGN_BYTES)

        def start(address: int) -> None:
            x, dy, dw, workspace = (address + places[name] for name in ("x", "y", "w", "workspace"))
            plan.run(None, x, dy, dw, workspace, adds)

        def work(address: int) -> None:
            if not captured:
                start(address)
                return
            self.probe.stream.begin_capture()
            try:
                start(address)
            finally:
                graph = self.probe.stream.end_capture()
            graph.launch(self.probe.stream)

        before = np.frombuffer(content, np.uint8)
        after = self.probe.run(before, work)
        assert self.probe.unequal == 0, "two runs differ"
        first, end = places["w"], places["w"] + case.rooms["w"].nbytes
        np.testing.assert_array_equal(after[:first], before[:first])
        np.testing.assert_array_equal(after[end : places["workspace"]], before[end : places["workspace"]])
        assert (after[places["workspace"] + plan.workspace_bytes :] == 0xFF).all()
        return after[first:end].view(np.float32).reshape(case.arrays["w"].shape)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


def check(gpu: Gpu, problem: ConvProblem, shares: int | str, *, adds: bool = False, **options: Any) -> None:
    case = Case(problem, **options)
    plan = gpu.taps.plan(problem, f"TAPS_{shares}")
    found = gpu.run(case, plan, adds=adds)
    change, exact = found - (case.old if adds else 0), case.expected
    for r, s in np.ndindex(*problem.w[2:]):
        difference, size = np.linalg.norm(change[:, r, s] - exact[:, r, s]), np.linalg.norm(exact[:, r, s])
        assert difference <= ERROR * size, f"tap ({r}, {s}): {difference / size:.1e}"
    np.testing.assert_array_equal(gpu.run(case, plan, adds=adds, captured=True), found)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_tap_agrees_with_the_definition(gpu: Gpu, window: tuple[int, int], adds: bool) -> None:
    check(gpu, problem_of(8, 64, 9, 10, 128, window), 4, adds=adds)


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("channels", [12, 64, 33])
def test_any_number_of_images_and_channels(gpu: Gpu, images: int, channels: int) -> None:
    check(gpu, problem_of(images, channels, 7, 6, 80, (3, 3)), 3)


@pytest.mark.parametrize("window", [(3, 3), (5, 5), (7, 7)])
def test_products_at_the_same_time(gpu: Gpu, window: tuple[int, int]) -> None:
    check(gpu, problem_of(8, 64, 9, 10, 128, window), "3x4", adds=True)


def test_channels_of_larger_tensors_and_odd_addresses(gpu: Gpu) -> None:
    check(gpu, problem_of(8, 64, 7, 7, 96, (3, 3), (160, 224)), 2)
    check(gpu, replace(problem_of(8, 64, 7, 7, 96, (3, 3), (65, 97)), alignment=4), 2, shift=1)


@pytest.mark.parametrize("shares", ["1", "7", "32", "3x11"])
def test_larger_ones(gpu: Gpu, shares: str) -> None:
    """Of which cuBLAS takes the kernels that large layers get."""
    check(gpu, problem_of(64, 256, 13, 13, 192, (3, 3)), shares)
