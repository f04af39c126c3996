"""Bytes of a layer-wise plan as the vDNN paper counts them (MICRO'16, figures 4 and 11).

    counted = paper_count(plan, program)
    counted.peak.nbytes + counted.weights_bytes, counted.average_bytes

A pass is one layer forward or backward. It holds every map that it or a later pass still reads, its own maps until it
ends, and the workspace of one kernel at a time; beside it lie the weights of all convolutions. What belongs to the
classifier is left out, and layers that work in place are no passes of their own.

The paper does not say how maps on their way back and workspaces enter its bars. Two rules make figure 11 come out. For
the maximum a fetched map counts from the pass that fetches it if that is a convolution's, from the next one otherwise:
all(m) of VGG-16 (64) would be 2,820 MiB if pools counted what they fetch; it is 2,451. For the average it counts from
its use on, and a workspace by the share of the pass's kernels that have it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from vdnn.layers.op import Program
from vdnn.memory.passes import is_workspace
from vdnn.memory.plan import Alloc, CopyIn, Free, Launch, Plan
from vdnn.memory.prefetch import layer_passes

PHASES = (("forward",), ("backward", "update"))
IN_PLACE = ("input", "relu", "copy")
"""Kinds without a pass of their own: they work within the pass of the layer before or after."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One layer in one direction: bytes of feature maps, of gradient maps and of workspace when it holds most.

    `settled` are its bytes in the average.
    """

    layer: str
    forward: bool
    feature_maps: int
    gradient_maps: int
    workspace: int
    settled: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.feature_maps + self.gradient_maps + self.workspace


@dataclass(frozen=True, slots=True)
class PaperCount:
    """The passes of all layers.

    Args:
        features: layers before the classifier that have passes. weights_bytes: of convolutions.
        live: bytes of maps during each op, without weights and workspace.
    """

    passes: tuple[Pass, ...]
    features: frozenset[str]
    weights_bytes: int
    live: Mapping[str, int]

    @property
    def counted(self) -> list[Pass]:
        """Passes of feature extraction."""
        return [each for each in self.passes if each.layer in self.features]

    @property
    def peak(self) -> Pass:
        """The pass that holds most."""
        return max(self.counted or self.passes, key=lambda each: each.nbytes)

    @property
    def average_bytes(self) -> int:
        """Unweighted mean over passes, weights included."""
        counted = self.counted or self.passes
        return sum(each.settled for each in counted) // len(counted) + self.weights_bytes

    def categories(self) -> dict[str, int]:
        """Bytes at the peak by category of a report."""
        peak = self.peak
        return {
            "weights": self.weights_bytes,
            "feature_maps": peak.feature_maps,
            "gradient_maps": peak.gradient_maps,
            "workspace": peak.workspace,
            "other": 0,
        }

    def layer_bytes(self) -> Mapping[tuple[str, bool], int]:
        """Most bytes of a layer's pass, weights included, by its name and whether it is the forward one."""
        found: dict[tuple[str, bool], int] = {}
        for each in self.passes:
            key = each.layer, each.forward
            found[key] = max(found.get(key, 0), each.nbytes + self.weights_bytes)
        return found


def feature_layers(program: Program) -> frozenset[str]:
    """Names of the layers before the first fully connected one."""
    names: set[str] = set()
    for op in program.ops:
        if op.kind.startswith("linear."):
            break
        names.add(op.layer)
    return frozenset(names)


def paper_count(plan: Plan, program: Program) -> PaperCount:
    """Count a layer-wise `plan` of `program` (with algorithms)."""
    launched = {step.op: i for i, step in enumerate(plan.steps) if isinstance(step, Launch)}
    kinds = {op.layer: op.kind.split(".")[0] for op in reversed(program.ops) if op.phase == "forward"}
    passes = [each for phases in PHASES for each in layer_passes(program, phases)]
    ends = [max(launched[op.name] for op in program.ops[start:end]) for _, start, end in passes]
    held = {"act": [0] * (len(plan.steps) + 2), "grad": [0] * (len(plan.steps) + 2)}
    waiting = [0] * (len(plan.steps) + 2)
    for storage, nbytes, first, used, last in _stays(plan, program):
        role = program.tensors[storage].role
        if role not in held:
            continue
        number = bisect_left(ends, first)
        if first != used and kinds.get(passes[number][0]) != "conv":
            first = min(used, ends[number] + 1)
        held[role][first] += nbytes
        held[role][ends[bisect_left(ends, last)] + 1] -= nbytes
        waiting[first] += nbytes
        waiting[used] -= nbytes
    act, grad, early = (list(accumulate(changes)) for changes in (held["act"], held["grad"], waiting))
    found = []
    for layer, start, end in passes:
        ops = [op for op in program.ops[start:end] if op.phase != "update"] or program.ops[start:end]
        scratch = [sum(program.tensors[t].nbytes for t in op.writes.values() if is_workspace(program, t)) for op in ops]
        moments = [(launched[op.name], nbytes) for op, nbytes in zip(ops, scratch, strict=True)]
        at, nbytes = max(moments, key=lambda moment: act[moment[0]] + grad[moment[0]] + moment[1])
        settled = max(act[i] + grad[i] - early[i] for i, _ in moments) + sum(scratch) // len(scratch)
        found.append(Pass(layer, ops[0].phase == "forward", act[at], grad[at], nbytes, settled))
    features = frozenset(name for name in feature_layers(program) if kinds.get(name) not in IN_PLACE)
    weights = sum(program.tensors[op.reads["w"]].nbytes for op in program.ops if op.kind == "conv.forward")
    live = {op: act[at] + grad[at] for op, at in launched.items()}
    return PaperCount(tuple(found), features, weights, live)


def _stays(plan: Plan, program: Program) -> Iterator[tuple[str, int, int, int, int]]:
    """Storage, bytes, and first step, first kernel and last kernel of every residency that a kernel uses."""
    ops = {op.name: op for op in program.ops}
    opened: dict[str, tuple[int, list[int], list[int]]] = {}  # storage → bytes, copies in, kernels
    for i, step in enumerate(plan.steps):
        match step:
            case Alloc():
                opened[step.storage] = (step.nbytes, [], [])
            case CopyIn():
                opened[step.storage][1].append(i)
            case Launch():
                op = ops[step.op]
                for storage in {program.storage(t) for t in (*op.reads.values(), *op.writes.values())} & opened.keys():
                    opened[storage][2].append(i)
            case Free():
                nbytes, copies, kernels = opened.pop(step.storage)
                if kernels:
                    yield step.storage, nbytes, (*copies, *kernels)[0], kernels[0], kernels[-1]
            case _:
                pass
