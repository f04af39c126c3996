"""What a plan costs in time, without running it: a clock per stream, waits, copy rates, and what slows what down.

Copies of both directions share a link: the later one in the plan is slowed down. Copies also take memory bandwidth from
kernels: a kernel takes longer beside copies that stand before it in the plan, and what a copy costs kernels that stand
before it is added to the next one.

    timing = simulate(plan, program, costs)
    timing.total_ms, timing.compute_idle_ms

The same rules serve the simulated backend: a `StreamClock` is told each step as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from vdnn.layers.op import Program
from vdnn.memory.costs import CopyRates, CostTable
from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Wait

BUSY: Mapping[type, str] = {Launch: "compute", CopyOut: "out", Fetch: "out", CopyIn: "in", Feed: "in"}
"""Steps that take time, and what each keeps busy: the kernels, or the link in one direction."""


@dataclass(slots=True)
class StreamClock:
    """Time of each stream in ms; copies of both directions at once share `rates.both_gbps`."""

    rates: CopyRates
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    events: dict[int, float] = field(default_factory=dict)
    copies: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"out": [], "in": []})
    _past: dict[tuple[str, str], int] = field(default_factory=dict)
    _ran: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    _owed: dict[str, float] = field(default_factory=dict)

    def run(self, stream: str, time_ms: float, slowdown: float = 1.0) -> tuple[float, float]:
        """Occupy `stream` for `time_ms`, and longer for copies beside it; returns start and end.

        Args:
            slowdown: how many times as long it takes while copies run both ways; one way counts half.
        """
        start = self.now[stream]
        end = start + time_ms
        if slowdown != 1.0:
            end = self._stretched(stream, start, time_ms, slowdown)
            self._ran.setdefault(stream, []).append((start, end, slowdown))
        self.now[stream] = end = end + self._owed.pop(stream, 0.0)
        return start, end

    def _stretched(self, stream: str, start: float, left: float, slowdown: float) -> float:
        """When work that takes `left` ms alone is done, if it starts at `start`."""
        time = start
        while True:
            active, until = 0, math.inf
            for direction, spans in self.copies.items():
                # copies that were over before this stream got here are never looked at again
                place = self._past.get((stream, direction), 0)
                while place < len(spans) and spans[place][1] <= time:
                    place += 1
                self._past[stream, direction] = place
                if place < len(spans):
                    low, high = spans[place]
                    active += low <= time
                    until = min(until, high if low <= time else low)
            pace = 1 / (1 + (slowdown - 1) * active / 2)
            if (until - time) * pace >= left:
                return time + left / pace
            left -= (until - time) * pace
            time = until

    def copy(self, direction: str, nbytes: int, stream: str) -> tuple[float, float]:
        """A copy "out" (device to host) or "in"; slower while the other direction has one in flight."""
        alone = self.rates.d2h_gbps if direction == "out" else self.rates.h2d_gbps
        shared = min(alone, self.rates.both_gbps / 2)
        start = self.now[stream] + self.rates.latency_us / 1000
        time, left = start, nbytes / 1e6  # MB; GB/s = MB/ms
        for low, high in self.copies["in" if direction == "out" else "out"]:
            if high <= time or left <= 0:
                continue
            before = max(0.0, low - time)
            if before * alone >= left:
                break
            left -= before * alone
            time += before
            done = min(left, (high - time) * shared)
            left -= done
            time += done / shared
        end = time + left / alone
        self.copies[direction].append((start, end))
        self._charge(start, end)
        start = self.now[stream]
        self.now[stream] = end
        return start, end

    def _charge(self, start: float, end: float) -> None:
        """Let streams owe what a copy costs the kernels that have run by now."""
        for stream, spans in self._ran.items():
            for low, high, slowdown in reversed(spans):
                if high <= start:
                    break
                overlap = max(0.0, min(high, end) - max(low, start))
                self._owed[stream] = self._owed.get(stream, 0.0) + overlap * (slowdown - 1) / 2

    def record(self, event: int, stream: str) -> None:
        """Note when `event` is reached."""
        self.events[event] = self.now[stream]

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until `event`."""
        self.now[stream] = max(self.now[stream], self.events[event])

    def join(self) -> float:
        """All streams meet; returns when."""
        latest = max(time + self._owed.get(stream, 0.0) for stream, time in self.now.items())
        self.now = dict.fromkeys(STREAMS, latest)
        self.copies, self._past, self._ran, self._owed = {"out": [], "in": []}, {}, {}, {}
        return latest


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in ms.

    Args:
        total_ms: of the step. compute_ms, out_ms, in_ms: of all kernels and of all copies each way, as they ran.
        spans: per plan step (start, end) on its stream; None for steps that take no time.
    """

    total_ms: float
    compute_ms: float
    out_ms: float
    in_ms: float
    spans: tuple[tuple[float, float] | None, ...]

    @property
    def compute_idle_ms(self) -> float:
        """Time in which no kernel ran: copies that computation did not hide."""
        return max(0.0, self.total_ms - self.compute_ms)


def op_times(program: Program, costs: CostTable) -> Mapping[str, float]:
    """ms by op name under the algorithms chosen in `program`."""
    return {op.name: costs.run_ms(op, program) for op in program.ops}


def simulate(plan: Plan, program: Program, costs: CostTable) -> Timing:
    """Time of one run of `plan` of `program` (with algorithms) under `costs`."""
    clock = StreamClock(costs.rates)
    times = op_times(program, costs)
    slowdowns = {op.name: costs.rates.slowdown(op.kind) for op in program.ops}
    tensors = program.tensors
    spans: list[tuple[float, float] | None] = []
    busy = dict.fromkeys(STREAMS, 0.0)
    for step in plan.steps:
        span = None
        match step:
            case Launch():
                span = clock.run(step.stream, times[step.op], slowdowns[step.op])
                busy["compute"] += span[1] - span[0]
            case CopyOut():
                span = clock.copy("out", tensors[step.storage].nbytes, step.stream)
            case CopyIn():
                span = clock.copy("in", tensors[step.storage].nbytes, step.stream)
            case Feed():
                span = clock.copy("in", tensors[step.tensor].nbytes, step.stream)
            case Fetch():
                span = clock.copy("out", tensors[step.tensor].nbytes, step.stream)
            case Record():
                clock.record(step.event, step.stream)
            case Wait():
                clock.wait(step.event, step.stream)
            case Alloc() | Free():
                pass
        if span is not None and not isinstance(step, Launch):
            busy[BUSY[type(step)]] += span[1] - span[0]
        spans.append(span)
    return Timing(clock.join(), busy["compute"], busy["out"], busy["in"], tuple(spans))
