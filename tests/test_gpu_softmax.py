"""Softmax on this GPU where blocks share a row or a column: right, and equal bits however often they meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vdnn.layers import Op
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.probe import Probe

pytestmark = pytest.mark.gpu

REPEATS = 40
ALIGN = 256


def results(probe: Any, n: int, k: int, *, by_columns: bool, repeats: int = REPEATS) -> tuple[Any, list[Any]]:
    """Scores (N, K), and what several launches in a row make of them, each into a result of its own."""
    x = np.random.default_rng(n + k).standard_normal((n, k), np.float32) * 3
    stored = np.ascontiguousarray(x.T if by_columns else x)
    size = -(-stored.nbytes // ALIGN) * ALIGN
    content = np.full((1 + repeats) * size + workspace_bytes("softmax.forward", {"x": (n, k)}), 0xFF, np.uint8)
    content[: stored.nbytes] = stored.reshape(-1).view(np.uint8)
    strides = (1, n) if by_columns else (k, 1)
    op = Op("softmax", "softmax.forward", "loss", "forward", {}, {})

    def work(address: int) -> None:
        places = [
            DeviceArray(address + i * size, (n, k), strides, "float32", stored.nbytes) for i in range(1 + repeats)
        ]
        start = (1 + repeats) * size
        arrays = {"x": places[0], "workspace": contiguous(address + start, (content.size - start,), "uint8")}
        for y in places[1:]:
            CUDA_KERNELS[op.kind](op, {**arrays, "y": y}, probe.kernels, probe.stream)

    after = probe.run(content, work)
    found = [
        after[i * size : i * size + stored.nbytes].view(np.float32).reshape(stored.shape) for i in range(1, 1 + repeats)
    ]
    return x, [y.T if by_columns else y for y in found]


CASES = [
    *((2, 2_000_001, False), (64, 100_000, False), (300, 16_400, False), (1000, 8200, False), (7, 9001, False)),
    *((128, 1000, True), (32, 60_000, True), (33, 5001, True)),
]


@pytest.mark.parametrize(("n", "k", "by_columns"), CASES)
def test_blocks_that_meet_give_one_softmax_always(n: int, k: int, by_columns: bool) -> None:
    probe = Probe()
    x, found = results(probe, n, k, by_columns=by_columns, repeats=min(REPEATS, max(4, REPEATS * 10**6 // (n * k))))
    wide = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found[0], wide / wide.sum(axis=1, keepdims=True), rtol=2e-5, atol=1e-12)
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert probe.unequal == 0
