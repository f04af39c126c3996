"""What both sides of vdnn.bench.peers share: how many steps are timed, and how their times are told.

spread([5.1, 5.0, 5.3]) == {"step_ms": 5.1, "low_ms": 5.0, "high_ms": 5.3}
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

WARM_UP = 5
"""Steps before the clock; a compiled step is captured within the first three."""
WALL_STEPS = 5
"""Steps timed by the host's clock, the loss read after each."""
FEWEST, MOST = 8, 200
RATE = 1e-7
"""Learning rate: small, so that random labels lead to no NaN."""


def steps_for(step_ms: float, seconds: float) -> int:
    """How many steps of `step_ms` take about `seconds`, within bounds; 2 at least where `seconds` is 0."""
    if seconds <= 0:
        return 2
    return max(FEWEST, min(MOST, int(1000 * seconds / max(step_ms, 1e-3))))


def spread(times_ms: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, _, high = quantiles(times_ms, method="inclusive") if len(times_ms) > 1 else (times_ms[0],) * 3
    return {"step_ms": median(times_ms), "low_ms": low, "high_ms": high}
