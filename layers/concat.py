"""Concatenation along channels.

    graph.add("inception_3a", Concat(), ["b1", "b2", "b3", "b4"])

Branches write straight into their channels of the output, and read their gradients from there, so that usually no op
is needed; a branch whose bytes are claimed elsewhere is copied.
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
class Concat(Layer):
    """Two inputs or more of equal (H, W)."""

    kind = "concat"

    @property
    def joins_channels(self) -> bool:
        return True

    @property
    def shares_gradient(self) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if len(inputs) < 2:
            raise ShapeError(name, "x", expected="two inputs or more", got=str(len(inputs)))
        for shape in inputs[1:]:
            if shape[1:] != inputs[0][1:]:
                raise ShapeError(name, "x", expected=f"equal sizes {inputs[0][1:]}", got=str(shape[1:]))
        return (sum(shape[0] for shape in inputs), *inputs[0][1:])

    def forward(self, low: Lowering, node: Node) -> None:
        whole = low.tensors[low.value(node.name)]
        for i, (tensor, channel) in enumerate(self._channels(low, node)):
            x = low.tensors[low.value(tensor)]
            if x.storage == whole.storage and x.channel == whole.channel + channel:
                continue
            shape = (low.batch, *low.graph.shape(tensor))
            part = low.tensor(f"{node.name}.part{i}", "act", shape, view_of=whole.name, channel=channel)
            low.emit(node, "copy.forward", {"x": x.name}, {"y": part}, name=f"{node.name}.copy{i}")

    def backward(self, low: Lowering, node: Node) -> None:
        dy = low.grad(node.name)
        for i, (tensor, channel) in enumerate(self._channels(low, node)):
            if not low.requires_grad(tensor):
                continue
            alone = low.consumers[tensor] == [node.name] and node.inputs.count(tensor) == 1
            if alone and low.canonical(tensor) == tensor:
                low.share_grad(tensor, dy, channel)
                continue
            shape = (low.batch, *low.graph.shape(tensor))
            part = low.tensor(f"{node.name}.grad{i}", "grad", shape, view_of=dy, channel=channel)
            dx, adds = low.contribute(tensor)
            accumulate = ("y",) if adds else ()
            low.emit(
                node, "copy.forward", {"x": part}, {"y": dx}, accumulate=accumulate, name=f"{node.name}.copy_grad{i}"
            )

    def _channels(self, low: Lowering, node: Node) -> list[tuple[str, int]]:
        starts, channel = [], 0
        for tensor in node.inputs:
            starts.append((tensor, channel))
            channel += low.graph.shape(tensor)[0]
        return starts
