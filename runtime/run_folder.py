"""The folder of a run: resolved configuration, plan, metrics and checkpoints; never written over another run.

    folder = RunFolder.create("runs/lenet")        # or runs/lenet-2 if that is taken
    folder.metrics.write(step=63, epoch=1, split="train", loss=0.31)
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vdnn.errors import CheckpointError, ConfigError
from vdnn.runtime.checkpoint import latest

CONFIG, PLAN, METRICS, CHECKPOINTS = "config.yaml", "plan.json", "metrics.csv", "checkpoints"
COLUMNS = ("step", "epoch", "split", "loss", "accuracy", "lr", "images_per_s")


class Metrics:
    """metrics.csv: one row per report, appended as it happens."""

    def __init__(self, path: Path):
        self.path = path

    def start(self, resumed_step: int | None = None) -> None:
        """Write the header; on resume keep the rows up to that step, so that none appears twice."""
        rows = []
        if resumed_step is not None and self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as stream:
                rows = [row for row in csv.DictReader(stream) if _whole(row.get("step")) <= resumed_step]
        part = self.path.with_suffix(".part")
        with part.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)

    def write(self, **values: Any) -> None:
        """Append one row; columns not given stay empty."""
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            csv.DictWriter(stream, COLUMNS, lineterminator="\n").writerow(values)

    def has(self, step: int, split: str) -> bool:
        """Whether a row of this step and split is there."""
        if not self.path.is_file():
            return False
        with self.path.open(newline="", encoding="utf-8") as stream:
            return any(_whole(row.get("step")) == step and row.get("split") == split for row in csv.DictReader(stream))


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
        """A new folder at `wanted`, or at `wanted`-2, -3, ... if a run is there already; ConfigError if it cannot be."""
        number = 1
        while True:
            path = Path(wanted if number == 1 else f"{wanted}-{number}")
            try:
                path.mkdir(parents=True, exist_ok=False)
                return cls(path)
            except FileExistsError:
                if path.is_dir() and not any(path.iterdir()):
                    return cls(path)
                number += 1
            except OSError as error:
                raise ConfigError(
                    f"output folder '{path}' cannot be made: {error.strerror}; choose another with --output",
                    key="output",
                ) from error

    @classmethod
    def find_checkpoint(cls, resume: str, wanted: str) -> Path:
        """The checkpoint that --resume means: a path, or with "auto" the newest of the runs at `wanted`, `wanted`-2, ..."""
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
        part = self.path / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path / name)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write JSON whole or not at all."""
        self.write(name, json.dumps(data, indent=1))
