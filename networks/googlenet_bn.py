"""GoogLeNet with batch normalisation, as torchvision's googlenet without its auxiliary heads.

    graph = googlenet_bn()              # 3x224x224 images, 1000 classes, 6,624,904 parameters

The modules of Szegedy et al. 2014 (arXiv 1409.4842) with batch normalisation (eps 0.001) after every convolution, which
has no bias, and no response normalisation. As in torchvision's model the third branch is 3x3 where the paper has 5x5,
and pool4 is 2x2 / 2. Weights start from a normal distribution of std 0.01, which batch normalisation rescales.
"""

from __future__ import annotations

from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.concat import Concat
from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu
from vdnn.networks.googlenet import INCEPTION
from vdnn.networks.parts import conv_norm, drop, scores

POOL_AFTER = {"3b": ("pool3", 3), "4e": ("pool4", 2)}
"""Module → name and window of the pool that follows it."""


def googlenet_bn(
    *, classes: int = 1000, image_size: int = 224, dropout: float = 0.2, label_smoothing: float = 0.0
) -> Graph:
    """The graph; `image_size` in pixels, `dropout` the probability before fc."""
    g = Graph("googlenet_bn", (3, image_size, image_size), classes)
    x = _conv(g, "1", g.input, 64, 7, stride=2)
    x = g.add("pool1", _pool(3), x)
    x = _conv(g, "2_reduce", x, 64, 1)
    x = _conv(g, "2", x, 192, 3)
    x = g.add("pool2", _pool(3), x)
    for module, filters in INCEPTION.items():
        x = _inception(g, f"inception_{module}", x, filters)
        if module in POOL_AFTER:
            name, window = POOL_AFTER[module]
            x = g.add(name, _pool(window), x)
    x = g.add("flat", Flatten(), g.add("pool5", Pool("average", "global"), x))
    scores(g, "", drop(g, "drop5", x, dropout), label_smoothing=label_smoothing)
    return g


def _pool(window: int) -> Pool:
    return Pool("max", window, stride=2, ceil_mode=True)


def _conv(g: Graph, label: str, x: str, channels: int, kernel: int, *, stride: int = 1, prefix: str = "") -> str:
    """Convolution, batch normalisation and ReLU: <prefix>conv<label>, <prefix>bn<label>, <prefix>relu<label>."""
    conv = Conv(channels, kernel, stride=stride, padding=kernel // 2, bias=False, init="normal:0.01")
    x = conv_norm(g, f"{prefix}conv{label}", f"{prefix}bn{label}", x, conv, BatchNorm(eps=0.001))
    return g.add(f"{prefix}relu{label}", Relu(), x)


def _inception(g: Graph, name: str, x: str, filters: tuple[int, int, int, int, int, int]) -> str:
    """Four branches from `x`, concatenated; the labels end in the branch's number."""
    one, reduce2, two, reduce3, three, projection = filters
    prefix = f"{name}_"
    branches = [
        _conv(g, "1", x, one, 1, prefix=prefix),
        _conv(g, "2", _conv(g, "2_reduce", x, reduce2, 1, prefix=prefix), two, 3, prefix=prefix),
        _conv(g, "3", _conv(g, "3_reduce", x, reduce3, 1, prefix=prefix), three, 3, prefix=prefix),
    ]
    pooled = g.add(f"{name}_pool", Pool("max", 3, stride=1, padding=1, ceil_mode=True), x)
    branches.append(_conv(g, "4", pooled, projection, 1, prefix=prefix))
    return g.add(name, Concat(), branches)
