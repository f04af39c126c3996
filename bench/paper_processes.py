"""Measuring in processes of their own, one a network: what one leaves on the card, or breaks there, touches no other.

    measure_apart(Order("cuda", 5, "runs/tables", tasks(FIGURES, None), budget_s=300.0), print)

Such a process is `python -m vdnn.bench.paper_processes ORDER`, with the order as JSON; it tells a line for every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import IO

from vdnn.bench.command import end_with_parent, tied
from vdnn.bench.paper_files import read_runs
from vdnn.bench.paper_gpu import Bench, measure_missing
from vdnn.bench.paper_runs import Case
from vdnn.bench.paper_tasks import Task
from vdnn.errors import BackendUnavailable
from vdnn.runtime.signals import Stopped, stoppable

MODULE = "vdnn.bench.paper_processes"
PATIENCE_S = 5.0
"""For a child that was told to end, to tidy up."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure, on which device, with how many steps each, and the folder that keeps it."""

    device: str
    steps: int
    out: str
    tasks: tuple[Task, ...]
    budget_s: float | None = None

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal order."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """The order that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "tasks": tuple(Task(Case(**row["case"]), row["best"]) for row in data["tasks"])})


def measure_apart(order: Order, progress: Callable[[str], None]) -> None:
    """Measure what is not in the order's folder yet; BackendUnavailable if the device is not there.

    Args:
        progress: told a line for every run, and why one is missing.
    """
    measured, started = read_runs(Path(order.out)), monotonic()
    todo = [task for task in order.tasks if not measured.has(task.case, task.best)]
    for network, group in groupby(todo, key=lambda task: (task.case.network, task.case.batch)):
        tasks = tuple(group)
        left = None if order.budget_s is None else order.budget_s - (monotonic() - started)
        if left is not None and left <= 0:
            progress(
                f"time is over: {len(todo) - todo.index(tasks[0])} run(s) left; the same command goes on with them"
            )
            return
        code, error = _run(replace(order, tasks=tasks, budget_s=left), progress)
        if code == BackendUnavailable.exit_code:
            raise BackendUnavailable(error)
        if code:
            progress(f"{network[0]} ({network[1]}): the process that measures ended with {code}: {error}")


def _run(order: Order, progress: Callable[[str], None]) -> tuple[int, str]:
    """Exit code, and the last line on standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        words = [sys.executable, "-m", MODULE, order.to_json()]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, **tied())
        try:
            _tell(process.stdout, progress)
            code = process.wait()
        except BaseException:  # a signal: the card is not to be kept busy by a child that nobody waits for
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:  # deep in a library
                process.kill()
                process.wait()
            raise
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        return code, lines[-1] if lines else ""


def _tell(stream: IO[str] | None, progress: Callable[[str], None]) -> None:
    if stream is not None:
        for line in stream:
            progress(line.rstrip("\n"))


def main() -> int:
    """Carry out the order on the command line."""
    end_with_parent()
    order = Order.from_json(sys.argv[1])
    out = Path(order.out)
    bench = Bench(order.device, order.steps)
    try:
        with stoppable():
            tell = partial(print, flush=True)
            measure_missing(bench, order.tasks, out, read_runs(out), tell, order.budget_s)
    except (BackendUnavailable, Stopped) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
