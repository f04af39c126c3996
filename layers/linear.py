"""Fully connected layer: y[n,k] = b[k] + sum over c of x[n,c] * w[k,c].

    graph.add("fc6", Linear(4096), "flat")

x may keep its image shape; its C*H*W numbers lie in logical c, h, w order (see vdnn.layers.flatten). w has shape
(K, C). `activation` is as in vdnn.layers.conv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, Parameter, one_input
from vdnn.layers.relu import activation_attrs, masked_gradient
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Linear(Layer):
    """`features` outputs (K). Lowering sets `activation` and `masked_above` (see vdnn.layers.fuse and relu)."""

    features: int
    bias: bool = True
    init: str = "kaiming"
    activation: Literal["relu"] | None = None
    masked_above: bool = False

    kind = "linear"

    @property
    def needs_output(self) -> bool:
        return self._masks

    @property
    def overwrites_gradient(self) -> bool:
        return self._masks

    @property
    def _masks(self) -> bool:
        return self.activation is not None and not self.masked_above

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        shape = one_input(name, inputs)
        if len(shape) != 1:
            raise ShapeError(name, "x", expected="a vector (C,); add a Flatten layer before", got=str(shape))
        if self.features < 1:
            raise ShapeError(name, "y", expected="1 feature or more", got=str(self.features))
        return (self.features,)

    def parameters(self, inputs: tuple[Shape, ...]) -> tuple[Parameter, ...]:
        weight = Parameter("weight", (self.features, inputs[0][0]), self.init)
        return (weight, Parameter("bias", (self.features,), "zeros", decay=False)) if self.bias else (weight,)

    def forward(self, low: Lowering, node: Node) -> None:
        reads = {"x": low.value(node.inputs[0]), "w": low.prepare_filter(node)}
        if self.bias:
            reads["b"] = low.parameter(node, "bias")
        attrs = activation_attrs(self.activation)
        low.emit(node, "linear.forward", reads, {"y": low.output(node)}, attrs=attrs)

    def backward(self, low: Lowering, node: Node) -> None:
        x, dy = node.inputs[0], low.grad(node.name)
        if self._masks:
            dy = masked_gradient(low, node, self.bias)
        elif self.bias:
            db = low.weight_gradient(node, "bias")
            low.emit(node, "linear.bgrad", {"dy": dy}, {"db": db}, accumulate=low.accumulates("db"))
        dw = low.weight_gradient(node, "weight")
        reads = {"x": low.value(x), "dy": dy}
        low.emit(node, "linear.wgrad", reads, {"dw": dw}, accumulate=low.accumulates("dw"))
        if low.requires_grad(x):
            dx, adds = low.contribute(x)
            reads = {"w": low.used_filter(node), "dy": dy}
            low.emit(node, "linear.dgrad", reads, {"dx": dx}, accumulate=("dx",) if adds else ())
        low.emit_update(node, "weight")
        if self.bias:
            low.emit_update(node, "bias")
