"""One step as Perfetto shows it: each stream a track, a track of layers above them, and a counter of live bytes.

    trace = plan_trace(plan, program, simulate(plan, program, costs), f"modelled, {costs.source}")
    trace.write("step.json")                   # open it at ui.perfetto.dev, or in chrome://tracing

    executor.observer = marks = Marks(backend)
    executor.run(feeds)
    trace = marks.trace("measured on this machine")

A file holds the JSON object of the Chrome trace event format ("Trace Event Format", Chromium project): complete events
("X") with times in µs, counters ("C"), and names of tracks ("M").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.memory.clock import BUSY, Timing
from vdnn.memory.passes import batch_of
from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Step
from vdnn.runtime.backend import Backend
from vdnn.runtime.files import check_output, write_output

LAYERS = "layers"
TRACKS = {LAYERS: "layers", "compute": "stream compute", "out": "stream out: to host", "in": "stream in: from host"}
"""Tracks in the order in which they are shown, with their names there."""
COUNTER = "live bytes"
COPY_WORDS = {CopyOut: "copy out", CopyIn: "copy in", Feed: "feed", Fetch: "fetch"}
TIMED = (Launch, CopyOut, CopyIn, Feed, Fetch)
"""Steps that take time."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time: on a stream or on LAYERS, from start to end in µs, with what else is worth knowing."""

    name: str
    track: str
    start_us: float
    end_us: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of one step.

    Args:
        title: what ran, and where its times are from.
        events: those of one track follow one another without overlap.
        live: (µs, bytes): so many bytes of the slab are in use from then on, persistent ones included.
    """

    title: str
    events: tuple[Event, ...]
    live: tuple[tuple[float, int], ...]

    @property
    def end_us(self) -> float:
        """End of the last event, in µs from the start of the trace."""
        return max((event.end_us for event in self.events), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a trace file."""
        thread = {track: number for number, track in enumerate(TRACKS, start=1)}
        rows: list[dict[str, Any]] = [_names("process_name", 0, name=self.title)]
        for track, name in TRACKS.items():
            rows += [
                _names("thread_name", thread[track], name=name),
                _names("thread_sort_index", thread[track], sort_index=thread[track]),
            ]
        for event in self.events:
            # in whole ns, so that rounding lets no event reach into the next one
            start, end = round(1000 * event.start_us), round(1000 * event.end_us)
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            place = {"ph": "X", "pid": 1, "tid": thread[event.track]}
            rows.append({"name": event.name, "cat": event.track, **place, **times, "args": dict(event.args)})
        for time_us, nbytes in self.live:
            rows.append({"name": COUNTER, "ph": "C", "pid": 1, "ts": round(time_us, 3), "args": {"bytes": nbytes}})
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"title": self.title}}

    def write(self, path: str | Path) -> None:
        """Write the file whole or not at all, its folder too; ConfigError if that cannot be."""
        write_output(path, json.dumps(self.to_json(), separators=(",", ":")).encode())


def _names(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": args}


def check_trace_path(path: str) -> None:
    """ConfigError if no file can be put at `path`, before the run whose trace it is to hold; nothing is left there."""
    target = Path(path)
    if os.path.isdir(path):  # which, unlike Path's, takes a name that is too long for none
        raise ConfigError(f"trace '{path}' is a folder; give the name of a file, such as trace.json")
    above = next(place for place in target.absolute().parents if os.path.exists(place))
    if not above.is_dir():
        raise ConfigError(f"trace '{path}': '{above}' is no folder; choose another place for it")
    check_output(path)


def plan_trace(plan: Plan, program: Program, timing: Timing, source: str) -> Trace:
    """A run of `plan` of `program` (with algorithms) in the times of `timing`.

    Args:
        source: where the times are from, in words.
    """
    return _trace([(plan, program, timing)], source)


class Marks:
    """An observer of executors that lets `backend` mark the time before and after every step that takes some.

    Each step is queued by itself, so that what a captured run saves is seen here as gaps and as longer short kernels.
    Runs that follow one another, as the parts of a step, make one trace.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._origin: Any = None
        self._before: Any = None
        self._runs: list[tuple[Plan, Program, list[tuple[Any, Any] | None]]] = []

    def started(self, plan: Plan, program: Program) -> None:
        """Note the run, and the time if it is the first."""
        if self._origin is None:
            self._origin = self._backend.mark("compute")
            self._backend.sync()  # so that no other stream's mark can be earlier
        self._runs.append((plan, program, []))

    def before(self, step: Step) -> None:
        """Mark the start of a step that takes time."""
        if isinstance(step, TIMED):
            self._before = self._backend.mark(step.stream)

    def after(self, step: Step) -> None:
        """Mark its end."""
        marks = self._runs[-1][2]
        marks.append((self._before, self._backend.mark(step.stream)) if isinstance(step, TIMED) else None)

    def timings(self) -> list[tuple[Plan, Program, Timing]]:
        """What ran, with times in ms from the start of the first run; after the sync that ends a run."""

        def at(mark: Any) -> float:
            return self._backend.between_ms(self._origin, mark)

        found = []
        for plan, program, marks in self._runs:
            spans = tuple(None if pair is None else (at(pair[0]), at(pair[1])) for pair in marks)
            found.append((plan, program, timing_of(plan, spans)))
        return found

    def trace(self, source: str) -> Trace:
        """All runs so far; `source` says on what."""
        return _trace(self.timings(), source)


def timing_of(plan: Plan, spans: Sequence[Span | None]) -> Timing:
    """A Timing from (start, end) in ms of every step of `plan`, None for steps that take no time."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for step, span in zip(plan.steps, spans, strict=True):
        if span is not None:
            busy[BUSY[type(step)]] += span[1] - span[0]
    total = max((span[1] for span in spans if span is not None), default=0.0)
    return Timing(total, busy["compute"], busy["out"], busy["in"], tuple(spans))


def _trace(runs: Sequence[tuple[Plan, Program, Timing]], source: str) -> Trace:
    events: list[Event] = []
    live: list[tuple[float, int]] = []
    for plan, program, timing in runs:
        streams = list(_stream_events(plan, program, timing))
        events += [*_layer_events(streams), *streams]
        live += _live_bytes(plan, timing)
    program = runs[0][1]
    parts = "" if len(runs) == 1 else f" in {len(runs)} parts"
    title = f"{program.name} ({program.mode}), {sum(run[1].batch for run in runs)} images{parts}: {source}"
    return Trace(title, tuple(events), tuple(live))


def _stream_events(plan: Plan, program: Program, timing: Timing) -> Iterator[Event]:
    ops = {op.name: op for op in program.ops}
    writers: dict[str, Op] = {}
    for op in program.ops:
        for tensor in op.writes.values():
            writers.setdefault(program.storage(tensor), op)
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if span is None:
            continue
        start_us, end_us = 1000 * span[0], 1000 * span[1]
        if isinstance(step, Launch):
            op = ops[step.op]
            tensors = dict.fromkeys((*op.reads.values(), *op.writes.values()))
            nbytes = sum(program.tensors[tensor].nbytes for tensor in tensors)
            args: dict[str, Any] = {"layer": op.layer, "phase": op.phase, "kind": op.kind, "bytes": nbytes}
            if "algorithm" in op.attrs:
                args["algorithm"] = op.attrs["algorithm"]
            if op.slice_of is not None:
                args["images"] = batch_of(op, program)
            yield Event(op.name, step.stream, start_us, end_us, args)
        elif isinstance(step, (CopyOut, CopyIn, Feed, Fetch)):
            name = step.storage if isinstance(step, (CopyOut, CopyIn)) else step.tensor
            nbytes = program.tensors[name].nbytes
            args = {"bytes": nbytes}
            if end_us > start_us:
                args["GB/s"] = float(f"{nbytes / (end_us - start_us) / 1000:.4g}")
            if program.storage(name) in writers:
                args["layer"] = writers[program.storage(name)].layer
            yield Event(f"{COPY_WORDS[type(step)]} {name}", step.stream, start_us, end_us, args)


def _layer_events(events: Iterable[Event]) -> Iterator[Event]:
    """One event for kernels of one layer and phase that follow one another."""
    group: list[Event] = []
    for event in events:
        if "phase" not in event.args:
            continue
        if group and any(group[0].args[key] != event.args[key] for key in ("layer", "phase")):
            yield _layer_event(group)
            group = []
        group.append(event)
    if group:
        yield _layer_event(group)


def _layer_event(group: Sequence[Event]) -> Event:
    layer, phase = group[0].args["layer"], group[0].args["phase"]
    args = {"layer": layer, "phase": phase, "kernels": len(group)}
    return Event(f"{layer} {phase}", LAYERS, group[0].start_us, group[-1].end_us, args)


def _live_bytes(plan: Plan, timing: Timing) -> Iterator[tuple[float, int]]:
    """From the end of each kernel to that of the next the most bytes in use on the way; then what is left."""
    live = highest = plan.persistent_bytes
    held: dict[str, int] = {}
    start_us = 1000 * min((span[0] for span in timing.spans if span is not None), default=0.0)
    for step, span in zip(plan.steps, timing.spans, strict=True):
        if isinstance(step, Alloc):
            held[step.storage] = step.nbytes
            live += step.nbytes
            highest = max(highest, live)
        elif isinstance(step, Free):
            live -= held.pop(step.storage)
        elif isinstance(step, Launch) and span is not None:
            yield start_us, highest
            start_us, highest = 1000 * span[1], live
    yield start_us, highest
    yield 1000 * timing.total_ms, live
