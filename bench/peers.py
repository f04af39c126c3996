"""vdnn beside PyTorch on one GPU in one run: whole training steps, network by network, a process a case, alternating.

    python -m vdnn.bench.peers --out runs/peers --minutes 10
    python -m vdnn.bench.peers --networks vgg19:256 --precisions tf32 --out runs/peers \
        --programs torch-compile torch-accum4-12GiB torch-ckpt-12GiB ours ours-12GiB
    python -m vdnn.bench.peers --table --out runs/peers          # peers.md of what is there

Every finished case lies in OUT/peers.json at once, and the same command goes on with what is missing; a case that fails
is a result with its reason. Programs: vdnn.bench.peers_cases; the table: vdnn.bench.peers_table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from vdnn.bench.command import above_zero, command, not_negative, tied, whole_from
from vdnn.bench.harness import check_device, facts
from vdnn.bench.peers_cases import (
    DEFAULT_NETWORKS,
    DEFAULT_PRECISIONS,
    DEFAULT_PROGRAMS,
    PRECISIONS,
    Case,
    parse_program,
    schedule,
)
from vdnn.bench.peers_table import markdown
from vdnn.errors import BackendUnavailable, ConfigError, DataError, VdnnError
from vdnn.runtime.files import user_path

WORKER = [sys.executable, "-m", "vdnn.bench.peers_worker"]
FILE, TABLE = "peers.json", "peers.md"
LOOK_S = 0.1
"""Between two looks at a process and at the memory in use on the card."""
LEAST_S = 20.0
"""A case is not begun with less time left."""
AHEAD_SHARE = 0.4
"""Of the time for everything, at most, goes to compiling ahead."""
SETTLED_BYTES, SETTLE_S = 64 * 2**20, 10.0
"""The card counts as free when no more than so much above the start is in use; waited for so long."""


class Card:
    """The memory in use on the first GPU by NVML, of all processes; None where that cannot be asked."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self.machine = "no GPU"
        with suppress(Exception):  # no NVML, no driver, no library: then nobody knows
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
            words = (pynvml.nvmlDeviceGetName(self._handle), pynvml.nvmlDeviceGetUUID(self._handle)[-8:])
            self.machine = f"{' '.join(words)}, driver {pynvml.nvmlSystemGetDriverVersion()}"
        self.at_start = self.used_bytes()

    def used_bytes(self) -> int | None:
        """Now."""
        return None if self._nvml is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def settle(self) -> None:
        """Wait until what the last process held has come back, but not for ever."""
        until = monotonic() + SETTLE_S
        while self.at_start is not None and monotonic() < until:
            if (self.used_bytes() or 0) <= self.at_start + SETTLED_BYTES:
                return
            sleep(LOOK_S)


@dataclass(slots=True)
class Store:
    """OUT/peers.json: facts of the last command that added to it, and results by the key of their case."""

    path: Path
    command: str
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, command: str) -> Store:
        """What lies in `folder`; empty if nothing does; DataError if it is no file of this study or cannot be read."""
        path = folder / FILE
        try:
            return cls(path, command, dict(json.loads(path.read_text(encoding="utf-8"))["results"].items()))
        except (FileNotFoundError, NotADirectoryError):
            return cls(path, command)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror}; name another --out") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"'{path}' is no file of this study ({error}); move it away or name another --out"
            ) from error

    def add(self, case: Case, found: Mapping[str, Any]) -> None:
        """Keep a result, on disk too, and the table of all of them."""
        self.results[case.key] = {"case": case.to_json(), **found}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.facts = self.facts or facts(self.command)
        text = json.dumps({"facts": self.facts, "results": self.results}, indent=1)
        part = self.path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path)
        self.write_table()

    def write_table(self) -> str:
        """OUT/peers.md anew; its text."""
        text = markdown(self.results.values())
        (self.path.parent / TABLE).write_text(text, encoding="utf-8")
        return text


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker ended: its code, None if it was stopped after its time; what it found; its last words; the card."""

    code: int | None
    found: dict[str, Any] | None
    words: str
    card_peak_bytes: int | None
    seconds: float


def measure_all(
    cases: Iterable[Case],
    store: Store,
    tell: Callable[[str], None],
    *,
    timeout_s: float,
    budget_s: float | None = None,
    card: Card | None = None,
) -> bool:
    """Measure what the store does not hold; True if all of it is there afterwards.

    Args:
        timeout_s: of one case, which is then a result: failed.
        budget_s: of all; a case that it cuts short is no result.
    """
    card, started = card or Card(), monotonic()
    for case in cases:
        if case.key in store.results:
            continue
        left = float("inf") if budget_s is None else budget_s - (monotonic() - started)
        if left < min(LEAST_S, timeout_s):
            tell("time is over: the same command goes on with what is missing")
            return False
        card.settle()
        ended = run_worker(case, min(timeout_s, left), card)
        if ended.code is None and left < timeout_s:
            tell(f"{case.key}: time is over; the same command measures it again")
            return False
        if ended.code == 2:
            raise BackendUnavailable(ended.words or f"case '{case.key}': its library or device is not there")
        found = ended.found or {"failed": _failure(ended, timeout_s)}
        found |= {"machine": card.machine, "seconds": ended.seconds, "card_peak_bytes": ended.card_peak_bytes}
        if "failed" in found:
            found["log"] = ended.words
        store.add(case, found)
        tell(f"{case.key}: {found.get('failed') or describe(found, case)} ({ended.seconds:.0f} s)")
    return True


def check_folder(path: Path) -> None:
    """Make the folder before minutes of work; ConfigError if it cannot be or cannot be written to."""
    probe = path / ".vdnn-peers"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out: folder '{path}' cannot be written: {error.strerror}; choose another") from error


def describe(found: Mapping[str, Any], case: Case) -> str:
    """A result in a line."""
    return f"{found['step_ms']:.2f} ms, {1000 * case.batch / found['step_ms']:,.0f} images/s"


def _failure(ended: Ended, timeout_s: float) -> str:
    if ended.code is None:
        return f"no result within {timeout_s:.0f} s"
    last = ended.words.splitlines()[-1] if ended.words else "no words"
    return f"the process ended with {ended.code}: {last}"


def run_worker(case: Case, timeout_s: float, card: Card) -> Ended:
    """Measure `case` in a process of its own, stopped with all that it has started after `timeout_s`."""
    begin = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        with log.open("wb") as stream:
            process = _start(case, [str(out)], stream)
        peak, code = card.used_bytes(), None
        try:
            while code is None and monotonic() - begin < timeout_s:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(LOOK_S)
                used = card.used_bytes()
                peak = None if used is None or peak is None else max(peak, used)
        finally:
            _stop(process)
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        words = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-30:])
        return Ended(code, found, words, peak, monotonic() - begin)


def compile_ahead(cases: Iterable[Case], at_once: int, timeout_s: float, tell: Callable[[str], None]) -> None:
    """Let PyTorch fill its compiler's cache on disk for `cases`, some at a time; what fails shows when it is measured.

    Args:
        timeout_s: of all of it; what has not come to an end by then is compiled when it is measured.
    """
    waiting, running = list(cases), list[tuple[Case, subprocess.Popen[bytes], float]]()
    until = monotonic() + timeout_s
    try:
        while (waiting or running) and monotonic() < until:
            while waiting and len(running) < at_once:
                case = waiting.pop(0)
                running.append((case, _start(case, [], subprocess.DEVNULL), monotonic()))
            sleep(LOOK_S)
            for entry in list(running):
                case, process, begin = entry
                if process.poll() is not None:
                    running.remove(entry)
                    _stop(process)
                    tell(f"compiled ahead: {case.key} ({monotonic() - begin:.0f} s, code {process.returncode})")
    finally:
        for _, process, _ in running:
            _stop(process)


def _start(case: Case, more: Sequence[str], log: Any) -> subprocess.Popen[bytes]:
    words = [*WORKER, json.dumps(case.to_json()), *more]
    streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(words, **streams, start_new_session=True, **tied())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the worker's own session, compilers of its included."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if every case is there afterwards and one of them has times, else 1; 2 for bad input."""
    try:
        return _main(arguments)
    except VdnnError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.peers", description=(__doc__ or "").split("\n")[0])
    text = f"default: {' '.join(DEFAULT_NETWORKS)}"
    parser.add_argument("--networks", nargs="+", default=DEFAULT_NETWORKS, metavar="NETWORK:IMAGES", help=text)
    text = f"default: {' '.join(DEFAULT_PROGRAMS)}"
    parser.add_argument("--programs", "--cases", nargs="+", default=DEFAULT_PROGRAMS, metavar="PROGRAM", help=text)
    text = f"default: {' '.join(DEFAULT_PRECISIONS)}"
    parser.add_argument("--precisions", nargs="+", default=DEFAULT_PRECISIONS, choices=PRECISIONS, help=text)
    text = "where peers.json and peers.md are kept (default: runs/peers)"
    parser.add_argument("--out", default="runs/peers", metavar="DIR", help=text)
    parser.add_argument("--minutes", type=above_zero, help="for everything; the next call goes on (default: no end)")
    parser.add_argument("--timeout", type=above_zero, default=150.0, metavar="S", help="of one case (default: 150)")
    text = "of timed steps in a case, about; 0 for the fewest (default: 1)"
    parser.add_argument("--seconds", type=not_negative, default=1.0, help=text)
    parser.add_argument("--once", action="store_true", help="do not measure the first PyTorch program again at the end")
    text = "processes that compile ahead; 0 for none (default: 4)"
    parser.add_argument("--ahead", type=whole_from(0), default=4, metavar="N", help=text)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (default: cuda)")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="of the networks' configurations")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="the same, for vdnn alone")
    parser.add_argument("--retry", action="store_true", help="measure again what has failed")
    parser.add_argument("--table", action="store_true", help="measure nothing; write and print the table")
    given = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    out = user_path(given.out)
    store = Store.open(out, " ".join(["python -m vdnn.bench.peers", *words]))
    if given.table:
        if not store.results:
            raise ConfigError(f"--out: '{given.out}' holds no results; leave out --table to measure")
        check_folder(out)
        print(store.write_table())
        return 0
    if given.retry:
        store.results = {key: found for key, found in store.results.items() if "failed" not in found}
    settings = {"device": given.device, "options": tuple(given.o), "ours": tuple(given.ours), "seconds": given.seconds}
    try:
        cases = list(schedule(given.networks, given.precisions, given.programs, closing=not given.once, **settings))
    except ConfigError as error:
        parser.error(str(error))
    todo = [case for case in cases if case.key not in store.results]
    check_device(given.device, loads=False)
    if find_spec("torch") is None and any(not case.is_ours for case in todo):
        parser.error("PyTorch is not installed: install it beside vdnn to compare with it")
    check_folder(out)
    begin, tell = monotonic(), lambda text: print(text, flush=True)
    compiled = [c for c in todo if (recipe := parse_program(c.program).recipe) and recipe.compiled and c.repeat == 1]
    budget_s = None if given.minutes is None else 60 * given.minutes
    if given.ahead and len(compiled) > 1:
        whole_s = given.timeout * len(compiled) / given.ahead
        compile_ahead(compiled, given.ahead, min(whole_s, AHEAD_SHARE * (budget_s or whole_s)), tell)
    left = None if budget_s is None else budget_s - (monotonic() - begin)
    complete = measure_all(cases, store, tell, timeout_s=given.timeout, budget_s=left)
    if store.results:
        print(store.write_table())
    if complete and not any("step_ms" in store.results[case.key] for case in cases):
        print("every case failed; the table says why, --retry measures again", file=sys.stderr)
        return 1
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(command(main))
