"""Before the first weight is written: plans run on blank data, to see what the device holds and how long steps take.

rehearse(prepared, executor_of)         # LimitExceeded if the system sees more than memory.limit
step_ms, source = predict(prepared, print)
"""

from __future__ import annotations

from collections.abc import Callable

from vdnn.errors import BudgetError
from vdnn.memory.clock import simulate
from vdnn.runtime.executor import Executor
from vdnn.runtime.forecast import SILENT_MS, expected_step
from vdnn.runtime.measure import RUNS, blank_feeds, measure_costs
from vdnn.runtime.planset import Key
from vdnn.runtime.prepare import Prepared
from vdnn.units import MIB, format_bytes, format_ms

MEASURE_BELOW_MS = 3000.0
"""Steps expected to be shorter than this are measured, a few runs long, for the prediction."""


SPARE_BYTES = 32 * MIB
"""Set aside beyond what was held outside the slab: another plan has other steps to capture. VGG-416's second plan held
19 MB more than its first (H200)."""


class LimitExceeded(BudgetError):
    """The system sees more device memory held than `memory.limit`.

    `reserve_bytes` is what to plan again with: what lay outside the slab, and SPARE_BYTES.
    """

    def __init__(self, held_bytes: int, limit_bytes: int, slab_bytes: int):
        self.reserve_bytes = held_bytes - slab_bytes + SPARE_BYTES
        super().__init__(
            f"the process holds {format_bytes(held_bytes)} of the device once its steps are captured, "
            f"{format_bytes(held_bytes - slab_bytes)} of it outside the slab: more than memory.limit "
            f"{format_bytes(limit_bytes)}; raise the limit to {held_bytes:,} bytes",
            layer="context",
            needed_bytes=held_bytes,
            budget_bytes=limit_bytes,
            smallest_bytes=held_bytes,
        )


def rehearse(prepared: Prepared, executor_of: Callable[[Key], Executor]) -> None:
    """Run every plan twice, so that all of them are captured, and compare what the system sees with the limit."""
    for key, planned in prepared.plans.plans.items():
        feeds = blank_feeds(planned.program)
        for _ in range(2):
            executor_of(key).run(feeds)
    held, limit = prepared.backend.held_bytes(), prepared.config.memory.limit
    if limit is not None and held > limit:
        raise LimitExceeded(held, limit, prepared.plans.slab_bytes)


def predict(prepared: Prepared, note: Callable[[str], None]) -> tuple[float, str]:
    """Time of a whole step in ms and where it is from: measured here if that is quick and not done yet.

    Args:
        note: told in words before a measurement that will take a while.
    """
    (expected, source), caps = expected_step(prepared), prepared.backend.caps
    if caps.measured_costs or expected >= MEASURE_BELOW_MS:
        return expected, source
    if expected * RUNS > SILENT_MS:
        note(f"measuring {RUNS} steps on blank data: about {format_ms(expected * RUNS)}")
    total = 0.0
    for key in prepared.steps.full:
        planned = prepared.plans[key]
        feeds = blank_feeds(planned.program)
        costs = measure_costs(prepared.backend, planned.plan, planned.program, feeds, planned.costs)
        total += simulate(planned.plan, planned.program, costs).total_ms
        source = costs.source
    return total, source
