"""Workspace formulas against what cuDNN asked for on a GPU, against figure 5 of the vDNN paper, and by hand."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from vdnn.layers import Conv, Flatten, Graph, Linear, Op, Program, SoftmaxLoss, lower
from vdnn.runtime.profile import load_profile, model_candidates, operands
from vdnn.runtime.spectra import WORKSPACES, ConvSize, conv_size, spectrum
from vdnn.units import MIB

MEASURED = {
    "ragged": (3, 5, 17, 19, Conv(7, 3, padding=1)),
    "1x1": (8, 32, 14, 14, Conv(48, 1)),
    "vgg": (16, 64, 56, 56, Conv(64, 3, padding=1)),
}
"""Cases of bench/results/h200_binding.json (cuDNN 9.19) with whole tensors and one group: N, C, H, W, layer."""
ROUNDING = 16
"""Bytes to which cuDNN rounds what it adds up."""


def convolution(n: int, c: int, h: int, w: int, layer: Conv) -> Program:
    graph = Graph("one", (c, h, w), 2)
    before = graph.add("before", Conv(c, 1), graph.input)
    x = graph.add("flat", Flatten(), graph.add("conv", layer, before))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(2), x))
    return lower(graph, n)


def op_of(program: Program, name: str) -> Op:
    return next(op for op in program.ops if op.name == name)


def size_of(program: Program, direction: str) -> ConvSize:
    op = op_of(program, f"conv.{direction}")
    return conv_size(op, operands(op, program))


@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("case", MEASURED)
def test_fft_takes_what_cudnn_asks_for(case: str, direction: str) -> None:
    text = (resources.files("vdnn.bench") / "results" / "h200_binding.json").read_text(encoding="utf-8")
    (row,) = [
        row
        for row in json.loads(text)["rows"]
        if (row.get("case"), row.get("direction"), row.get("algorithm")) == (case, direction, "FFT")
    ]
    ours = WORKSPACES["fft"](size_of(convolution(*MEASURED[case]), direction))
    assert ours is not None
    assert 0 <= row["workspace_bytes"] - ours < ROUNDING


@pytest.mark.parametrize(
    ("c", "side", "k", "formula", "mib"),
    [
        (128, 112, 128, "fft_tiling", 882),
        (128, 56, 256, "fft_tiling", 1224),
        (256, 56, 256, "fft_tiling", 1907),
        (256, 28, 512, "fft", 1636),
        (512, 28, 512, "fft", 3273),
        (512, 14, 512, "fft", 873),
    ],
)
def test_cudnn_4_in_figure_5_of_the_paper(c: int, side: int, k: int, formula: str, mib: float) -> None:
    size = ConvSize(256, c, side, side, k, 3, 3, side, side, 1, (1, 1), (1, 1), "forward")
    nbytes = WORKSPACES[formula](size)
    assert nbytes is not None
    assert nbytes / MIB == pytest.approx(mib, abs=5)  # as exactly as the figure can be read


def test_sizes_of_each_direction() -> None:
    program = convolution(2, 3, 9, 7, Conv(5, (3, 1), stride=(2, 1)))
    forward, dgrad, wgrad = (size_of(program, way) for way in ("forward", "dgrad", "wgrad"))
    for size in (forward, dgrad, wgrad):
        assert (size.n, size.c, size.h, size.w, size.k, size.r, size.s, size.p, size.q) == (2, 3, 9, 7, 5, 3, 1, 4, 7)
        assert size.flops == 2 * 2 * 5 * 4 * 7 * 3 * 3
    assert (forward.rows, forward.depth, forward.products) == (5, 3 * 3, 3)
    assert (dgrad.rows, dgrad.depth, dgrad.products) == (3, 5 * 3, 5)
    assert (wgrad.rows, wgrad.depth, wgrad.products) == (5, 3 * 3, 2)


@pytest.mark.parametrize("layer", [Conv(8, 3, stride=2), Conv(8, 3, dilation=2), Conv(8, 3, groups=2), Conv(8, 33)])
def test_where_no_fft_applies(layer: Conv) -> None:
    size = size_of(convolution(1, 4, 40, 40, layer), "forward")
    assert WORKSPACES["fft"](size) is None
    assert WORKSPACES["fft_tiling"](size) is None


def test_planes_are_powers_of_two_or_tiles() -> None:
    size = ConvSize(1, 1, 100, 30, 1, 5, 3, 96, 28, 1, (1, 1), (1, 1), "forward")
    assert spectrum(size, "fft") == (128, 32, 1)  # 100 + 4 and 30 + 2 pixels
    assert spectrum(size, "fft_tiling") == (32, 32, 4)  # 96 rows in tiles of 28, 28 columns in one of 30
    assert spectrum(size, "indices") is None
    assert spectrum(ConvSize(1, 1, 255, 9, 1, 3, 3, 253, 7, 1, (1, 1), (1, 1), "forward"), "fft") is None


def test_what_makes_a_convolution_slow() -> None:
    """Of equally many operations: few channels in, and fewer filters than a tile has rows, take longer."""
    profile = load_profile("titan-x-maxwell")

    def time_ms(c: int, k: int, kind: str, algorithm: str) -> float:
        program = convolution(32, c, 28, 28, Conv(k, 3, padding=1))
        op = op_of(program, f"conv.{kind}")
        found = model_candidates(op, operands(op, program), profile)
        return next(row.time_ms for row in found if row.algorithm == algorithm)

    # half the speed at 147 columns of the filter matrix, and tiles of 128 filters: a launch of 8 us aside
    deep, flat = 9 * 128 / (9 * 128 + 147), 9 * 64 / (9 * 64 + 147)
    ratio = time_ms(64, 128, "forward", "IMPLICIT_GEMM") / time_ms(128, 64, "forward", "IMPLICIT_GEMM")
    assert ratio == pytest.approx(deep / flat, rel=0.02)
    ratio = time_ms(128, 64, "wgrad", "ALGO_0") / time_ms(64, 128, "wgrad", "ALGO_0")
    assert ratio == pytest.approx(2 * flat / deep, rel=0.02)
    assert time_ms(4, 128, "wgrad", "ALGO_0") > 1.5 * time_ms(5, 128, "wgrad", "ALGO_0")  # a first layer
