"""The memory-efficiency study's part of `vdnn tables`: layouts, pooling, softmax, transforms, networks.

vdnn tables layouts pooling                              # without a GPU: as measured on an H200
vdnn tables study --device cuda --out runs/study         # measures here first
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from vdnn.bench.command import tied
from vdnn.bench.harness import check_device
from vdnn.bench.study_cases import PARTS, networks
from vdnn.bench.study_table import StudyTable
from vdnn.bench.study_tables import make_tables
from vdnn.errors import ConfigError, DataError

SECONDS = 80
"""For each table, where no time budget is given."""
CUDA = "cuda"


def study_tables(
    names: Sequence[str], out: Path | None, device: str | None, budget_s: float | None, progress: Callable[[str], None]
) -> tuple[StudyTable, ...]:
    """The tables `names`, measured first into `out` if `device` is "cuda"."""
    if names and out is not None and device == CUDA:
        measure_apart(names, out, budget_s, progress)
    elif names and device is not None:
        raise ConfigError(f"--device: {', '.join(names)} are measured on {CUDA} only, not on {device}")
    return make_tables(names, out)


def for_the_study(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[str, ...] | None:
    """Networks whose rows are asked for; ConfigError for options that the study's tables do not take."""
    for flag, given in (("--profile", arguments.profile), ("--steps", arguments.steps)):
        if given is not None:
            raise ConfigError(f"{flag} applies to the vDNN paper's figures, not to {', '.join(names)}; leave it out")
    if arguments.networks is None:
        return None
    if "networks" not in names:
        raise ConfigError(f"--networks applies to the table networks and to figures, not to {', '.join(names)}")
    if arguments.device == CUDA:
        raise ConfigError("--networks chooses rows that are shown; the table networks is measured whole, leave it out")
    words = [word.strip().lower() for word in arguments.networks.split(",")]
    known = [name.lower() for name in networks()]
    for word in words:
        if word not in known:
            raise ConfigError(f"--networks: the study has no network '{word}', expected of {', '.join(known)}")
    return tuple(words)


def of_networks(table: StudyTable, only: Sequence[str]) -> StudyTable:
    """Only the rows of these networks."""
    return replace(table, rows=tuple(row for row in table.rows if str(row["network"]).lower() in only))


def with_kept(made: Sequence[StudyTable], out: Path, progress: Callable[[str], None]) -> tuple[StudyTable, ...]:
    """`made` and the tables that an earlier call has written to `out`, in the order of the study."""
    tables = {table.key: table for table in made}
    for name in PARTS:
        if name not in tables and (out / f"{name}.csv").is_file():
            try:
                (tables[name],) = make_tables((name,), out)
            except DataError as error:
                progress(f"{name} is left out of the page: {error}")
    return tuple(tables[name] for name in PARTS if name in tables)


def require_gpu() -> None:
    """BackendUnavailable if there is no GPU; makes no context on it."""
    check_device(CUDA, "leave out --device", loads=False)


def measure_apart(names: Sequence[str], out: Path, budget_s: float | None, progress: Callable[[str], None]) -> None:
    """Measure each in a process of its own, so that one that dies costs no other its rows; what is there is kept."""
    begin = monotonic()
    for i, name in enumerate(names):
        left = SECONDS if budget_s is None else (budget_s - (monotonic() - begin)) / (len(names) - i)
        if left <= 0:
            progress(f"{name}: out of time")
            continue
        command = [sys.executable, "-m", "vdnn.bench.study", name, "--out", str(out), "--seconds", f"{left:.0f}"]
        ended = subprocess.run(command, stdout=sys.stderr.fileno(), **tied())
        if ended.returncode:
            progress(f"{name}: not everything could be measured (exit code {ended.returncode}); the table has the rest")
