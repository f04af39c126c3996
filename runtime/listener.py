"""What a trainer tells while it trains, and whom: a display, a tracer, a test.

class Quiet:
    def note(self, text): ...
    def step(self, info): print(info.loss)
    def evaluated(self, step, epoch, loss, accuracy): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One finished step, for a listener. Times in ms; in fp16 also the loss scale after it, and all skipped steps."""

    step: int
    total: int
    epoch: int
    loss: float
    accuracy: float
    lr: float
    images: int
    time_ms: float
    data_wait_ms: float
    loss_scale: float | None = None
    skipped: int = 0


class Listener(Protocol):
    """Who shows what happens."""

    def note(self, text: str) -> None:
        """A sentence."""

    def step(self, info: StepInfo) -> None:
        """A step is done."""

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """The test images were evaluated."""
