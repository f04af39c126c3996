"""Analytic gradients of every layer kind equal central differences in float64 to 1e-6, norm-wise per tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gradients import check_gradients
from interpreter import Run

from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Layer,
    Linear,
    Lrn,
    Pool,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)
from vdnn.runtime.backends.cpu import chunks, linear


class Net(Graph):
    """Two-channel images of 5x6 pixels, three classes."""

    def __init__(self, size: tuple[int, int] = (5, 6)) -> None:
        super().__init__("net", (2, *size), classes=3)

    def conv(self, name: str, x: str = "data", channels: int = 2, **options: object) -> str:
        kernel = options.pop("kernel", 2)
        return self.add(name, Conv(channels, kernel, **options), x)  # type: ignore[arg-type]

    def head(self, x: str, suffix: str = "", **options: float) -> Net:
        flat = self.add(f"flat{suffix}", Flatten(), x)
        self.add(f"loss{suffix}", SoftmaxLoss(**options), self.add(f"fc{suffix}", Linear(3), flat))
        return self


def between(*layers: Layer, size: tuple[int, int] = (5, 6)) -> Net:
    """conv, the layers, and a head."""
    net = Net(size)
    x = net.conv("conv1", padding=1)
    for i, layer in enumerate(layers):
        x = net.add(f"layer{i}", layer, x)
    return net.head(x)


ONE_LAYER: dict[str, list[Layer]] = {
    "conv": [Conv(3, 2)],
    "conv 1x1": [Conv(3, 1)],
    "conv 1x1 strided": [Conv(3, 1, stride=2)],
    "conv without bias": [Conv(3, 2, bias=False)],
    "conv strided, padded, dilated": [Conv(2, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(2, 1))],
    "conv grouped": [Conv(4, 3, padding=1, groups=2)],
    "conv 1x1 grouped": [Conv(4, 1, groups=2)],
    "conv padding wider than the filter": [Conv(2, 2, padding=3, stride=2)],
    "relu": [Relu()],
    "two relus": [Relu(), Conv(2, 2), Relu()],
    "max pool": [Pool("max", 2)],
    "max pool overlapping": [Pool("max", 3, stride=1, padding=1)],
    "max pool ceil": [Pool("max", (3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True)],
    "max pool gaps": [Pool("max", 1, stride=2)],
    "max pool global": [Pool("max", "global")],
    "average pool": [Pool("average", 2)],
    "average pool overlapping, padded": [Pool("average", 3, stride=2, padding=1)],
    "average pool ceil, padding not counted": [
        Pool("average", (3, 2), stride=(2, 3), padding=(1, 1), ceil_mode=True, count_include_pad=False)
    ],
    "average pool ceil, padding counted": [Pool("average", 3, stride=2, padding=1, ceil_mode=True)],
    "average pool global": [Pool("average", "global")],
    "lrn": [Conv(6, 1), Lrn(size=5, alpha=0.5, beta=0.75, k=1.5)],
    "lrn of even size": [Conv(3, 1), Lrn(size=4, alpha=2.0, beta=0.5, k=1.0)],
    "lrn wider than the channels": [Lrn(size=7, alpha=1.0)],
    "batchnorm": [BatchNorm()],
    "batchnorm after relu": [Relu(), BatchNorm(eps=1e-2)],
    "batchnorm of vectors": [Flatten(), Linear(3, bias=False), BatchNorm()],
    "batchnorm after flatten": [Pool("max", 3), Flatten(), BatchNorm()],
    "dropout": [Dropout(0.3)],
    "dropout after flatten": [Flatten(), Dropout(0.5)],
    "relu after flatten": [Flatten(), Relu()],
    "relu, dropout": [Relu(), Dropout(0.25), Conv(2, 2)],
    "linear, relu": [Flatten(), Linear(4), Relu()],
    "linear without bias": [Flatten(), Linear(4, bias=False)],
}


@pytest.mark.parametrize("layers", ONE_LAYER.values(), ids=ONE_LAYER)
def test_gradient_of_layer(layers: list[Layer]) -> None:
    check_gradients(between(*layers))


@pytest.mark.parametrize("name", [name for name in ONE_LAYER if name.startswith("conv")])
def test_gradient_of_convolution_in_tiles(name: str) -> None:
    check_gradients(between(*ONE_LAYER[name]), algorithm=1)


def fork_of_two_convs() -> Graph:
    net = Net()
    x = net.conv("conv1")
    return net.head(net.add("sum", Add(), [net.conv("left", x), net.conv("right", x)]))


def residual_block() -> Graph:
    net = Net()
    x = net.add("relu1", Relu(), net.conv("conv1"))
    inner = net.add("bn", BatchNorm(), net.conv("conv2", x, kernel=3, padding=1))
    return net.head(net.add("relu2", Relu(), net.add("sum", Add(), [inner, x])))


def sums_in_a_chain() -> Graph:
    """Gradients shared by several terms, one of which is overwritten."""
    net = Net()
    a, b = net.conv("a"), net.conv("b")
    first = net.add("first", Add(), [a, b])
    second = net.add("second", Add(), [first, net.add("relu", Relu(), a)])
    return net.head(net.add("third", Add(), [second, b]))


def concat_of_branches() -> Graph:
    """Branches that write straight into the concatenation."""
    net = Net()
    x = net.conv("conv1")
    left = net.add("relu_l", Relu(), net.conv("left", x, channels=3))
    right = net.add("pool", Pool("max", 2, stride=1), x)
    return net.head(net.conv("last", net.add("cat", Concat(), [left, right])))


def concat_of_claimed_branch() -> Graph:
    """A branch that another layer reads as well, and one that comes twice."""
    net = Net()
    x = net.conv("conv1")
    y = net.add("relu", Relu(), x)
    cat = net.add("cat", Concat(), [y, x, y])
    return net.head(net.add("sum", Add(), [net.conv("last", cat), net.conv("other", y)]))


def concat_in_concat() -> Graph:
    net = Net()
    x = net.conv("conv1")
    inner = net.add("inner", Concat(), [net.conv("a", x), net.conv("b", x, channels=1)])
    outer = net.add("outer", Concat(), [net.conv("c", x), inner])
    return net.head(net.add("bn", BatchNorm(), outer))


def auxiliary_head_on_concat_branch() -> Graph:
    """A linear layer that reads channels of a larger tensor, and adds to their gradient."""
    net = Net()
    x = net.conv("conv1")
    a = net.conv("a", x)
    net.head(a, "_aux", weight=0.3)
    cat = net.add("cat", Concat(), [net.add("relu", Relu(), a), net.conv("b", x)])
    return net.head(cat)


def label_smoothing_and_heads() -> Graph:
    net = Net()
    x = net.conv("conv1")
    net.head(net.add("relu_aux", Relu(), x), "_aux", weight=0.25, label_smoothing=0.2)
    return net.head(net.conv("conv2", x), label_smoothing=0.1)


def head_on_pooled_scores() -> Graph:
    """The loss reads (N, K, 1, 1)."""
    net = Net()
    x = net.add("pool", Pool("average", "global"), net.conv("scores", net.conv("conv1"), channels=3))
    net.add("loss", SoftmaxLoss(), net.add("flat", Flatten(), x))
    return net


def dropout_of_shared_input() -> Graph:
    net = Net()
    x = net.conv("conv1")
    return net.head(net.add("sum", Add(), [net.add("drop", Dropout(0.4), x), net.add("relu", Relu(), x)]))


def vectors_joined() -> Graph:
    net = Net()
    flat = net.add("flat1", Flatten(), net.conv("conv1"))
    joined = net.add("cat", Concat(), [net.add("a", Linear(3), flat), net.add("b", Linear(2), flat)])
    return net.head(net.add("relu", Relu(), joined))


def several_kinds_on_one_tensor() -> Graph:
    """Every kind adds to a gradient that is there already."""
    net = Net()
    x = net.conv("conv1", kernel=1)
    kinds: dict[str, Layer] = {
        "relu": Relu(),
        "lrn": Lrn(alpha=1.0),
        "bn": BatchNorm(),
        "drop": Dropout(0.5),
        "maximum": Pool("max", 3, stride=1, padding=1),
        "average": Pool("average", 3, stride=1, padding=1),
        "wide": Conv(2, 3, padding=1),
        "narrow": Conv(2, 1),
    }
    return net.head(net.add("cat", Concat(), [x, *(net.add(name, kind, x) for name, kind in kinds.items())]))


GRAPHS: list[Callable[[], Graph]] = [
    fork_of_two_convs,
    residual_block,
    sums_in_a_chain,
    concat_of_branches,
    concat_of_claimed_branch,
    concat_in_concat,
    auxiliary_head_on_concat_branch,
    label_smoothing_and_heads,
    head_on_pooled_scores,
    dropout_of_shared_input,
    vectors_joined,
    several_kinds_on_one_tensor,
]


@pytest.mark.parametrize("graph", GRAPHS)
def test_gradient_of_graph(graph: Callable[[], Graph]) -> None:
    check_gradients(graph())


@pytest.mark.parametrize("graph", [several_kinds_on_one_tensor, auxiliary_head_on_concat_branch, residual_block])
def test_gradient_of_graph_image_by_image(graph: Callable[[], Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """As large tensors go, in slices of one image; and products that are added in slices of one column."""
    monkeypatch.setattr(chunks, "TEMPORARY_BYTES", 1)
    monkeypatch.setattr(linear, "TEMPORARY_BYTES", 1)
    check_gradients(graph())


def projected_block() -> Graph:
    """The norm of the shortcut adds the other branch; the gradient of its term goes on to another norm."""
    net = Net()
    x = net.add("relu1", Relu(), net.conv("conv1"))
    inner = net.add("bn", BatchNorm(), net.conv("conv2", x, kernel=3, padding=1, bias=False))
    short = net.add("bn2", BatchNorm(), net.conv("conv3", x, kernel=1, bias=False))
    return net.head(net.add("relu2", Relu(), net.add("sum", Add(), [inner, short])))


def block_on_the_images() -> Graph:
    """A norm adds the images, which need no gradient."""
    net = Net()
    inner = net.add("bn", BatchNorm(), net.conv("conv", kernel=3, padding=1))
    return net.head(net.add("relu", Relu(), net.add("sum", Add(), ["data", inner])))


def block_without_relu() -> Graph:
    """What a norm adds is read again above; its two gradients meet."""
    net = Net()
    x = net.conv("conv1")
    y = net.add("sum", Add(), [net.add("bn", BatchNorm(), net.conv("conv2", x, kernel=1)), x])
    return net.head(net.add("sum2", Add(), [net.conv("conv3", y, kernel=1), x]))


def block_whose_term_is_read_above() -> Graph:
    """The gradient of what a norm adds has a term already."""
    net = Net()
    x = net.add("relu1", Relu(), net.conv("conv1"))
    y = net.add("sum", Add(), [x, net.add("bn", BatchNorm(), net.conv("conv2", x, kernel=1))])
    return net.head(net.add("cat", Concat(), [net.add("relu2", Relu(), y), net.conv("conv3", x, kernel=1)]))


def vectors_of_a_fused_network() -> Graph:
    """Linear layers, a norm of vectors that adds some, and one without bias."""
    net = Net()
    flat = net.add("pooled", Flatten(), net.add("relu1", Relu(), net.conv("conv1", bias=False)))
    x = net.add("relu2", Relu(), net.add("fc1", Linear(4), flat))
    y = net.add("bn", BatchNorm(), net.add("fc2", Linear(4, bias=False), x))
    y = net.add("relu3", Relu(), net.add("sum", Add(), [y, x]))
    return net.head(net.add("relu4", Relu(), net.add("fc3", Linear(5, bias=False), y)))


def norms_and_branches() -> Graph:
    """ReLUs after norms and convolutions that write into channels of a concatenation."""
    net = Net()
    x = net.add("relu1", Relu(), net.add("bn1", BatchNorm(), net.conv("conv1", bias=False)))
    left = net.add("relu2", Relu(), net.add("bn2", BatchNorm(), net.conv("left", x, kernel=1, bias=False)))
    right = net.add("relu3", Relu(), net.conv("right", x, kernel=1))
    return net.head(net.add("cat", Concat(), [left, right]))


FUSIBLE = [
    residual_block,
    projected_block,
    block_on_the_images,
    block_without_relu,
    block_whose_term_is_read_above,
    vectors_of_a_fused_network,
    norms_and_branches,
    concat_of_branches,
    auxiliary_head_on_concat_branch,
]


@pytest.mark.parametrize("graph", FUSIBLE)
def test_gradient_of_fused_graph(graph: Callable[[], Graph]) -> None:
    check_gradients(graph(), fuse=True)


@pytest.mark.parametrize("graph", FUSIBLE[:5])
def test_gradient_of_fused_graph_image_by_image(graph: Callable[[], Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TEMPORARY_BYTES", 1)
    check_gradients(graph(), fuse=True)


def test_parts_of_an_accumulated_step_sum_to_the_gradient_of_the_whole_batch() -> None:
    """Three parts of two images, dropout included, against one batch of six; and one update at the end."""
    net = Net()
    x = net.add("drop", Dropout(0.4), net.add("relu", Relu(), net.conv("conv1", channels=4)))
    x = net.add("lrn", Lrn(alpha=1.0), net.conv("grouped", x, channels=4, groups=2, padding=1))
    net.head(net.add("narrow", Conv(3, 1), net.add("pool", Pool("max", 2), x)), label_smoothing=0.1)
    update = Update(momentum=0.9, weight_decay=0.1)
    whole = Run(lower(net, 6, update=update, dtype="float64"), seed=8)
    parts: list[Run] = []
    for i, mode in enumerate(("first", "middle", "last")):
        program = lower(net, 2, mode, update=update, dtype="float64")
        kept = set(program.persistent) - {"step"}
        shared = {name: array for name, array in parts[0].storages.items() if name in kept} if parts else {}
        part = Run(program, shared=shared, images_in_step=6, sample=2 * i)
        if not parts:
            for name in kept & set(whole.storages):
                part.storages[name][...] = whole.storages[name]
        for name in ("images", "labels"):
            part.storages[name][...] = whole.storages[name][2 * i : 2 * i + 2]
        parts.append(part)
    for run in (whole, *parts):
        run.run("forward")
        run.run("backward")
    gradients = [name for name, spec in whole.program.tensors.items() if spec.role == "wgrad"]
    for name in gradients:
        np.testing.assert_allclose(parts[-1].storages[name], whole.storages[name], rtol=1e-9, atol=1e-13)
    for run in (whole, parts[-1]):
        before = {name: array.copy() for name, array in run.storages.items()}
        run.run("update")
        assert all((run.storages[name] == before[name]).all() for name in gradients)
        assert all((run.storages[name] != before[name]).any() for name in before if name.endswith(".weight"))
    for name in set(whole.program.persistent) - {"step"}:
        np.testing.assert_allclose(parts[-1].storages[name], whole.storages[name], rtol=1e-9, atol=1e-13)
