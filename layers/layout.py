"""The layout of every layer: where neighbours differ images are moved, and vectors are made in logical order.

    graph, layouts = with_layouts(graph, "NCHW", {"conv1": "CHWN", "pool1": "CHWN"})
    layouts["conv1"], graph.nodes["pool1_to_nchw"].layer      # "CHWN", Transform("NCHW")

A layer that nothing is said of has the layout of its first input, the images that of their first reader. A tensor is
moved to a layout at most once, however many layers read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from vdnn.layers.base import Layer
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph, Node
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.layers.transform import Transform


def with_layouts(graph: Graph, default: str, chosen: Mapping[str, str]) -> tuple[Graph, dict[str, str]]:
    """`graph` with the Transform layers that it needs, and the layout of its input and of every layer.

    Args:
        default: of layers above nothing that is chosen.
        chosen: by layer, or by graph.input for the normalised images.

    ValueError if a layout is unknown. Vectors have no layout; what is said of layers that make them means nothing.
    """
    for name, layout in chosen.items():
        if layout not in MEMORY_ORDERS:
            raise ValueError(f"layer '{name}': unknown layout '{layout}', expected one of {', '.join(MEMORY_ORDERS)}")
    made = Graph(graph.name, graph.input_shape, graph.classes)
    layouts = {graph.input: _of_images(graph, default, chosen)}
    for node in graph.nodes.values():
        layout = chosen.get(node.name, layouts[node.inputs[0]])
        layer, inputs = node.layer, node.inputs
        if isinstance(layer, Flatten):
            layout = layouts[node.inputs[0]]
            layer = _flatten(layer, graph, node, layout)
        else:
            inputs = tuple(_moved(made, layouts, tensor, layout) for tensor in node.inputs)
        made.add(node.name, layer, inputs)
        layouts[node.name] = layout
    return made, layouts


def _of_images(graph: Graph, default: str, chosen: Mapping[str, str]) -> str:
    readers = graph.consumers[graph.input]
    return chosen.get(graph.input, chosen.get(readers[0], default) if readers else default)


def _flatten(layer: Flatten, graph: Graph, node: Node, layout: str) -> Layer:
    """The layer, which `reorders` unless its numbers lie as those of vectors do.

    In NCHW they always do, in NHWC those of a single pixel, in CHWN none.
    """
    shape = graph.shape(node.inputs[0])
    lies = len(shape) != 3 or layout == "NCHW" or (layout == "NHWC" and prod(shape[1:]) == 1)
    return layer if lies else replace(layer, reorders=True)


def _moved(made: Graph, layouts: dict[str, str], tensor: str, layout: str) -> str:
    """The tensor that holds `tensor` in `layout`, with a Transform where it is the first to ask for that."""
    if len(made.shape(tensor)) != 3 or layouts[tensor] == layout:
        return tensor
    name = f"{tensor}_to_{layout.lower()}"
    if name not in made.nodes:
        made.add(name, Transform(layout), tensor)
        layouts[name] = layout
    return name
