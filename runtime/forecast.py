"""How long a run and its evaluations will take: by the clock, the cost tables, and what an earlier run showed.

step_ms, source = expected_step(prepared)   # of a whole step, and where that is from in words
evaluation_ms(prepared)                     # one pass over the test images
run_ms(prepared, step_ms)
compare(prepared, 40.2, [41.0, 41.3, ...])  # once, after the first steps
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from vdnn.memory.clock import simulate
from vdnn.runtime.calibration import (
    Calibration,
    calibrated_words,
    calibration_key,
    counted,
    keep_factor,
    known_factor,
)
from vdnn.runtime.planset import Planned, slice_sizes
from vdnn.runtime.prepare import Prepared, Steps

SILENT_MS = 2000.0
"""A phase expected to show nothing for longer than this is announced."""


def expected_step(prepared: Prepared) -> tuple[float, str]:
    """ms of a whole step and where that is from; calibrated if ops were measured and an earlier run has compared."""
    step_ms, caps = prepared.predicted_step_ms(), prepared.backend.caps
    factor = known_factor(_key(prepared)) if caps.measured_costs else None
    if factor is None:
        return step_ms, caps.cost_source
    return step_ms * factor, f"{caps.cost_source}; {calibrated_words(factor)}"


def is_calibrated(prepared: Prepared) -> bool:
    """Whether an earlier run has shown how whole steps compare with their parts."""
    return prepared.backend.caps.measured_costs and known_factor(_key(prepared)) is not None


def compare(prepared: Prepared, parts_ms: float, times_ms: Sequence[float]) -> Calibration | None:
    """How full steps, which took `times_ms`, compare with the sum of their parts: once there are enough, and kept then.

    None before and after, and where ops were not measured one by one.

    Args:
        parts_ms: prepared.predicted_step_ms().
    """
    skipped, count = counted(parts_ms)
    if len(times_ms) != skipped + count or not prepared.backend.caps.measured_costs:
        return None
    found = Calibration(parts_ms, median(times_ms[skipped:]), count)
    keep_factor(_key(prepared), found)
    return found


def evaluation_ms(prepared: Prepared) -> float:
    """ms of one evaluation of all test images."""
    images = len(prepared.source.test)
    sizes = slice_sizes(images, prepared.steps.evaluation[0][1])
    return sum(_plan_ms(prepared.plans["eval", size]) * sizes.count(size) for size in dict.fromkeys(sizes))


def evaluation_count(steps: Steps, every_epochs: int) -> int:
    """Evaluations in a run: one every so many epochs (0 for none of these), and one at the end."""
    epochs = range(every_epochs, steps.total // steps.per_epoch + 1, every_epochs) if every_epochs else ()
    return len({epoch * steps.per_epoch for epoch in epochs} | {steps.total})


def run_ms(prepared: Prepared, step_ms: float) -> float:
    """ms of the whole run with its evaluations, if a step takes `step_ms`: what is estimated is scaled to that."""
    scale = step_ms / prepared.predicted_step_ms()
    evaluations = evaluation_count(prepared.steps, prepared.config.evaluate.every_epochs)
    return prepared.steps.total * step_ms + evaluations * evaluation_ms(prepared) * scale


def _plan_ms(planned: Planned) -> float:
    return simulate(planned.plan, planned.program, planned.costs).total_ms


def _key(prepared: Prepared) -> dict[str, Any]:
    programs = [prepared.plans[key].program for key in prepared.steps.full]
    return calibration_key(prepared.backend.caps, prepared.graph.name, prepared.config.memory.policy, programs)
