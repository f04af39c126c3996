"""Sum of tensors of equal shape, as at the end of a residual block; written over the first one where possible.

    graph.add("res2a", Add(), ["bn2", "shortcut"])

The gradient of every term is dy itself: one storage serves them all unless a later write would be seen by another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Add(Layer):
    """Two terms."""

    kind = "add"

    @property
    def shares_gradient(self) -> bool:
        return True

    def works_in_place(self, training: bool) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if len(inputs) != 2:
            raise ShapeError(name, "x", expected="two inputs", got=str(len(inputs)))
        if inputs[0] != inputs[1]:
            raise ShapeError(name, "x", expected=f"equal shapes, {inputs[0]} twice", got=f"{inputs[0]} and {inputs[1]}")
        return inputs[0]

    def forward(self, low: Lowering, node: Node) -> None:
        a, b = node.inputs
        reads = {"a": low.value(a), "b": low.value(b)}
        low.emit(node, "add.forward", reads, {"y": low.output(node, over=a)})

    def backward(self, low: Lowering, node: Node) -> None:
        dy = low.grad(node.name)
        shared: list[str] = []
        for i, tensor in enumerate(node.inputs):
            if not low.requires_grad(tensor):
                continue
            fresh = not low.has_grad(tensor) and low.canonical(tensor) == tensor
            if fresh and all(self._compatible(low, node, tensor, other) for other in shared):
                low.share_grad(tensor, dy)
                shared.append(tensor)
                continue
            copy_gradient(low, node, tensor, i)

    def _compatible(self, low: Lowering, node: Node, one: str, two: str) -> bool:
        """Whether each gradient is last read before the other is first written (backward runs downwards)."""
        return all(_last_read(low, a) > _first_write(low, b, node.index) for a, b in ((one, two), (two, one)))


def copy_gradient(low: Lowering, node: Node, tensor: str, i: int) -> None:
    """Emit the term dy of d(`tensor`), input `i` of `node`, as a copy."""
    dx, adds = low.contribute(tensor)
    accumulate = ("y",) if adds else ()
    name = f"{node.name}.copy_grad{i}"
    low.emit(node, "copy.forward", {"x": low.grad(node.name)}, {"y": dx}, accumulate=accumulate, name=name)


def _first_write(low: Lowering, tensor: str, before: int) -> int:
    """Highest node index below `before` whose backward writes d(tensor)'s bytes; -2 if none does."""
    writers = _contributors(low, tensor)
    if tensor != low.graph.input and _rewrites(low.graph.nodes[tensor].layer):
        writers.append(low.graph.nodes[tensor].index)
    return max((i for i in writers if i < before), default=-2)


def _last_read(low: Lowering, tensor: str) -> int:
    """Node index of the last backward op that reads d(tensor); -1 where its bytes are passed on further."""
    if tensor == low.graph.input:
        return len(low.graph.nodes)
    node = low.graph.nodes[tensor]
    return -1 if _rewrites(node.layer) else node.index


def _contributors(low: Lowering, tensor: str) -> list[int]:
    """Indices of the nodes whose backward adds to d(tensor), also those that read it through a flatten layer."""
    found = []
    for consumer in low.consumers[tensor]:
        node = low.graph.nodes[consumer]
        found.extend(_contributors(low, consumer) if node.layer.passes_through(training=True) else [node.index])
    return found


def _rewrites(layer: Layer) -> bool:
    return layer.overwrites_gradient or layer.shares_gradient or layer.passes_through(training=True)
