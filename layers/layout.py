"""What a network in another layout than NCHW needs besides: vectors are made of images in logical order.

graph = with_layout(graph, "NHWC")      # the same network; its Flatten layers know where numbers must be moved
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from vdnn.layers.base import Layer
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph


def with_layout(graph: Graph, layout: str) -> Graph:
    """`graph` in which every Flatten of images of more than one pixel `reorders`, but for NCHW."""
    changed: dict[str, Layer] = {}
    for node in graph.nodes.values():
        if layout != "NCHW" and isinstance(node.layer, Flatten):
            shape = graph.shape(node.inputs[0])
            if len(shape) == 3 and prod(shape[1:]) > 1:
                changed[node.name] = replace(node.layer, reorders=True)
    return graph.with_layers(changed)
