"""The installed commands, as a user starts them.

run = script("vdnn-train", "lenet", "--iterations", "2", cwd=tmp_path)
run.code, run.out, run.error
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    error: str


def command(name: str, *arguments: object) -> list[str]:
    """The words of a command line: the script beside this Python."""
    return [str(Path(sys.executable).parent / name), *map(str, arguments)]


def environment() -> dict[str, str]:
    """That of this process without a terminal; one thread for BLAS, for two on busy cores wait for each other."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "120"}


def script(name: str, *arguments: object, cwd: Path, timeout_s: float = 120) -> Ended:
    """Run a command to its end."""
    words = command(name, *arguments)
    run = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    return Ended(run.returncode, run.stdout, run.stderr)


def refused(ended: Ended, code: int, *parts: str) -> None:
    """Check that a command ended with `code` and one line on standard error that has every one of `parts`."""
    assert ended.code == code, ended.error or ended.out
    assert ended.error.count("\n") == 1, ended.error
    assert "Traceback" not in ended.error
    for part in parts:
        assert part in ended.error, ended.error
