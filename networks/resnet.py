"""ResNet: He et al. 2015 (arXiv 1512.03385), table 1.

    graph = resnet("resnet50")          # 3x224x224 images, 1000 classes, 25,557,032 parameters

As torchvision's resnets: a bottleneck's stride is on its 3x3 convolution, not on its first 1x1 as in the paper
("v1.5"); a block whose shape changes has a 1x1 convolution with batch normalisation as its shortcut. Convolutions have
no bias and start as He et al. 2015 with std sqrt(2 / fan_out) ("kaiming_fan_out"); fc starts from a normal distribution
of std 0.01 (torchvision: uniform up to 1 / sqrt(fan_in)). With zero_init_residual the last norm of each block starts at
zero, so that blocks begin as identities (Goyal et al. 2017, arXiv 1706.02677).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vdnn.layers.add import Add
from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu
from vdnn.networks.parts import conv_norm, drop, scores

WIDTHS = (64, 128, 256, 512)
"""Filters inside the blocks of each stage."""


@dataclass(frozen=True)
class Depth:
    """Blocks in each stage, and the kernels of a block's convolutions; `expansion` is of the last one's filters."""

    blocks: tuple[int, int, int, int]
    kernels: tuple[int, ...]
    expansion: int


DEPTHS: Mapping[str, Depth] = {
    "resnet18": Depth((2, 2, 2, 2), (3, 3), 1),
    "resnet50": Depth((3, 4, 6, 3), (1, 3, 1), 4),
    "resnet101": Depth((3, 4, 23, 3), (1, 3, 1), 4),
    "resnet152": Depth((3, 8, 36, 3), (1, 3, 1), 4),
}


def resnet(
    name: str,
    *,
    classes: int = 1000,
    image_size: int = 224,
    dropout: float = 0.0,
    label_smoothing: float = 0.0,
    zero_init_residual: bool = False,
) -> Graph:
    """The graph of `name` in DEPTHS; `image_size` in pixels, `dropout` the probability before fc."""
    g = Graph(name, (3, image_size, image_size), classes)
    depth, last = DEPTHS[name], BatchNorm(init="zeros" if zero_init_residual else "ones")
    x = conv_norm(g, "conv1", "bn1", g.input, _conv(64, 7, stride=2), BatchNorm())
    x = g.add("relu1", Relu(), x)
    x = g.add("pool1", Pool("max", 3, stride=2, padding=1), x)
    for stage, (width, blocks) in enumerate(zip(WIDTHS, depth.blocks, strict=True), start=1):
        for i in range(blocks):
            stride = 2 if stage > 1 and i == 0 else 1
            x = _block(g, f"layer{stage}_{i}", x, depth, width, stride, last)
    x = g.add("pool5", Pool("average", "global"), x)
    x = drop(g, "drop5", g.add("flat", Flatten(), x), dropout)
    scores(g, "", x, label_smoothing=label_smoothing)
    return g


def _conv(channels: int, kernel: int, *, stride: int = 1) -> Conv:
    return Conv(channels, kernel, stride=stride, padding=kernel // 2, bias=False, init="kaiming_fan_out")


def _block(g: Graph, name: str, x: str, depth: Depth, width: int, stride: int, last: BatchNorm) -> str:
    """One residual block: its convolutions, the shortcut, their sum and its ReLU."""
    count, out = len(depth.kernels), width * depth.expansion
    strided = depth.kernels.index(3)
    y = x
    for i, kernel in enumerate(depth.kernels, start=1):
        conv = _conv(out if i == count else width, kernel, stride=stride if i == strided + 1 else 1)
        y = conv_norm(g, f"{name}_conv{i}", f"{name}_bn{i}", y, conv, last if i == count else BatchNorm())
        y = g.add(f"{name}_relu{i}", Relu(), y) if i < count else y
    shortcut = x
    if g.shape(x) != g.shape(y):
        names = f"{name}_downsample_conv", f"{name}_downsample_bn"
        shortcut = conv_norm(g, *names, x, _conv(out, 1, stride=stride), BatchNorm())
    return g.add(f"{name}_relu", Relu(), g.add(f"{name}_add", Add(), (y, shortcut)))
