"""What a plan costs in time, without running it: one clock per stream, waits, copy rates, and copies that share a link.

    timing = simulate(plan, program, costs)
    timing.total_ms, timing.compute_idle_ms

The same rules serve the simulated backend: a `StreamClock` is told each step as it comes.
"""

from __future__ import annotations

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

    def run(self, stream: str, time_ms: float) -> tuple[float, float]:
        """Occupy `stream` for `time_ms`; returns start and end."""
        start = self.now[stream]
        self.now[stream] = start + time_ms
        return start, start + time_ms

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
        start = self.now[stream]
        self.now[stream] = end
        return start, end

    def record(self, event: int, stream: str) -> None:
        """Note when `event` is reached."""
        self.events[event] = self.now[stream]

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until `event`."""
        self.now[stream] = max(self.now[stream], self.events[event])

    def join(self) -> float:
        """All streams meet; returns when."""
        latest = max(self.now.values())
        self.now = dict.fromkeys(STREAMS, latest)
        self.copies = {"out": [], "in": []}
        return latest


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in ms.

    Args:
        total_ms: of the step. compute_ms: of all kernels. out_ms, in_ms: of all copies each way, as they ran.
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
        return self.total_ms - self.compute_ms


def op_times(program: Program, costs: CostTable) -> Mapping[str, float]:
    """ms by op name under the algorithms chosen in `program`."""
    return {op.name: costs.run_ms(op, program) for op in program.ops}


def simulate(plan: Plan, program: Program, costs: CostTable) -> Timing:
    """Time of one run of `plan` of `program` (with algorithms) under `costs`."""
    clock = StreamClock(costs.rates)
    times = op_times(program, costs)
    tensors = program.tensors
    spans: list[tuple[float, float] | None] = []
    busy = dict.fromkeys(STREAMS, 0.0)
    for step in plan.steps:
        span = None
        match step:
            case Launch():
                span = clock.run(step.stream, times[step.op])
                busy["compute"] += times[step.op]
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
