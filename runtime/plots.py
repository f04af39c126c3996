"""A plan as a picture: bytes live over the time of a step, by category, with the copies to and from the host.

    draw_plan(plan, program, decisions, costs, "vgg19.png")

The numbers behind it are `timeline(...)`. matplotlib is imported by modules named "plots" only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from vdnn.errors import ConfigError
from vdnn.layers.op import Program
from vdnn.memory.clock import Timing, simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, align
from vdnn.memory.report import CATEGORIES, Report, category, make_report
from vdnn.runtime.files import write_output
from vdnn.units import GIB, MIB, format_bytes, format_ms

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 130
COLORS = {
    "weights": "#0072B2",
    "feature_maps": "#56B4E9",
    "gradient_maps": "#E69F00",
    "workspace": "#CC79A7",
    "other": "#C8C8C8",
    "out": "#D55E00",
    "in": "#009E73",
    "ideal": "#D55E00",
}
"""Colours that people with colour-blindness tell apart (Okabe and Ito 2008)."""
DASHES = (0, (4, 4))
LANES = {"out": "to host", "in": "from host"}
_KIND_OF_COPY = {CopyOut: "out", Fetch: "out", CopyIn: "in", Feed: "in"}


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the picture shows; times in ms from the start of the step.

    Args:
        edges: shape (n + 1,): level i holds from edges[i] to edges[i + 1]. One level a kernel, from the end of the
            kernel before it to its own end: the most bytes live on the way; a last one for what follows.
        levels: shape (n,) in bytes by category, in the order of CATEGORIES.
        copies: (start, duration) of every copy, "out" to the host and "in" from it.
        backward_ms: when the first kernel of backward starts; None if there is none.
    """

    edges: NDArray[np.float64]
    levels: Mapping[str, NDArray[np.int64]]
    copies: Mapping[str, list[tuple[float, float]]]
    backward_ms: float | None

    def total(self) -> NDArray[np.int64]:
        """Live bytes of all categories, shape (n,)."""
        total: NDArray[np.int64] = np.stack([self.levels[name] for name in CATEGORIES]).sum(axis=0)
        return total


def timeline(plan: Plan, program: Program, decisions: Decisions, costs: CostTable) -> Timeline:
    """The levels and copies of `plan` of `program` (with algorithms), timed by the clock."""
    timing = simulate(plan, program, costs)
    phases = {op.name: op.phase for op in program.ops}
    copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
    backward_ms = None
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if span is None:
            continue
        if isinstance(step, Launch):
            if backward_ms is None and phases[step.op] == "backward":
                backward_ms = span[0]
        else:
            copies[_KIND_OF_COPY[type(step)]].append((span[0], span[1] - span[0]))
    if decisions.allocation == "network":  # everything is set aside for the whole step
        report = make_report(plan, program, decisions, costs)
        edges = np.array([0.0, timing.total_ms])
        rows = np.array([[report.by_category[name] for name in CATEGORIES]], np.int64)
    else:
        edges, rows = _layer_wise(plan, program, timing)
    return Timeline(edges, dict(zip(CATEGORIES, rows.T, strict=True)), copies, backward_ms)


def _layer_wise(plan: Plan, program: Program, timing: Timing) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Edges in ms, shape (n + 1,), and bytes by category, shape (n, categories)."""
    live = np.zeros(len(CATEGORIES), np.int64)
    for name in program.persistent:
        live[CATEGORIES.index(category(program, name))] += align(program.tensors[name].nbytes)
    live[CATEGORIES.index("other")] += plan.persistent_bytes - int(live.sum())  # the gaps between them
    column = {name: CATEGORIES.index(category(program, name)) for name in program.tensors}
    held: dict[str, int] = {}
    edges, rows = [0.0], []
    highest = live.copy()
    total = highest_total = int(live.sum())
    for step, span in zip(plan.steps, timing.spans, strict=True):
        match step:
            case Alloc():
                held[step.storage] = step.nbytes
                live[column[step.storage]] += step.nbytes
                total += step.nbytes
                if total > highest_total:
                    highest, highest_total = live.copy(), total
            case Free():
                nbytes = held.pop(step.storage)
                live[column[step.storage]] -= nbytes
                total -= nbytes
            case Launch() if span is not None:
                edges.append(span[1])
                rows.append(highest)
                highest, highest_total = live.copy(), total
            case _:
                pass
    edges.append(max(timing.total_ms, edges[-1]))
    rows.append(highest)
    return np.array(edges), np.array(rows)


def draw_plan(plan: Plan, program: Program, decisions: Decisions, costs: CostTable, path: str) -> None:
    """Write the picture of `plan` of `program` (with algorithms) to `path`, a file in one of FORMATS.

    Raises ConfigError for another suffix, or if the file cannot be written.
    """
    suffix = check_picture_path(path)
    report = make_report(plan, program, decisions, costs)
    lines = timeline(plan, program, decisions, costs)
    figure = Figure(figsize=(11, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (6, 1)})
    scale, unit = (1000.0, "s") if lines.edges[-1] >= 10_000 else (1.0, "ms")
    _draw_levels(top, lines, report, scale)
    _draw_copies(bottom, lines, scale)
    bottom.set_xlabel(f"time in the step, {unit}")
    figure.suptitle(_title(report), fontsize=11)
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix[1:], dpi=DOTS_PER_INCH)
    write_output(path, buffer.getvalue())


def check_picture_path(path: str) -> str:
    """The suffix of `path`; ConfigError if it is not one of FORMATS."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"picture '{path}': expected a file name that ends in {', '.join(FORMATS)}")
    return suffix


def _title(report: Report) -> str:
    times = report.cost_source
    kind = "simulated, " if times.startswith("modelled") else ""
    return (
        f"{report.network} ({report.mode}), batch size {report.batch_size}, policy {report.policy}: "
        f"step {format_ms(report.predicted_step_ms)}, {format_bytes(report.offloaded_bytes)} offloaded\n"
        f"{kind}times {times}"
    )


def _draw_levels(axes: Axes, lines: Timeline, report: Report, scale: float) -> None:
    highest = max(report.device_peak_bytes, report.ideal_peak_bytes)
    size, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    below = np.zeros(len(lines.edges) - 1)
    for name in CATEGORIES:
        above = below + lines.levels[name] / size
        # not stairs: its patch takes seconds to find its limits, step by step
        low, high = (np.append(values, values[-1:]) for values in (below, above))
        axes.fill_between(lines.edges / scale, low, high, step="post", color=COLORS[name], linewidth=0)
        below = above
    peaks = peak_lines(report)
    for nbytes, _, color, style in peaks:
        axes.axhline(nbytes / size, color=color, linewidth=1.2, linestyle=style)
    axes.set_ylim(0, highest / size * 1.12)
    axes.set_xlim(0, max(lines.edges[-1] / scale, 1e-9))
    axes.set_ylabel(f"live bytes on the device, {unit}")
    if lines.backward_ms is not None:
        axes.axvline(lines.backward_ms / scale, color="black", linewidth=0.8, linestyle=":")
        for text, side, shift in (("forward", "right", -5), ("backward", "left", 5)):
            axes.annotate(
                text,
                (lines.backward_ms / scale, 1.0),
                (shift, -4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha=side,
                va="top",
                fontsize=9,
            )
    handles: list[Patch | Line2D] = [
        Patch(color=COLORS[name], label=name.replace("_", " ")) for name in reversed(CATEGORIES)
    ]
    handles += [Line2D([], [], color=color, linestyle=style, label=label) for _, label, color, style in peaks]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def peak_lines(report: Report) -> list[tuple[int, str, str, Any]]:
    """Bytes, label, colour and style of the slab and of the ideal peak: one line where they are equal."""
    slab, ideal = report.device_peak_bytes, report.ideal_peak_bytes
    if slab == ideal:
        return [(slab, f"slab = ideal peak\n{format_bytes(slab)}", "black", "-")]
    return [
        (slab, f"slab {format_bytes(slab)}", "black", "-"),
        (ideal, f"ideal peak {format_bytes(ideal)}", COLORS["ideal"], DASHES),
    ]


def _draw_copies(axes: Axes, lines: Timeline, scale: float) -> None:
    for row, name in enumerate(LANES):
        bars = [(start / scale, length / scale) for start, length in lines.copies[name]]
        axes.broken_barh(bars, (-row - 0.4, 0.8), color=COLORS[name], linewidth=0)
    axes.set_ylim(-len(LANES) + 0.4, 0.6)
    axes.set_yticks([-row for row in range(len(LANES))], [f"copies {label}" for label in LANES.values()])
    axes.tick_params(left=False)
