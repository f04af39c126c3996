"""The folder of a run: resolved configuration, plan, metrics and checkpoints; never written over another run.

folder = RunFolder.create("runs/lenet")        # or runs/lenet-2 if that is taken
folder.metrics.write(step=63, epoch=1, split="train", loss=0.31)
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vdnn.errors import CheckpointError, ConfigError
from vdnn.runtime.checkpoint import latest
from vdnn.runtime.files import write_file

CONFIG, PLAN, METRICS, CHECKPOINTS = "config.yaml", "plan.json", "metrics.csv", "checkpoints"
COLUMNS = ("step", "epoch", "split", "loss", "accuracy", "lr", "images_per_s")


class Metrics:
    """metrics.csv: one row per step and split that is reported, appended as it happens."""

    def __init__(self, path: Path):
        self.path = path
        self._written: set[tuple[int, str]] = set()

    def start(self, resumed_step: int | None = None) -> None:
        """Write the header; on resume keep the rows up to that step, so that none appears twice."""
        rows: list[dict[str, str]] = []
        if resumed_step is not None and self.path.is_file():
            whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")  # a kill may have cut the last row
            found = csv.DictReader(io.StringIO(whole))
            rows = [row for row in found if _whole(row.get("step")) <= resumed_step]
        self._written = {(int(row["step"]), row["split"]) for row in rows}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.path, text.getvalue().encode())

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


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 2**62


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = Metrics(path / METRICS)

    @classmethod
    def create(cls, wanted: str) -> RunFolder:
        """A new folder at `wanted`, or `wanted`-2, -3, ... if it holds something; ConfigError if that fails."""
        number = 1
        while True:
            path = Path(wanted if number == 1 else f"{wanted}-{number}")
            try:
                path.mkdir(parents=True, exist_ok=False)
                return cls(path)
            except FileExistsError:
                if not path.is_dir():
                    raise ConfigError(
                        f"output '{path}' is a file; choose a folder with --output", key="output"
                    ) from None
                if not any(path.iterdir()):
                    return cls(path)
                number += 1
            except OSError as error:
                raise ConfigError(
                    f"output folder '{path}' cannot be made: {error.strerror}; choose another with --output",
                    key="output",
                ) from error

    @classmethod
    def find_checkpoint(cls, resume: str, wanted: str) -> Path:
        """The checkpoint that --resume means: a path, or with "auto" the newest of the runs at `wanted`, `wanted`-2."""
        if resume != "auto":
            path = Path(resume)
            return latest(path / CHECKPOINTS) or latest(path) or path
        base = Path(wanted)
        pattern = re.compile(re.escape(base.name) + r"(-\d+)?")
        runs = [p for p in base.parent.glob(f"{base.name}*") if pattern.fullmatch(p.name)]
        found = [c for c in (latest(run / CHECKPOINTS) for run in runs) if c is not None]
        if not found:
            raise CheckpointError(
                f"nothing to resume: no checkpoint in '{base}' (or '{base}-2', ...); start without --resume, or give "
                "a checkpoint's path"
            )
        return max(found, key=lambda path: path.stat().st_mtime)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunFolder:
        """The run that a checkpoint belongs to."""
        return cls(checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent)

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        write_file(self.path / name, text.encode())

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write JSON whole or not at all."""
        self.write(name, json.dumps(data, indent=1))
