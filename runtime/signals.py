"""SIGINT and SIGTERM while a program does not train: one line and 128 + the number, with everything begun undone.

with stoppable():
    body()          # Stopped comes out of wherever it is

Training sets handlers of its own (vdnn.runtime.trainer), which finish the step and write a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal came; `exit_code` is 128 + its number."""

    def __init__(self, number: int):
        self.exit_code = 128 + number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Within it a signal raises Stopped once; while that unwinds, further ones change nothing."""

    def stop(number: int, frame: object) -> None:
        for each in NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_while_loading(program: str) -> None:
    """Let a signal end the process in one line at once: for the time in which libraries load and nothing is begun."""

    def stop(number: int, frame: object) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{program}: {Stopped(number)}\n".encode())
        os._exit(128 + number)

    for number in NUMBERS:
        signal.signal(number, stop)
