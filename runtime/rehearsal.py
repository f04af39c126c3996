"""Before the first step: plans run on blank data, to see what the device holds, and steps to see how long they take.

rehearse(prepared, executor_of)         # LimitExceeded if the system sees more than memory.limit
step_ms, source = predict(prepared, print, trainer.train_step)

What is predicted from ops that were timed one by one lacks what only whole steps show: the host's part of a step, and
the clock of a GPU under lasting load. So whole steps are rehearsed, and what they take more is in the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import numpy as np

from vdnn.errors import BudgetError, NotFiniteError
from vdnn.memory.clock import simulate
from vdnn.runtime.calibration import counted
from vdnn.runtime.data import Batch, batches, epoch_order, with_next
from vdnn.runtime.executor import Executor
from vdnn.runtime.forecast import SILENT_MS, expected_step, is_calibrated
from vdnn.runtime.measure import RUNS, blank_feeds, measure_costs
from vdnn.runtime.planset import Key
from vdnn.runtime.prepare import Prepared
from vdnn.units import MIB, format_bytes, format_ms

MEASURE_BELOW_MS = 3000.0
"""Steps expected to be shorter than this are measured, a few runs long, for the prediction."""
FEWEST = 3
"""Rehearsed steps that count, at least; more where they are short."""
TrainStep = Callable[..., tuple[float, float]]
"""Trainer.train_step: (images, labels, rate, the next images)."""

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


def predict(prepared: Prepared, note: Callable[[str], None], train_step: TrainStep | None = None) -> tuple[float, str]:
    """Time of a whole step in ms and where it is from: measured here if that is quick and not done yet.

    Args:
        note: told in words before a measurement that will take a while.
        train_step: takes a step on the weights that the device holds, which it may change; None to try none.
    """
    (expected, source), caps = expected_step(prepared), prepared.backend.caps
    if expected >= MEASURE_BELOW_MS:
        return expected, source
    if caps.measured_costs:
        if train_step is None or is_calibrated(prepared):
            return expected, source
        return _rehearsed(prepared, note, train_step, expected, source)
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


def _rehearsed(
    prepared: Prepared, note: Callable[[str], None], train_step: TrainStep, expected: float, source: str
) -> tuple[float, str]:
    """The median of whole steps at rate 0 on the run's first images, and how that compares with the sum of parts."""
    skipped, count = counted(expected, FEWEST)
    if (skipped + count) * expected > SILENT_MS:
        note(f"rehearsing {skipped + count} steps: about {format_ms((skipped + count) * expected)}")
    times: list[float] = []
    try:
        for (images, labels), later in with_next(_full_batches(prepared, skipped + count)):
            started = perf_counter()
            train_step(images, labels, 0.0, later and later[0])
            times.append((perf_counter() - started) * 1000)
    except NotFiniteError:  # the first step will say so
        return expected, source
    measured = median(times[skipped:])
    words = f"rehearsed: whole steps take {measured / expected:.2f} times as long as their parts"
    return measured, f"{source}; {words}"


def _full_batches(prepared: Prepared, count: int) -> Iterator[Batch]:
    """So many full batches, in the order in which training will read them, again from the start where an epoch ends."""
    split, seed = prepared.source.train, prepared.config.train.seed
    size = sum(n for _, n in prepared.steps.full)
    order = epoch_order(seed, 0, len(split))
    whole = order[: len(order) - len(order) % size]
    return batches(split, np.resize(whole, count * size), 0, size)
