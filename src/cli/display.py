"""What a run looks like: a live panel on a terminal, one plain line per interval elsewhere.

with make_display(prepared, sys.stdout) as display:
    Trainer(prepared, folder, display).run()
"""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from vdnn.runtime.run_folder import Metrics
from vdnn.runtime.trainer import StepInfo

INTERVAL_S = 5.0
SMOOTHING = 0.05


class Display:
    """Plain lines; writes training rows to the metrics too."""

    def __init__(self, stream: TextIO, metrics: Metrics, steps_per_epoch: int):
        self.stream, self.metrics, self.steps_per_epoch = stream, metrics, steps_per_epoch
        self._losses: list[float] = []
        self._right = self._images = 0
        self._busy_ms = self._waited_ms = 0.0
        self._last = monotonic()
        self.latest: StepInfo | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put back."""

    def note(self, text: str) -> None:
        """A sentence on a line of its own."""
        print(text, file=self.stream, flush=True)

    def step(self, info: StepInfo) -> None:
        """Gather, and report every few seconds and at the end of an epoch."""
        self.latest = info
        self._losses.append(info.loss * info.images)
        self._right += round(info.accuracy * info.images)
        self._images += info.images
        self._busy_ms += info.time_ms
        self._waited_ms += info.data_wait_ms
        now = monotonic()
        if now - self._last >= INTERVAL_S or info.step % self.steps_per_epoch == 0 or info.step == info.total:
            self._report(info)
            self._last = now

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """The result on the test images."""
        self.note(f"test   step {step:>6}  epoch {epoch:>3}  loss {loss:.4f}  accuracy {accuracy:.2%}")

    def _report(self, info: StepInfo) -> None:
        loss, accuracy = sum(self._losses) / self._images, self._right / self._images
        rate = self._images / max(1e-9, (self._busy_ms + self._waited_ms) / 1000)
        self.metrics.write(
            step=info.step,
            epoch=info.epoch + 1,
            split="train",
            loss=f"{loss:.6f}",
            accuracy=f"{accuracy:.6f}",
            lr=f"{info.lr:.6g}",
            images_per_s=f"{rate:.1f}",
        )
        self.show(info, loss, accuracy, rate, self._waited_ms / max(1e-9, self._busy_ms + self._waited_ms))
        self._losses, self._right, self._images, self._busy_ms, self._waited_ms = [], 0, 0, 0.0, 0.0

    def show(self, info: StepInfo, loss: float, accuracy: float, rate: float, waiting: float) -> None:
        """One report; `waiting` is the share of time spent on waiting for data."""
        self.note(
            f"train  step {info.step:>6}/{info.total}  epoch {info.epoch + 1:>3}  loss {loss:.4f}  "
            f"accuracy {accuracy:.2%}  lr {info.lr:.4g}  {rate:,.0f} images/s  data wait {waiting:.0%}"
        )


class LiveDisplay(Display):
    """A panel that is drawn anew several times a second."""

    def __init__(self, stream: TextIO, metrics: Metrics, steps_per_epoch: int, title: str):
        super().__init__(stream, metrics, steps_per_epoch)
        self.title = title
        self._loss = self._rate = float("nan")
        self._test = "not yet evaluated"
        self._live = Live(console=Console(file=stream), refresh_per_second=8, get_renderable=self._panel)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False)

    def step(self, info: StepInfo) -> None:
        fresh = self._loss != self._loss
        self._loss = info.loss if fresh else (1 - SMOOTHING) * self._loss + SMOOTHING * info.loss
        rate = info.images / max(1e-9, (info.time_ms + info.data_wait_ms) / 1000)
        self._rate = rate if fresh else (1 - SMOOTHING) * self._rate + SMOOTHING * rate
        super().step(info)

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        self._test = f"loss {loss:.4f}, accuracy {accuracy:.2%} after step {step}"

    def show(self, info: StepInfo, loss: float, accuracy: float, rate: float, waiting: float) -> None:
        """The panel shows it already."""

    def _panel(self) -> Panel:
        info = self.latest
        if info is None:
            return Panel("starting", title=self.title)
        table = Table.grid(padding=(0, 2))
        left_s = (info.total - info.step) * info.images / max(1e-9, self._rate)
        table.add_row("step", f"{info.step} of {info.total}, epoch {info.epoch + 1}, about {left_s:.0f} s left")
        table.add_row("loss", f"{self._loss:.4f} (training, smoothed)")
        table.add_row("test", self._test)
        table.add_row("rate", f"{self._rate:,.0f} images/s, learning rate {info.lr:.4g}")
        # the bar comes last, for it ends no line
        return Panel(Group(table, ProgressBar(total=info.total, completed=info.step)), title=self.title)


def make_display(stream: TextIO, metrics: Metrics, steps_per_epoch: int, title: str) -> Display:
    """A LiveDisplay if `stream` is a terminal, else a Display."""
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(stream, metrics, steps_per_epoch, title)
    return Display(stream, metrics, steps_per_epoch)
