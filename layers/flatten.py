"""(C, H, W) → (C*H*W,): a change of name only, no op and no bytes.

graph.add("flat", Flatten(), "pool5")
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from vdnn.layers.base import Layer, one_input
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Flatten(Layer):
    """Logical order c, h, w."""

    kind = "flatten"

    def passes_through(self, training: bool) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        return (prod(one_input(name, inputs)),)

    def forward(self, low: Lowering, node: Node) -> None:
        low.pass_through(node)
