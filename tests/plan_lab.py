"""Runs plans of real networks on the CPU backend from equal weights, and op by op on plain arrays for comparison.

lab = Lab("lenet", batch=2)
case = lab.case("all", tight=True)
Machine(lab, [case], order=("in", "out", "compute")).run(case, case.plan) == reference(lab, case)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vdnn.layers import Conv, Graph, Program, TensorSpec, Update, lower
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, make_plan, smallest_budget
from vdnn.networks import build
from vdnn.runtime.backends.cpu.backend import CpuBackend
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.executor import Executor
from vdnn.runtime.init import init_parameters
from vdnn.runtime.prepare import backend_costs
from vdnn.runtime.step import new_step

Bytes = NDArray[Any]
GARBAGE = 0xFF
"""Four of them are a NaN."""


class Case(NamedTuple):
    """A plan, the program with algorithms that it is of, and what it is in words."""

    name: str
    program: Program
    plan: Plan


class Outcome(NamedTuple):
    """What the host has read after every step, in order, and the persistent section after the last."""

    fetched: tuple[Bytes, ...]
    kept: Bytes

    def equals(self, other: Outcome) -> bool:
        """Whether every bit is the same."""
        pairs = zip((*self.fetched, self.kept), (*other.fetched, other.kept), strict=True)
        return all(np.array_equal(_words(a), _words(b)) for a, b in pairs)


class Lab:
    """One network with weights and images: of every step in `feeds`, and in `after` those of a step that never comes.

    Args:
        network, options: for `build`; or a graph.
        steps: training steps that a run takes.
        narrow: convolutions have this many times fewer filters; layers and forks stay.
    """

    def __init__(self, network: str | Graph, batch: int, *, steps: int = 1, narrow: int = 1, **options: Any):
        self.graph = narrowed(network if isinstance(network, Graph) else build(network, **options), narrow)
        self.program = lower(self.graph, batch, update=Update(momentum=0.9, weight_decay=5e-4), ahead=True)
        self.costs = backend_costs(CpuBackend(), self.program)
        self.weights = init_parameters(self.graph, seed=1)
        rng = np.random.default_rng(2)
        images = self.program.tensors["images"].shape
        self.feeds = [
            {
                "images": rng.integers(0, 256, images, np.uint8),
                "labels": rng.integers(0, self.graph.classes, batch, np.int32),
                "step": new_step(0.02, 1 / batch, step, seed=3),
            }
            for step in range(steps)
        ]
        self.after = rng.integers(0, 256, images, np.uint8)
        for value in (*(feeds["images"] for feeds in self.feeds), self.after):
            value.setflags(write=False)

    def case(self, policy: str, *, algorithms: str = MEMORY_OPTIMAL, join: str = "reuse", tight: bool = False) -> Case:
        """A plan under `policy`, in as many bytes as it likes or in the fewest."""
        budget = Budget(algorithms=algorithms, join=join)
        if tight:
            # what all with the least workspace needs, and dyn therefore too; else the policy's own least
            own = None if policy == "dyn" else POLICIES[policy](self.program, self.costs, budget)
            budget = replace(budget, device_bytes=smallest_budget(self.program, self.costs, budget, own))
        decisions, plan = make_plan(self.program, self.costs, policy, budget)
        name = f"{self.graph.name} {policy} {algorithms} {join}{' tight' if tight else ''}"
        return Case(name, apply_decisions(self.program, decisions), plan)

    def first_values(self, program: Program) -> dict[str, Bytes]:
        """Every persistent storage before the first step; momentum is at rest."""
        return {
            name: self.weights.get(name, np.zeros(program.tensors[name].shape, program.tensors[name].dtype))
            for name in program.persistent
        }


class Machine:
    """One CPU backend, large enough for `cases`, that forgets everything between runs.

    Args:
        order: streams from the most to the least favoured; threads if None.
    """

    def __init__(self, lab: Lab, cases: Sequence[Case], order: Sequence[str] | None):
        self.lab, self.order = lab, order
        self.backend = CpuBackend(poison=True, order=order)
        sizes = [(c.plan.slab_bytes, c.plan.host_bytes, c.plan.stage_bytes) for c in cases]
        slab_bytes, self.host_bytes, stage_bytes = map(max, zip(*sizes, strict=True))
        self.backend.open(slab_bytes, self.host_bytes, stage_bytes)
        self.slab = self._range(slab_bytes)
        self._first: dict[tuple[str, ...], Bytes] = {}

    def run(self, case: Case, plan: Plan) -> Outcome:
        """`plan`, which is that of `case` or one like it, from the first weights; raises what the backend raises."""
        self._start(case)
        executor = Executor(self.backend, plan, case.program)
        fetched: list[Bytes] = []
        try:
            following = [*(feeds["images"] for feeds in self.lab.feeds[1:]), self.lab.after]
            for feeds, images in zip(self.lab.feeds, following, strict=True):
                found = executor.run(feeds, {"images": images})
                fetched.extend(found[name] for name in case.program.fetches)
        except Exception:
            self._drain()
            raise
        return Outcome(tuple(fetched), self.slab[: case.plan.persistent_bytes])

    def close(self) -> None:
        """Give the memory back."""
        self.backend.close()

    def _start(self, case: Case) -> None:
        """Garbage everywhere but in the persistent section, so that nothing is right by what an earlier run left."""
        end = case.plan.persistent_bytes
        self.slab[end:] = GARBAGE
        rest = len(self.slab) - end
        for start in range(0, self.host_bytes, rest):
            self.backend.copy_out(end, start, min(rest, self.host_bytes - start), "out")
        self.backend.sync()
        if case.program.persistent not in self._first:
            self._first[case.program.persistent] = layout(case, self.lab.first_values(case.program))
        self.slab[:end] = self._first[case.program.persistent]
        self.backend.held.forget(case.program.ahead)

    def _drain(self) -> None:
        try:
            self.backend.sync()  # what was queued before the error would else run first in the next run
        except Exception:
            return

    def _range(self, nbytes: int) -> Bytes:
        spec = TensorSpec("slab", "aux", (nbytes,), "uint8")
        return self.backend.view(spec, spec, 0)


def narrowed(graph: Graph, divisor: int) -> Graph:
    """`graph` with 1 / `divisor` of the filters in every convolution."""
    result = Graph(graph.name, graph.input_shape, graph.classes)
    for node in graph.nodes.values():
        layer = node.layer
        if isinstance(layer, Conv):
            layer = replace(layer, channels=layer.channels // divisor)
        result.add(node.name, layer, node.inputs)
    return result


def reference(lab: Lab, case: Case) -> Outcome:
    """What `case` must give: the ops in program order, every storage in an array of its own."""
    program = case.program
    storages = {n: np.full(s.nbytes, GARBAGE, np.uint8) for n, s in program.tensors.items() if s.view_of is None}
    for name, value in lab.first_values(program).items():
        storages[name][...] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    values = {name: _array(spec, program.tensors[spec.storage], storages) for name, spec in program.tensors.items()}
    fetched: list[Bytes] = []
    for feeds in lab.feeds:
        for name in program.feeds:
            values[name][...] = feeds[name]
        for op in program.ops:
            KERNELS[op.kind](op, **{argument: values[t] for argument, t in {**op.reads, **op.writes}.items()})
        fetched.extend(values[name].copy() for name in program.fetches)
    for name in program.ahead:
        values[name][...] = lab.after
    return Outcome(tuple(fetched), layout(case, {name: storages[name] for name in program.persistent}))


def layout(case: Case, values: Mapping[str, Bytes]) -> Bytes:
    """The persistent section with `values` in their places and 0 between them."""
    section = np.zeros(case.plan.persistent_bytes, np.uint8)
    for name, value in values.items():
        offset = case.plan.persistent[name]
        section[offset : offset + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return section


def _array(spec: TensorSpec, root: TensorSpec, storages: Mapping[str, Bytes]) -> Bytes:
    whole = storages[root.name].view(spec.dtype)
    if spec.nbytes == root.nbytes:
        return whole.reshape(spec.shape)
    images = whole.reshape(root.shape)[spec.image : spec.image + spec.shape[0]]
    return images[:, spec.channel : spec.channel + spec.shape[1]]


def _words(array: Bytes) -> Bytes:
    """The bits as whole numbers, eight bytes at a time where that is possible."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat
