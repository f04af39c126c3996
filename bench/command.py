"""What every command here shares: signals and errors as one line and a code, values of options, an end with the parent.

    if __name__ == "__main__":
        sys.exit(command(main))

    parser.add_argument("--minutes", type=above_zero, default=9.0, help="for all of it (default: 9)")
    process = subprocess.Popen(words, **tied())          # the child calls end_with_parent()

Only the standard library is imported, so that a process which measures a library may use this before it loads that.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from vdnn.errors import VdnnError
from vdnn.runtime.guard import guarded
from vdnn.runtime.streams import run_program

LIFELINE = "VDNN_BENCH_LIFELINE"
"""Environment variable: the descriptor of a pipe that ends when the parent does."""


def command(body: Callable[[], int | None]) -> int:
    """Run `body`, a child of another bench to the end of its parent; returns the exit code, see `guarded` and
    `run_program`: 128 + the signal's number (SIGINT 130, SIGTERM 143), 141 if nobody reads on.
    """
    program = Path(sys.argv[0]).stem

    def tied_body() -> int | None:
        end_with_parent()
        return body()

    return run_program(program, lambda: guarded(program, tied_body))


def reason(error: BaseException) -> str:
    """Why something failed, for people: an error of vdnn's has all of it in its words, others need their class."""
    return str(error) if isinstance(error, VdnnError) else f"{type(error).__name__}: {error}"


# ---- values of options


def above_zero(text: str) -> float:
    """A finite number above 0; for argparse."""
    number = _finite(text)
    if number is None or number <= 0:
        raise ArgumentTypeError(f"expected a finite number above 0, got '{text}'")
    return number


def not_negative(text: str) -> float:
    """A finite number of 0 or more; for argparse."""
    number = _finite(text)
    if number is None or number < 0:
        raise ArgumentTypeError(f"expected a finite number of 0 or more, got '{text}'")
    return number


def whole_from(least: int) -> Callable[[str], int]:
    """What argparse is to take for a whole number of `least` or more."""

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"expected a whole number of {least} or more, got '{text}'")
        return number

    return whole


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# ---- a child that ends with its parent


def tied() -> dict[str, Any]:
    """Arguments of subprocess.Popen for a child that calls `end_with_parent`: it ends however this process does."""
    read, _ = _pipe()
    return {"env": {**os.environ, LIFELINE: str(read)}, "pass_fds": (read,)}


def end_with_parent() -> None:
    """In a child started with `tied`: watch, without waking up, for the end of the parent; elsewhere nothing.

    Then this process is killed, with all of its group if it leads one.
    """
    number = os.environ.pop(LIFELINE, "")  # children of this process are not meant
    if number:
        os.set_inheritable(int(number), False)
        Thread(target=_watch, args=(int(number),), daemon=True).start()


@cache
def _pipe() -> tuple[int, int]:
    """Both ends of a pipe of which this process alone holds the second, to its end."""
    return os.pipe()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)  # nobody writes: returns when the other end is closed
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
