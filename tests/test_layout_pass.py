"""A layout for each layer: where images are moved, and that results stay what they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from gradients import check_gradients
from interpreter import Run
from test_cpu_gradients import GRAPHS, Net, concat_of_branches, residual_block
from test_layouts import UPDATE
from test_lower_random import check, random_graph

from vdnn.layers import Graph, Op, lower
from vdnn.layers.layout import with_layouts
from vdnn.layers.op import PHASES
from vdnn.layers.transform import Transform
from vdnn.memory.decisions import Decisions, LayoutChoice
from vdnn.memory.layout import LAYOUTS
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import POLICIES, Budget, make_plan
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.profile import load_profile, model_costs

# ---- where images are moved


def images(graph: Graph) -> list[str]:
    return [name for name in (graph.input, *graph.nodes) if len(graph.shape(name)) == 3]


def any_layouts(graph: Graph, seed: int) -> dict[str, str]:
    random = Random(seed)
    return {name: random.choice(LAYOUTS) for name in images(graph)}


def two_readers() -> Graph:
    """A tensor that three layers read, two of them in another layout than it has."""
    net = Net()
    x = net.conv("conv1")
    for name in ("a", "b", "c"):
        net.head(net.conv(name, x), f"_{name}")
    return net


def test_a_tensor_is_moved_to_a_layout_once() -> None:
    chosen = {"data": "NCHW", "conv1": "NCHW", "a": "CHWN", "b": "CHWN", "c": "NHWC"}
    graph, layouts = with_layouts(two_readers(), "NCHW", chosen)
    moves = {node.name: (node.inputs, node.layer) for node in graph.nodes.values() if isinstance(node.layer, Transform)}
    assert moves == {
        "conv1_to_chwn": (("conv1",), Transform("CHWN")),
        "conv1_to_nhwc": (("conv1",), Transform("NHWC")),
    }
    assert [graph.nodes[name].inputs for name in "abc"] == [("conv1_to_chwn",), ("conv1_to_chwn",), ("conv1_to_nhwc",)]
    assert {name: layouts[name] for name in chosen} == chosen
    program = lower(two_readers(), 4, layouts=chosen)
    assert {op.name: (program.tensors[op.reads["x"]].layout, program.tensors[op.writes["y"]].layout)
            for op in program.ops if op.kind == "layout.transform" and op.layer in moves} == {
        "conv1_to_chwn.transform": ("NCHW", "CHWN"),
        "conv1_to_nhwc.transform": ("NCHW", "NHWC"),
        "conv1_to_chwn.transform_grad": ("CHWN", "NCHW"),
        "conv1_to_nhwc.transform_grad": ("NHWC", "NCHW"),
    }  # fmt: skip


def test_layers_that_nothing_is_said_of_follow_what_they_read() -> None:
    graph, layouts = with_layouts(build("lenet"), "NCHW", {"conv1": "CHWN", "conv2": "NHWC"})
    assert [layouts[name] for name in ("data", "conv1", "pool1", "conv2", "pool2")] == ["CHWN"] * 3 + ["NHWC"] * 2
    moves = [node.name for node in graph.nodes.values() if isinstance(node.layer, Transform)]
    assert moves == ["pool1_to_nhwc"]
    with pytest.raises(ValueError, match="layer 'conv1': unknown layout 'HWCN', expected one of NCHW, NHWC, CHWN"):
        with_layouts(build("lenet"), "NCHW", {"conv1": "HWCN"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_layout_for_each_layer_is_that_layout_for_all(layout: str) -> None:
    graph = build("googlenet", image_size=64)
    assert lower(graph, 2, layouts=dict.fromkeys(images(graph), layout)) == lower(graph, 2, layout=layout)


@pytest.mark.parametrize(("one", "two"), [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]])
def test_a_transform_moves_every_number_to_its_place(one: str, two: str) -> None:
    orders = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
    values = np.arange(3 * 4 * 5 * 6, dtype=np.float32).reshape(3, 4, 5, 6)
    x, memory = np.empty_like(values.transpose(orders[one]), order="C"), np.zeros(values.size, np.float32)
    x[...] = values.transpose(orders[one])
    y = memory.reshape([values.shape[axis] for axis in orders[two]])
    KERNELS["layout.transform"](
        Op("t", "layout.transform", "t", "forward", {"x": "x"}, {"y": "y"}),
        x=x.transpose(np.argsort(orders[one])),
        y=y.transpose(np.argsort(orders[two])),
    )
    assert memory.tobytes() == values.transpose(orders[two]).tobytes()


# ---- results


def outcome(graph: Graph, **options: Any) -> Run:
    run = Run(lower(graph, 4, update=UPDATE, dtype="float64", **options), seed=3)
    for phase in PHASES:
        run.run(phase)
    return run


def check_equal(plain: Run, other: Run, words: str) -> None:
    """To 1e-12: losses, gradients of weights, weights after the update."""
    for spec in plain.program.tensors.values():
        if spec.role in ("weight", "wgrad", "loss") and spec.view_of is None:
            wanted = plain.storages[spec.name]
            tolerance = 1e-12 * max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(other.storages[spec.name], wanted, 0, tolerance, err_msg=f"{spec.name}, {words}")


@pytest.mark.parametrize("graph", [*GRAPHS, two_readers])
def test_results_are_those_of_one_layout(graph: Callable[[], Graph]) -> None:
    for fuse in (False, True):
        plain = outcome(graph(), fuse=fuse, pool_indices=fuse)
        for seed in range(4):
            layouts = any_layouts(graph(), seed)
            check_equal(plain, outcome(graph(), layouts=layouts, fuse=fuse, pool_indices=fuse), str(layouts))


@pytest.mark.parametrize("network", ["resnet18", "googlenet"])
def test_results_of_whole_networks_are_those_of_one_layout(network: str) -> None:
    graph = build(network, image_size=64, classes=10)
    plain = outcome(graph, fuse=True, pool_indices=True)
    check_equal(plain, outcome(graph, layouts=any_layouts(graph, 1), fuse=True, pool_indices=True), network)


@pytest.mark.parametrize("graph", [residual_block, concat_of_branches])
def test_gradients_are_central_differences(graph: Callable[[], Graph]) -> None:
    check_gradients(graph(), layouts=any_layouts(graph(), 2))
    check_gradients(graph(), layouts=any_layouts(graph(), 3), fuse=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_pass_the_verifier_under_every_policy(policy: str) -> None:
    graph, profile = build("googlenet", image_size=64, classes=10), load_profile("titan-x-maxwell")
    layouts = any_layouts(graph, 4)
    choices = {name: LayoutChoice(layout, "drawn") for name, layout in layouts.items()}
    program = lower(graph, 8, layouts=layouts, fuse=True, pool_indices=True)
    decisions, plan = make_plan(program, model_costs(program, profile), policy, Budget(layouts=choices))
    verify(apply_decisions(program, decisions), plan)
    assert decisions.layouts == choices
    assert Decisions.from_json(json.loads(json.dumps(decisions.to_json()))) == decisions


# ---- random networks


@pytest.mark.parametrize("block", range(4))
def test_random_networks_compute_what_the_graph_says(block: int) -> None:
    """As in test_lower_random.py: every value is a hash of all that made it."""
    moved = 0
    for seed in range(block * 60, block * 60 + 60):
        graph, random = random_graph(seed, fusible=0.4), Random(seed)
        layouts = {tensor: random.choice(LAYOUTS) for tensor in graph.consumers if random.random() < 0.8}
        check(graph, fuse=seed % 2 == 0, layouts=layouts)
        ops = lower(graph, 2, layouts=layouts).ops
        moved += sum(op.kind == "layout.transform" and "_to_" in op.layer for op in ops)
    assert moved > 60
