"""What a network becomes before it is lowered: layers that apply others, and pools that know their winners.

graph = rewritten(graph, "train", pool_indices=True, fuse=True)
"""

from __future__ import annotations

from vdnn.layers.fuse import with_fusion
from vdnn.layers.graph import Graph
from vdnn.layers.winners import with_winners


def rewritten(graph: Graph, mode: str, *, pool_indices: bool, fuse: bool) -> Graph:
    """The layers that emit the ops of vdnn.layers.lower.lower with these options, but for those that move images."""
    if pool_indices and mode != "eval":
        graph = with_winners(graph)
    return with_fusion(graph) if fuse else graph
