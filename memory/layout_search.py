"""The quickest layouts where finding a time takes time: from bounds, measuring only what the choice rests on.

    choices, times = search_layouts(graph, bounds, layer_ms, transform_ms)

Bounds are times that nothing can be quicker than. What looks best by bounds is measured, and the search goes on with
what was found; it ends when the best choice is of measured times alone. No other choice can then be quicker.
"""

from __future__ import annotations

from collections.abc import Callable

from vdnn.layers.graph import Graph
from vdnn.memory.decisions import LayoutChoice
from vdnn.memory.layout import LAYOUTS, LayoutTimes, quickest_layouts, step_ms, why

LEAST_GAIN = 0.01
"""Of the step: what a mix of layouts has to gain on the best single one. Less may be noise of measurements."""
LEAST_GAIN_BY_CLOCK = 0.1
"""The same where times are those of a few steps by the clock of a machine that does other things too."""

Layer = tuple[str, str]
Move = tuple[str, str, str]


def search_layouts(
    graph: Graph,
    bounds: LayoutTimes,
    layer_ms: Callable[[str, str], float],
    transform_ms: Callable[[str, str, str], float],
    least_gain: float = LEAST_GAIN,
) -> tuple[dict[str, LayoutChoice], LayoutTimes]:
    """The choice of every layer that makes images, and of graph.input; and the times, measured ones and bounds.

    The best single layout is always among what is compared, and is taken unless a mix gains `least_gain`.

    Args:
        bounds: of every layer in every layout, and of every transform.
        layer_ms: measures a layer in a layout. transform_ms: a tensor, from one layout to another, see LayoutTimes.
    """
    return _decide(graph, _Search(graph, bounds, layer_ms, transform_ms), least_gain)


def _decide(graph: Graph, search: _Search, least_gain: float) -> tuple[dict[str, LayoutChoice], LayoutTimes]:
    single = search.best_single()
    most_ms = (1 - least_gain) * search.sum_ms(single)
    while True:
        times = search.times()
        chosen = {name: choice.layout for name, choice in quickest_layouts(graph, times).items()}
        if len(set(chosen.values())) == 1 or search.sum_ms(chosen) > most_ms:
            return search.single_choices(single, least_gain), times
        if not search.measure(chosen):
            return {name: LayoutChoice(chosen[name], why(graph, name, chosen, times)) for name in chosen}, times


def choose_known(
    graph: Graph, times: LayoutTimes, least_gain: float = LEAST_GAIN
) -> tuple[dict[str, LayoutChoice], LayoutTimes]:
    """`search_layouts` where all times are known."""

    def layer_ms(name: str, layout: str) -> float:
        return times.layers[layout].get(name, 0.0)

    def transform_ms(tensor: str, one: str, two: str) -> float:
        return times.transforms[tensor, one, two]

    return _decide(graph, _Search(graph, times, layer_ms, transform_ms, known=True), least_gain)


def single_layouts(graph: Graph, times: LayoutTimes) -> tuple[str, ...]:
    """Layouts in the order of the time of a network that has them everywhere."""
    names = [name for name in (graph.input, *graph.nodes) if len(graph.shape(name)) == 3]
    sums = {layout: step_ms(graph, dict.fromkeys(names, layout), times) for layout in LAYOUTS}
    return tuple(sorted(LAYOUTS, key=lambda layout: sums[layout]))


class _Search:
    """What is known so far."""

    def __init__(
        self,
        graph: Graph,
        bounds: LayoutTimes,
        layer_ms: Callable[[str, str], float],
        transform_ms: Callable[[str, str, str], float],
        known: bool = False,
    ) -> None:
        self.graph, self._layer_ms, self._transform_ms = graph, layer_ms, transform_ms
        self._given = bounds
        self.names = [name for name in (graph.input, *graph.nodes) if len(graph.shape(name)) == 3]
        every = (graph.input, *graph.nodes)  # some have no ops in some layouts
        self._layers = {layout: {name: bounds.layers[layout].get(name, 0.0) for name in every} for layout in LAYOUTS}
        self._moves = dict(bounds.transforms)
        self._unknown = {part for layout in LAYOUTS for part in self._layer_parts(dict.fromkeys(self.names, layout))}
        self._unmoved = set(self._moves)
        if known:
            self._unknown, self._unmoved = set(), set()

    def times(self) -> LayoutTimes:
        """A copy of all."""
        layers = {layout: dict(found) for layout, found in self._layers.items()}
        known = self._given
        return LayoutTimes(layers, dict(self._moves), frozenset(self._unknown), known.source, known.measured)

    def sum_ms(self, chosen: dict[str, str]) -> float:
        """Of a choice."""
        return step_ms(self.graph, chosen, LayoutTimes(self._layers, self._moves))

    def best_single(self) -> dict[str, str]:
        """The quickest of one layout everywhere; all its times are measured."""
        parts = {layout: self._layer_parts(dict.fromkeys(self.names, layout)) for layout in LAYOUTS}
        while True:
            sums = {layout: sum(self._layers[one][name] for name, one in parts[layout]) for layout in LAYOUTS}
            layout = min(LAYOUTS, key=lambda layout: sums[layout])
            unknown = [part for part in parts[layout] if part in self._unknown]
            if not unknown:
                return dict.fromkeys(self.names, layout)
            # the largest first: what is ruled out is ruled out by few
            self._measure_layer(max(unknown, key=lambda part: self._layers[part[1]][part[0]]))

    def single_choices(self, single: dict[str, str], least_gain: float) -> dict[str, LayoutChoice]:
        """One layout everywhere, with reasons."""
        times, layout = self.times(), single[self.graph.input]
        tail = f"in {layout} as all layers: no mix of layouts gains {least_gain:.0%}"
        return {n: LayoutChoice(layout, f"{why(self.graph, n, single, times, alone=True)}; {tail}") for n in self.names}

    def measure(self, chosen: dict[str, str]) -> bool:
        """Measure what `chosen` takes and is not known; whether there was anything."""
        layers = [part for part in self._layer_parts(chosen) if part in self._unknown]
        moves = [part for part in self._move_parts(chosen) if part in self._unmoved]
        for part in layers:
            self._measure_layer(part)
        for move in moves:
            self._moves[move] = self._transform_ms(*move)
            self._unmoved.discard(move)
        return bool(layers or moves)

    def _measure_layer(self, part: Layer) -> None:
        name, layout = part
        self._layers[layout][name] = self._layer_ms(name, layout)
        self._unknown.discard(part)

    def _layer_parts(self, chosen: dict[str, str]) -> list[Layer]:
        """Layers and their layouts; those that make vectors of images go by what they read."""
        found = [(name, chosen[name]) for name in self.names]
        nodes = self.graph.nodes.values()
        return found + [(n.name, chosen[n.inputs[0]]) for n in nodes if n.name not in chosen and n.inputs[0] in chosen]

    def _move_parts(self, chosen: dict[str, str]) -> list[Move]:
        found: dict[Move, None] = {}
        for name in self.names:
            readers = (reader for reader in self.graph.consumers[name] if reader in chosen)
            found |= {(name, chosen[name], chosen[r]): None for r in readers if chosen[r] != chosen[name]}
        return list(found)
