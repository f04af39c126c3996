"""Images from one layout to another: the same logical values, in other places of memory.

    graph.add("conv2_to_chwn", Transform("CHWN"), "conv2")

vdnn.layers.layout puts these layers where neighbours differ. Backward takes the gradient the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vdnn.layers.base import Layer, image_input
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Transform(Layer):
    """Images (C, H, W) in the layout `to`, a key of vdnn.layers.tensor.MEMORY_ORDERS."""

    to: str

    kind = "layout"

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        return image_input(name, inputs)

    def forward(self, low: Lowering, node: Node) -> None:
        move(low, node)

    def backward(self, low: Lowering, node: Node) -> None:
        move_back(low, node)


def move(low: Lowering, node: Node) -> None:
    """Emit y = x, number by number, for a layer whose y lies otherwise than its x."""
    low.emit(node, "layout.transform", {"x": low.value(node.inputs[0])}, {"y": low.output(node)})


def move_back(low: Lowering, node: Node) -> None:
    """Emit dx = dy, or its term of dx, of such a layer."""
    x = node.inputs[0]
    if not low.requires_grad(x):
        return
    dx, adds = low.contribute(x)
    reads, accumulate = {"x": low.grad(node.name)}, ("y",) if adds else ()
    name = f"{node.name}.transform_grad"
    low.emit(node, "layout.transform", reads, {"y": dx}, accumulate=accumulate, name=name)
