"""What a run looks like: a live panel on a terminal, one plain line per interval elsewhere.

with make_display(sys.stdout, folder.metrics, steps.per_epoch, "lenet on cpu", "planned 5.1 MiB") as display:
    Trainer(prepared, folder, display).run()
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from vdnn.runtime.listener import StepInfo
from vdnn.runtime.run_folder import Metrics
from vdnn.units import format_ms

INTERVAL_S = 5.0
SMOOTHING = 0.05


@dataclass(slots=True)
class Tally:
    """Sums over steps. Times in ms."""

    steps: int = 0
    images: int = 0
    right: int = 0
    losses: float = 0.0
    busy_ms: float = 0.0
    waited_ms: float = 0.0

    def add(self, info: StepInfo) -> None:
        """One more step."""
        self.steps += 1
        self.images += info.images
        self.right += round(info.accuracy * info.images)
        self.losses += info.loss * info.images
        self.busy_ms += info.time_ms
        self.waited_ms += info.data_wait_ms

    @property
    def rate(self) -> float:
        """Images per second, waiting for data included."""
        return 1000 * self.images / max(1e-6, self.busy_ms + self.waited_ms)

    @property
    def waiting(self) -> float:
        """The share of time spent on waiting for data."""
        return self.waited_ms / max(1e-6, self.busy_ms + self.waited_ms)


class Display:
    """Plain lines; writes the training row of every epoch to the metrics too."""

    def __init__(self, stream: TextIO, metrics: Metrics, steps_per_epoch: int):
        self.stream, self.metrics, self.steps_per_epoch = stream, metrics, steps_per_epoch
        self._recent, self._epoch = Tally(), Tally()
        self._last = monotonic()
        self.latest: StepInfo | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that stops inside an epoch has a row of what it did of it."""
        self._write_row()

    def note(self, text: str) -> None:
        """A sentence on a line of its own."""
        print(text, file=self.stream, flush=True)

    def step(self, info: StepInfo) -> None:
        """Gather, and report every few seconds and at the end of an epoch."""
        self.latest = info
        self._recent.add(info)
        self._epoch.add(info)
        now = monotonic()
        if info.step % self.steps_per_epoch == 0 or info.step == info.total:
            whole = self._epoch.steps == self.steps_per_epoch
            self.show(info, self._epoch, "whole epoch" if whole else f"{self._epoch.steps} steps of the epoch")
            self._write_row()
        elif now - self._last >= INTERVAL_S:
            self.show(info, self._recent, f"last {self._recent.steps} steps")
        else:
            return
        self._recent, self._last = Tally(), now

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """The result on the test images."""
        self.note(f"test   step {step:>6}  epoch {epoch:>3}  loss {loss:.4f}  accuracy {accuracy:.2%}")

    def _write_row(self) -> None:
        info, tally = self.latest, self._epoch
        if info is None or not tally.steps:
            return
        self.metrics.write(
            step=info.step,
            epoch=info.epoch + 1,
            split="train",
            loss=f"{tally.losses / tally.images:.6f}",
            accuracy=f"{tally.right / tally.images:.6f}",
            lr=f"{info.lr:.6g}",
            images=tally.images,
            images_per_s=f"{tally.rate:.1f}",
            **(
                {} if info.loss_scale is None else {"loss_scale": f"{info.loss_scale:g}", "skipped_steps": info.skipped}
            ),
        )
        self._epoch = Tally()

    def show(self, info: StepInfo, tally: Tally, over: str) -> None:
        """One report: means over the steps of `tally`, which `over` names."""
        loss, accuracy = tally.losses / tally.images, tally.right / tally.images
        self.note(
            f"train  step {info.step:>6}/{info.total}  epoch {info.epoch + 1:>3}  loss {loss:.4f}  "
            f"accuracy {accuracy:.2%}  ({over})  lr {info.lr:.4g}  {tally.rate:,.0f} images/s  "
            f"data wait {tally.waiting:.0%}{scale_words(info)}"
        )


class LiveDisplay(Display):
    """A panel that is drawn anew several times a second."""

    def __init__(self, stream: TextIO, metrics: Metrics, steps_per_epoch: int, title: str, memory: str):
        super().__init__(stream, metrics, steps_per_epoch)
        self.title, self.memory = title, memory
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
        super().__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def step(self, info: StepInfo) -> None:
        fresh = self._loss != self._loss
        self._loss = info.loss if fresh else (1 - SMOOTHING) * self._loss + SMOOTHING * info.loss
        rate = info.images / max(1e-9, (info.time_ms + info.data_wait_ms) / 1000)
        self._rate = rate if fresh else (1 - SMOOTHING) * self._rate + SMOOTHING * rate
        super().step(info)

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        self._test = f"loss {loss:.4f}, accuracy {accuracy:.2%} after step {step}"

    def show(self, info: StepInfo, tally: Tally, over: str) -> None:
        """The panel shows it already."""

    def _panel(self) -> Panel:
        info = self.latest
        if info is None:
            return Panel("starting", title=self.title)
        table = Table.grid(padding=(0, 2))
        left_ms = 1000 * (info.total - info.step) * info.images / max(1e-9, self._rate)
        table.add_row("step", f"{info.step} of {info.total}, epoch {info.epoch + 1}, about {format_ms(left_ms)} left")
        table.add_row("loss", f"{self._loss:.4f} (training, smoothed)")
        table.add_row("test", self._test)
        table.add_row("rate", f"{self._rate:,.0f} images/s, learning rate {info.lr:.4g}{scale_words(info, ', ')}")
        table.add_row("memory", self.memory)
        # the bar comes last, for it ends no line
        return Panel(Group(table, ProgressBar(total=info.total, completed=info.step)), title=self.title)


def scale_words(info: StepInfo, before: str = "  ") -> str:
    """The loss scale and skipped steps of a run in fp16, after `before`; nothing of others."""
    if info.loss_scale is None:
        return ""
    return f"{before}loss scale {info.loss_scale:g} ({info.skipped} steps skipped)"


def make_display(stream: TextIO, metrics: Metrics, steps_per_epoch: int, title: str, memory: str) -> Display:
    """A LiveDisplay with `title` and a line on `memory` if `stream` is a terminal, else a Display."""
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(stream, metrics, steps_per_epoch, title, memory)
    return Display(stream, metrics, steps_per_epoch)
