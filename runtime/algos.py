"""Convolution algorithms of a network under workspace limits: what there is, what a limit costs, what more would buy.

    study = make_study(graph, recipe, 256, backend_source(backend))
    study.total(64 * MIB).time_ms
    for sentence in purchases(study, [0, 64 * MIB, None]):
        print(sentence)                       # 0 B → 64.0 MiB: 31.2 ms less ...

Candidates come from a Source: a machine at hand, a stored table of measurements, or a profile's model; never from two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from csv import DictWriter
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from itertools import pairwise
from typing import Any

from vdnn.errors import ConfigError
from vdnn.layers.graph import Graph
from vdnn.memory.costs import Candidate
from vdnn.memory.slices import Division, divide, sizes_of
from vdnn.runtime.algo_sources import Source
from vdnn.runtime.backends.cuda.products import CONV_KINDS
from vdnn.runtime.planset import Recipe
from vdnn.units import format_bytes

DIRECTIONS = tuple(direction for direction, *_ in CONV_KINDS.values())
MOST_SENTENCES = 3
"""Layers named for each step to a higher limit."""
LEAST_GAIN = 0.005
"""Of the total time: what a layer must gain to be named, if another gains more."""
LEAST_CHANGE = 1e-9
"""Of a total time: what two sums of the same times may differ by."""


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
        return front_of(self.candidates)

    def known_slices(self) -> tuple[int, ...]:
        """Sizes of the slices that are known, the batch not among them; the largest first."""
        return tuple(sorted(set(self.slices) - {self.batch}, reverse=True))


def front_of(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in time without more workspace; the fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.time_ms, c.workspace_bytes)):
        if not front or candidate.workspace_bytes < front[-1].workspace_bytes:
            front.append(candidate)
    return tuple(front)


@dataclass(frozen=True, slots=True)
class Total:
    """All convolutions of the network under one limit of workspace each.

    Args:
        by_direction: ms by "forward", "dgrad", "wgrad".
        divided_ms: ms with each batch divided as is fastest, or whole where no slices are known; None if none are.
        undivided: how many convolutions count whole in it because their slices are not known.
        workspace_bytes: the largest that is used.
        over: how many have no algorithm within the limit, and take the smallest they have.
    """

    limit_bytes: int | None
    by_direction: Mapping[str, float]
    divided_ms: float | None
    workspace_bytes: int
    over: int
    undivided: int = 0

    @property
    def time_ms(self) -> float:
        """All directions."""
        return sum(self.by_direction.values())

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object."""
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
        sizes: of the slices that were asked for; None if none were to be.
    """

    network: str
    batch: int
    source: Source
    convs: tuple[ConvCosts, ...]
    asked: str = ""
    notes: tuple[str, ...] = ()
    sizes: tuple[int, ...] | None = None

    def heading(self) -> str:
        """What is shown and, where that is something else, what was asked for."""
        source = self.source
        kind = " (no measurement)" if source.modelled else ""
        head = f"{self.network}, batch size {self.batch}"
        if self.asked:
            shown = f"{source.precision}, {source.layout}{self.only_words()}"
            return f"{head}: asked for {self.asked}; shown instead: {shown}, times {source.words}{kind}"
        layout = "" if source.layout == "NCHW" else f", {source.layout}"
        return f"{head}, {source.precision}{layout}{self.only_words()}: times {source.words}{kind}"

    def only_words(self) -> str:
        """ ", deterministic algorithms only", or "" for all."""
        return f", {self.source.only} algorithms only" if self.source.only else ""

    def slice_words(self) -> str:
        """Which slices of the batch are known, and of how many convolutions; "" if all, or if none were asked for."""
        if self.sizes is None:
            return ""
        if not self.sizes:
            return "a batch of one image has no slices"
        counts: dict[tuple[int, ...], int] = {}
        for conv in self.convs:
            counts[conv.known_slices()] = counts.get(conv.known_slices(), 0) + 1
        whole = counts.pop((), 0)
        if not counts:
            return f"{self.source.name} knows no slices of {_listed(self.sizes, 'or')} images"
        if not whole and list(counts) == [self.sizes]:
            return ""
        known = ", ".join(f"of {_listed(sizes)} known for {count}" for sizes, count in counts.items())
        rest = "; the others whole" if whole else ""
        return f"slices {known} of {len(self.convs)} convolutions{rest}"

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
            sum(not conv.known_slices() for conv in self.convs),
        )

    def curve(self) -> list[Total]:
        """A total for every limit at which one of them changes, the lowest first."""
        sizes = {0} | {c.workspace_bytes for conv in self.convs for c in conv.pareto()}
        sizes |= {c.workspace_bytes for conv in self.convs for some in conv.slices.values() for c in front_of(some)}
        found: list[Total] = []
        for nbytes in sorted(sizes):
            total = self.total(nbytes)
            if not found or replace(total, limit_bytes=found[-1].limit_bytes) != found[-1]:
                found.append(total)
        return found


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
            if found:
                slices[n] = found
        convs.append(ConvCosts(op.layer, CONV_KINDS[op.kind][0], batch, whole, slices))
    sizes = tuple(n for n in programs if n != batch) if micro_batches else None
    return Study(graph.name, batch, source, tuple(convs), sizes=sizes)


def purchases(study: Study, limits: Sequence[int | None]) -> list[str]:
    """For every step from one limit to the next higher: what it gains in all, and where most of it comes from."""
    sentences = []
    for low, high in pairwise(limits):
        before, after = study.total(low), study.total(high)
        gained = before.time_ms - after.time_ms
        head = f"{limit_text(low)} → {limit_text(high)}: "
        if gained <= 0:
            sentences.append(f"{head}nothing gained{_divided_gain(before, after)}")
            continue
        rows = []
        for conv in study.convs:
            lower, higher = conv.fastest(low), conv.fastest(high)
            rows.append((lower.time_ms - higher.time_ms, higher.workspace_bytes - lower.workspace_bytes, conv))
        rows.sort(key=lambda row: -row[0])
        least = min(LEAST_GAIN * before.time_ms, rows[0][0])
        parts = [
            f"{ms_text(time_ms)} less with {format_bytes(nbytes)} more in {conv.layer} {conv.direction}"
            for time_ms, nbytes, conv in rows[:MOST_SENTENCES]
            if time_ms >= least
        ]
        sentences.append(f"{head}{ms_text(gained)} less in all; {'; '.join(parts)}")
    return sentences


def _divided_gain(before: Total, after: Total) -> str:
    """What micro-batches gain from one limit to the next where whole batches gain nothing."""
    if before.divided_ms is None or after.divided_ms is None:
        return ""
    gained = before.divided_ms - after.divided_ms
    return f"; with micro-batches {ms_text(gained)} less" if gained > LEAST_CHANGE * before.divided_ms else ""


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
        "notes": [*study.notes, *filter(None, [study.slice_words()])],
        "source": study.source.words,
        "modelled": study.source.modelled,
        "layers": layers,
        "limits": [study.total(limit).to_json() for limit in limits],
        "purchases": purchases(study, limits),
    }


def totals_csv(totals: Sequence[Total]) -> str:
    """One row a limit, with a header; no limit is an empty cell, and so are micro-batches not known of all."""
    text = StringIO()
    writer = DictWriter(text, list(totals[0].to_json()), lineterminator="\n")
    writer.writeheader()
    for total in totals:
        unknown = {"micro_batched_ms": None} if total.undivided else {}
        writer.writerow(total.to_json() | unknown)
    return text.getvalue()


def sorted_limits(limits: Iterable[int | None]) -> list[int | None]:
    """Each once, the lowest first, no limit last."""
    return sorted(dict.fromkeys(limits), key=lambda limit: (limit is None, limit or 0))


def limit_text(limit_bytes: int | None) -> str:
    """ "64.0 MiB", or "no limit"."""
    return "no limit" if limit_bytes is None else format_bytes(limit_bytes)


def _listed(numbers: Sequence[int], conjunction: str = "and") -> str:
    """ "64, 32 and 16"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def ms_text(time_ms: float) -> str:
    """ms with three significant digits: "1,235 ms", "1.94 ms", "0.0321 ms"."""
    return f"{ms_number(time_ms)} ms"


def ms_number(time_ms: float) -> str:
    """The number of `ms_text`."""
    exponent = int(f"{time_ms:.2e}".partition("e")[2])  # after rounding: 9.996 is 10.0
    return f"{time_ms:,.{max(0, 2 - exponent)}f}" if time_ms else "0"
