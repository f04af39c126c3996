"""VGG: Simonyan and Zisserman 2014 (arXiv 1409.1556), configurations D and E, and the deeper ones of the vDNN paper.

    graph = vgg19()                     # 3x224x224 images, 1000 classes, 143,667,240 parameters, 16 convolutions
    graph = vgg416()                    # configuration E with 80 more convolutions in each of its five groups

Names count all weight layers for vgg16 and vgg19, as everyone does, and convolutions only from vgg116 on, as the vDNN
paper does. What that paper calls VGG-16 is vgg19 here. Groups of 3x3 convolutions of 64, 128, 256, 512, 512 filters,
each closed by a pool of 2x2; dropout after fc6 and fc7. Weights start as `vdnn.networks.parts` says.
"""

from __future__ import annotations

from collections.abc import Mapping

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.networks.parts import conv_relu, hidden, scores

FILTERS = (64, 128, 256, 512, 512)
"""Filters of each group's convolutions."""

CONVOLUTIONS: Mapping[str, tuple[int, ...]] = {
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
    "vgg116": (22, 22, 24, 24, 24),
    "vgg216": (42, 42, 44, 44, 44),
    "vgg316": (62, 62, 64, 64, 64),
    "vgg416": (82, 82, 84, 84, 84),
}
"""Convolutions in each group."""


def vgg(
    name: str, *, classes: int = 1000, image_size: int = 224, dropout: float = 0.5, label_smoothing: float = 0.0
) -> Graph:
    """The graph of `name` in CONVOLUTIONS; `image_size` in pixels, `dropout` the probability after fc6 and fc7."""
    g = Graph(name, (3, image_size, image_size), classes)
    x = g.input
    for group, (filters, count) in enumerate(zip(FILTERS, CONVOLUTIONS[name], strict=True), start=1):
        for i in range(1, count + 1):
            x = conv_relu(g, f"{group}_{i}", x, Conv(filters, 3, padding=1))
        x = g.add(f"pool{group}", Pool("max", 2), x)
    x = g.add("flat", Flatten(), x)
    x = hidden(g, "6", x, 4096, dropout=dropout)
    x = hidden(g, "7", x, 4096, dropout=dropout)
    scores(g, "8", x, label_smoothing=label_smoothing)
    return g
