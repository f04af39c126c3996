"""ZFNet: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" 2013 (arXiv 1311.2901), figure 3.

    graph = zfnet()                     # 3x224x224 images, 1000 classes, 62,357,608 parameters

Maps of 110, 55, 26, 13 and 6 pixels as in the figure: conv1 96@7x7 / 2 with padding 1, conv2 256@5x5 / 2 without,
conv3 to conv5 3x3 with padding 1, pools of 3x3 / 2 rounded up. The paper's "contrast normalisation" after pool1 and
pool2 is response normalisation across maps with AlexNet's constants; lrn=False leaves it out. Weights start as
`vdnn.networks.parts` says, not from the paper's normal distribution of std 0.01.
"""

from __future__ import annotations

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.lrn import Lrn
from vdnn.layers.pool import Pool
from vdnn.networks.parts import conv_relu, hidden, scores


def zfnet(
    *,
    classes: int = 1000,
    image_size: int = 224,
    dropout: float = 0.5,
    label_smoothing: float = 0.0,
    lrn: bool = True,
) -> Graph:
    """The graph; `image_size` in pixels, `dropout` the probability after fc6 and fc7."""
    g = Graph("zfnet", (3, image_size, image_size), classes)
    pool = Pool("max", 3, stride=2, ceil_mode=True)
    x = conv_relu(g, "1", g.input, Conv(96, 7, stride=2, padding=1))
    x = g.add("pool1", pool, x)
    x = g.add("norm1", Lrn(), x) if lrn else x
    x = conv_relu(g, "2", x, Conv(256, 5, stride=2))
    x = g.add("pool2", pool, x)
    x = g.add("norm2", Lrn(), x) if lrn else x
    x = conv_relu(g, "3", x, Conv(384, 3, padding=1))
    x = conv_relu(g, "4", x, Conv(384, 3, padding=1))
    x = conv_relu(g, "5", x, Conv(256, 3, padding=1))
    x = g.add("flat", Flatten(), g.add("pool5", pool, x))
    x = hidden(g, "6", x, 4096, dropout=dropout)
    x = hidden(g, "7", x, 4096, dropout=dropout)
    scores(g, "8", x, label_smoothing=label_smoothing)
    return g
