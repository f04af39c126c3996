"""(C, H, W) → (C*H*W,): a change of name only, no op and no bytes, unless the numbers lie in another order.

graph.add("flat", Flatten(), "pool5")
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from vdnn.layers.base import Layer, one_input
from vdnn.layers.tensor import Shape
from vdnn.layers.transform import move, move_back

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Flatten(Layer):
    """Logical order c, h, w.

    `reorders`: x does not lie in that order in memory, so that an op copies it; see vdnn.layers.layout.
    """

    reorders: bool = False

    kind = "flatten"

    def passes_through(self, training: bool) -> bool:
        return not self.reorders

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        return (prod(one_input(name, inputs)),)

    def forward(self, low: Lowering, node: Node) -> None:
        if self.reorders:
            move(low, node)
        else:
            low.pass_through(node)

    def backward(self, low: Lowering, node: Node) -> None:
        if self.reorders:
            move_back(low, node)
