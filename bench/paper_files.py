"""What `vdnn tables` keeps: a file for every measured run, so that measuring can go on later, and one of all tables.

write_run(folder, case, run, best=False, facts=facts("vdnn tables all"))
measured = read_runs(folder)                          # DataError names a damaged file
write_tables(folder / "tables.json", tables, facts)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from vdnn.bench.paper_runs import Case, LayerRun, Run
from vdnn.bench.paper_tables import MEASURED, SIMULATED, Table
from vdnn.errors import ConfigError, DataError
from vdnn.runtime.files import write_file

Made = TypeVar("Made", Case, LayerRun, Run)
RUN_FORMAT, TABLES_FORMAT = "vdnn-paper-run-1", "vdnn-tables-1"
RUNS_FOLDER, TABLES_FILE = "runs", "tables.json"


@dataclass(slots=True)
class Measured:
    """Runs that were measured: of the paper's cases, and of our best configuration by network and batch size.

    Args:
        machine: on what, in words; "" if there is no run.
    """

    runs: dict[Case, Run] = field(default_factory=dict)
    best: dict[tuple[str, int], Run] = field(default_factory=dict)
    machine: str = ""

    def has(self, case: Case, best: bool) -> bool:
        """Whether this run is there."""
        return (case.network, case.batch) in self.best if best else case in self.runs

    def add(self, run: Run, best: bool, machine: str) -> None:
        """One more run, measured on `machine`."""
        self.machine = machine
        if best:
            self.best[run.case.network, run.case.batch] = run
        else:
            self.runs[run.case] = run


def run_name(case: Case, best: bool) -> str:
    """Name of the file of a run: "vgg19-64-all-m-layer.json"."""
    kind = "best" if best else f"{case.policy}-{case.algorithms[0]}-{case.join}"
    return f"{case.network}-{case.batch}-{kind}.json"


def write_run(folder: Path, run: Run, best: bool, facts: Mapping[str, Any]) -> None:
    """Keep a measured run under `folder`."""
    data = {"format": RUN_FORMAT, "facts": dict(facts), "best": best, "run": asdict(run)}
    write_file(folder / RUNS_FOLDER / run_name(run.case, best), json.dumps(data, indent=1).encode())


def read_runs(folder: Path) -> Measured:
    """All runs kept under `folder`; DataError for a damaged file, or for runs of different machines."""
    found = Measured()
    for path in sorted((folder / RUNS_FOLDER).glob("*.json")):
        data = _read(path, RUN_FORMAT, "a run that 'vdnn tables --device cuda' has kept")
        try:
            run, best, machine = run_from_json(data["run"]), bool(data["best"]), str(data["facts"]["machine"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"run file '{path}' is damaged ({reason}); delete it and measure again") from error
        if found.machine and machine != found.machine:
            raise DataError(
                f"run file '{path}' is of another machine: expected {found.machine}, got {machine}; keep the runs of "
                "each machine in a folder of their own and put them side by side with 'vdnn tables compare'"
            )
        found.add(run, best, machine)
    return found


def run_from_json(data: Mapping[str, Any]) -> Run:
    """The run that `asdict` described; an exception if a field is missing, unknown or no number."""
    rows = tuple(_made(LayerRun, row) for row in data["layers"])
    return _made(Run, {**data, "case": _made(Case, data["case"]), "layers": rows})


def _made(kind: type[Made], data: Mapping[str, Any]) -> Made:
    """An object of a dataclass; its fields with a unit in the name must be numbers."""
    for item in fields(kind):
        if item.name.endswith(("_bytes", "_ms")):
            value = data[item.name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{item.name}: expected a number, got {value!r}")
    return kind(**data)


def write_tables(path: Path, tables: Sequence[Table], facts: Mapping[str, Any]) -> None:
    """Write every number of `tables` as JSON."""
    data = {"format": TABLES_FORMAT, "facts": dict(facts), "tables": [table.to_json() for table in tables]}
    write_file(path, json.dumps(data, indent=1).encode())


@dataclass(frozen=True, slots=True)
class Kept:
    """The numbers of a tables file: (figure, network, bar, quantity) → (unit, the paper's, ours).

    Args:
        machine: what ours are of, in words.
    """

    machine: str
    numbers: Mapping[tuple[str, str, str, str], tuple[str, float, float]]


def read_tables(name: str) -> Kept:
    """A tables file, or that of a folder; ours are the measured numbers if there are any, else the simulated ones."""
    path = Path(name)
    path = path / TABLES_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"'{path}' does not exist: expected a folder that 'vdnn tables --out' has written")
    data = _read(path, TABLES_FORMAT, "a tables file that 'vdnn tables --out' has written")
    try:
        rows = [(table["figure"], row) for table in data["tables"] for row in table["rows"]]
        column = MEASURED if any(MEASURED in row for _, row in rows) else SIMULATED
        numbers = {
            (str(figure), str(row["network"]), str(row["bar"]), str(row["quantity"])): (
                str(row["unit"]),
                float(row["paper"]),
                float(row[column]),
            )
            for figure, row in rows
            if column in row
        }
        return Kept(str(data["facts"][column]), numbers)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"tables file '{path}' is damaged ({reason}); write it again") from error


def _read(path: Path, form: str, expected: str) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"file '{path}' cannot be read as JSON: {reason}; expected {expected}") from error
    if not isinstance(data, dict) or data.get("format") != form:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise DataError(f"file '{path}': expected {expected} (format {form}), got format {got}")
    return data
