"""GoogLeNet, Inception v1 as published: Szegedy et al. 2014 (arXiv 1409.4842), table 1.

    graph = googlenet()                 # 3x224x224 images, 1000 classes, 6,998,552 parameters
    graph = googlenet(aux_heads=True)   # with the two auxiliary classifiers on 4a and 4d, loss weight 0.3 each

Pools round their size up, so that maps have the table's 112, 56, 28, 14 and 7 pixels. Response normalisation, whose
constants the paper leaves open, is over 5 channels with alpha 1e-4, beta 0.75, k 1. Dropout is 0.4 before the last
layer and 0.7 in the auxiliary heads. Weights start as `vdnn.networks.parts` says. Evaluation drops the auxiliary heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from vdnn.layers.concat import Concat
from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.lrn import Lrn
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu
from vdnn.networks.parts import conv_relu, drop, hidden, scores

INCEPTION: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Filters of each module, in the columns of table 1: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection."""

POOLED_AFTER = {"3b": "3", "4e": "4"}
"""Module → label of the pool that follows it."""

AUXILIARY = {"4a": "aux1", "4d": "aux2"}
"""Module → auxiliary classifier on its output."""


def googlenet(
    *,
    classes: int = 1000,
    image_size: int = 224,
    dropout: float = 0.4,
    label_smoothing: float = 0.0,
    aux_heads: bool = False,
    aux_dropout: float = 0.7,
) -> Graph:
    """The graph; `image_size` in pixels, `dropout` before fc, `aux_dropout` before the last layer of each aux head."""
    g = Graph("googlenet", (3, image_size, image_size), classes)
    pool, norm = Pool("max", 3, stride=2, ceil_mode=True), Lrn(k=1.0)
    x = conv_relu(g, "1", g.input, Conv(64, 7, stride=2, padding=3))
    x = g.add("norm1", norm, g.add("pool1", pool, x))
    x = conv_relu(g, "2_reduce", x, Conv(64, 1))
    x = conv_relu(g, "2", x, Conv(192, 3, padding=1))
    x = g.add("pool2", pool, g.add("norm2", norm, x))
    for module, filters in INCEPTION.items():
        x = _inception(g, f"inception_{module}", x, filters)
        if aux_heads and module in AUXILIARY:
            _auxiliary(g, AUXILIARY[module], x, aux_dropout, label_smoothing)
        if module in POOLED_AFTER:
            x = g.add(f"pool{POOLED_AFTER[module]}", pool, x)
    x = g.add("flat", Flatten(), g.add("pool5", Pool("average", "global"), x))
    scores(g, "", drop(g, "drop5", x, dropout), label_smoothing=label_smoothing)
    return g


def _inception(g: Graph, name: str, x: str, filters: tuple[int, int, int, int, int, int]) -> str:
    """Four branches from `x`, concatenated in the order of table 1."""

    def conv(label: str, x: str, layer: Conv) -> str:
        return g.add(f"{name}_{label}_relu", Relu(), g.add(f"{name}_{label}", layer, x))

    one, reduce3, three, reduce5, five, projection = filters
    branches = [
        conv("1x1", x, Conv(one, 1)),
        conv("3x3", conv("3x3_reduce", x, Conv(reduce3, 1)), Conv(three, 3, padding=1)),
        conv("5x5", conv("5x5_reduce", x, Conv(reduce5, 1)), Conv(five, 5, padding=2)),
        conv("pool_proj", g.add(f"{name}_pool", Pool("max", 3, stride=1, padding=1), x), Conv(projection, 1)),
    ]
    return g.add(name, Concat(), branches)


def _auxiliary(g: Graph, name: str, x: str, dropout: float, label_smoothing: float) -> None:
    """An auxiliary classifier: average 5x5 / 3, 128 filters of 1x1, fc 1024, dropout, scores; loss weight 0.3."""
    x = g.add(f"pool_{name}", Pool("average", 5, stride=3), x)
    x = conv_relu(g, f"_{name}", x, Conv(128, 1))
    x = g.add(f"flat_{name}", Flatten(), x)
    x = hidden(g, f"_{name}_1", x, 1024, dropout=dropout)
    scores(g, f"_{name}_2", x, label_smoothing=label_smoothing, head=name, weight=0.3)
