"""What several networks share: a convolution with its ReLU, a hidden fully connected layer, the end of a network.

    x = conv_relu(graph, "1", "data", Conv(64, 11, stride=4, padding=2))     # conv1, relu1
    x = hidden(graph, "6", x, 4096, dropout=0.5)                             # fc6, relu6, drop6
    scores(graph, "8", x, label_smoothing=0.0)                               # fc8, loss

Unless a network says otherwise its weights start as He et al. 2015 (arXiv 1502.01852, "kaiming": std
sqrt(2 / fan_in)), those of the last layer from a normal distribution of std 0.01, and its biases at 0.
"""

from __future__ import annotations

from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.conv import Conv
from vdnn.layers.dropout import Dropout
from vdnn.layers.graph import Graph
from vdnn.layers.linear import Linear
from vdnn.layers.relu import Relu
from vdnn.layers.softmax_loss import SoftmaxLoss

LAST_INIT = "normal:0.01"


def conv_relu(graph: Graph, label: str, x: str, conv: Conv) -> str:
    """conv<label> and relu<label> after tensor `x`; returns the latter."""
    return graph.add(f"relu{label}", Relu(), graph.add(f"conv{label}", conv, x))


def conv_norm(graph: Graph, conv_name: str, norm_name: str, x: str, conv: Conv, norm: BatchNorm) -> str:
    """A convolution and its batch normalisation after tensor `x`; returns the latter."""
    return graph.add(norm_name, norm, graph.add(conv_name, conv, x))


def drop(graph: Graph, name: str, x: str, p: float) -> str:
    """Dropout with probability `p` after tensor `x`; no layer if `p` is 0."""
    return graph.add(name, Dropout(p), x) if p else x


def hidden(graph: Graph, label: str, x: str, features: int, *, dropout: float = 0.0) -> str:
    """fc<label>, relu<label> and, unless `dropout` is 0, drop<label> after the vector `x`; returns the last."""
    x = graph.add(f"relu{label}", Relu(), graph.add(f"fc{label}", Linear(features), x))
    return drop(graph, f"drop{label}", x, dropout)


def scores(
    graph: Graph,
    label: str,
    x: str,
    *,
    label_smoothing: float,
    head: str = "",
    weight: float = 1.0,
    init: str = LAST_INIT,
) -> None:
    """fc<label>, one score per class, and its loss: "loss", or "loss_<head>" counted `weight` times."""
    x = graph.add(f"fc{label}", Linear(graph.classes, init=init), x)
    name = f"loss_{head}" if head else "loss"
    graph.add(name, SoftmaxLoss(label_smoothing=label_smoothing, weight=weight), x)
