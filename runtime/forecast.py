"""How long a run and its evaluations will take, by the clock and the cost tables.

evaluation_ms(prepared)                     # one pass over the test images
run_ms(prepared, prepared.predicted_step_ms())
"""

from __future__ import annotations

from vdnn.memory.clock import simulate
from vdnn.runtime.planset import Planned, slice_sizes
from vdnn.runtime.prepare import Prepared, Steps

SILENT_MS = 2000.0
"""A phase expected to show nothing for longer than this is announced."""


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
