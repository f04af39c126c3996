"""The folder of a run: resolved configuration, plan, metrics and checkpoints; never written over another run.

with RunFolder.create("runs/lenet") as folder:        # or runs/lenet-2 if there is one
    folder.metrics.write(step=63, epoch=1, split="train", loss=0.31)
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from vdnn.errors import CheckpointError, ConfigError, VdnnError
from vdnn.runtime.checkpoint import intact, is_unfinished, latest, newest_time
from vdnn.runtime.files import is_place_fault, user_path, write_file

CONFIG, PLAN, METRICS, CHECKPOINTS = "config.yaml", "plan.json", "metrics.csv", "checkpoints"
COLUMNS = (
    "step",
    "epoch",
    "split",
    "loss",
    "accuracy",
    "lr",
    "images",
    "images_per_s",
    "loss_scale",
    "skipped_steps",
)
"""Loss and accuracy are means over `images`: of a train row, those since the epoch began or the run was resumed. The
last two have numbers in fp16 alone: the scale of the next step, and skipped steps since training began."""
SPLITS = ("train", "test")
_STEP = re.compile(r"[0-9]{1,16}")


class Metrics:
    """metrics.csv: one row per step and split that is reported, appended as it happens."""

    def __init__(self, path: Path):
        self.path = path
        self._written: set[tuple[int, str]] = set()

    def start(self, resumed_step: int | None = None) -> None:
        """Write the header; on resume keep the rows up to that step, so that none appears twice."""
        rows = [] if resumed_step is None else [row for row in self._rows() if int(row["step"]) <= resumed_step]
        self._written = {(int(row["step"]), row["split"]) for row in rows}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _write(self.path, text.getvalue())

    def write(self, *, step: int, split: str, **values: Any) -> None:
        """Append one row unless there is one of this step and split; columns not given stay empty."""
        if self.has(step, split):
            return
        self._written.add((step, split))
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            row = {"step": step, "split": split, **values}
            csv.DictWriter(stream, COLUMNS, lineterminator="\n").writerow(row)

    def has(self, step: int, split: str) -> bool:
        """Whether a row of this step and split is there."""
        return (step, split) in self._written

    @property
    def empty(self) -> bool:
        """Whether there is no row."""
        return not self._written

    def on_disk(self, step: int, split: str) -> bool:
        """Whether an earlier run has left a row of this step and split."""
        return any(int(row["step"]) == step and row["split"] == split for row in self._rows())

    def is_bare(self) -> bool:
        """Whether the file on disk has nothing after its header."""
        return not self.path.read_bytes().partition(b"\n")[2].strip()

    def _rows(self) -> list[dict[str, str]]:
        """Whole rows on disk; a kill may have cut the last one."""
        if not self.path.is_file():
            return []
        whole, _, _ = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        rows: list[dict[str, str]] = []
        found = csv.DictReader(io.StringIO(whole))
        with suppress(csv.Error):  # a quote that is never closed: what comes after it is lost
            rows.extend(row for row in found if _STEP.fullmatch(row.get("step") or "") and row.get("split") in SPLITS)
        return rows


def _write(path: Path, text: str) -> None:
    """Write a file of the run; what goes wrong during a run is no fault of the command line, whatever it is."""
    try:
        write_file(path, text.encode())
    except ConfigError as error:
        raise VdnnError(f"the run cannot go on: {error}") from error


class RunFolder:
    """Paths of one run, which only one process writes to at a time.

    Attributes:
        reused: whether it is that of an earlier run, which left nothing worth keeping.
        continued: whether it is that of the run whose checkpoint is resumed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = Metrics(path / METRICS)
        self.reused = self.continued = False
        self._made: list[Path] = []
        self._lock: int | None = None
        self._locked = False

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error remove the folder of a run that has nothing to show; a user who stops it wants no rows."""
        if error is not None and (self.metrics.empty or isinstance(error, KeyboardInterrupt)):
            self.discard()
        self.release()

    @classmethod
    def create(cls, wanted: str) -> RunFolder:
        """A claimed folder at `wanted`, or `wanted`-2, -3, ... if that is there; ConfigError if that fails.

        It is a new one, or that of a run that was killed before its first row of metrics and its first checkpoint.
        """
        base = _base(wanted)
        made: list[Path] = []
        path = base
        try:
            for parent in reversed(base.parents):
                if not parent.is_dir():
                    made.append(parent)  # before it is made: a signal may come in between
                    try:
                        parent.mkdir()
                    except FileExistsError:  # another run has made it meanwhile
                        made.remove(parent)
            for path in (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in count(1)):
                try:
                    path.mkdir()  # making it is what makes it ours: a folder that is there is another's, even if empty
                    made.append(path)
                    break
                except FileExistsError:
                    if not path.is_dir():
                        raise ConfigError(
                            f"output '{path}' is a file; choose a folder with --output", key="output"
                        ) from None
                    abandoned = cls._reuse(path)
                    if abandoned is not None:
                        return abandoned
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            message = f"output folder '{path}' cannot be made: {reason}"
            if isinstance(error, OSError) and not is_place_fault(error):
                raise VdnnError(message) from error
            raise ConfigError(f"{message}; choose another with --output", key="output") from error
        except BaseException:  # stopped by a signal: nobody else knows of what was made
            for path in reversed(made):
                with suppress(OSError):
                    path.rmdir()
            raise
        folder = cls(path)
        folder._made = made
        folder.claim()
        return folder

    @classmethod
    def _reuse(cls, path: Path) -> RunFolder | None:
        """The run at `path`, claimed, if it was killed before it had anything to keep; else None."""
        folder = cls(path)
        try:
            # first without a claim: another run may be about to make its own, which it does before it writes metrics
            if folder._is_abandoned():
                folder.claim()
                if folder._locked and folder._is_abandoned():
                    folder.reused = True
                    return folder
        except (OSError, CheckpointError):  # it cannot be read, is in use, or has gone
            pass
        folder.release()
        return None

    def _is_abandoned(self) -> bool:
        """Whether a run has begun here and left neither a row nor a checkpoint, and there is nothing else."""
        names = {path.name for path in self.path.iterdir()}
        if METRICS not in names or not names <= {CONFIG, PLAN, METRICS, CHECKPOINTS}:
            return False
        saved = self.checkpoints.iterdir() if CHECKPOINTS in names else ()
        return self.metrics.is_bare() and all(is_unfinished(path) for path in saved)

    @classmethod
    def find_checkpoint(cls, resume: str, wanted: str, progress: Callable[[str], None] | None = None) -> Path:
        """The checkpoint that --resume means: a path, or with "auto" the newest of the runs at `wanted`, `wanted`-2.

        Args:
            progress: told of damaged checkpoints that are passed over. One that is named itself never is.
        """
        if resume != "auto":
            path = user_path(resume)
            found = _newest((path / CHECKPOINTS, path), progress)
            if found is None and (path / METRICS).is_file():
                raise CheckpointError(_none_yet(path))
            return found or path
        base = _base(wanted)
        try:
            runs = [p for p in base.parent.iterdir() if _is_named(p, base)] if base.parent.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"folder '{base.parent}' cannot be read: {error.strerror}") from error
        places = [run / CHECKPOINTS for run in runs]
        found = _newest(sorted(places, key=newest_time, reverse=True), progress)
        if found is not None:
            return found
        begun = sorted(run for run in runs if (run / METRICS).is_file())
        if begun:
            raise CheckpointError(_none_yet(begun[0]))
        raise CheckpointError(
            f"nothing to resume: no checkpoint in '{base}' (or '{base}-2', ...); start without --resume, or give "
            "a checkpoint's path"
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunFolder | None:
        """The run that a checkpoint belongs to, claimed; None if it lies in no run's folder."""
        run = run_of(checkpoint)
        if run is None:
            return None
        folder = cls(run)
        folder.claim()
        folder.continued = True
        return folder

    def claim(self) -> None:
        """Keep other processes from writing here until `release`; CheckpointError if one does already."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise CheckpointError(
                f"run folder '{self.path}' is in use by another process: wait for its end, or start a run of its own "
                "without --resume"
            ) from error
        except OSError:  # a file system without locks
            self._locked = False
        else:
            self._locked = True
        self._lock = handle

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove what this process made, if it has no checkpoint: a run that did not get anywhere leaves no trace."""
        if not self._made or latest(self.checkpoints) is not None:
            return
        with suppress(OSError):
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            for name in (CONFIG, PLAN, METRICS):
                (self.path / name).unlink(missing_ok=True)
            for path in reversed(self._made):
                path.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        _write(self.path / name, text)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write JSON whole or not at all."""
        self.write(name, json.dumps(data, indent=1))


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint belongs to, only looked at; None if it lies in no run's folder."""
    for path in (checkpoint, checkpoint.resolve()):
        run = path.parent.parent
        if path.parent.name == CHECKPOINTS and all((run / name).is_file() for name in (CONFIG, PLAN)):
            return run
    return None


def belongs(run: Path, wanted: str) -> bool:
    """Whether `run` is a run of output `wanted`: the folder itself or, where that is there, `wanted`-2, ..."""
    base, found = _base(wanted), run.resolve()
    named = base.parent.resolve() / base.name
    return found == base.resolve() or (base.is_dir() and found.parent == named.parent and _is_named(found, base))


def _is_named(run: Path, base: Path) -> bool:
    return re.fullmatch(re.escape(base.name) + r"(-\d+)?", run.name) is not None


def _newest(folders: Iterable[Path], progress: Callable[[str], None] | None) -> Path | None:
    """The newest intact checkpoint of the first of `folders` that has one; None if nothing is named like one.

    CheckpointError if all are damaged.
    """
    faults: list[str] = []
    for folder in folders:
        found, damaged = intact(folder)
        faults += damaged
        if found is not None:
            if faults and progress is not None:
                progress(f"{', '.join(faults)}, going on from step {int(found.name.rpartition('-')[2])}")
            return found
    if faults:
        raise CheckpointError(f"nothing to resume: {', '.join(faults)}; the same command without --resume starts anew")
    return None


def _none_yet(run: Path) -> str:
    return (
        f"nothing to resume: the run in '{run}' has no checkpoint yet (it was stopped before its first one); the same "
        "command without --resume starts anew"
    )


def _base(wanted: str) -> Path:
    """The folder that is meant, without slashes at the end, so that "run/" and "run" are one; it must have a name."""
    path = user_path(wanted)
    if path.name in ("", ".."):
        raise ConfigError(f"output '{wanted}' names no new folder; give it a name with --output", key="output")
    return path
