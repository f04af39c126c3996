"""Rows that the parts of the memory-efficiency study have measured: kept in a folder, or those that come with vdnn.

    kept = read_rows("pooling", Path("runs/study"))      # or of an H200, if nothing was measured there
    kept.machine, kept.rows

    recorder = Recorder(Path("runs/study"), "pooling", command)
    if not recorder.has(case="POOL1", method="cudnn"): recorder.add({"case": "POOL1", "method": "cudnn", ...})

A file is JSON, {"facts": ..., "results": {"rows": [...]}}, or with the rows as "results"; in a folder it is called
study_PART.json, and one that is put into results/ under the name h200_study_PART.json comes with vdnn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from vdnn.bench.study_table import NOT_MEASURED
from vdnn.errors import DataError
from vdnn.runtime.files import write_file

STORED = Path(__file__).parent / "results"
TEXT, NUMBER = (str,), (int, float)
TIMED = {"gbps": NUMBER, "share": NUMBER}
REQUIRED: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "layouts": dict.fromkeys(("direction", "precision", "layout", "method"), TEXT),
    "pooling": {**dict.fromkeys(("direction", "layout", "dtype", "method"), TEXT), **TIMED, "nbytes": NUMBER},
    "softmax": {"n": (int,), "k": (int,), "method": TEXT, **TIMED},
    "transforms": {**dict.fromkeys(("dtype", "from", "to", "method"), TEXT), "shape": (list,), **TIMED},
    "networks": {"case": TEXT, "precision": TEXT, "layout": TEXT, "predicted_ms": NUMBER},
}
"""What every row of a part that has a time must have, and of which types."""
TIMES = {"networks": "step_ms"}
"""The key of a row's time, where it is not time_us."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured rows, and where they were measured, in words."""

    rows: tuple[Row, ...] = ()
    machine: str = NOT_MEASURED
    facts: Mapping[str, Any] = field(default_factory=dict)

    def where(self, **wanted: Any) -> list[Row]:
        """The rows that have all of these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def one(self, **wanted: Any) -> Row | None:
        """The fastest row that has all of these values; None if there is none."""
        found = [row for row in self.where(**wanted) if row.get("time_us")]
        return min(found, key=lambda row: float(row["time_us"])) if found else None


def file_name(part: str) -> str:
    """Of a part's rows in a folder."""
    return f"study_{part}.json"


def read_rows(part: str, folder: Path | None = None, stored: Path = STORED) -> Rows:
    """The rows of `part` in `folder`, else those that come with vdnn, else none; DataError for a damaged file."""
    if folder is not None and (folder / file_name(part)).is_file():
        return _checked(part, folder / file_name(part))
    path = stored / f"h200_{file_name(part)}"
    return _checked(part, path) if path.is_file() else Rows()


def _checked(part: str, path: Path) -> Rows:
    """The rows in a file of `part`; DataError names the first row that lacks something, and what."""
    found, key = read_file(path), TIMES.get(part, "time_us")
    for number, row in enumerate(found.rows, 1):
        time = row.get(key)
        needed: Mapping[str, tuple[type, ...]] = {key: NUMBER, **REQUIRED[part]}
        if part == "layouts" and row.get("case") == "rule":
            needed = {"channels": NUMBER, "images": NUMBER}
        elif time is None and key in row:
            needed = {}
        for name, types in needed.items():
            value = row.get(name)
            if not isinstance(value, types) or isinstance(value, bool) or (types == NUMBER and not _is_size(value)):
                expected = "a number above 0" if types == NUMBER else f"a {types[0].__name__}"
                got = f"{value!r}" if name in row else "nothing"
                raise DataError(
                    f"'{path}', row {number} ({row.get('case')}): '{name}' is missing or wrong: expected {expected}, "
                    f"got {got}; remove the file and measure again"
                )
        if part == "networks" and needed and not _are_losses(row.get("losses", [])):
            raise DataError(
                f"'{path}', row {number} ({row.get('case')}): 'losses': expected a list of finite numbers, got "
                f"{row['losses']!r}; remove the file and measure again"
            )
    return found


def _are_losses(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, NUMBER) and isfinite(one) for one in value)


def _is_size(value: Any) -> bool:
    """Whether a number can be a time, a rate or a count."""
    return bool(0 < value <= sys.float_info.max)


def read_file(path: Path) -> Rows:
    """The rows in a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        results, about = data["results"], dict(data["facts"])
        rows = tuple(dict(row) for row in (results if isinstance(results, list) else results["rows"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"'{path}' holds no measured rows; remove it and measure again") from error
    return Rows(rows, machine_words(about) if rows else NOT_MEASURED, about)


def machine_words(about: Mapping[str, Any]) -> str:
    """GPU, commit and day of a file's facts."""
    device = about.get("device") or about.get("gpu") or "an unnamed machine"
    commit = f", commit {str(about['commit'])[:7]}" if about.get("commit") else ""
    day = f", {str(about['date'])[:10]}" if about.get("date") else ""
    return f"measured on {device}{commit}{day}"


class Recorder:
    """The file of a part, written after every few rows, so that a run that is cut short can go on.

    A row of something that failed has None in place of its time, and is left out by the next Recorder.

    Raises: DataError if the folder holds rows of another GPU.
    """

    def __init__(self, folder: Path, part: str, command: str, device: str = "") -> None:
        from vdnn.bench.harness import facts  # brings in the trainer, which tables do not need

        self.part, self.path = part, folder / file_name(part)
        self._facts = {**facts(command), **({"device": device} if device else {})}
        self.rows: list[dict[str, Any]] = []
        if self.path.is_file():
            kept = read_file(self.path)
            for key in ("gpu", "device"):
                if kept.facts.get(key) != self._facts.get(key):
                    raise DataError(
                        f"'{self.path}' holds rows of {kept.facts.get(key)}, this is {self._facts.get(key)}; "
                        "choose another folder"
                    )
            self.rows = [dict(row) for row in kept.rows if None not in row.values()]  # what failed is tried again

    def has(self, **wanted: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.rows)

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Add rows and write the file."""
        self.rows += [dict(row) for row in rows]
        text = json.dumps({"facts": self._facts, "results": {"rows": self.rows}}, indent=1)
        write_file(self.path, text.encode())
