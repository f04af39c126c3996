"""What each op can cost: the candidates of every op, and the rates of copies. The only list of candidates.

table.fastest("conv1.forward", limit_bytes=64 * MIB).time_ms
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run one op: its algorithm, time in ms, workspace in bytes, and whether two runs give equal bits.

    `math` is what its products round to: "fp32" or "tf32".
    """

    algorithm: str
    time_ms: float
    workspace_bytes: int = 0
    deterministic: bool = True
    math: str = "fp32"


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Copies between device and host: GB/s (10^9 bytes) each way alone, their sum when both run, µs to start one."""

    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float
    latency_us: float = 10.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Candidates by op name, fastest first; `source` says on which GPU they were measured or by what modelled."""

    candidates: Mapping[str, tuple[Candidate, ...]]
    rates: CopyRates
    source: str

    def fastest(self, op: str, limit_bytes: int | None = None) -> Candidate:
        """The fastest candidate whose workspace fits in `limit_bytes`; the smallest one if none does."""
        fits = [c for c in self.candidates[op] if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        return min(fits, key=lambda c: (c.time_ms, c.workspace_bytes)) if fits else self.smallest(op)

    def smallest(self, op: str) -> Candidate:
        """The candidate with the least workspace, the fastest of those."""
        return min(self.candidates[op], key=lambda c: (c.workspace_bytes, c.time_ms))

    def time_ms(self, op: str, algorithm: str | None = None) -> float:
        """Time of `op` under `algorithm`; of its only candidate if None."""
        options = self.candidates[op]
        if algorithm is None:
            return options[0].time_ms
        return next(c.time_ms for c in options if c.algorithm == algorithm)

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
