"""When offloaded storages come back: vDNN's search window, bounded in bytes.

    issue = prefetch_points(program, offloaded(uses, names), bound_bytes=None, room=room)
    issue["conv3"]    # index of the op before which its copy-in starts

The window (MICRO'16, section III-B): as the backward pass of a layer starts, the layers before it are searched
backwards for one whose input is offloaded and not yet on its way; the search ends behind the nearest convolution, so
that data does not lie idle long before its use. Beyond the paper, a prefetch waits while more than `bound_bytes` lie
fetched and unused, or while it would not fit beside what is live until its use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from vdnn.layers.op import Program
from vdnn.memory.liveness import Offloaded


def layer_passes(program: Program, phases: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """(layer, first op, end op) of every run of consecutive ops of one layer within `phases`."""
    passes: list[tuple[str, int, int]] = []
    for i, op in enumerate(program.ops):
        if op.phase not in phases:
            continue
        if passes and passes[-1][0] == op.layer and passes[-1][2] == i:
            passes[-1] = (op.layer, passes[-1][1], i + 1)
        else:
            passes.append((op.layer, i, i + 1))
    return passes


def prefetch_points(
    program: Program,
    away: Sequence[Offloaded],
    bound_bytes: int | None,
    room: Callable[[str, int, int], bool],
) -> dict[str, int]:
    """Op index before which each offloaded storage's copy-in is issued; its first backward reader at the latest.

    Args:
        bound_bytes: most bytes fetched and not yet used when another prefetch starts; None: the largest storage.
        room: room(storage, first, last) says whether it fits beside what is live from op `first` to op `last`, and
            if so takes that place.
    """
    stays = {stay.storage: stay for stay in away}
    if bound_bytes is None:
        bound_bytes = max((stay.nbytes for stay in away), default=0)
    layers, inputs = _layer_inputs(program, set(stays))
    position = {layer: i for i, (layer, _) in enumerate(layers)}
    points: dict[str, int] = {}
    unused: dict[str, int] = {}  # fetched, with the op that will use it
    waiting = iter(sorted(away, key=attrgetter("backward_first")))
    due = next(waiting, None)
    for layer, start, end in layer_passes(program, ("backward", "update")):
        unused = {name: op for name, op in unused.items() if op >= start}
        found = _search(layers, inputs, position.get(layer, 0), points)
        if found is not None:
            use = stays[found].backward_first
            fetched = sum(stays[name].nbytes for name in unused)
            small_enough = fetched + stays[found].nbytes <= bound_bytes
            if use >= end and small_enough and room(found, start, use):
                points[found] = start
                unused[found] = use
        while due is not None and due.backward_first < end:
            points.setdefault(due.storage, due.backward_first)
            due = next(waiting, None)
    return points


def _layer_inputs(program: Program, away: set[str]) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Layers with their kind in forward order, and the offloaded storages that each reads in forward."""
    layers: list[tuple[str, str]] = []
    inputs: dict[str, list[str]] = {}
    for layer, start, end in layer_passes(program, ("forward",)):
        ops = program.ops[start:end]
        layers.append((layer, ops[-1].kind.split(".")[0]))  # what comes before it prepares its operands
        read = (program.storage(tensor) for op in ops for tensor in op.reads.values())
        inputs.setdefault(layer, []).extend(name for name in dict.fromkeys(read) if name in away)
    return layers, inputs


def _search(
    layers: list[tuple[str, str]], inputs: Mapping[str, list[str]], current: int, fetched: Mapping[str, int]
) -> str | None:
    for layer, kind in reversed(layers[:current]):
        for name in inputs[layer]:
            if name not in fetched:
                return name
        if kind == "conv":
            return None
    return None
