"""Dropout: each value is kept with probability 1 - p and scaled by 1 / (1 - p); in evaluation it does nothing.

    graph.add("drop6", Dropout(0.5), "relu6")

No mask is stored: backward draws it again. The random word of a value comes from Philox4x32-10 (Salmon et al. 2011)
keyed by the run's seed and counted by (layer, step, sample, logical index), so it is the same on every backend, in
every layout, and however the batch is sliced:
    key = (seed low 32 bits, seed high 32 bits), counter = (i // 4, sample, step, layer key), word i % 4,
with i = (c*H + h)*W + w, sample = the image's place in the whole step, layer key = CRC-32 of the layer's name.
A value is kept if its word, as an unsigned integer, is at least p * 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, one_input
from vdnn.layers.lower import STEP
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Dropout(Layer):
    """`p` is the probability that a value is dropped."""

    p: float = 0.5

    kind = "dropout"

    @property
    def overwrites_gradient(self) -> bool:
        return True

    def passes_through(self, training: bool) -> bool:
        return not training

    def works_in_place(self, training: bool) -> bool:
        return training

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if not 0 <= self.p < 1:
            raise ShapeError(name, "y", expected="p from 0 up to, not including, 1", got=str(self.p))
        return one_input(name, inputs)

    def forward(self, low: Lowering, node: Node) -> None:
        if not low.training:
            low.pass_through(node)
            return
        x = node.inputs[0]
        reads = {"x": low.value(x), "step": STEP}
        low.emit(node, "dropout.forward", reads, {"y": low.output(node, over=x)}, attrs=self._attrs(node))

    def backward(self, low: Lowering, node: Node) -> None:
        x, dy = node.inputs[0], low.grad(node.name)
        if low.requires_grad(x):
            dx, adds = low.contribute(x, over=dy)
            reads = {"dy": dy, "step": STEP}
            accumulate = ("dx",) if adds else ()
            low.emit(node, "dropout.backward", reads, {"dx": dx}, attrs=self._attrs(node), accumulate=accumulate)

    def _attrs(self, node: Node) -> dict[str, object]:
        return {"p": self.p, "key": crc32(node.name.encode())}
