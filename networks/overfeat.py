"""OverFeat, the accurate model: Sermanet et al. 2013 (arXiv 1312.6229), table 3.

    graph = overfeat()                  # 3x221x221 images, 1000 classes, 144,656,488 parameters

Six convolutions, the first 7x7 / 2, without response normalisation and with pools that do not overlap; maps of 108, 36,
30, 15 and 5 pixels. Layers are numbered as in the table. It is the OverFeat of the vDNN paper. Weights start as
`vdnn.networks.parts` says, not from the paper's normal distribution of std 0.01.
"""

from __future__ import annotations

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.networks.parts import conv_relu, hidden, scores


def overfeat(
    *, classes: int = 1000, image_size: int = 221, dropout: float = 0.5, label_smoothing: float = 0.0
) -> Graph:
    """The graph; `image_size` in pixels, `dropout` the probability after fc7 and fc8."""
    g = Graph("overfeat", (3, image_size, image_size), classes)
    x = conv_relu(g, "1", g.input, Conv(96, 7, stride=2))
    x = g.add("pool1", Pool("max", 3), x)
    x = conv_relu(g, "2", x, Conv(256, 7))
    x = g.add("pool2", Pool("max", 2), x)
    x = conv_relu(g, "3", x, Conv(512, 3, padding=1))
    x = conv_relu(g, "4", x, Conv(512, 3, padding=1))
    x = conv_relu(g, "5", x, Conv(1024, 3, padding=1))
    x = conv_relu(g, "6", x, Conv(1024, 3, padding=1))
    x = g.add("flat", Flatten(), g.add("pool6", Pool("max", 3), x))
    x = hidden(g, "7", x, 4096, dropout=dropout)
    x = hidden(g, "8", x, 4096, dropout=dropout)
    scores(g, "9", x, label_smoothing=label_smoothing)
    return g
