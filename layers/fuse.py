"""Which layers are applied by others, so that y is written once: ReLUs and sums, and the gradient of a loss with it.

    graph = with_fusion(graph)      # the same network of fewer layers; those that have weights keep their names

A ReLU goes into the convolution, the linear layer or the norm that it alone reads. A sum goes into a norm that it alone
reads, if its other term is there before the norm: then that norm may stay where it is, and gradients at forks are
summed in the same order as before. What is left stands for itself. A loss and its gradient become one op. Results are
the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.layers.add import Add
from vdnn.layers.base import Layer
from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.conv import Conv
from vdnn.layers.graph import Graph, Node
from vdnn.layers.linear import Linear
from vdnn.layers.relu import Relu
from vdnn.layers.softmax_loss import SoftmaxLoss


def with_fusion(graph: Graph) -> Graph:
    """`graph` without the ReLUs and sums that other layers apply, its losses fused."""
    layers: dict[str, Layer] = {node.name: node.layer for node in graph.nodes.values()}
    inputs = {node.name: node.inputs for node in graph.nodes.values()}
    giver: dict[str, str] = {}  # a layer that is gone → the one whose output is now its own
    for node in graph.nodes.values():
        x = node.inputs[0]
        if isinstance(node.layer, SoftmaxLoss):
            layers[node.name] = replace(node.layer, fused=True)
        elif isinstance(node.layer, Add):
            found = _norm_below(graph, node)
            if found is not None:
                name, norm, other = found
                layers[name] = replace(norm, adds=True)
                inputs[name] = (*inputs[name], other)
                giver[node.name] = name
        elif isinstance(node.layer, Relu) and len(graph.consumers[x]) == 1:
            below = giver.get(x, x)
            layer = layers.get(below)
            if isinstance(layer, (Conv, Linear, BatchNorm)) and layer.activation is None:
                layers[below] = replace(layer, activation="relu", masked_above=node.layer.masked_above)
                giver[node.name] = below
    made = Graph(graph.name, graph.input_shape, graph.classes)
    for name, layer in layers.items():
        if name not in giver:
            made.add(name, layer, tuple(giver.get(t, t) for t in inputs[name]))
    return made


def _norm_below(graph: Graph, node: Node) -> tuple[str, BatchNorm, str] | None:
    """The norm that can apply the sum `node`, its layer and what it then adds; None if there is none."""
    for one, other in (node.inputs, node.inputs[::-1]):
        norm = graph.nodes.get(one)
        if norm is None or not isinstance(norm.layer, BatchNorm) or one == other or len(graph.consumers[one]) != 1:
            continue
        term = graph.nodes.get(other)
        if term is not None and (term.index > norm.index or term.layer.passes_through(training=True)):
            continue
        if other in norm.inputs:  # its two gradients would be terms of one sum, written by one op
            continue
        # the gradient of the other term is now written at the place of the norm: no term of its sum may lie between
        if not any(norm.index < graph.nodes[reader].index < node.index for reader in graph.consumers[other]):
            return one, norm.layer, other
    return None
