"""Which layout each layer gets: the least sum of times against all there are, and the rule of the study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from random import Random

import pytest
from test_cpu_gradients import concat_of_branches, residual_block
from test_layout_pass import images, two_readers

from vdnn.layers import Graph
from vdnn.layers.layout import with_layouts
from vdnn.layers.rewrite import rewritten
from vdnn.layers.transform import Transform
from vdnn.memory import least as least_module
from vdnn.memory.decisions import LayoutChoice
from vdnn.memory.layout import LAYOUTS, LayoutTimes, Rule, quickest_layouts, step_ms, study_layouts
from vdnn.memory.least import Factor, least
from vdnn.networks import build

# ---- the least sum


def brute(variables: list[str], values: tuple[str, ...], factors: list[Factor]) -> float:
    def total(found: Mapping[str, str]) -> float:
        return sum(f.costs[tuple(found[v] for v in f.scope)] for f in factors)

    return min(total(dict(zip(variables, combo, strict=True))) for combo in product(values, repeat=len(variables)))


def drawn(seed: int) -> tuple[list[str], list[Factor]]:
    """Seven variables, each alone and nine groups of two or three with costs of their own."""
    random = Random(seed)
    variables = [f"v{i}" for i in range(7)]
    scopes = [(v,) for v in variables] + [tuple(random.sample(variables, random.choice((2, 3)))) for _ in range(9)]
    return variables, [
        Factor(scope, {combo: random.random() for combo in product("abc", repeat=len(scope))}) for scope in scopes
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_least_sum_is_found(seed: int) -> None:
    variables, factors = drawn(seed)
    found = least(variables, tuple("abc"), factors)
    total = sum(f.costs[tuple(found[v] for v in f.scope)] for f in factors)
    assert total == pytest.approx(brute(variables, tuple("abc"), factors), abs=1e-12)


def test_what_is_too_wide_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_module, "MOST_JOINED", 2)
    variables, factors = drawn(1)
    found = least(variables, tuple("abc"), factors)
    assert sorted(found) == variables
    total = sum(f.costs[tuple(found[v] for v in f.scope)] for f in factors)
    assert brute(variables, tuple("abc"), factors) <= total < sum(max(f.costs.values()) for f in factors)


def test_equal_sums_take_the_first_value() -> None:
    flat = [Factor(("a", "b"), dict.fromkeys(product("xy", repeat=2), 1.0))]
    assert least(["a", "b"], ("x", "y"), flat) == {"a": "x", "b": "x"}


def drawn_times(graph: Graph, seed: int) -> LayoutTimes:
    random = Random(seed)
    layers = {layout: {name: random.uniform(1, 3) for name in (graph.input, *graph.nodes)} for layout in LAYOUTS}
    pairs = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]]
    return LayoutTimes(layers, {(name, *pair): random.uniform(0, 2) for name in images(graph) for pair in pairs})


def counted(graph: Graph, chosen: Mapping[str, str], times: LayoutTimes) -> float:
    """The time of the network that the choice makes: its layers, and the transforms that are really in it."""
    made, layouts = with_layouts(graph, "NCHW", chosen)
    total = times.layers[layouts[graph.input]][graph.input]
    for node in made.nodes.values():
        if isinstance(node.layer, Transform):
            total += times.transforms[node.inputs[0], layouts[node.inputs[0]], node.layer.to]
        elif len(node.shape) == 3:
            total += times.layers[layouts[node.name]][node.name]
        elif len(made.shape(node.inputs[0])) == 3:  # a Flatten
            total += times.layers[layouts[node.inputs[0]]][node.name]
    return total


@pytest.mark.parametrize("graph", [residual_block, concat_of_branches, two_readers])
@pytest.mark.parametrize("seed", range(3))
def test_the_quickest_layouts_are_the_best_of_all(graph: Callable[[], Graph], seed: int) -> None:
    net = rewritten(graph(), "train", pool_indices=True, fuse=True)
    times, names = drawn_times(net, seed), images(net)
    best = min(
        counted(net, dict(zip(names, combo, strict=True)), times) for combo in product(LAYOUTS, repeat=len(names))
    )
    chosen = {name: choice.layout for name, choice in quickest_layouts(net, times).items()}
    assert sorted(chosen) == sorted(names)
    assert counted(net, chosen, times) == pytest.approx(best, abs=1e-9)
    assert step_ms(net, chosen, times) == pytest.approx(best, abs=1e-9)


def test_a_dear_transform_keeps_neighbours_together() -> None:
    graph = rewritten(build("lenet"), "train", pool_indices=True, fuse=True)
    layers = {layout: dict.fromkeys((graph.input, *graph.nodes), 1.0) for layout in LAYOUTS}
    layers["CHWN"]["conv1"] = 0.5
    layers["NHWC"]["pool1"] = 0.9
    pairs = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]]

    def chosen(transform_ms: float) -> dict[str, LayoutChoice]:
        moves = {(name, *pair): transform_ms for name in images(graph) for pair in pairs}
        return quickest_layouts(graph, LayoutTimes(layers, moves))

    cheap, dear = chosen(0.01), chosen(0.3)
    assert [cheap[name].layout for name in ("conv1", "pool1")] == ["CHWN", "NHWC"]
    assert [dear[name].layout for name in ("data", "conv1", "pool1", "conv2")] == ["CHWN"] * 4
    assert cheap["conv1"].reason == "0.500 ms; 1.000 in NCHW, 1.000 in NHWC"
    assert dear["pool1"].reason == "1.000 ms; 1.000 in NCHW, 0.900 in NHWC, but conv1 and conv2 would need transforms"
    assert dear["conv2"].reason == "the same time in every layout"


@pytest.mark.parametrize("network", ["alexnet", "vgg19", "googlenet", "googlenet_bn", "resnet50", "overfeat"])
def test_no_single_layout_is_quicker(network: str) -> None:
    """And the choice takes a moment, on the deepest networks too."""
    graph = rewritten(build(network), "train", pool_indices=True, fuse=True)
    times = drawn_times(graph, 7)
    chosen = {name: choice.layout for name, choice in quickest_layouts(graph, times).items()}
    total = counted(graph, chosen, times)
    for layout in LAYOUTS:
        assert total <= counted(graph, dict.fromkeys(images(graph), layout), times)


# ---- the study's rule


def test_the_rule_of_the_study() -> None:
    graph = rewritten(build("alexnet"), "train", pool_indices=True, fuse=True)
    few = study_layouts(graph, 64, Rule())
    assert few["conv1"] == LayoutChoice("CHWN", "C = 3 < 32")
    assert few["conv2"] == LayoutChoice("NCHW", "C = 64 >= 32 and N = 64 < 128")
    assert few["pool1"] == LayoutChoice("CHWN", "as conv1, which it reads")
    assert few["data"] == LayoutChoice("CHWN", "as conv1, which reads it")
    many = study_layouts(graph, 128, Rule())
    assert many["conv2"] == LayoutChoice("CHWN", "N = 128 >= 128")
    assert {choice.layout for choice in many.values()} == {"CHWN"}
    assert study_layouts(graph, 64, Rule(channels=65))["conv2"].reason == "C = 64 < 65"
