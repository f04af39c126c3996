"""A small network for CIFAR-10, after Krizhevsky's cuda-convnet (2012).

    graph = cifar10()                   # 3x32x32 images, 10 classes, 89,578 parameters

Three convolutions of 32, 32 and 64 filters of 5x5 with ReLU, each with a pool of 3x3 / 2 whose size rounds up, the
first a maximum and the others averages: cuda-convnet's 18-percent model. Its ReLU after pool1 stands before it here,
which is the same function; its two normalisation layers are left out. Weights start as `vdnn.networks.parts` says.
"""

from __future__ import annotations

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.networks.parts import conv_relu, drop, scores


def cifar10(*, classes: int = 10, image_size: int = 32, dropout: float = 0.0, label_smoothing: float = 0.0) -> Graph:
    """The graph; `image_size` in pixels (24 for cuda-convnet's crops), `dropout` the probability before fc4."""
    g = Graph("cifar10", (3, image_size, image_size), classes)
    average = Pool("average", 3, stride=2, ceil_mode=True, count_include_pad=False)
    x = conv_relu(g, "1", g.input, Conv(32, 5, padding=2))
    x = g.add("pool1", Pool("max", 3, stride=2, ceil_mode=True), x)
    x = conv_relu(g, "2", x, Conv(32, 5, padding=2))
    x = g.add("pool2", average, x)
    x = conv_relu(g, "3", x, Conv(64, 5, padding=2))
    x = g.add("pool3", average, x)
    x = drop(g, "drop3", g.add("flat", Flatten(), x), dropout)
    scores(g, "4", x, label_smoothing=label_smoothing)
    return g
