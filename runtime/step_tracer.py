"""A trace of one training step in the middle of a run, written as soon as the step is done.

trainer.start()
trainer.listener = StepTracer(trainer, "trace.json")
trainer.run()
"""

from __future__ import annotations

from vdnn.errors import VdnnError
from vdnn.runtime.listener import StepInfo
from vdnn.runtime.trace import Marks
from vdnn.runtime.trainer import Trainer

AFTER_STEPS = 3
"""Steps before the one that is traced: by then kernels are loaded, plans captured and caches warm."""


class StepTracer:
    """A listener that passes everything on to the trainer's own, and traces one step into the file `path`.

    The step is the fourth of this process, or the last one if there are fewer. It runs uncaptured, with equal results.
    """

    def __init__(self, trainer: Trainer, path: str):
        self._trainer, self._path = trainer, path
        self._inner = trainer.listener
        self._marks: Marks | None = None
        left = trainer.prepared.steps.total - trainer.step
        self._traced_step = trainer.step + min(AFTER_STEPS + 1, left)
        if left:
            self._arm_before(trainer.step + 1)
        else:
            self.note(f"no trace: no step is left to run, so '{path}' is not written")

    def note(self, text: str) -> None:
        """A sentence."""
        self._inner.note(text)

    def step(self, info: StepInfo) -> None:
        """A step is done: the traced one, or perhaps the one before it."""
        self._inner.step(info)
        if self._marks is not None:
            self._write(self._marks, info.step)
            self._trainer.observer = self._marks = None
        self._arm_before(info.step + 1)

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """The test images were evaluated."""
        self._inner.evaluated(step, epoch, loss, accuracy)

    def _arm_before(self, step: int) -> None:
        if step == self._traced_step:
            self._trainer.observer = self._marks = Marks(self._trainer.backend)

    def _write(self, marks: Marks, step: int) -> None:
        trace = marks.trace(f"step {step}, measured uncaptured on {self._trainer.backend.caps.description}")
        try:
            trace.write(self._path)
        except VdnnError as error:  # the training is worth more than its trace
            self.note(f"no trace: {error}")
        else:
            self.note(
                f"trace of step {step} ({trace.end_us / 1000:,.1f} ms): '{self._path}'; open it at ui.perfetto.dev"
            )
