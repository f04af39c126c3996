"""Softmax and cross-entropy in one, with label smoothing; also says whether the first choice is right.

    graph.add("loss", SoftmaxLoss(label_smoothing=0.1), "fc8")

probs[n,k] = exp(x[n,k]) / sum exp; loss[n] = -sum over k of t[n,k] * log probs[n,k], with
t = (1 - label_smoothing) * one_hot(label) + label_smoothing / K; evaluation does not smooth.
Backward: dx = (probs - t) * weight * gradient_scale, where gradient_scale (in the step state) is loss scale / images in
the whole step. `weight` is that of an auxiliary head. A fused head computes both in one op of the backward pass, where
it has a gradient to write, and keeps no probs; its results are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, one_input
from vdnn.layers.tensor import LABELS, Shape
from vdnn.layers.update import STEP

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class SoftmaxLoss(Layer):
    """The end of a network, or of one head of it.

    Args:
        fused: loss and gradient are one op in training, see vdnn.layers.fuse.
    """

    label_smoothing: float = 0.0
    weight: float = 1.0
    fused: bool = False

    kind = "softmax_loss"

    @property
    def is_head(self) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        shape = one_input(name, inputs)
        if len(shape) != 1:
            raise ShapeError(name, "x", expected="a vector (K,); add a Flatten layer before", got=str(shape))
        if not 0 <= self.label_smoothing < 1:
            raise ShapeError(name, "y", expected="label_smoothing from 0 to below 1", got=str(self.label_smoothing))
        return ()

    def forward(self, low: Lowering, node: Node) -> None:
        x = node.inputs[0]
        classes = low.graph.shape(x)[0]
        if classes != low.graph.classes:
            raise ShapeError(
                node.name, "x", expected=f"one score for each of {low.graph.classes} classes", got=str(classes)
            )
        results = {
            "loss": low.tensor(f"{node.name}.loss", "loss", (low.batch,)),
            "correct": low.tensor(f"{node.name}.correct", "loss", (low.batch,), dtype="uint8"),
        }
        low.fetches.extend(results.values())
        if self._is_one_op(low, node):
            return
        probs = low.tensor(f"{node.name}.probs", "act", (low.batch, classes), dtype=low.parameter_dtype)
        reads = {"x": low.value(x), "labels": LABELS}
        smoothing = self.label_smoothing if low.training else 0.0  # a measure of the network, not of the method
        low.emit(node, "softmax_loss.forward", reads, {"probs": probs, **results}, attrs={"label_smoothing": smoothing})

    def backward(self, low: Lowering, node: Node) -> None:
        x = node.inputs[0]
        if not low.requires_grad(x):
            return
        dx, adds = low.contribute(x)
        attrs = {"label_smoothing": self.label_smoothing, "weight": self.weight}
        accumulate = ("dx",) if adds else ()
        if self._is_one_op(low, node):
            reads = {"x": low.value(x), "labels": LABELS, "step": STEP}
            writes = {"dx": dx, "loss": f"{node.name}.loss", "correct": f"{node.name}.correct"}
            low.emit(node, "softmax_loss.train", reads, writes, attrs=attrs, accumulate=accumulate)
        else:
            reads = {"probs": f"{node.name}.probs", "labels": LABELS, "step": STEP}
            low.emit(node, "softmax_loss.backward", reads, {"dx": dx}, attrs=attrs, accumulate=accumulate)

    def _is_one_op(self, low: Lowering, node: Node) -> bool:
        return self.fused and low.training and low.requires_grad(node.inputs[0])
