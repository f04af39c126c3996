"""The CPU backend against PyTorch: losses, gradients, weights and statistics of whole networks after three steps.

In float64 the two differ by the order of sums alone, so that a wrong constant shows even where float32 would hide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpreter import Array, Run
from plan_lab import Lab, Machine

from vdnn.bench.torch_reference import TorchTrainer
from vdnn.errors import VdnnError
from vdnn.layers import Conv, Dropout, Flatten, Graph, Linear, Lrn, Pool, Relu, SoftmaxLoss, Update, lower
from vdnn.networks import build
from vdnn.runtime.init import init_parameters
from vdnn.runtime.step import new_step

pytest.importorskip("torch", reason="needs PyTorch, which vdnn is compared with and does not depend on")

BATCH, STEPS = 4, 3
RATE = 2.0**-10
"""As a power of two the same in float32, in which the step record holds it, and in float64."""
MEAN, STD = (0.4, 0.5, 0.45), (0.25, 0.3, 0.2)
PLAIN = Update(momentum=0.9, weight_decay=5e-4)

Batches = list[tuple[Array, Array]]


def thin(graph: Graph, divisor: int) -> Graph:
    """`graph` with 1 / `divisor` of the filters and hidden neurons."""
    thinner = Graph(graph.name, graph.input_shape, graph.classes)
    for node in graph.nodes.values():
        layer = node.layer
        if isinstance(layer, Conv):
            layer = replace(layer, channels=layer.channels // divisor)
        elif isinstance(layer, Linear) and layer.features != graph.classes:
            layer = replace(layer, features=layer.features // divisor)
        thinner.add(node.name, layer, node.inputs)
    return thinner


def draw(graph: Graph, steps: int = STEPS) -> Batches:
    rng = np.random.default_rng(2)
    return [
        (
            rng.integers(0, 256, (BATCH, *graph.input_shape), np.uint8),
            rng.integers(0, graph.classes, BATCH).astype(np.int32),
        )
        for _ in range(steps)
    ]


def steps_of_vdnn(graph: Graph, weights: Mapping[str, Array], data: Batches, update: Update) -> tuple[list[float], Run]:
    """Losses of the steps, and the run with weights and last gradients; float64."""
    channels = graph.input_shape[0]
    program = lower(graph, BATCH, update=update, mean=MEAN[:channels], std=STD[:channels], dtype="float64")
    run = Run(program)
    for name, value in weights.items():
        run.values[name][...] = value
    losses = []
    for step, (images, labels) in enumerate(data):
        run.values["images"][...], run.values["labels"][...] = images, labels
        run.values["step"][...] = new_step(RATE, 1 / BATCH, step, seed=0)
        for phase in ("forward", "backward", "update"):
            run.run(phase)
        losses.append(float(run.values[program.loss].mean()))
    return losses, run


def peer(graph: Graph, weights: Mapping[str, Array], update: Update) -> TorchTrainer:
    channels = graph.input_shape[0]
    return TorchTrainer(graph, weights, update, lr=RATE, mean=MEAN[:channels], std=STD[:channels], dtype="float64")


def distance(got: Array, expected: Array) -> float:
    """Relative, of norms; a value that is zero but for rounding counts by its size."""
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-6))


def check(graph: Graph, update: Update = PLAIN, tolerance: float = 1e-11) -> None:
    weights, data = init_parameters(graph, seed=1), draw(graph)
    losses, run = steps_of_vdnn(graph, weights, data, update)
    trainer = peer(graph, weights, update)
    expected = trainer.train(data)
    assert len(set(expected.losses)) == STEPS, "equal steps would prove nothing"
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance)
    assert set(weights) == set(expected.weights)
    moved = {n: distance(run.values[n] - weights[n], v - weights[n]) for n, v in expected.weights.items()}
    slopes = {n: distance(run.values[f"{n}.grad"], v) for n, v in trainer.gradients().items()}
    assert max(moved.values()) < 10 * tolerance, max(moved, key=lambda name: moved[name])
    assert max(slopes.values()) < 10 * tolerance, max(slopes, key=lambda name: slopes[name])
    still = [n for n, v in expected.weights.items() if np.array_equal(v, weights[n])]
    assert not still


SMALL: dict[str, dict[str, Any]] = {
    "lenet": {"dropout": 0.0},
    "cifar10": {},
    "alexnet": {"image_size": 63, "dropout": 0.0},
    "googlenet": {"image_size": 160, "dropout": 0.0, "aux_dropout": 0.0, "aux_heads": True, "label_smoothing": 0.1},
    "googlenet_bn": {"image_size": 64, "dropout": 0.0},
    "resnet18": {"image_size": 64, "label_smoothing": 0.1},
    "resnet50": {"image_size": 64, "zero_init_residual": True},
    "vgg16": {"image_size": 32, "dropout": 0.0},
    "zfnet": {"image_size": 64, "dropout": 0.0},
}
NARROW = 4
"""Filters and hidden neurons are a quarter, to be quick."""
ILL_CONDITIONED = {"googlenet_bn": 1e-8}
"""57 norms in a row over few numbers from tiny weights: rounding grows a millionfold, in PyTorch by itself as well."""


@pytest.mark.parametrize("name", SMALL)
def test_networks_train_as_in_pytorch(name: str) -> None:
    graph = build(name, **SMALL[name], classes=10)
    check(thin(graph, NARROW), tolerance=ILL_CONDITIONED.get(name, 1e-11))


@pytest.mark.parametrize(
    "update",
    [
        Update(),
        Update(momentum=0.9, nesterov=True, weight_decay=0.01),
        Update(momentum=0.5, weight_decay=0.01, decay_bias_and_norm=False),
    ],
    ids=["plain", "nesterov", "weights only decay"],
)
def test_the_optimiser_is_that_of_pytorch(update: Update) -> None:
    check(thin(build("resnet18", image_size=32, classes=10), 8), update)


def odd_ends() -> Graph:
    """What the networks above do not use."""
    g = Graph("odd", (3, 19, 17), classes=5)
    x = g.add("conv", Conv(8, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), g.input)
    x = g.add("norm", Lrn(size=4, alpha=0.5, beta=0.6, k=1.5), g.add("relu", Relu(), x))
    x = g.add("grouped", Conv(8, 3, padding=1, groups=4), x)
    x = g.add("inner", Pool("average", 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), x)
    x = g.add("outer", Pool("average", (3, 2), stride=2, padding=1, ceil_mode=True), x)
    x = g.add("drop", Dropout(0.0), g.add("flat", Flatten(), x))
    g.add("loss", SoftmaxLoss(label_smoothing=0.2, weight=0.7), g.add("fc", Linear(5), x))
    return g


def test_momentum_after_a_step_from_rest_is_the_gradient_with_its_decay() -> None:
    graph = build("lenet", dropout=0.0)
    weights = init_parameters(graph, seed=0)
    trainer = peer(graph, weights, PLAIN)
    assert trainer.momentum() == {}
    trainer.train(draw(graph, 1))
    momentum, slopes = trainer.momentum(), trainer.gradients()
    assert momentum.keys() == slopes.keys()
    for name, slope in slopes.items():
        np.testing.assert_allclose(
            momentum[name], slope + 5e-4 * weights[name].astype(np.float64), rtol=1e-12, atol=1e-15
        )


def test_windows_groups_and_response_norms_of_every_shape() -> None:
    check(odd_ends())


def test_dropout_is_refused_because_it_draws_other_numbers() -> None:
    graph = build("lenet", dropout=0.5)
    trainer = peer(graph, init_parameters(graph, seed=0), PLAIN)
    with pytest.raises(VdnnError, match=r"drop.*expected dropout of 0, got 0\.5"):
        trainer.train(draw(graph, 1))


def test_a_plan_on_the_cpu_backend_trains_as_in_pytorch() -> None:
    lab = Lab("lenet", BATCH, steps=STEPS, dropout=0.0)
    case = lab.case("all", tight=True)
    machine = Machine(lab, [case], order=None)
    outcome = machine.run(case, case.plan)
    feeds = [(feed["images"], feed["labels"]) for feed in lab.feeds]
    run = TorchTrainer(lab.graph, lab.weights, PLAIN, lr=0.02, mean=(0.5,), std=(0.5,)).train(feeds)
    index, width = case.program.fetches.index(case.program.loss), len(case.program.fetches)
    losses = [outcome.fetched[step * width + index].mean() for step in range(STEPS)]
    np.testing.assert_allclose(losses, run.losses, rtol=1e-5)
    for name, expected in run.weights.items():
        start = case.plan.persistent[name]
        got = outcome.kept[start : start + expected.nbytes].view(np.float32).reshape(expected.shape)
        assert distance(got, expected) < 1e-5, name
    machine.close()
