"""The vDNN paper's count of bytes, by hand on a network of two convolutions with a pool between them."""

from __future__ import annotations

import pytest

from vdnn.layers import Conv, Flatten, Graph, Linear, Pool, Program, Relu, SoftmaxLoss, lower
from vdnn.memory.decisions import Algorithm, Decisions
from vdnn.memory.paper_count import PaperCount, feature_layers, paper_count
from vdnn.memory.passes import apply_decisions
from vdnn.memory.planner import plan_program

DATA, WIDE, POOLED = 2048, 4096, 1024
"""Bytes of the images, of conv1's output, and of the pool's and conv2's: four images in fp32."""
WEIGHTS = 4 * (4 * 2 * 9 + 4 * 4 * 9)
LARGE, SMALL = 512, 256
"""Workspaces of conv2's two backward kernels."""


def network() -> Program:
    g = Graph("small", (2, 8, 8), 3)
    x = g.add("relu1", Relu(), g.add("conv1", Conv(4, 3, padding=1), g.input))
    x = g.add("pool1", Pool("max", 2), x)
    x = g.add("relu2", Relu(), g.add("conv2", Conv(4, 3, padding=1), x))
    x = g.add("fc", Linear(3), g.add("flat", Flatten(), x))
    g.add("loss", SoftmaxLoss(), x)
    return lower(g, 4)


def counted(*offload: str) -> PaperCount:
    program = network()
    algorithms = {"conv2.wgrad": Algorithm("B", SMALL), "conv2.dgrad": Algorithm("A", LARGE)}
    decisions = Decisions("test", offload, algorithms, join="layer", prefetch_bytes=1 << 40)
    return paper_count(plan_program(program, decisions), apply_decisions(program, decisions))


EVERYTHING = {
    ("conv1", True): DATA + WIDE,
    ("pool1", True): WIDE + POOLED,
    ("conv2", True): 2 * POOLED,
    # x, dy and dx of conv2, its larger workspace, and the pool's input, which this pass fetches
    ("conv2", False): 3 * POOLED + LARGE + WIDE,
    # x, y, dy and dx; the images that this pass fetches count from the next pass on
    ("pool1", False): 2 * WIDE + 2 * POOLED,
    ("conv1", False): DATA + WIDE,
}
NOTHING = {
    ("conv1", True): DATA + WIDE,
    ("pool1", True): DATA + WIDE + POOLED,
    ("conv2", True): DATA + WIDE + 2 * POOLED,
    ("conv2", False): DATA + WIDE + 3 * POOLED + LARGE,
    ("pool1", False): DATA + 2 * WIDE + 2 * POOLED,
    ("conv1", False): DATA + WIDE,
}


@pytest.mark.parametrize(
    ("offload", "expected"), [(("data", "conv1", "pool1"), EVERYTHING), ((), NOTHING)], ids=["all", "none"]
)
def test_what_each_pass_holds(offload: tuple[str, ...], expected: dict[tuple[str, bool], int]) -> None:
    count = counted(*offload)
    assert {(each.layer, each.forward): each.nbytes for each in count.counted} == expected
    assert count.weights_bytes == WEIGHTS
    (most,) = [key for key, nbytes in expected.items() if nbytes == max(expected.values())]
    assert (count.peak.layer, count.peak.forward) == most
    # in the average a fetched map counts from its use on, a workspace by the share of kernels that have one
    settled = sum(expected.values()) - LARGE + (LARGE + SMALL) // 3 - (WIDE if offload else 0)
    assert count.average_bytes == settled // 6 + WEIGHTS
    assert count.layer_bytes()["pool1", False] == expected["pool1", False] + WEIGHTS


def test_the_peak_by_category() -> None:
    peak = counted("data", "conv1", "pool1").categories()
    assert peak == {
        "weights": WEIGHTS,
        "feature_maps": WIDE + POOLED,
        "gradient_maps": WIDE + POOLED,
        "workspace": 0,
        "other": 0,
    }


def test_live_bytes_of_an_op_are_without_its_workspace() -> None:
    live = counted().live
    # the input of a pass stays to its end, its gradient comes with the kernel that writes it
    assert live["conv2.wgrad"] == DATA + WIDE + 2 * POOLED
    assert live["conv2.dgrad"] == DATA + WIDE + 3 * POOLED


def test_features_end_at_the_classifier() -> None:
    assert feature_layers(network()) == {"data", "conv1", "relu1", "pool1", "conv2", "relu2"}
