"""The network as a person thinks of it: named layers joined by named tensors, forks and joins included.

    g = Graph("tiny", (1, 28, 28), classes=10)
    x = g.add("conv1", Conv(20, 5), g.input)
    x = g.add("relu1", Relu(), x)
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(10), g.add("flat", Flatten(), x)))

A Graph knows no batch, no backward, no memory and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, Parameter
from vdnn.layers.tensor import Shape


@dataclass(frozen=True, slots=True)
class Node:
    """One layer in place: `name` is also the name of its output; `shape` is that output's, per image."""

    name: str
    layer: Layer
    inputs: tuple[str, ...]
    shape: Shape
    index: int


RESERVED = ("data", "images", "labels", "step")
"""Names of tensors that every program has."""


class Graph:
    """Nodes in topological order.

    Args:
        name: of the network.
        input_shape: (C, H, W) of one image.
        classes: labels run from 0 to classes - 1.
    """

    input = "data"

    def __init__(self, name: str, input_shape: tuple[int, int, int], classes: int):
        if min(input_shape) < 1 or classes < 1:
            raise ShapeError(name, self.input, expected="sizes of 1 or more", got=f"{input_shape}, {classes} classes")
        self.name, self.input_shape, self.classes = name, input_shape, classes
        self.nodes: dict[str, Node] = {}
        self.consumers: dict[str, list[str]] = {self.input: []}

    def shape(self, tensor: str) -> Shape:
        """Shape per image of the input or of a node's output."""
        return self.input_shape if tensor == self.input else self.nodes[tensor].shape

    def add(self, name: str, layer: Layer, inputs: str | list[str] | tuple[str, ...]) -> str:
        """Append a layer that reads `inputs`; returns the name of its output, which is `name`."""
        names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        if name in RESERVED or "." in name:
            raise ShapeError(
                name, "y", expected="a name without '.', other than " + ", ".join(RESERVED), got=f"'{name}'"
            )
        if name in self.nodes:
            raise ShapeError(name, "y", expected="a name not used before", got=f"'{name}' again")
        for tensor in names:
            if tensor not in self.consumers:
                raise ShapeError(name, "x", expected="the output of an earlier layer", got=f"unknown '{tensor}'")
        shape = layer.output_shape(name, tuple(self.shape(t) for t in names))
        self.nodes[name] = Node(name, layer, names, shape, len(self.nodes))
        self.consumers[name] = []
        for tensor in dict.fromkeys(names):
            self.consumers[tensor].append(name)
        return name

    def with_layers(self, changed: Mapping[str, Layer]) -> Graph:
        """The same graph with other layers of these names."""
        made = Graph(self.name, self.input_shape, self.classes)
        for node in self.nodes.values():
            made.add(node.name, changed.get(node.name, node.layer), node.inputs)
        return made

    def parameters(self, node: Node) -> tuple[Parameter, ...]:
        """The parameters of one node."""
        return node.layer.parameters(tuple(self.shape(t) for t in node.inputs))

    def parameter_count(self) -> int:
        """Trainable numbers in the whole network."""
        return sum(prod(p.shape) for n in self.nodes.values() for p in self.parameters(n) if p.trainable)

    @property
    def loss(self) -> Node:
        """The main loss: the last softmax_loss node. Earlier ones are auxiliary heads, used in training only."""
        heads = [node for node in self.nodes.values() if node.layer.is_head]
        if not heads:
            raise ShapeError(self.name, "loss", expected="a softmax_loss layer at the end", got="none")
        return heads[-1]

    def ancestors(self, name: str) -> set[str]:
        """The node and every node whose output it depends on."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            current = stack.pop()
            if current not in seen and current in self.nodes:
                seen.add(current)
                stack.extend(self.nodes[current].inputs)
        return seen
