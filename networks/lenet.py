"""LeNet for handwritten digits, after LeCun et al. 1998.

    graph = lenet()                     # 1x28x28 images, 10 classes, 431,080 parameters

The form that Caffe made common: conv 20@5x5, pool, conv 50@5x5, pool, fc 500, ReLU, fc. Against the paper: max-pools
without weights in place of trained averages, every filter sees every channel, ReLU in place of tanh and only after the
hidden fully connected layer, softmax in place of radial basis functions. Dropout is an addition. Weights: "xavier".
"""

from __future__ import annotations

from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.linear import Linear
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu
from vdnn.networks.parts import drop, scores


def lenet(
    *, classes: int = 10, image_size: int = 28, channels: int = 1, dropout: float = 0.5, label_smoothing: float = 0.0
) -> Graph:
    """The graph; `image_size` in pixels, `channels` of the image, `dropout` the probability before the last layer."""
    g = Graph("lenet", (channels, image_size, image_size), classes)
    x = g.add("conv1", Conv(20, 5, init="xavier"), g.input)
    x = g.add("pool1", Pool("max", 2), x)
    x = g.add("conv2", Conv(50, 5, init="xavier"), x)
    x = g.add("pool2", Pool("max", 2), x)
    x = g.add("flat", Flatten(), x)
    x = g.add("fc3", Linear(500, init="xavier"), x)
    x = g.add("relu3", Relu(), x)
    x = drop(g, "drop3", x, dropout)
    scores(g, "4", x, label_smoothing=label_smoothing, init="xavier")
    return g
