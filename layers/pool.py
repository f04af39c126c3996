"""Pooling over windows: maximum or average, with padding and ceil mode, or over the whole image.

    graph.add("pool1", Pool("max", 3, stride=2, ceil_mode=True), "relu1")
    graph.add("pool5", Pool("average", "global"), "relu5")

Output size as torch.nn.MaxPool2d: floor or ceil of (H + 2*padding - R) / stride, plus 1; with ceil the last window must
start inside the image or its left padding. Padding never wins a maximum. The average divides by R*S with
`count_include_pad` (windows beyond the padding count only the part within it), else by the pixels covered.
In backward of the maximum the first largest pixel of a window in row order takes dy. It is found again in x and y; or,
with `winners`, forward has written down its place in the window: one byte an output, and neither x nor y is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, image_input, pair
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


NO_WINNER = 255
"""The index of a window with a NaN, whose gradient goes nowhere."""


@dataclass(frozen=True)
class Pool(Layer):
    """`kernel` (R, S) or "global"; `stride` defaults to the kernel.

    Args:
        winners: forward in training also writes `indices` (N, C, P, Q) uint8: r*S + s of the winner, or NO_WINNER.
        masks: x is what ReLUs give, and backward drops dy where y <= 0 for them. Lowering sets both
            (see vdnn.layers.winners).
    """

    mode: Literal["max", "average"]
    kernel: int | tuple[int, int] | Literal["global"]
    stride: int | tuple[int, int] | None = None
    padding: int | tuple[int, int] = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    winners: bool = False
    masks: bool = False

    kind = "pool"

    @property
    def needs_output(self) -> bool:
        return self.mode == "max" and (self.masks or not self.winners)

    def can_index_winners(self, x: Shape) -> bool:
        """Whether a byte can say which pixel of a window on images (C, H, W) is the largest."""
        (r, s), _ = self._window((x[1], x[2]))
        return self.mode == "max" and r * s <= NO_WINNER

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        c, h, w = image_input(name, inputs)
        if self.mode not in ("max", "average"):
            raise ShapeError(name, "y", expected="mode 'max' or 'average'", got=repr(self.mode))
        kernel, stride = self._window((h, w))
        if min(*kernel, *stride) < 1 or min(pair(self.padding)) < 0:
            raise ShapeError(name, "x", expected="kernel and stride of 1 or more, padding of 0 or more", got=str(self))
        sizes = []
        for size, r, step, pad in zip((h, w), kernel, stride, pair(self.padding), strict=True):
            if 2 * pad > r:
                raise ShapeError(name, "x", expected=f"padding of at most half the window ({r // 2})", got=str(pad))
            room = size + 2 * pad - r
            if room < 0:
                raise ShapeError(name, "x", expected=f"at least {r} rows and columns after padding", got=f"{h}x{w}")
            out = (-(-room // step) if self.ceil_mode else room // step) + 1
            if self.ceil_mode and (out - 1) * step >= size + pad:
                out -= 1
            sizes.append(out)
        return (c, *sizes)

    def forward(self, low: Lowering, node: Node) -> None:
        x, writes = node.inputs[0], {"y": low.output(node)}
        if self.winners:
            writes["indices"] = low.tensor(self._indices(node), "aux", (low.batch, *node.shape), dtype="uint8")
        low.emit(node, "pool.forward", {"x": low.value(x)}, writes, attrs=self._attrs(low, x))

    def backward(self, low: Lowering, node: Node) -> None:
        x, reads = node.inputs[0], {}
        if not low.requires_grad(x):
            return
        if self.winners:
            reads["indices"] = self._indices(node)
        elif self.mode == "max":
            reads["x"] = low.value(x)
        if self.needs_output:
            reads["y"] = low.value(node.name)
        reads["dy"] = low.grad(node.name)
        dx, adds = low.contribute(x)
        attrs = self._attrs(low, x)
        low.emit(node, "pool.backward", reads, {"dx": dx}, attrs=attrs, accumulate=("dx",) if adds else ())

    def _indices(self, node: Node) -> str:
        return f"{node.name}.indices"

    def _window(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        if isinstance(self.kernel, str):
            return size, size
        kernel = pair(self.kernel)
        return kernel, kernel if self.stride is None else pair(self.stride)

    def _attrs(self, low: Lowering, x: str) -> dict[str, object]:
        _, h, w = low.graph.shape(x)
        kernel, stride = self._window((h, w))
        return {
            "mode": self.mode,
            "kernel": list(kernel),
            "stride": list(stride),
            "padding": list(pair(self.padding)),
            "count_include_pad": self.count_include_pad,
        }
