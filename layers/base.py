"""The shape of every layer kind: one frozen dataclass that infers shapes, lists parameters and emits ops.

    @dataclass(frozen=True)
    class Relu(Layer):
        kind = "relu"
        ...

A new kind is one file in this folder, one function per backend and op kind, one row in the agreement test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vdnn.errors import ShapeError
from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight or a statistic of a layer.

    Args:
        suffix: name within the layer: "weight", "bias", "running_mean".
        shape: as stored, (K, C/groups, R, S) for filters.
        init: "kaiming" (normal, std sqrt(2 / fan_in)), "kaiming_fan_out" (std sqrt(2 / fan_out), fan_out = K*R*S),
            "xavier" (uniform), "normal:STD", "zeros" or "ones".
        trainable: False for statistics, which the layer itself updates.
        decay: whether weight decay applies when biases and norms are left out of it.
    """

    suffix: str
    shape: Shape
    init: str
    trainable: bool = True
    decay: bool = True


@dataclass(frozen=True, slots=True)
class StridedWindow:
    """A window of `kernel` pixels that moves by `stride` both ways, with `padding` around the image; pairs are vertical
    first."""

    stride: int
    kernel: tuple[int, int]
    padding: tuple[int, int]


class Layer:
    """A layer kind. Shapes here are per image, without N: (C, H, W), or (C,) after flatten."""

    kind: ClassVar[str] = ""

    @property
    def needs_output(self) -> bool:
        """Whether backward reads the layer's own output y; then nothing may overwrite y in place."""
        return False

    @property
    def overwrites_gradient(self) -> bool:
        """Whether backward writes dx over the bytes of dy."""
        return False

    @property
    def joins_channels(self) -> bool:
        """Whether the output is its inputs side by side along channels, so that they may be written into it."""
        return False

    @property
    def takes_zero_channels(self) -> bool:
        """Whether the output stays the same where channels of zeros follow those of x, and w is prepared for them."""
        return False

    @property
    def strided_window(self) -> StridedWindow | None:
        """The window of products whose stride may become channels of x, or None (see vdnn.layers.images)."""
        return None

    @property
    def shares_gradient(self) -> bool:
        """Whether the gradients of the inputs may be the output's own gradient, or parts of it."""
        return False

    @property
    def is_head(self) -> bool:
        """Whether the layer ends the network, or one head of it, with a loss per image."""
        return False

    def passes_through(self, training: bool) -> bool:
        """Whether the output is the input's own value, with no op in forward."""
        return False

    def works_in_place(self, training: bool) -> bool:
        """Whether forward writes y over its first input where nothing else needs that."""
        return False

    def output_shape(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        """Shape of y; raises ShapeError naming the layer, the expected and the actual shape."""
        raise ShapeError(name, "x", expected="a layer kind with a shape rule", got=self.kind)

    def parameters(self, inputs: tuple[Shape, ...]) -> tuple[Parameter, ...]:
        """Weights and statistics for inputs of these shapes."""
        return ()

    def forward(self, low: Lowering, node: Node) -> None:
        """Emit the forward ops of `node`."""

    def backward(self, low: Lowering, node: Node) -> None:
        """Emit the backward ops of `node`; `low.grad(node.name)` is dy."""


def one_input(name: str, inputs: tuple[Shape, ...]) -> Shape:
    """The only input's shape; ShapeError if there are none or several."""
    if len(inputs) != 1:
        raise ShapeError(name, "x", expected="one input", got=f"{len(inputs)} inputs")
    return inputs[0]


def image_input(name: str, inputs: tuple[Shape, ...]) -> tuple[int, int, int]:
    """The only input's (C, H, W); ShapeError if it is not an image."""
    shape = one_input(name, inputs)
    if len(shape) != 3:
        raise ShapeError(name, "x", expected="an image (C, H, W)", got=str(shape))
    return shape[0], shape[1], shape[2]


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """(vertical, horizontal) from one number or two."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])
