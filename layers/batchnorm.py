"""Batch normalisation over N, H, W per channel (Ioffe and Szegedy 2015).

    graph.add("bn1", BatchNorm(), "conv1")

Training: y = weight * (x - mean) * invstd + bias with the batch's mean and biased variance,
invstd = 1 / sqrt(var + eps); both are kept for backward. The running statistics are moved by an op of their own, so
that they change once a step however often forward is repeated: running = (1 - momentum) * running + momentum * batch,
with the unbiased variance (as torch.nn.BatchNorm2d). Inference uses the running statistics.

A norm may add a second input z before it is done, and apply a ReLU: y = max(... + bias + z, 0). Backward then begins
with g = dy where y > 0, else 0. Without z the sign of y is found again from x; with z it is read from y, and d(z) = g
is written over dy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from vdnn.errors import ShapeError
from vdnn.layers.add import copy_gradient
from vdnn.layers.base import Layer, Parameter, one_input
from vdnn.layers.joint import STATISTICS
from vdnn.layers.relu import activation_attrs
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class BatchNorm(Layer):
    """`init` is that of the weight (gamma): "ones", or "zeros" for the last norm of a residual branch.

    Args:
        adds: whether there is a second input z. Lowering sets it, `activation` and `masked_above` (see
            vdnn.layers.fuse and relu).
    """

    eps: float = 1e-5
    momentum: float = 0.1
    init: str = "ones"
    activation: Literal["relu"] | None = None
    masked_above: bool = False
    adds: bool = False

    kind = "batchnorm"

    @property
    def needs_output(self) -> bool:
        return self.adds and self._masks

    @property
    def overwrites_gradient(self) -> bool:
        return self.adds and self._masks

    @property
    def shares_gradient(self) -> bool:
        return self.adds and not self._masks

    @property
    def _masks(self) -> bool:
        return self.activation is not None and not self.masked_above

    def works_in_place(self, training: bool) -> bool:
        return not training

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if not self.adds:
            return one_input(name, inputs)
        if len(inputs) != 2 or inputs[0] != inputs[1]:
            raise ShapeError(name, "z", expected="two inputs of equal shapes", got=" and ".join(map(str, inputs)))
        return inputs[0]

    def parameters(self, inputs: tuple[Shape, ...]) -> tuple[Parameter, ...]:
        shape = (inputs[0][0],)
        return (
            Parameter("weight", shape, self.init, decay=False),
            Parameter("bias", shape, "zeros", decay=False),
            Parameter("running_mean", shape, "zeros", trainable=False),
            Parameter("running_var", shape, "ones", trainable=False),
        )

    def forward(self, low: Lowering, node: Node) -> None:
        x = low.value(node.inputs[0])
        reads = {"x": x, "weight": low.parameter(node, "weight"), "bias": low.parameter(node, "bias")}
        if self.adds:
            reads["z"] = low.value(node.inputs[1])
        running = {name: low.parameter(node, name) for name in ("running_mean", "running_var")}
        attrs = {"eps": self.eps, **activation_attrs(self.activation)}
        if not low.training:
            over = low.output(node, over=node.inputs[0])
            low.emit(node, "batchnorm.inference", {**reads, **running}, {"y": over}, attrs=attrs)
            return
        count = low.batch * prod(node.shape[1:])
        if count < 2:
            raise ShapeError(
                node.name, "x", expected="2 or more values per channel in training (a larger batch)", got=str(count)
            )
        saved = {
            "mean": low.tensor(f"{node.name}.mean", "aux", node.shape[:1]),
            "invstd": low.tensor(f"{node.name}.invstd", "aux", node.shape[:1]),
        }
        low.emit(node, "batchnorm.forward", reads, {"y": low.output(node), **saved}, attrs=attrs)
        attrs = {"eps": self.eps, "momentum": self.momentum, "count": count}
        low.joint.add(low, node, STATISTICS, saved, running, attrs=attrs, accumulate=tuple(running))

    def backward(self, low: Lowering, node: Node) -> None:
        x, dy = node.inputs[0], low.grad(node.name)
        reads = {
            "x": low.value(x),
            "dy": dy,
            "weight": low.parameter(node, "weight"),
            "mean": f"{node.name}.mean",
            "invstd": f"{node.name}.invstd",
        }
        writes = {"dweight": low.weight_gradient(node, "weight"), "dbias": low.weight_gradient(node, "bias")}
        accumulate = low.accumulates(*writes)
        attrs = {"eps": self.eps, **activation_attrs(self.activation if self._masks else None)}
        if self._masks and self.adds:
            reads["y"] = low.value(node.name)
            writes["dz"], adds = self._term_gradient(low, node)
            accumulate = (*accumulate, "dz") if adds else accumulate
        elif self._masks:
            reads["bias"] = low.parameter(node, "bias")
        if low.requires_grad(x):
            writes["dx"], adds = low.contribute(x)
            accumulate = (*accumulate, "dx") if adds else accumulate
        low.emit(node, "batchnorm.backward", reads, writes, attrs=attrs, accumulate=accumulate)
        if self.adds and not self._masks:
            self._pass_on(low, node)
        low.emit_update(node, "weight")
        low.emit_update(node, "bias")

    def _term_gradient(self, low: Lowering, node: Node) -> tuple[str, bool]:
        """Where d(z) is written, and whether it is added to what is there."""
        z, dy = node.inputs[1], low.grad(node.name)
        if low.requires_grad(z):
            return low.contribute(z, over=dy)
        unread = low.tensor(f"{node.name}.masked.grad", "grad", low.tensors[dy].shape, view_of=dy)
        return unread, False

    def _pass_on(self, low: Lowering, node: Node) -> None:
        """d(z) is dy as it came, which nothing reads any more."""
        z = node.inputs[1]
        if not low.requires_grad(z):
            return
        if not low.has_grad(z) and low.canonical(z) == z:
            low.share_grad(z, low.grad(node.name))
        else:
            copy_gradient(low, node, z, 1)
