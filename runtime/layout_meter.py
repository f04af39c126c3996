"""What layers and transforms take on a machine that measures every op: bounds at first, times when they are asked for.

    meter = LayoutMeter(programs, transforms, costs_of)
    choices, times = search_layouts(graph, bounds(programs, transforms, caps), meter.layer_ms, meter.transform_ms)

A bound is the time that the bytes of an op take at least, or the products of a convolution in CHWN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from vdnn.errors import VdnnError
from vdnn.layers.op import Op, Program
from vdnn.memory.costs import CostTable
from vdnn.memory.layout import LayoutTimes
from vdnn.runtime.backend import Caps

CACHED_BYTES = 32 * 2**20
"""Operands of fewer bytes may come from the cache."""
CACHE_SPEED = 4.0
"""How many times as fast as memory they then come, at most: an allowance, not measured."""
TENSOR_SPEED = 8.0
"""How many times as fast as fp32 tensor cores multiply TF32, as vdnn's own convolutions do in the other precisions too:
495 against 67 TFLOP/s by the data sheet of an H100 or H200, 156 against 19.5 of an A100."""


@dataclass(frozen=True, slots=True)
class LayoutMeter:
    """Measures a layer or a transform at a time.

    Args:
        programs: of the network, by layout. transforms: as vdnn.memory.layout.transform_program makes it.
        costs_of: the CostTable of a program, for which its ops are measured where that has not been done.
    """

    programs: Mapping[str, Program]
    transforms: Program
    costs_of: Callable[[Program], CostTable]

    def layer_ms(self, layer: str, layout: str) -> float:
        """All ops of a layer in a layout; infinite where it cannot be computed so."""
        program = self.programs[layout]
        return self._ms(program, tuple(op for op in program.ops if op.layer == layer))

    def transform_ms(self, tensor: str, one: str, two: str) -> float:
        """Of a tensor from one layout to another, and of its gradient back."""
        found = {op.name: op for op in self.transforms.ops}
        names = transform_names(self.transforms, tensor, one, two)
        return sum(self._ms(self.transforms, (found[name],)) for name in names)

    def _ms(self, program: Program, ops: tuple[Op, ...]) -> float:
        try:
            costs = self.costs_of(replace(program, ops=ops))
        except VdnnError:  # this layout has no algorithm for it; another has, or planning will say what is missing
            return inf
        return sum(costs.fastest(op.name).time_ms for op in ops)


def bounds(programs: Mapping[str, Program], transforms: Program, caps: Caps) -> LayoutTimes:
    """For every layer and transform a time that it cannot be below on a machine with these peak rates."""
    layers: dict[str, dict[str, float]] = {}
    for layout, program in programs.items():
        found: dict[str, float] = {}
        for op in program.ops:
            found[op.layer] = found.get(op.layer, 0.0) + bound_ms(op, program, caps)
        layers[layout] = found
    own = {op.name: bound_ms(op, transforms, caps) for op in transforms.ops}
    moves = {}
    for name in own:
        tensor, one, two = name.split(".")
        moves[tensor, one, two] = sum(own[move] for move in transform_names(transforms, tensor, one, two))
    return LayoutTimes(layers, moves)


def transform_names(transforms: Program, tensor: str, one: str, two: str) -> tuple[str, ...]:
    """The ops that a change of layout takes: there in forward, and in training back, but for the images."""
    there, back = f"{tensor}.{one}.{two}", f"{tensor}.{two}.{one}"
    return (there,) if transforms.mode == "eval" or tensor == transforms.ops[0].layer else (there, back)


def bound_ms(op: Op, program: Program, caps: Caps) -> float:
    """Of one op: 0 where a peak rate is not known."""
    specs = [program.tensors[name] for name in dict.fromkeys((*op.reads.values(), *op.writes.values()))]
    nbytes = sum(spec.nbytes for spec in specs)
    gbps = caps.memory_gbps * (CACHE_SPEED if nbytes < CACHED_BYTES else 1.0)
    found = nbytes / gbps / 1e6 if gbps else 0.0
    if op.kind in OUTPUTS and caps.fp32_gflops:
        w, y = (program.tensors[{**op.reads, **op.writes}[name]] for name in OUTPUTS[op.kind])
        if w.layout == "CHWN":
            gflops = caps.fp32_gflops * (1.0 if caps.precision == "fp32" else TENSOR_SPEED)
            return max(found, 2e-6 * prod(y.shape) * prod(w.shape[1:]) / gflops)
    return found


OUTPUTS: Mapping[str, tuple[str, str]] = {
    "conv.forward": ("w", "y"),
    "conv.dgrad": ("w", "dy"),
    "conv.wgrad": ("dw", "dy"),
}
"""Kind → the arguments whose sizes say how many products there are."""
