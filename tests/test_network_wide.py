"""Network-wide allocation as the vDNN paper counts it: sums by hand over VGG-19 ("VGG-16" there) and GoogLeNet.

Expected numbers are those of MICRO'16, figure 4 and its text, and shapes written out here from the networks' papers.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import pytest

from vdnn.layers import Conv, Flatten, Graph, Linear, Program, SoftmaxLoss, Update, lower
from vdnn.memory.decisions import Algorithm, Decisions
from vdnn.memory.network_wide import network_wide_offsets
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Launch
from vdnn.memory.schedule import Residency, Schedule, make_schedule
from vdnn.networks import build
from vdnn.units import MIB

VGG_GROUPS = ((64, 224, 2), (128, 112, 2), (256, 56, 4), (512, 28, 4), (512, 14, 4))
"""Filters, pixels a side, convolutions (configuration E); each group ends in a pool that halves the sides."""


def vgg19_maps(batch: int) -> list[int]:
    """Bytes of the images, of Y of every convolution and pool, and of the classifier: what the paper counts."""
    maps = [3 * 224 * 224]
    for filters, side, convolutions in VGG_GROUPS:
        maps += [filters * side * side] * convolutions + [filters * (side // 2) ** 2]
    return [4 * batch * size for size in (*maps, 4096, 4096, 1000)]


def classifier_extras(batch: int) -> list[int]:
    """Beyond the paper: dropout cannot work in place, as ReLU's backward reads its own output; the probabilities."""
    return [4 * batch * size for size in (4096, 4096, 1000)]


@cache
def placed(network: str, batch: int, workspace: int = 0) -> tuple[Program, Schedule, list[int], int]:
    program = lower(build(network), batch, update=Update(momentum=0.9))
    algorithms = {}
    if workspace:
        names = [op.name for op in program.ops if op.kind in ("conv.forward", "conv.wgrad", "conv.dgrad")]
        algorithms = {name: Algorithm("X", workspace >> (i % 5)) for i, name in enumerate(names)}
    decisions = Decisions("base", allocation="network", algorithms=algorithms)
    planned = apply_decisions(program, decisions)
    schedule = make_schedule(planned, decisions)
    return planned, schedule, *network_wide_offsets(planned, schedule)


def of_role(program: Program, schedule: Schedule, offsets: list[int], role: str) -> list[tuple[Residency, int]]:
    pairs = zip(schedule.residencies, offsets, strict=True)
    return [(stay, offset) for stay, offset in pairs if program.tensors[stay.storage].role == role]


@pytest.mark.parametrize(("batch", "feature_maps_mib"), [(64, 4039), (128, 8077), (256, 16154)])
def test_every_map_of_vgg_has_bytes_of_its_own(batch: int, feature_maps_mib: int) -> None:
    program, schedule, offsets, _ = placed("vgg19", batch)
    maps = of_role(program, schedule, offsets, "act")
    assert sorted(stay.nbytes for stay, _ in maps) == sorted(vgg19_maps(batch) + classifier_extras(batch))
    assert round(sum(vgg19_maps(batch)) / MIB) == pytest.approx(feature_maps_mib, abs=1)
    ends = 0
    for stay, offset in sorted(maps, key=lambda pair: pair[1]):
        assert offset >= ends
        ends = offset + stay.nbytes
    launches = [i for i, action in enumerate(schedule.actions) if isinstance(action, Launch)]
    assert all(stay.start < launches[0] and stay.end > launches[-1] for stay, _ in maps)


@pytest.mark.parametrize("batch", [64, 256])
def test_a_chain_takes_two_gradient_buffers_of_the_largest_map(batch: int) -> None:
    program, schedule, offsets, _ = placed("vgg19", batch)
    gradients = of_role(program, schedule, offsets, "grad")
    largest = 4 * batch * 64 * 224 * 224
    places = sorted({offset for _, offset in gradients})
    assert len(places) == 2
    assert places[1] - places[0] == largest == max(stay.nbytes for stay, _ in gradients)


def test_googlenet_takes_three_gradient_buffers() -> None:
    program, schedule, offsets, _ = placed("googlenet", 128)
    gradients = of_role(program, schedule, offsets, "grad")
    places = sorted({offset for _, offset in gradients})
    assert len(places) == 3
    # 1,176 MiB in the paper: three times Y of the first convolution, 64 x 112 x 112
    assert [b - a for a, b in pairwise(places)] == [4 * 128 * 64 * 112 * 112] * 2
    maps = sum(stay.nbytes for stay, _ in of_role(program, schedule, offsets, "act"))
    # 2,342 MiB by the layers' shapes without response normalisation; norm1 and norm2 add 64 and 192 maps of 56 x 56
    assert maps / MIB == pytest.approx(2342 + 4 * 128 * (64 + 192) * 56 * 56 / MIB, rel=0.001)


def test_one_workspace_of_the_largest_size() -> None:
    _, schedule, offsets, height = placed("vgg19", 64, workspace=100 * MIB)
    pairs = zip(schedule.residencies, offsets, strict=True)
    workspaces = [(stay, offset) for stay, offset in pairs if stay.storage.endswith(".workspace")]
    assert len(workspaces) == 16 * 3 - 1  # the first convolution has no gradient of its input
    assert len({offset for _, offset in workspaces}) == 1
    without = placed("vgg19", 64)[3]
    assert height - without == 100 * MIB


@pytest.mark.parametrize(
    ("batch", "total_mib"),
    [
        (64, 6148),  # base(m) of figure 11
        (256, 22957),
    ],
)
def test_the_total_is_that_of_the_paper(batch: int, total_mib: int) -> None:
    program, schedule, offsets, height = placed("vgg19", batch)
    weights = sum(spec.nbytes for spec in program.tensors.values() if spec.role == "weight")
    pairs = zip(schedule.residencies, offsets, strict=True)
    counted = {"act", "grad"}
    top = max(o + s.nbytes for s, o in pairs if program.tensors[s.storage].role in counted)
    by_formula = sum(vgg19_maps(batch)) + 2 * 4 * batch * 64 * 224 * 224
    assert top == by_formula + sum(classifier_extras(batch)) <= height
    assert (top + weights) / MIB == pytest.approx(total_mib, rel=0.03)


def test_what_is_live_together_never_overlaps() -> None:
    for network in ("googlenet", "resnet18"):
        _, schedule, offsets, height = placed(network, 2, workspace=1 << 20)
        blocks = list(zip(schedule.residencies, offsets, strict=True))
        for (a, low), (b, other) in combinations(blocks, 2):
            together = a.start < b.end and b.start < a.end
            assert not together or low + a.nbytes <= other or other + b.nbytes <= low, (a.storage, b.storage)
        assert max(offset + stay.nbytes for stay, offset in blocks) == height


def test_a_program_without_gradients() -> None:
    g = Graph("one", (1, 4, 4), 2)
    x = g.add("flat", Flatten(), g.add("conv", Conv(2, 3), g.input))
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(2), x))
    program = lower(g, 1, "eval")
    schedule = make_schedule(program, Decisions("base", allocation="network"))
    offsets, height = network_wide_offsets(program, schedule)
    maps = {stay.storage for stay, _ in of_role(program, schedule, offsets, "act")}
    assert maps == {"data", "conv", "fc", "loss.probs"}
    # 256 B each; labels, loss and its flags are live together, and the images before them share their bytes
    assert height == 4 * 256 + 3 * 256
