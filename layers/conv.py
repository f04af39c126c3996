"""Convolution: y[n,k,p,q] = b[k] + sum over c,r,s of x[n,c, p*stride-pad+r*dilation, ...] * w[k,c,r,s].

    graph.add("conv1", Conv(64, 11, stride=4, padding=2), "data")

A cross-correlation, as in every deep-learning library. w has shape (K, C/groups, R, S), b has shape (K,).
Output size P = floor((H + 2*padding - dilation*(R-1) - 1) / stride) + 1.
With `activation` "relu" y = max(conv, 0), written once; backward then drops dy where y <= 0 and sums db in one op, in
place, before the other gradients read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vdnn.errors import ShapeError
from vdnn.layers.base import Layer, Parameter, StridedWindow, image_input, pair
from vdnn.layers.relu import activation_attrs, masked_gradient
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True)
class Conv(Layer):
    """`channels` filters (K) of size `kernel` (R, S); every size may be one number or (vertical, horizontal).

    Lowering sets `activation` and `masked_above` (see vdnn.layers.fuse and relu).
    """

    channels: int
    kernel: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    bias: bool = True
    init: str = "kaiming"
    activation: Literal["relu"] | None = None
    masked_above: bool = False

    kind = "conv"

    @property
    def needs_output(self) -> bool:
        return self._masks

    @property
    def overwrites_gradient(self) -> bool:
        return self._masks

    @property
    def _masks(self) -> bool:
        return self.activation is not None and not self.masked_above

    @property
    def takes_zero_channels(self) -> bool:
        return self.groups == 1

    @property
    def strided_window(self) -> StridedWindow | None:
        (stride, horizontal), kernel = pair(self.stride), pair(self.kernel)
        if stride == 1 or horizontal != stride or min(kernel) < stride or pair(self.dilation) != (1, 1):
            return None
        return StridedWindow(stride, kernel, pair(self.padding)) if self.groups == 1 else None

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        c, h, w = image_input(name, inputs)
        if self.groups < 1 or c % self.groups or self.channels % self.groups:
            expected = f"input and output channels divisible by groups={self.groups}"
            raise ShapeError(name, "x", expected=expected, got=f"{c} and {self.channels} channels")
        if min(*pair(self.kernel), *pair(self.stride), *pair(self.dilation), self.channels) < 1:
            raise ShapeError(name, "w", expected="channels, kernel, stride and dilation of 1 or more", got=str(self))
        if min(pair(self.padding)) < 0:
            raise ShapeError(name, "x", expected="padding of 0 or more", got=str(self.padding))
        sizes = []
        for size, r, stride, pad, dilation in zip(
            (h, w), pair(self.kernel), pair(self.stride), pair(self.padding), pair(self.dilation), strict=True
        ):
            reach = dilation * (r - 1) + 1
            if size + 2 * pad < reach:
                raise ShapeError(name, "x", expected=f"at least {reach} rows and columns after padding", got=f"{h}x{w}")
            sizes.append((size + 2 * pad - reach) // stride + 1)
        return (self.channels, *sizes)

    def parameters(self, inputs: tuple[Shape, ...]) -> tuple[Parameter, ...]:
        weight = Parameter("weight", (self.channels, inputs[0][0] // self.groups, *pair(self.kernel)), self.init)
        return (weight, Parameter("bias", (self.channels,), "zeros", decay=False)) if self.bias else (weight,)

    def forward(self, low: Lowering, node: Node) -> None:
        reads = {"x": low.value(node.inputs[0]), "w": low.prepare_filter(node)}
        if self.bias:
            reads["b"] = low.parameter(node, "bias")
        attrs = {**self._attrs(low, node), **activation_attrs(self.activation)}
        low.emit(node, "conv.forward", reads, {"y": low.output(node)}, attrs=attrs)

    def backward(self, low: Lowering, node: Node) -> None:
        x, dy, attrs = node.inputs[0], low.grad(node.name), self._attrs(low, node)
        if self._masks:
            dy = masked_gradient(low, node, self.bias)
        elif self.bias:
            db = low.weight_gradient(node, "bias")
            low.emit(node, "conv.bgrad", {"dy": dy}, {"db": db}, accumulate=low.accumulates("db"))
        reads = {"x": low.value(x), "dy": dy}
        dw = low.weight_gradient(node, "weight")
        folded = {**attrs, **low.filter_attrs(node)}
        low.emit(node, "conv.wgrad", reads, {"dw": dw}, attrs=folded, accumulate=low.accumulates("dw"))
        if low.requires_grad(x):
            dx, adds = low.contribute(x)
            reads = {"w": low.used_filter(node), "dy": dy}
            low.emit(node, "conv.dgrad", reads, {"dx": dx}, attrs=attrs, accumulate=("dx",) if adds else ())
        low.emit_update(node, "weight")
        if self.bias:
            low.emit_update(node, "bias")

    def _attrs(self, low: Lowering, node: Node) -> dict[str, object]:
        folded = bool(low.filter_attrs(node))  # then stride and padding are in the images
        return {
            "stride": [1, 1] if folded else list(pair(self.stride)),
            "padding": [0, 0] if folded else list(pair(self.padding)),
            "dilation": list(pair(self.dilation)),
            "groups": self.groups,
        }
