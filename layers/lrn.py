"""Local response normalisation across channels (Krizhevsky et al. 2012, section 3.3).

    graph.add("norm1", Lrn(size=5, alpha=1e-4, beta=0.75, k=2.0), "pool1")

y[c] = x[c] / (k + alpha / size * sum of x[j]^2 over the `size` channels around c) ^ beta, j from c - (size-1)//2 to
c + size//2, clipped to the tensor (as ONNX; torch.nn.LocalResponseNorm reaches the other way where size is even). alpha
is divided by size, as in Caffe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, image_input
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Lrn(Layer):
    """Defaults are AlexNet's."""

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0

    kind = "lrn"

    @property
    def needs_output(self) -> bool:
        return True

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if self.size < 1 or self.k <= 0:
            raise ShapeError(name, "y", expected="size of 1 or more and k above 0", got=str(self))
        return image_input(name, inputs)

    def forward(self, low: Lowering, node: Node) -> None:
        x = low.value(node.inputs[0])
        low.emit(node, "lrn.forward", {"x": x}, {"y": low.output(node)}, attrs=self._attrs())

    def backward(self, low: Lowering, node: Node) -> None:
        x = node.inputs[0]
        if low.requires_grad(x):
            reads = {"x": low.value(x), "y": low.value(node.name), "dy": low.grad(node.name)}
            dx, adds = low.contribute(x)
            attrs = self._attrs()
            low.emit(node, "lrn.backward", reads, {"dx": dx}, attrs=attrs, accumulate=("dx",) if adds else ())

    def _attrs(self) -> dict[str, object]:
        return {"size": self.size, "alpha": self.alpha, "beta": self.beta, "k": self.k}
