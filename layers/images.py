"""How normalised images lie for the convolutions that read them: with channels of zeros, and a stride in channels.

    form = image_form(graph.input_shape, [node], layout="NHWC", multiple=8)
    form.shape, form.fold, form.filters((64, 3, 7, 7))      # (16, 115, 115), 2, (64, 16, 4, 4)

A fold S takes the stride S out of a convolution: channel (a * S + b) * C + c of pixel (i, j) is channel c of pixel
(S * i + a - padding, S * j + b - padding) of the images, 0 outside of them. So is a filter, whose tap (r, s) becomes
channel (r % S, s % S, c) of tap (r // S, s // S), and the convolution of both, with stride 1 and without padding, sums
the same products. GPUs compute it faster: tensor cores multiply channels, of which images have few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vdnn.layers.tensor import Shape

if TYPE_CHECKING:
    from vdnn.layers.graph import Node


@dataclass(frozen=True, slots=True)
class ImageForm:
    """`shape` (C', I, J) of an image as it is stored, the stride in its channels, and the padding (vertical,
    horizontal) around its pixels."""

    shape: Shape
    fold: int = 1
    padding: tuple[int, int] = (0, 0)

    def filters(self, shape: Shape) -> Shape:
        """Shape of the filters (K, C, R, S) as they are multiplied with such images."""
        return folded_filters(shape, self.fold, self.shape[0])

    @property
    def attrs(self) -> dict[str, Any]:
        """Of the op that makes the images."""
        return {"fold": self.fold, "padding": list(self.padding)} if self.fold > 1 else {}

    @property
    def filter_attrs(self) -> dict[str, Any]:
        """Of ops that make such filters, or their gradients."""
        return {"fold": self.fold} if self.fold > 1 else {}


def image_form(shape: Shape, readers: Sequence[Node], layout: str, multiple: int) -> ImageForm:
    """The form for images (C, H, W) with these readers: their own unless all readers can do with another.

    Channels are rounded up to a multiple, in NHWC alone, where those of a pixel are read together; with a multiple of 1
    images stay what they are. A stride is folded for a single reader.
    """
    layers = [node.layer for node in readers]
    if multiple == 1 or layout != "NHWC" or not all(layer.takes_zero_channels for layer in layers):
        return ImageForm(shape)
    channels, height, width = shape
    window = layers[0].strided_window if len(layers) == 1 else None
    if window is None:
        return ImageForm((_rounded(channels, multiple), height, width))
    fold, (r, s), (p, q) = window.stride, window.kernel, readers[0].shape[1:]
    sides = (p + -(-r // fold) - 1, q + -(-s // fold) - 1)
    return ImageForm((_rounded(fold * fold * channels, multiple), *sides), fold, window.padding)


def folded_filters(shape: Shape, fold: int, channels: int) -> Shape:
    """Shape of filters (K, C, R, S) with a stride in their channels, of which they get so many."""
    if len(shape) != 4:
        return (shape[0], channels)
    k, _, r, s = shape
    return (k, channels, -(-r // fold), -(-s // fold))


def _rounded(channels: int, multiple: int) -> int:
    return -(-channels // multiple) * multiple
