"""What each op can cost: the candidates of every op, and the rates of copies. The only list of candidates.

table.fastest("conv1.forward", limit_bytes=64 * MIB).time_ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from vdnn.layers.op import Op, Program


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run one op: its algorithm, time in ms, workspace in bytes, and whether two runs give equal bits.

    `math` is what it rounds to: "fp32", "tf32" (operands), "bf16" or "fp16" (operands and results).
    """

    algorithm: str
    time_ms: float
    workspace_bytes: int = 0
    deterministic: bool = True
    math: str = "fp32"


@dataclass(frozen=True, slots=True)
class Part:
    """So many images by one candidate."""

    images: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Division:
    """Parts that together are the batch, the largest first; they run one after another in one workspace."""

    parts: tuple[Part, ...]

    @property
    def time_ms(self) -> float:
        """The sum of their times."""
        return sum(part.candidate.time_ms for part in self.parts)

    @property
    def workspace_bytes(self) -> int:
        """The largest of their workspaces."""
        return max(part.candidate.workspace_bytes for part in self.parts)


class Options(NamedTuple):
    """Candidates for some images of an op, fastest first; `complete` if none was left out for the memory it needs."""

    candidates: tuple[Candidate, ...]
    complete: bool = True


PRODUCTS = frozenset(("conv.forward", "conv.dgrad", "conv.wgrad", "linear.forward", "linear.dgrad", "linear.wgrad"))
"""Kinds of ops that are sums of products; all others are bound by the bytes that they move."""


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Copies between device and host: GB/s (10^9 bytes) each way alone, their sum when both run, µs to start one.

    Args:
        product_slowdown, stream_slowdown: how many times as long as alone an op takes while copies run both ways; one
            of PRODUCTS, and one that streams bytes.
    """

    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float
    latency_us: float = 10.0
    product_slowdown: float = 1.0
    stream_slowdown: float = 1.0

    def slowdown(self, kind: str) -> float:
        """That of an op of `kind`."""
        return self.product_slowdown if kind in PRODUCTS else self.stream_slowdown


@dataclass(frozen=True, slots=True)
class CostTable:
    """What ops and copies cost.

    Args:
        candidates: by op name, fastest first.
        source: on which GPU they were measured, or by what modelled.
        slices: candidates of a convolution, by its op's name, for fewer images than the batch; asking may measure them.
            None where nothing is known of slices. No part of the JSON form.
        given: what an earlier run has chosen and is to be used again, by op name.
    """

    candidates: Mapping[str, tuple[Candidate, ...]]
    rates: CopyRates
    source: str
    slices: Callable[[str, int], Options] | None = field(default=None, compare=False, repr=False)
    given: Mapping[str, Candidate | Division] = field(default_factory=dict, compare=False, repr=False)

    def fastest(self, op: str, limit_bytes: int | None = None) -> Candidate:
        """The fastest candidate whose workspace fits in `limit_bytes`; the smallest one if none does."""
        fits = [c for c in self.candidates[op] if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        return min(fits, key=lambda c: (c.time_ms, c.workspace_bytes)) if fits else self.smallest(op)

    def smallest(self, op: str) -> Candidate:
        """The candidate with the least workspace, the fastest of those."""
        return min(self.candidates[op], key=lambda c: (c.workspace_bytes, c.time_ms))

    def time_ms(self, op: str, algorithm: str | None = None) -> float:
        """Time of `op` under `algorithm`; of its only candidate if None."""
        return _time_ms(self.candidates[op], algorithm)

    def of(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Candidates of an op of a program with algorithms: of a slice, those for its number of images."""
        if op.slice_of is None or op.name in self.candidates or self.slices is None:
            return self.candidates[op.name]
        images = next(s.shape[0] for s in (program.tensors[t] for t in op.reads.values()) if s.slice_of is not None)
        return self.slices(op.slice_of, images).candidates

    def run_ms(self, op: Op, program: Program) -> float:
        """Time of `op` of a program with algorithms under its own."""
        return _time_ms(self.of(op, program), op.attrs.get("algorithm"))

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal table."""
        return {
            "source": self.source,
            "rates": asdict(self.rates),
            "candidates": {op: [asdict(c) for c in options] for op, options in self.candidates.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """The table that `to_json` described."""
        options = {op: tuple(Candidate(**c) for c in rows) for op, rows in data["candidates"].items()}
        return cls(options, CopyRates(**data["rates"]), data["source"])


def _time_ms(options: tuple[Candidate, ...], algorithm: str | None) -> float:
    if algorithm is None:
        return options[0].time_ms
    return next(c.time_ms for c in options if c.algorithm == algorithm)
