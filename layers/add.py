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
            dx, adds = low.contribute(tensor)
            accumulate = ("y",) if adds else ()
            low.emit(
                node, "copy.forward", {"x": dy}, {"y": dx}, accumulate=accumulate, name=f"{node.name}.copy_grad{i}"
            )

    def _compatible(self, low: Lowering, node: Node, one: str, two: str) -> bool:
        """Whether each gradient is last read before the other is first written (backward runs downwards)."""
        return all(
            low.last_gradient_read(a) > low.first_gradient_write(b, node.index) for a, b in ((one, two), (two, one))
        )
