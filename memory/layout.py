"""Which layout each layer gets: by the study's rule, or so that the time of layers and transforms is least.

    choices = study_layouts(graph, batch=128, rule=Rule(channels=32, images=128))
    choices = quickest_layouts(graph, times)       # times: LayoutTimes, in ms
    choices["conv1"].layout, choices["conv1"].reason      # "CHWN", "C = 3 < 32"

Li, Yang, Feng, Chakradhar and Zhou, "Optimizing Memory Efficiency for Deep Convolutional Neural Networks on GPUs"
(SC 2016) give a convolution CHWN where it has few channels or many images, else NCHW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from vdnn.layers.conv import Conv
from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import MEMORY_ORDERS, TensorSpec
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import LayoutChoice
from vdnn.memory.least import MOST_JOINED, Factor, least

LAYOUTS = tuple(MEMORY_ORDERS)
"""In order of preference where times are equal."""


@dataclass(frozen=True, slots=True)
class Rule:
    """CHWN where C < `channels` or N >= `images`, else NCHW; `source` says where these numbers are from."""

    channels: int = 32
    images: int = 128
    source: str = "the study's for a GTX Titan Black, as recalled"

    def __str__(self) -> str:
        return f"CHWN if C < {self.channels} or N >= {self.images}, else NCHW; thresholds: {self.source}"


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """What a choice is made by, in ms of a whole step.

    Args:
        layers: by layout, the time of each layer in a network that has this layout everywhere.
        transforms: of a tensor from one layout to another, gradient included: by (tensor, from, to).
        bounds: (layer, layout) whose time is none that was found, but one that it cannot be below.
        source: where the times are from, in words. measured: whether they are of the machine, no estimates.
    """

    layers: Mapping[str, Mapping[str, float]]
    transforms: Mapping[tuple[str, str, str], float]
    bounds: frozenset[tuple[str, str]] = frozenset()
    source: str = ""
    measured: bool = True


def study_layouts(graph: Graph, batch: int, rule: Rule) -> dict[str, LayoutChoice]:
    """The choice of every layer that makes images, and of graph.input, by `rule`.

    Convolutions are what it speaks of; what lies between has the layout of its first input, the images that of their
    first reader.
    """
    found: dict[str, LayoutChoice] = {}
    for node in graph.nodes.values():
        if len(node.shape) != 3:
            continue
        first = node.inputs[0]
        if isinstance(node.layer, Conv):
            found[node.name] = _by_rule(graph.shape(first)[0], batch, rule)
        elif first in found:
            found[node.name] = LayoutChoice(found[first].layout, f"as {first}, which it reads")
        else:
            found[node.name] = LayoutChoice("NCHW", "reads the images and is no convolution")
    reader = next(iter(graph.consumers[graph.input]))
    layout = found[reader].layout if reader in found else "NCHW"
    return {graph.input: LayoutChoice(layout, f"as {reader}, which reads it"), **found}


def _by_rule(channels: int, batch: int, rule: Rule) -> LayoutChoice:
    if channels < rule.channels:
        return LayoutChoice("CHWN", f"C = {channels} < {rule.channels}")
    if batch >= rule.images:
        return LayoutChoice("CHWN", f"N = {batch} >= {rule.images}")
    return LayoutChoice("NCHW", f"C = {channels} >= {rule.channels} and N = {batch} < {rule.images}")


def quickest_layouts(graph: Graph, times: LayoutTimes) -> dict[str, LayoutChoice]:
    """The choice of every layer that makes images, and of graph.input, with the least sum of all times.

    The sum counts each transform of a tensor to a layout once. It is the least there is, forks and joins included,
    unless a tensor has so many readers that `least` has to guess (see vdnn.memory.least).
    """
    names = [graph.input, *(node.name for node in graph.nodes.values() if len(node.shape) == 3)]
    chosen = least(names, LAYOUTS, _factors(graph, names, times))
    return {name: LayoutChoice(chosen[name], why(graph, name, chosen, times)) for name in names}


def step_ms(graph: Graph, chosen: Mapping[str, str], times: LayoutTimes) -> float:
    """The sum of times with these layouts of graph.input and of every layer that makes images."""
    names = [name for name in (graph.input, *graph.nodes) if len(graph.shape(name)) == 3]
    factors = _factors(graph, names, times)
    return sum(factor.costs[tuple(chosen[name] for name in factor.scope)] for factor in factors)


def _factors(graph: Graph, names: Sequence[str], times: LayoutTimes) -> list[Factor]:
    """What each layer costs by its own layout, and what its transforms cost by those of its readers too."""
    own = {name: dict.fromkeys(LAYOUTS, 0.0) for name in names}
    for layout in LAYOUTS:
        for name in names:
            own[name][layout] += times.layers[layout].get(name, 0.0)
        for node in graph.nodes.values():
            if node.name not in own and node.inputs[0] in own:  # makes vectors: its time goes by what it reads
                own[node.inputs[0]][layout] += times.layers[layout].get(node.name, 0.0)
    factors = [Factor((name,), {(layout,): own[name][layout] for layout in LAYOUTS}) for name in names]
    for name in names:
        readers = tuple(r for r in graph.consumers[name] if r in own)
        # so many readers that a table of all their layouts is out of reach count their transforms each for itself
        groups = [readers] if len(readers) < MOST_JOINED else [(reader,) for reader in readers]
        factors += [_moves(name, group, times) for group in groups if group]
    return factors


def _moves(name: str, readers: tuple[str, ...], times: LayoutTimes) -> Factor:
    """What the transforms of one tensor cost, one to each layout that some reader asks for."""
    costs = {}
    for layouts in product(LAYOUTS, repeat=len(readers) + 1):
        moved = dict.fromkeys(to for to in layouts[1:] if to != layouts[0])
        costs[layouts] = sum(times.transforms[name, layouts[0], to] for to in moved)
    return Factor((name, *readers), costs)


def why(graph: Graph, name: str, chosen: Mapping[str, str], times: LayoutTimes, alone: bool = False) -> str:
    """The reason for the layout of a layer, in words; with `alone` its own times only, without its neighbours."""
    own = {layout: times.layers[layout].get(name, 0.0) for layout in LAYOUTS}
    layout = chosen[name]
    least_of = {other: "at least " if (name, other) in times.bounds else "" for other in LAYOUTS}
    words = ", ".join(f"{least_of[other]}{own[other]:.3f} in {other}" for other in LAYOUTS if other != layout)
    best = min(own.values())
    if best == max(own.values()):
        return "the same time in every layout" if times.measured else "not measured; the same estimate in every layout"
    if own[layout] <= best or alone:
        return f"{own[layout]:.3f} ms; {words}"
    node = graph.nodes.get(name)
    beside = [t for t in (*(node.inputs if node is not None else ()), *graph.consumers[name]) if t in chosen]
    same = [t for t in beside if chosen[t] == layout]
    return f"{own[layout]:.3f} ms; {words}, but {' and '.join(same[:2]) or 'a neighbour'} would need transforms"


def layer_times(program: Program, costs: CostTable) -> dict[str, float]:
    """ms of each layer of a program, by the fastest candidate of every op."""
    found: dict[str, float] = {}
    for op in program.ops:
        found[op.layer] = found.get(op.layer, 0.0) + costs.fastest(op.name).time_ms
    return found


def transform_program(graph: Graph, batch: int, mode: str, dtype: str) -> Program:
    """Every transform that a choice may ask for as an op "TENSOR.FROM.TO", for a CostTable; it is never run.

    That of the gradient goes the way back, from TO to FROM, and is named so.
    """
    tensors: dict[str, TensorSpec] = {}
    ops = []
    for name in (graph.input, *graph.nodes):
        shape = graph.shape(name)
        if len(shape) != 3:
            continue
        for layout in LAYOUTS:
            label = f"{name}.{layout}"
            tensors[label] = TensorSpec(label, "act", (batch, *shape), dtype, layout)
        for one, two in product(LAYOUTS, repeat=2):
            if one != two:
                arguments = {"x": f"{name}.{one}"}, {"y": f"{name}.{two}"}
                ops.append(Op(f"{name}.{one}.{two}", "layout.transform", name, "forward", *arguments))
    return Program(graph.name, batch, mode, tensors, tuple(ops), (), (), (), "", "")


def transform_times(graph: Graph, program: Program, costs: CostTable) -> dict[tuple[str, str, str], float]:
    """`LayoutTimes.transforms`: of the images in forward only, of all else back in training too."""
    found = {}
    for op in program.ops:
        name, one, two = op.name.split(".")
        there, back = (costs.fastest(f"{name}.{a}.{b}").time_ms for a, b in ((one, two), (two, one)))
        found[name, one, two] = there + (back if name != graph.input and program.mode != "eval" else 0.0)
    return found
