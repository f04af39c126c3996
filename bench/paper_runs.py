"""Every case of the vDNN paper (MICRO'16, arXiv 1602.08124), planned and timed on a machine that a profile describes.

    run = run_case(Case("vgg19", 256, "all", MEMORY_OPTIMAL, "layer"), load_profile("titan-x-maxwell"))
    run.peak_bytes, run.average_bytes, run.offloaded_bytes, run.feature_ms

Bytes are counted as the paper counts them, times are the clock's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from vdnn.bench.paper_search import paper_dyn
from vdnn.layers.graph import Graph
from vdnn.layers.lower import lower
from vdnn.layers.op import Op, Program
from vdnn.memory.clock import Timing, simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.paper_count import feature_layers
from vdnn.memory.passes import WORKSPACE, apply_decisions
from vdnn.memory.plan import CopyOut, Launch, Plan
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import PERFORMANCE_OPTIMAL, Budget, make_plan
from vdnn.memory.report import make_report
from vdnn.networks import build
from vdnn.runtime.profile import Profile, model_costs

NETWORKS: Mapping[str, tuple[str, int]] = {
    "AlexNet (128)": ("alexnet", 128),
    "OverFeat (128)": ("overfeat", 128),
    "GoogLeNet (128)": ("googlenet", 128),
    "VGG-16 (64)": ("vgg19", 64),
    "VGG-16 (128)": ("vgg19", 128),
    "VGG-16 (256)": ("vgg19", 256),
    "VGG-116 (32)": ("vgg116", 32),
    "VGG-216 (32)": ("vgg216", 32),
    "VGG-316 (32)": ("vgg316", 32),
    "VGG-416 (32)": ("vgg416", 32),
}
"""The paper's name of each network → ours and its batch size. Its VGG-16 has 16 convolutions, as our vgg19 has."""
UNBOUNDED = 1 << 60
"""Bytes: prefetches as the paper's search finds them, however much is fetched and unused."""
BASE_WORKSPACE = 0.5
"""Largest workspace in base(p), as a share of the device. The paper's figures disagree here: the peaks of all(p) and
conv(p) of VGG-16 (256) need the 9,888 MiB of an FFT in conv2_2's filter gradient, but base(p) has at most 5,012 MiB."""
NORMALIZE = "input.normalize"


@dataclass(frozen=True, slots=True)
class Case:
    """A bar of the paper.

    Args:
        network, batch: as in `vdnn.networks`.
        policy: "base", "all", "conv", "dyn", or "oracle": the fastest algorithms and no limit.
        algorithms: "memory-optimal" or "performance-optimal".
        join: "layer": copies and computation meet at the end of each layer, as in the paper; "reuse": only for data
            or bytes, and dyn is this program's own.
    """

    network: str
    batch: int
    policy: str
    algorithms: str = PERFORMANCE_OPTIMAL
    join: str = "layer"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """One layer of a run: times of its kernels in ms, bytes of its inputs, output, forward workspace and weights.

    `reuse_distance_ms` is the time from the end of its forward pass to the start of its backward pass.
    """

    name: str
    kind: str
    forward_ms: float
    backward_ms: float
    reuse_distance_ms: float
    x_bytes: int
    y_bytes: int
    workspace_bytes: int
    weight_bytes: int
    offloaded_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a case takes.

    Args:
        peak_bytes, average_bytes: as in figure 11: of the largest layer pass, and unweighted over passes, with the
            weights of convolutions; of base everything, which is both.
        offloaded_bytes: copied out in a step. host_bytes: pinned for them.
        by_category: as in figure 4, all weights included: weights, feature_maps, gradient_maps, workspace.
        feature_ms: forward and backward of the layers before the classifier, copies that they wait for included.
        step_ms: of all layers, input normalisation and updates left out.
        fits: in the memory of the machine.
        choice: what dyn took, in words.
    """

    case: Case
    peak_bytes: int
    average_bytes: int
    offloaded_bytes: int
    by_category: Mapping[str, int]
    feature_ms: float
    step_ms: float
    fits: bool
    choice: str
    layers: tuple[LayerRun, ...]
    host_bytes: int


def run_case(case: Case, profile: Profile) -> Run:
    """Plan and time `case` on `profile`."""
    program, costs = _machine(case.network, case.batch, profile)
    network_wide = case.policy in ("base", "oracle")
    decisions, plan = _decide(case, program, costs, profile.memory_bytes)
    planned = apply_decisions(program, decisions)
    report = make_report(plan, planned, decisions, costs, paper=True)
    timing = simulate(plan, planned, costs)
    copied = _concatenated(case.network, case.batch) if network_wide else 0
    categories = {name: nbytes for name, nbytes in report.by_category.items() if name != "other"}
    categories["feature_maps"] += copied
    categories["weights"] = sum(spec.nbytes for spec in program.tensors.values() if spec.role == "weight")
    return Run(
        case=case,
        peak_bytes=report.device_peak_bytes + copied,
        average_bytes=report.device_average_bytes + copied,
        offloaded_bytes=report.offloaded_bytes,
        by_category=categories,
        feature_ms=_feature_ms(plan, planned, timing),
        step_ms=timing.total_ms,
        fits=(sum(categories.values()) if network_wide else plan.slab_bytes) <= profile.memory_bytes,
        choice=decisions.notes[0] if case.policy == "dyn" else "",
        layers=layers_of(plan, planned, timing),
        host_bytes=plan.host_bytes,
    )


def _decide(case: Case, program: Program, costs: CostTable, memory_bytes: int) -> tuple[Decisions, Plan]:
    budget = Budget(algorithms=case.algorithms)
    if case.policy in ("base", "oracle"):
        return make_plan(program, costs, "base", replace(budget, workspace_bytes=int(BASE_WORKSPACE * memory_bytes)))
    if (case.policy, case.join) == ("dyn", "reuse"):
        return make_plan(program, costs, "dyn", replace(budget, device_bytes=memory_bytes))
    budget = replace(budget, join=case.join, prefetch_bytes=UNBOUNDED)
    if case.policy != "dyn":
        return make_plan(program, costs, case.policy, budget)
    decisions = paper_dyn(program, costs, memory_bytes, budget)
    return decisions, plan_program(program, decisions)


@cache
def paper_graph(network: str) -> Graph:
    """The network as the paper had it: without dropout, whose bytes it does not count, and GoogLeNet without LRN.

    With LRN, all would offload 2,733 MiB of GoogLeNet; figure 12 has 2,340, and the shapes without LRN give 2,341.
    """
    full = build(network, dropout=0.0)
    graph, tensors = Graph(full.name, full.input_shape, full.classes), {full.input: full.input}
    for node in full.nodes.values():
        inputs = [tensors[name] for name in node.inputs]
        tensors[node.name] = inputs[0] if node.layer.kind == "lrn" else graph.add(node.name, node.layer, inputs)
    return graph


@cache
def _concatenated(network: str, batch: int) -> int:
    """Bytes of all concatenations, which the paper's baseline copies as Torch does.

    By the shapes 603 MiB: figure 4 shows 588 more feature maps of GoogLeNet than it has tensors. Layer-wise allocation
    lets branches write into their channels, which is what figures 11 and 12 show.
    """
    return sum(4 * batch * prod(n.shape) for n in paper_graph(network).nodes.values() if n.layer.joins_channels)


_machines: dict[tuple[str, int, int], tuple[Profile, Program, CostTable]] = {}


def _machine(network: str, batch: int, profile: Profile) -> tuple[Program, CostTable]:
    """Program and costs, made once; what the paper does not time (input normalisation, updates) takes no time."""
    key = (network, batch, id(profile))  # the profile is kept too, so that no other one gets its id
    if key not in _machines:
        program = lower(paper_graph(network), batch)
        costs = model_costs(program, profile)
        untimed = {op.name for op in program.ops if op.phase == "update" or op.kind == NORMALIZE}
        table = {
            name: tuple(replace(c, time_ms=0.0) for c in options) if name in untimed else options
            for name, options in costs.candidates.items()
        }
        _machines[key] = profile, program, replace(costs, candidates=table)
    return _machines[key][1:]


def _feature_ms(plan: Plan, program: Program, timing: Timing) -> float:
    """From the start of the first layer to that of the classifier, and from its backward end to that of the step."""
    features = feature_layers(program)
    layers = {op.name: op.layer for op in program.ops if op.kind != NORMALIZE}
    total, since, until = 0.0, None, 0.0
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if not isinstance(step, Launch) or span is None or step.op not in layers:
            continue
        if layers[step.op] not in features:
            total, since = total + (span[0] - since if since is not None else 0.0), None
        elif since is None:
            since = span[0]
        until = span[1]
    return total + (until - since if since is not None else 0.0)


def layers_of(plan: Plan, program: Program, timing: Timing) -> tuple[LayerRun, ...]:
    """One row for every layer with a kernel, in the order of forward.

    Args:
        program: with algorithms. timing: of `plan`, by the clock or measured.
    """
    spans = {s.op: t for s, t in zip(plan.steps, timing.spans, strict=True) if isinstance(s, Launch) and t is not None}
    away = {step.storage for step in plan.steps if isinstance(step, CopyOut)}
    readers = {program.storage(t): op.layer for op in program.ops if op.phase == "forward" for t in op.reads.values()}
    ops: dict[str, list[Op]] = {}
    for op in program.ops:
        if op.phase != "update" and op.kind != NORMALIZE:
            ops.setdefault(op.layer, []).append(op)

    def nbytes(tensors: Iterable[str], role: str) -> int:
        return sum(program.tensors[t].nbytes for t in tensors if program.tensors[t].role == role)

    def time_ms(ops: Iterable[Op]) -> float:
        return sum(spans[op.name][1] - spans[op.name][0] for op in ops)

    rows = []
    for layer, own in ops.items():
        forward = [op for op in own if op.phase == "forward"]
        backward = [op for op in own if op.phase == "backward"]
        reads = dict.fromkeys(t for op in forward for t in op.reads.values())
        writes = dict.fromkeys(t for op in forward for t in op.writes.values())
        scratch = [program.tensors[op.writes[WORKSPACE]].nbytes for op in forward if WORKSPACE in op.writes]
        distance_ms = spans[backward[0].name][0] - spans[forward[-1].name][1] if forward and backward else 0.0
        rows.append(
            LayerRun(
                name=layer,
                kind=own[0].kind.split(".")[0],
                forward_ms=time_ms(forward),
                backward_ms=time_ms(backward),
                reuse_distance_ms=distance_ms,
                x_bytes=nbytes(reads, "act"),
                y_bytes=nbytes(writes, "act"),
                workspace_bytes=max(scratch, default=0),
                weight_bytes=nbytes(reads, "weight"),
                offloaded_bytes=sum(program.tensors[name].nbytes for name in away if readers[name] == layer),
            )
        )
    return tuple(rows)
