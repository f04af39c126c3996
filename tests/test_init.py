"""First weights: distribution by name, seed and name alone deciding the numbers, and the fans by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest

from vdnn.errors import ConfigError
from vdnn.layers import BatchNorm, Conv, Flatten, Graph, Linear, Relu
from vdnn.layers.base import Layer, Parameter
from vdnn.networks import build
from vdnn.runtime.init import PIECE, init_parameters


@dataclass(frozen=True)
class Holder(Layer):
    """A layer that only has one parameter."""

    parameter: Parameter

    kind = "holder"

    def output_shape(self, name, inputs):
        return inputs[0]

    def parameters(self, inputs):
        return (self.parameter,)


def draw(init: str, shape: tuple[int, ...], seed: int = 0, layer: str = "layer") -> np.ndarray:
    graph = Graph("one", (1, 1, 1), 2)
    graph.add(layer, Holder(Parameter("weight", shape, init)), graph.input)
    return init_parameters(graph, seed)[f"{layer}.weight"]


@pytest.mark.parametrize(
    ("init", "shape", "std"),
    [
        ("kaiming", (64, 32, 5, 5), (2 / (32 * 5 * 5)) ** 0.5),
        ("kaiming", (400, 300), (2 / 300) ** 0.5),
        ("kaiming_fan_out", (64, 32, 5, 5), (2 / (64 * 5 * 5)) ** 0.5),
        ("kaiming_fan_out", (400, 300), (2 / 400) ** 0.5),
        ("xavier", (64, 32, 5, 5), (2 / ((32 + 64) * 5 * 5)) ** 0.5),
        ("xavier", (400, 300), (2 / 700) ** 0.5),
        ("normal:0.01", (400, 300), 0.01),
        ("normal:1e-3", (50_000,), 0.001),
    ],
)
def test_the_spread_is_that_of_the_formula(init, shape, std):
    values = draw(init, shape).astype(np.float64)
    count = values.size
    assert values.shape == shape
    assert abs(values.mean()) < 5 * std / count**0.5
    assert values.std() == pytest.approx(std, rel=5 / (2 * count) ** 0.5)


def test_xavier_is_uniform_within_its_bound_and_kaiming_is_normal():
    bound = (6 / 700) ** 0.5
    uniform = draw("xavier", (400, 300)) / bound
    assert np.abs(uniform).max() <= 1
    counts, _ = np.histogram(uniform, bins=10, range=(-1, 1))
    assert counts == pytest.approx(np.full(10, 12_000), rel=0.05)
    normal = draw("kaiming", (400, 300)) / (2 / 300) ** 0.5
    for sigmas, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert (np.abs(normal) < sigmas).mean() == pytest.approx(share, abs=0.006)


def test_constants():
    assert (draw("zeros", (7,)) == 0).all()
    assert (draw("ones", (3, 2)) == 1).all()


@pytest.mark.parametrize(
    ("init", "shape"),
    [("he", (3, 3)), ("", (3, 3)), ("normal", (3, 3)), ("normal:x", (3, 3)), ("kaiming", (3,)), ("xavier", (3,))],
)
def test_an_init_that_is_unknown_or_unfit_names_the_layer(init, shape):
    with pytest.raises(ConfigError) as caught:
        draw(init, shape, layer="conv7")
    message = str(caught.value)
    assert "layer 'conv7', parameter 'weight'" in message
    assert f"got '{init}'" in message
    assert "kaiming, kaiming_fan_out, xavier, normal:STD, zeros, ones" in message


def test_every_tensor_is_drawn_from_seed_and_name_alone():
    def net(extra: bool) -> dict[str, np.ndarray]:
        g = Graph("net", (3, 8, 8), 10)
        x = g.add("stem", Conv(4, 3), g.input) if extra else g.input
        x = g.add("relu", Relu(), g.add("norm", BatchNorm(), g.add("conv", Conv(5, 1, bias=extra), x)))
        g.add("fc", Linear(10), g.add("flat", Flatten(), x))
        return init_parameters(g, seed=3)

    small, large = net(False), net(True)
    assert small.keys() == {
        "conv.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "fc.weight",
        "fc.bias",
    }
    assert large.keys() == small.keys() | {"stem.weight", "stem.bias", "conv.bias"}
    assert (small["norm.running_var"] == 1).all()
    assert (small["norm.running_mean"] == 0).all()
    a, b = draw("normal:1", (4, 5, 6), 3, "a"), draw("normal:1", (4, 5, 6), 3, "b")
    assert not np.array_equal(a, b)
    assert np.array_equal(a, draw("normal:1", (4, 5, 6), 3, "a"))
    assert np.array_equal(a.ravel(), draw("normal:1", (120,), 3, "a"))
    assert not np.array_equal(a, draw("normal:1", (4, 5, 6), 4, "a"))
    for array in large.values():
        assert array.dtype == np.float32
        assert array.flags.c_contiguous


def test_the_pieces_of_a_large_tensor_differ_and_agree_with_a_smaller_one():
    values = draw("normal:1", (3 * PIECE + 5,))
    pieces = np.split(values[: 3 * PIECE], 3)
    assert len({piece[:8].tobytes() for piece in pieces}) == 3
    assert abs(np.corrcoef(pieces)[np.triu_indices(3, 1)]).max() < 0.01
    assert np.array_equal(values[: PIECE // 2], draw("normal:1", (PIECE // 2,)))


def test_an_odd_seed_of_63_bits():
    assert not np.array_equal(draw("normal:1", (9,), 2**63 - 1), draw("normal:1", (9,), 2**31 - 1))


def test_vgg19_is_ready_in_seconds():
    start = time.process_time()
    weights = init_parameters(build("vgg19"), 0)
    assert sum(w.size for w in weights.values()) == 143_667_240
    assert time.process_time() - start < 10  # 2.4 s of processor time on the machine this was written on
