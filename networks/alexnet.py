"""AlexNet in its one-GPU form: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" 2014.

    graph = alexnet()                   # 3x224x224 images, 1000 classes, 61,100,840 parameters

Convolutions of 64, 192, 384, 256, 256 filters without groups and without response normalisation, pools of 3x3 / 2. As
torchvision's alexnet, dropout before fc6 and before fc7 included; this is also the AlexNet of the vDNN paper. Weights
start as `vdnn.networks.parts` says.
"""

from __future__ import annotations

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.networks.parts import conv_relu, drop, hidden, scores


def alexnet(*, classes: int = 1000, image_size: int = 224, dropout: float = 0.5, label_smoothing: float = 0.0) -> Graph:
    """The graph; `image_size` in pixels, `dropout` the probability in the classifier."""
    g = Graph("alexnet", (3, image_size, image_size), classes)
    pool = Pool("max", 3, stride=2)
    x = conv_relu(g, "1", g.input, Conv(64, 11, stride=4, padding=2))
    x = g.add("pool1", pool, x)
    x = conv_relu(g, "2", x, Conv(192, 5, padding=2))
    x = g.add("pool2", pool, x)
    x = conv_relu(g, "3", x, Conv(384, 3, padding=1))
    x = conv_relu(g, "4", x, Conv(256, 3, padding=1))
    x = conv_relu(g, "5", x, Conv(256, 3, padding=1))
    x = g.add("pool5", pool, x)
    x = drop(g, "drop5", g.add("flat", Flatten(), x), dropout)
    x = hidden(g, "6", x, 4096, dropout=dropout)
    x = hidden(g, "7", x, 4096)
    scores(g, "8", x, label_smoothing=label_smoothing)
    return g
