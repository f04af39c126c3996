"""Which maximum pools write down where their winners lie, and which ReLUs leave their mask to the pool above them.

    graph = with_winners(graph)      # the same network; its layers know what backward need not read again

A pool that knows its winners reads neither x nor y in backward. A ReLU that only such a pool reads, itself or through
concatenations of ReLUs, needs no backward op: the winner of a window is the pool's y, so y > 0 says for each pixel that
gets a gradient whether the ReLU had passed it. Then the whole x of the pool is free once forward has read it.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.layers.base import Layer
from vdnn.layers.concat import Concat
from vdnn.layers.graph import Graph
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu


def with_winners(graph: Graph) -> Graph:
    """`graph` in which each maximum pool of few enough pixels a window has `winners`, and `masks` where it may."""
    changed: dict[str, Layer] = {}
    for node in graph.nodes.values():
        layer, x = node.layer, node.inputs[0]
        if isinstance(layer, Pool) and layer.can_index_winners(graph.shape(x)):
            relus = _relus_below(graph, x)
            changed[node.name] = replace(layer, winners=True, masks=bool(relus))
            changed |= {name: Relu(masked_above=True) for name in relus}
    return graph.with_layers(changed)


def _relus_below(graph: Graph, tensor: str) -> tuple[str, ...]:
    """The ReLUs whose outputs together are `tensor`, if nothing else reads any of them; none if there is more to it.

    What a ReLU reads must have no other reader either: sums of gradients would be taken in another order.
    """
    if tensor == graph.input or len(graph.consumers[tensor]) != 1:
        return ()
    node = graph.nodes[tensor]
    if isinstance(node.layer, Relu):
        below = node.inputs[0]
        return (tensor,) if below != graph.input and len(graph.consumers[below]) == 1 else ()
    if isinstance(node.layer, Concat) and len(set(node.inputs)) == len(node.inputs):
        branches = [_relus_below(graph, x) for x in node.inputs]
        return tuple(name for branch in branches for name in branch) if all(branches) else ()
    return ()
