"""Rectified linear unit: y = max(x, 0), in place where no backward op needs x.

    graph.add("relu1", Relu(), "conv1")

Backward reads y, not x: dx = dy where y > 0, else 0. It is written over dy. Where a pool above has dropped dy already
(see vdnn.layers.winners), dx is dy: no op, no bytes, and y is not needed. A layer that applies the ReLU itself (see
vdnn.layers.fuse) names it in the attribute "activation" of its op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vdnn.layers.base import Layer, one_input
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Relu(Layer):
    """No parameters; any shape. `masked_above`: dy arrives as 0 where y <= 0, which lowering sees to."""

    masked_above: bool = False

    kind = "relu"

    @property
    def needs_output(self) -> bool:
        return not self.masked_above

    @property
    def overwrites_gradient(self) -> bool:
        return not self.masked_above

    @property
    def shares_gradient(self) -> bool:
        return self.masked_above

    def works_in_place(self, training: bool) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        return one_input(name, inputs)

    def forward(self, low: Lowering, node: Node) -> None:
        x = node.inputs[0]
        low.emit(node, "relu.forward", {"x": low.value(x)}, {"y": low.output(node, over=x)})

    def backward(self, low: Lowering, node: Node) -> None:
        x, dy = node.inputs[0], low.grad(node.name)
        if not low.requires_grad(x):
            return
        if self.masked_above:
            low.share_grad(x, dy)
        else:
            dx, adds = low.contribute(x, over=dy)
            reads = {"y": low.value(node.name), "dy": dy}
            low.emit(node, "relu.backward", reads, {"dx": dx}, accumulate=("dx",) if adds else ())


def activation_attrs(activation: str | None) -> dict[str, str]:
    """The attribute of an op whose layer applies `activation` itself."""
    return {} if activation is None else {"activation": activation}


def masked_gradient(low: Lowering, node: Node, bias: bool) -> str:
    """Emit dx = dy where y > 0, else 0, of a layer that applied its ReLU itself, over dy; returns dx.

    Args:
        bias: whether the layer has a bias: then the same op sums dx to db.
    """
    dy = low.grad(node.name)
    dx = low.tensor(f"{node.name}.masked.grad", "grad", low.tensors[dy].shape, view_of=dy)
    reads = {"y": low.value(node.name), "dy": dy}
    if bias:
        writes = {"dx": dx, "db": low.weight_gradient(node, "bias")}
        low.emit(node, "relu.bias_backward", reads, writes, accumulate=low.accumulates("db"))
    else:
        low.emit(node, "relu.backward", reads, {"dx": dx}, name=f"{node.name}.relu_backward")
    return dx
