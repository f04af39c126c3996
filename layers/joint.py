"""Small ops of many layers as one op, where their weights are updated together: one launch in place of fifty.

    joint = Joint(together=True)
    joint.add(low, node, "filter.prepare", {"w": "conv1.weight"}, {"y": "conv1.weight.used"})
    joint.finish(low)                  # "filters" reads w0, w1, ..., writes y0, y1, ...

So are the 16-bit copies of filters, at the begin of forward, and the running statistics of all norms, at its end. Each
layer's numbers are computed as by an op of its own, to the same bits. The copies then live from the first op on: 2
bytes a parameter, where one update for all weights lets their gradients wait, 4 bytes each, to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vdnn.layers.op import Op

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering

FILTERS, STATISTICS = "filter.prepare", "batchnorm.update_stats"


@dataclass(slots=True)
class Calls:
    """Calls of one kind: argument X of call number i becomes X<i>, an attribute the list of its values."""

    layer: str = ""
    reads: dict[str, str] = field(default_factory=dict)
    writes: dict[str, str] = field(default_factory=dict)
    attrs: dict[str, list[Any]] = field(default_factory=dict)
    accumulate: tuple[str, ...] = ()
    count: int = 0

    def add(
        self,
        layer: str,
        reads: Mapping[str, str],
        writes: Mapping[str, str],
        attrs: Mapping[str, Any],
        accumulate: tuple[str, ...],
    ) -> None:
        """One call more, told as an op of its own would be."""
        self.reads |= {f"{argument}{self.count}": tensor for argument, tensor in reads.items()}
        self.writes |= {f"{argument}{self.count}": tensor for argument, tensor in writes.items()}
        self.accumulate += tuple(f"{argument}{self.count}" for argument in accumulate)
        for key, value in attrs.items():
            self.attrs.setdefault(key, []).append(value)
        self.layer, self.count = layer, self.count + 1

    def op(self, name: str, kind: str, layer: str) -> Op:
        """All calls as one op of forward."""
        return Op(name, kind, layer, "forward", self.reads, self.writes, self.attrs, self.accumulate)


class Joint:
    """Emits ops at once, or gathers them until forward is complete.

    Args:
        together: whether it gathers.
    """

    def __init__(self, together: bool):
        self._together = together
        self._calls = {FILTERS: Calls(), STATISTICS: Calls()}

    def add(
        self,
        low: Lowering,
        node: Node,
        kind: str,
        reads: Mapping[str, str],
        writes: Mapping[str, str],
        *,
        attrs: Mapping[str, Any] | None = None,
        accumulate: tuple[str, ...] = (),
    ) -> None:
        """An op of `node` of a kind FILTERS or STATISTICS; a filter that is no mere copy is never gathered."""
        copies = kind != FILTERS or (low.tensors[reads["w"]].shape == low.tensors[writes["y"]].shape and not attrs)
        if self._together and copies:
            self._calls[kind].add(node.name, reads, writes, attrs or {}, accumulate)
        else:
            low.emit(node, kind, reads, writes, attrs=attrs, accumulate=accumulate)

    def finish(self, low: Lowering) -> None:
        """Forward is complete: filters come before it, as an op of no layer, statistics after it."""
        filters, statistics = self._calls[FILTERS], self._calls[STATISTICS]
        if filters.count:
            low.ops.insert(0, filters.op("filters", f"{FILTERS}_all", low.graph.input))
        if statistics.count:
            low.ops.append(statistics.op("running_stats", f"{STATISTICS}_all", statistics.layer))
