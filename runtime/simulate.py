"""A run on the simulated backend: one step of each kind, so that plan, executor and clock are exercised without data.

print(simulated_run(prepared))
"""

from __future__ import annotations

from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.executor import Executor, Observer
from vdnn.runtime.forecast import run_ms
from vdnn.runtime.measure import blank_feeds
from vdnn.runtime.planset import Key
from vdnn.runtime.prepare import Prepared
from vdnn.units import format_ms


def simulated_run(prepared: Prepared, observer: Observer | None = None) -> str:
    """Execute a full step and an evaluation batch; what they and the whole run would take, in a sentence.

    Args:
        observer: follows the plans of the step.
    """
    backend = prepared.backend
    assert isinstance(backend, SimulatedBackend)
    plans = prepared.plans
    backend.open(plans.slab_bytes, plans.host_bytes, plans.stage_bytes)
    step_ms = sum(_run(prepared, key, observer) for key in prepared.steps.full)
    evaluation_ms = _run(prepared, prepared.steps.evaluation[0])
    backend.close()
    images = sum(key[1] for key in prepared.steps.full)
    return (
        f"simulated ({backend.caps.cost_source}): {format_ms(step_ms)} per step of {images} images "
        f"({images / step_ms * 1000:,.1f} images/s), {format_ms(evaluation_ms)} per evaluation batch, "
        f"{prepared.steps.total} steps with their evaluations about {format_ms(run_ms(prepared, step_ms))}. No data "
        "was computed, so there are no weights and no losses, and no run folder is written"
    )


def _run(prepared: Prepared, key: Key, observer: Observer | None = None) -> float:
    backend, planned = prepared.backend, prepared.plans[key]
    assert isinstance(backend, SimulatedBackend)
    executor, feeds = Executor(backend, planned.plan, planned.program), blank_feeds(planned.program)
    executor.run(feeds)  # brings the images that the next run finds
    before = backend.elapsed_ms
    executor.observer = observer
    executor.run(feeds)
    return backend.elapsed_ms - before
