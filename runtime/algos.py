"""Convolution algorithms of a network under workspace limits: what there is, what a limit costs, what more would buy.

    study = make_study(graph, recipe, 256, backend_source(backend))
    study.total(64 * MIB).time_ms
    for sentence in purchases(study, [0, 64 * MIB, None]):
        print(sentence)                       # 0 B → 64.0 MiB: 31.2 ms less ...

Candidates come from a Source: a machine at hand, a stored table of measurements, or a profile's model; never from two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from csv import DictWriter
from dataclasses import asdict, dataclass, field
from io import StringIO
from itertools import pairwise
from typing import Any

from vdnn.errors import ConfigError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate
from vdnn.memory.slices import Division, divide, sizes_of
from vdnn.runtime.algorithm_table import AlgorithmTable
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cuda.products import CONV_KINDS, unplaced_problem
from vdnn.runtime.planset import Recipe
from vdnn.units import format_bytes

DIRECTIONS = tuple(direction for direction, *_ in CONV_KINDS.values())
MOST_SENTENCES = 3
"""Layers named for each step to a higher limit."""
LEAST_GAIN = 0.005
"""Of the total time: what a layer must gain to be named."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where candidates come from.

    Args:
        find: candidates of a conv op of a program; None if the source does not know it.
        words: for people, such as "measured on NVIDIA H200, cuDNN 9.19.0".
        modelled: whether the times are of no measurement.
        precision: of the products.
        layout: of the tensors that times are of.
    """

    find: Callable[[Op, Program], tuple[Candidate, ...] | None]
    words: str
    modelled: bool
    precision: str
    layout: str = "NCHW"


def backend_source(backend: Backend, layout: str = "NCHW") -> Source:
    """What the machine at hand measures for programs in `layout`, or the simulated one models, which knows NCHW."""
    caps = backend.caps
    modelled = not caps.measured_costs
    layout = "NCHW" if caps.simulated else layout
    return Source(backend.candidates, caps.cost_source.partition(";")[0], modelled, caps.precision, layout)


def table_source(table: AlgorithmTable) -> Source:
    """What was measured elsewhere; of a convolution with an epilogue that it does not know, the convolution alone."""

    def find(op: Op, program: Program) -> tuple[Candidate, ...] | None:
        problem = unplaced_problem(op, program)
        measured = table.problems.get(str(problem)) or table.problems.get(str(problem.plain))
        return measured.candidates if measured is not None and measured.candidates else None

    return Source(find, table.source, False, table.precision, table.layout)


def without_epilogue(table: AlgorithmTable, graph: Graph, recipe: Recipe, batch: int) -> bool:
    """Whether convolutions of `graph` apply an activation with which the table does not know them."""
    program = recipe.lower(graph, ("train", batch))
    problems = (unplaced_problem(op, program) for op in program.ops if op.kind in CONV_KINDS)
    return any(problem.epilogue and str(problem) not in table.problems for problem in problems)


@dataclass(frozen=True, slots=True)
class ConvCosts:
    """One direction of one convolution.

    Args:
        candidates: fastest first, for the whole batch.
        slices: candidates by number of images, the whole batch among them.
    """

    layer: str
    direction: str
    batch: int
    candidates: tuple[Candidate, ...]
    slices: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)

    def fastest(self, limit_bytes: int | None) -> Candidate:
        """The fastest candidate within the limit; the one of least workspace if none is."""
        fits = [c for c in self.candidates if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        if fits:
            return min(fits, key=lambda c: (c.time_ms, c.workspace_bytes))
        return min(self.candidates, key=lambda c: (c.workspace_bytes, c.time_ms))

    def divided(self, limit_bytes: int | None) -> Division | None:
        """The fastest division of the batch within the limit; None if there is none, or no slices are known."""
        return divide(self.batch, self.slices, limit_bytes) if len(self.slices) > 1 else None

    def divided_ms(self, limit_bytes: int | None) -> float:
        """Time of the fastest division, or of the whole batch where that is no slower or nothing else is known."""
        whole, division = self.fastest(limit_bytes), self.divided(limit_bytes)
        if division is None:
            return whole.time_ms
        exceeds = limit_bytes is not None and whole.workspace_bytes > limit_bytes
        return division.time_ms if exceeds else min(whole.time_ms, division.time_ms)

    def pareto(self) -> tuple[Candidate, ...]:
        """The candidates that no other beats in time without more workspace; the fastest first."""
        front: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (c.time_ms, c.workspace_bytes)):
            if not front or candidate.workspace_bytes < front[-1].workspace_bytes:
                front.append(candidate)
        return tuple(front)


@dataclass(frozen=True, slots=True)
class Total:
    """All convolutions of the network under one limit of workspace each.

    Args:
        by_direction: ms by "forward", "dgrad", "wgrad".
        divided_ms: ms with each batch divided as is fastest; None if slices are not known.
        workspace_bytes: the largest that is used.
        over: how many have no algorithm within the limit, and take the smallest they have.
    """

    limit_bytes: int | None
    by_direction: Mapping[str, float]
    divided_ms: float | None
    workspace_bytes: int
    over: int

    @property
    def time_ms(self) -> float:
        """All directions."""
        return sum(self.by_direction.values())

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object, also a row of the CSV file."""
        return {
            "limit_bytes": self.limit_bytes,
            "time_ms": self.time_ms,
            **{f"{name}_ms": time_ms for name, time_ms in self.by_direction.items()},
            "micro_batched_ms": self.divided_ms,
            "workspace_bytes": self.workspace_bytes,
            "over_limit": self.over,
        }


@dataclass(frozen=True, slots=True)
class Study:
    """All convolutions of one training step, in the order of the program.

    Args:
        asked: what was asked for, "bf16, NHWC", where the source has times of something else; else "".
        notes: sentences on what the times are of, or leave out.
    """

    network: str
    batch: int
    source: Source
    convs: tuple[ConvCosts, ...]
    asked: str = ""
    notes: tuple[str, ...] = ()

    def heading(self) -> str:
        """What is shown and, where that is something else, what was asked for."""
        source = self.source
        kind = " (no measurement)" if source.modelled else ""
        head = f"{self.network}, batch size {self.batch}"
        if self.asked:
            shown = f"{source.precision}, {source.layout}"
            return f"{head}: asked for {self.asked}; shown instead: {shown}, times {source.words}{kind}"
        layout = "" if source.layout == "NCHW" else f", {source.layout}"
        return f"{head}, {source.precision}{layout}: times {source.words}{kind}"

    def total(self, limit_bytes: int | None) -> Total:
        """What the limit costs."""
        chosen = [(conv, conv.fastest(limit_bytes)) for conv in self.convs]
        times = {name: sum(c.time_ms for conv, c in chosen if conv.direction == name) for name in DIRECTIONS}
        divided = [conv.divided_ms(limit_bytes) for conv in self.convs]
        return Total(
            limit_bytes,
            times,
            sum(divided) if any(len(conv.slices) > 1 for conv in self.convs) else None,
            max((c.workspace_bytes for _, c in chosen), default=0),
            sum(limit_bytes is not None and c.workspace_bytes > limit_bytes for _, c in chosen),
        )

    def curve(self) -> list[Total]:
        """A total for every limit at which one of the convolutions gets another algorithm, the lowest first."""
        sizes = {0} | {c.workspace_bytes for conv in self.convs for c in conv.pareto()}
        sizes |= {c.workspace_bytes for conv in self.convs for options in conv.slices.values() for c in options}
        return [self.total(nbytes) for nbytes in sorted(sizes)]


def make_study(
    graph: Graph,
    recipe: Recipe,
    batch: int,
    source: Source,
    *,
    layer: str | None = None,
    micro_batches: bool = True,
) -> Study | None:
    """The study of one training step of `batch` images; None if the source does not know all of its convolutions.

    Args:
        layer: only this one; ConfigError if the network has no convolution of that name.
        micro_batches: also ask for slices of the batch, halves down to eighths.
    """
    programs = {n: recipe.lower(graph, ("train", n)) for n in (sizes_of(batch) if micro_batches else (batch,))}
    ops = [op for op in programs[batch].ops if op.kind in CONV_KINDS]
    if layer is not None:
        known = list(dict.fromkeys(op.layer for op in ops))
        if layer not in known:
            text = f"network '{graph.name}' has no convolution '{layer}', it has: {', '.join(known) or 'none'}"
            raise ConfigError(text, key=layer, known=known)
        ops = [op for op in ops if op.layer == layer]
    by_name = {n: {op.name: op for op in program.ops} for n, program in programs.items()}
    convs = []
    for op in ops:
        whole = source.find(op, programs[batch])
        if whole is None:
            return None
        slices = {batch: whole}
        for n, program in programs.items():
            found = source.find(by_name[n][op.name], program) if n != batch else None
            if found is not None:
                slices[n] = found
        convs.append(ConvCosts(op.layer, CONV_KINDS[op.kind][0], batch, whole, slices))
    return Study(graph.name, batch, source, tuple(convs))


def purchases(study: Study, limits: Sequence[int | None]) -> list[str]:
    """For every step from one limit to the next higher: what it gains in all, and where most of it comes from."""
    sentences = []
    for low, high in pairwise(limits):
        gained = study.total(low).time_ms - study.total(high).time_ms
        head = f"{limit_text(low)} → {limit_text(high)}: "
        if gained <= 0:
            sentences.append(f"{head}nothing gained")
            continue
        rows = []
        for conv in study.convs:
            before, after = conv.fastest(low), conv.fastest(high)
            rows.append((before.time_ms - after.time_ms, after.workspace_bytes - before.workspace_bytes, conv))
        rows.sort(key=lambda row: -row[0])
        least = LEAST_GAIN * study.total(low).time_ms
        parts = [
            f"{ms_text(time_ms)} less with {format_bytes(nbytes)} more in {conv.layer} {conv.direction}"
            for time_ms, nbytes, conv in rows[:MOST_SENTENCES]
            if time_ms >= least
        ]
        sentences.append(f"{head}{ms_text(gained)} less in all" + (f"; {'; '.join(parts)}" if parts else ""))
    return sentences


def study_json(study: Study, limits: Sequence[int | None]) -> dict[str, Any]:
    """All of it as one JSON object."""
    layers = []
    for conv in study.convs:
        front = conv.pareto()
        rows = [{**asdict(c), "layout": study.source.layout, "pareto": c in front} for c in conv.candidates]
        layers.append({"layer": conv.layer, "direction": conv.direction, "candidates": rows})
    return {
        "network": study.network,
        "batch_size": study.batch,
        "heading": study.heading(),
        "precision": study.source.precision,
        "layout": study.source.layout,
        "notes": list(study.notes),
        "source": study.source.words,
        "modelled": study.source.modelled,
        "layers": layers,
        "limits": [study.total(limit).to_json() for limit in limits],
        "purchases": purchases(study, limits),
    }


def totals_csv(totals: Sequence[Total]) -> str:
    """One row a limit, with a header; no limit is an empty cell, and so is what is not known."""
    text = StringIO()
    writer = DictWriter(text, list(totals[0].to_json()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(total.to_json() for total in totals)
    return text.getvalue()


def sorted_limits(limits: Iterable[int | None]) -> list[int | None]:
    """Each once, the lowest first, no limit last."""
    return sorted(dict.fromkeys(limits), key=lambda limit: (limit is None, limit or 0))


def limit_text(limit_bytes: int | None) -> str:
    """ "64.0 MiB", or "no limit"."""
    return "no limit" if limit_bytes is None else format_bytes(limit_bytes)


def ms_text(time_ms: float) -> str:
    """ms with three significant digits: "1,235 ms", "1.94 ms", "0.0321 ms"."""
    return f"{ms_number(time_ms)} ms"


def ms_number(time_ms: float) -> str:
    """The number of `ms_text`."""
    exponent = int(f"{time_ms:.2e}".partition("e")[2])  # after rounding: 9.996 is 10.0
    return f"{time_ms:,.{max(0, 2 - exponent)}f}" if time_ms else "0"
