"""Batch normalisation over N, H, W per channel (Ioffe and Szegedy 2015).

    graph.add("bn1", BatchNorm(), "conv1")

Training: y = weight * (x - mean) * invstd + bias with the batch's mean and biased variance,
invstd = 1 / sqrt(var + eps); both are kept for backward. The running statistics are moved by an op of their own, so
that they change once a step however often forward is repeated: running = (1 - momentum) * running + momentum * batch,
with the unbiased variance (as torch.nn.BatchNorm2d). Inference uses the running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, Parameter, one_input
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class BatchNorm(Layer):
    """`init` is that of the weight (gamma): "ones", or "zeros" for the last norm of a residual branch."""

    eps: float = 1e-5
    momentum: float = 0.1
    init: str = "ones"

    kind = "batchnorm"

    def works_in_place(self, training: bool) -> bool:
        return not training

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        return one_input(name, inputs)

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
        running = {name: low.parameter(node, name) for name in ("running_mean", "running_var")}
        if not low.training:
            over = low.output(node, over=node.inputs[0])
            low.emit(node, "batchnorm.inference", {**reads, **running}, {"y": over}, attrs={"eps": self.eps})
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
        low.emit(node, "batchnorm.forward", reads, {"y": low.output(node), **saved}, attrs={"eps": self.eps})
        attrs = {"eps": self.eps, "momentum": self.momentum, "count": count}
        low.emit(node, "batchnorm.update_stats", saved, running, attrs=attrs, accumulate=tuple(running))

    def backward(self, low: Lowering, node: Node) -> None:
        x = node.inputs[0]
        reads = {
            "x": low.value(x),
            "dy": low.grad(node.name),
            "weight": low.parameter(node, "weight"),
            "mean": f"{node.name}.mean",
            "invstd": f"{node.name}.invstd",
        }
        writes = {"dweight": low.weight_gradient(node, "weight"), "dbias": low.weight_gradient(node, "bias")}
        accumulate = low.accumulates(*writes)
        if low.requires_grad(x):
            writes["dx"], adds = low.contribute(x)
            accumulate = (*accumulate, "dx") if adds else accumulate
        low.emit(node, "batchnorm.backward", reads, writes, attrs={"eps": self.eps}, accumulate=accumulate)
        low.emit_update(node, "weight")
        low.emit_update(node, "bias")
