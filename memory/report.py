"""What a plan will do, in numbers: peak, averages, bounds, per category and per layer, over the step and in time.

    report = make_report(plan, planned_program, decisions, costs)
    report.device_peak_bytes, report.by_category["feature_maps"]

Everything is read off the plan's own steps, so that a report cannot say something else than what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vdnn.layers.op import Program
from vdnn.memory.clock import Timing, simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.paper_count import paper_count
from vdnn.memory.passes import WORKSPACE, batch_of, is_workspace
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, align
from vdnn.memory.prefetch import layer_passes
from vdnn.memory.slices import describe

CATEGORIES = ("weights", "feature_maps", "gradient_maps", "workspace", "other")
_BY_ROLE = {"weight": "weights", "act": "feature_maps", "grad": "gradient_maps"}


def category(program: Program, storage: str) -> str:
    """The category a storage is counted in; "other" is weight gradients, momentum, statistics, inputs and losses."""
    if is_workspace(program, storage):
        return "workspace"
    return _BY_ROLE.get(program.tensors[storage].role, "other")


@dataclass(frozen=True, slots=True)
class Stay:
    """One residency read off a plan: steps [start, end) and times from first use's start to last use's end, in ms."""

    storage: str
    nbytes: int
    start: int
    end: int
    begin_ms: float
    end_ms: float
    used: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: most bytes live in its forward and backward pass, its offloaded inputs, algorithms, time.

    An algorithm by kind of op; of an op in slices a text such as "4 x 64 images with WINOGRAD".
    """

    layer: str
    kind: str
    forward_bytes: int
    backward_bytes: int
    workspace_bytes: int
    offloaded_bytes: int
    time_ms: float
    algorithms: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes unless the name says otherwise.

    Args:
        device_peak_bytes: the slab: what the plan takes from the device.
        ideal_peak_bytes: most bytes live at any moment; no placement needs less.
        fragmentation: device_peak_bytes / ideal_peak_bytes - 1.
        device_average_bytes: over time, each storage counted from its first use's start to its last use's end.
        device_average_passes_bytes: the vDNN paper's average, unweighted over forward and backward layer passes.
        by_category: at the moment of the peak, summing to ideal_peak_bytes.
        predicted_step_ms, compute_ms, copy_out_ms, copy_in_ms, exposed_ms: of the clock; exposed is the time in which
            no kernel ran.
    """

    network: str
    batch_size: int
    mode: str
    policy: str
    counting: str
    device_peak_bytes: int
    ideal_peak_bytes: int
    fragmentation: float
    device_average_bytes: int
    device_average_passes_bytes: int
    host_bytes: int
    offloaded_bytes: int
    by_category: Mapping[str, int]
    peak_layer: str
    predicted_step_ms: float
    compute_ms: float
    copy_out_ms: float
    copy_in_ms: float
    exposed_ms: float
    cost_source: str
    notes: tuple[str, ...]
    layers: tuple[LayerRow, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return asdict(self)


def residencies(plan: Plan, program: Program, timing: Timing) -> list[Stay]:
    """Every stay of a non-persistent storage on the device, in order of allocation."""
    ops = {op.name: op for op in program.ops}
    opened: dict[str, tuple[int, int, int]] = {}  # storage → rank, step, bytes
    times: dict[str, tuple[float, float]] = {}
    used: dict[str, list[int]] = {}
    stays: dict[int, Stay] = {}
    for i, step in enumerate(plan.steps):
        touched: tuple[str, ...] = ()
        match step:
            case Alloc():
                opened[step.storage] = (len(opened) + len(stays), i, step.nbytes)
                used[step.storage] = []
            case Launch():
                op = ops[step.op]
                touched = tuple(program.storage(t) for t in (*op.reads.values(), *op.writes.values()))
            case CopyOut() | CopyIn():
                touched = (step.storage,)
            case Feed() | Fetch():
                touched = (program.storage(step.tensor),)
            case Free():
                rank, start, nbytes = opened.pop(step.storage)
                begin, end = times.pop(step.storage, (0.0, 0.0))
                uses = tuple(used.pop(step.storage))
                stays[rank] = Stay(step.storage, nbytes, start, i, begin, end, uses)
        span = timing.spans[i]
        if span is None:
            continue
        for storage in touched:
            if storage in opened:
                begin, end = times.get(storage, span)
                times[storage] = (min(begin, span[0]), max(end, span[1]))
                used[storage].append(i)
    return [stays[rank] for rank in sorted(stays)]


def make_report(plan: Plan, program: Program, decisions: Decisions, costs: CostTable, *, paper: bool = False) -> Report:
    """The report of `plan` of `program` (with algorithms).

    Args:
        paper: count as the vDNN paper does (MICRO'16, figures 4 and 11): no momentum, weight gradients, statistics,
            inputs as bytes or losses; where allocation is layer-wise as `vdnn.memory.paper_count` says.
    """
    timing = simulate(plan, program, costs)
    stays = residencies(plan, program, timing)
    network_wide = decisions.allocation == "network"
    persistent = dict.fromkeys(CATEGORIES, 0)
    for name in program.persistent:
        persistent[category(program, name)] += align(program.tensors[name].nbytes)
    persistent["other"] += plan.persistent_bytes - sum(persistent.values())
    if network_wide:
        peak_categories, peak_layer = _network_wide(plan, program, stays, persistent), "every layer"
        ideal = plan.slab_bytes
    else:
        peak_categories, peak_layer = _at_peak(plan, program, stays, persistent)
        ideal = sum(peak_categories.values())
    passes = _pass_bytes(plan, program, stays)
    average = _over_time(stays, timing) + plan.persistent_bytes
    mean_pass = sum(passes.values()) // max(1, len(passes)) + persistent["weights"]
    peak = plan.slab_bytes
    if network_wide:
        average = mean_pass = peak
    layers = _layer_rows(plan, program, stays, timing, plan.persistent_bytes)
    if network_wide:
        layers = tuple(replace(row, forward_bytes=peak, backward_bytes=peak) for row in layers)
    if paper and network_wide:
        peak_categories = {**peak_categories, "other": 0}
        peak = ideal = average = mean_pass = sum(peak_categories.values())
        layers = tuple(replace(row, forward_bytes=peak, backward_bytes=peak) for row in layers)
    elif paper:
        counted = paper_count(plan, program)
        peak_categories, peak_layer = counted.categories(), counted.peak.layer
        peak = ideal = counted.peak.nbytes + counted.weights_bytes
        average = mean_pass = counted.average_bytes
        sizes = counted.layer_bytes()
        layers = tuple(
            replace(
                row,
                forward_bytes=sizes.get((row.layer, True), 0),
                backward_bytes=sizes.get((row.layer, False), 0),
            )
            for row in layers
        )
    return Report(
        network=program.name,
        batch_size=program.batch,
        mode=program.mode,
        policy=decisions.policy,
        counting="vDNN paper" if paper else "all bytes",
        device_peak_bytes=peak,
        ideal_peak_bytes=ideal,
        fragmentation=peak / ideal - 1 if ideal else 0.0,
        device_average_bytes=average,
        device_average_passes_bytes=mean_pass,
        host_bytes=plan.host_bytes,
        offloaded_bytes=sum(program.tensors[s.storage].nbytes for s in plan.steps if isinstance(s, CopyOut)),
        by_category=peak_categories,
        peak_layer=peak_layer,
        predicted_step_ms=timing.total_ms,
        compute_ms=timing.compute_ms,
        copy_out_ms=timing.out_ms,
        copy_in_ms=timing.in_ms,
        exposed_ms=timing.compute_idle_ms,
        cost_source=costs.source,
        notes=(*decisions.notes, *_layout_note(program, decisions)),
        layers=layers,
    )


def count_transforms(program: Program) -> str:
    """In words how many times a step moves images or gradients to another layout."""
    moves = [op for op in program.ops if op.kind == "layout.transform"]
    forward = sum(op.phase == "forward" for op in moves)
    words = f"{len(moves)} transform{'' if len(moves) == 1 else 's'}"
    return f"{words} ({forward} forward, {len(moves) - forward} backward)" if moves else words


def _layout_note(program: Program, decisions: Decisions) -> tuple[str, ...]:
    """A sentence where layers have layouts of their own."""
    if not decisions.layouts:
        return ()
    counts = Counter(choice.layout for choice in decisions.layouts.values())
    moves = count_transforms(program)
    layers = ", ".join(f"{count} in {layout}" for layout, count in sorted(counts.items()))
    return (f"layouts of layers: {layers}, {moves} ('vdnn layouts explain' says why)",)


def _at_peak(
    plan: Plan, program: Program, stays: list[Stay], persistent: Mapping[str, int]
) -> tuple[dict[str, int], str]:
    ends = {stay.end: stay for stay in stays}
    starts = {stay.start: stay for stay in stays}
    layer_of = {op.name: op.layer for op in program.ops}
    live = dict(persistent)
    best, best_total, best_step = dict(live), sum(live.values()), 0
    for i in range(len(plan.steps)):
        if i in starts:
            live[category(program, starts[i].storage)] += starts[i].nbytes
            total = sum(live.values())
            if total > best_total:
                best, best_total, best_step = dict(live), total, i
        elif i in ends:
            live[category(program, ends[i].storage)] -= ends[i].nbytes
    following = (layer_of[step.op] for step in plan.steps[best_step:] if isinstance(step, Launch))
    return best, next(following, program.name)


def _network_wide(plan: Plan, program: Program, stays: list[Stay], persistent: Mapping[str, int]) -> dict[str, int]:
    """Bytes set aside per category: own bytes for maps, the span of the buffers shared by the others."""
    found = dict(persistent)
    offsets = {i: step.offset for i, step in enumerate(plan.steps) if isinstance(step, Alloc)}
    extent: dict[str, tuple[int, int]] = {}
    for stay in stays:
        kind = category(program, stay.storage)
        if kind == "feature_maps":
            found[kind] += stay.nbytes
            continue
        low, high = extent.get(kind, (plan.slab_bytes, 0))
        extent[kind] = (min(low, offsets[stay.start]), max(high, offsets[stay.start] + stay.nbytes))
    for kind, (low, high) in extent.items():
        found[kind] += high - low
    found["gradient_maps"] += plan.slab_bytes - sum(found.values())  # the rest of buffers that no map fills
    return found


def _pass_bytes(plan: Plan, program: Program, stays: list[Stay]) -> dict[tuple[str, int], int]:
    """Live bytes of maps and workspace per layer pass (layer, first op), maps that wait for later use left out.

    A map counts while it is between its uses for computation; one that was fetched early counts from its first use.
    """
    launched = {step.op: i for i, step in enumerate(plan.steps) if isinstance(step, Launch)}
    copies = {i for i, step in enumerate(plan.steps) if isinstance(step, (CopyIn, CopyOut))}
    result: dict[tuple[str, int], int] = {}
    counted = [
        stay for stay in stays if category(program, stay.storage) in ("feature_maps", "gradient_maps", "workspace")
    ]
    change: dict[int, int] = {}
    for stay in counted:
        computing = [i for i in stay.used if i not in copies]
        if computing:
            change[computing[0]] = change.get(computing[0], 0) + stay.nbytes
            change[computing[-1] + 1] = change.get(computing[-1] + 1, 0) - stay.nbytes
    live, levels = 0, []
    for i in range(len(plan.steps)):
        live += change.get(i, 0)
        levels.append(live)
    for phases in (("forward",), ("backward", "update")):
        for layer, start, end in layer_passes(program, phases):
            at = [launched[op.name] for op in program.ops[start:end]]
            result[layer, start] = max(levels[i] for i in at)
    return result


def _over_time(stays: list[Stay], timing: Timing) -> int:
    held = sum(stay.nbytes * (stay.end_ms - stay.begin_ms) for stay in stays)
    return int(held / timing.total_ms) if timing.total_ms else 0


def _layer_rows(
    plan: Plan, program: Program, stays: list[Stay], timing: Timing, persistent_bytes: int
) -> tuple[LayerRow, ...]:
    launched = {step.op: i for i, step in enumerate(plan.steps) if isinstance(step, Launch)}
    change = [0] * (len(plan.steps) + 1)
    for stay in stays:
        change[stay.start] += stay.nbytes
        change[stay.end] -= stay.nbytes
    level, levels = persistent_bytes, []
    for delta in change[:-1]:
        level += delta
        levels.append(level)
    leaving = {i: step for i, step in enumerate(plan.steps) if isinstance(step, CopyOut)}
    after = sorted(leaving)
    rows: dict[str, dict[str, Any]] = {}
    sliced: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for op in program.ops:
        row = rows.setdefault(
            op.layer,
            {"kind": op.kind.split(".")[0], "forward": 0, "backward": 0, "ws": 0, "off": 0, "ms": 0.0, "alg": {}},
        )
        if op.phase == "forward":
            row["kind"] = op.kind.split(".")[0]  # of its last op there: those before it prepare operands
        i = launched[op.name]
        side = "forward" if op.phase == "forward" else "backward"
        row[side] = max(row[side], levels[i])
        if WORKSPACE in op.writes:
            row["ws"] = max(row["ws"], program.tensors[op.writes[WORKSPACE]].nbytes)
        span = timing.spans[i]
        row["ms"] += span[1] - span[0] if span else 0.0
        if op.slice_of is not None:
            sliced.setdefault((op.layer, op.kind), []).append((batch_of(op, program), op.attrs["algorithm"]))
            row["alg"][op.kind] = describe(sliced[op.layer, op.kind])
        elif "algorithm" in op.attrs:
            row["alg"][op.kind] = op.attrs["algorithm"]
    order = sorted((i, op.layer) for op in program.ops for i in (launched[op.name],))
    rank = 0
    for i in after:  # a copy-out belongs to the layer launched last before it
        while rank + 1 < len(order) and order[rank + 1][0] < i:
            rank += 1
        rows[order[rank][1]]["off"] += program.tensors[leaving[i].storage].nbytes
    return tuple(
        LayerRow(layer, r["kind"], r["forward"], r["backward"], r["ws"], r["off"], r["ms"], r["alg"])
        for layer, r in rows.items()
    )
