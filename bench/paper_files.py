"""What `vdnn tables` keeps: a file for every measured run, so that measuring can go on later, and one of all tables.

write_run(folder, case, run, best=False, facts=facts("vdnn tables all"))
measured = read_runs(folder)                          # DataError names a damaged file
write_tables(folder / "tables.json", tables, facts)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from vdnn.bench.paper_figures import FIGURES, load_figure
from vdnn.bench.paper_runs import Case, LayerRun, Run
from vdnn.bench.paper_tables import MEASURED, SIMULATED, Row, Table, remarks_on
from vdnn.bench.paper_text import DIGITS
from vdnn.errors import ConfigError, DataError
from vdnn.runtime.files import write_file

Made = TypeVar("Made", Case, LayerRun, Run)
RUN_FORMAT, TABLES_FORMAT = "vdnn-paper-run-1", "vdnn-tables-1"
RUNS_FOLDER, TABLES_FILE = "runs", "tables.json"
EXPECTED_TABLES = "a tables file that 'vdnn tables --out' has written"
KINDS: Mapping[type[Any], str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
"""Types of values in JSON, in words."""
TYPES: Mapping[str, type[Any]] = {
    **dict.fromkeys(("name", "kind", "network", "policy", "algorithms", "join", "choice"), str),
    "batch": int,
    "by_category": dict,
    "fits": bool,
}
"""Fields of kept runs that are no numbers with a unit."""
LARGEST = sys.float_info.max
SHOWN_CHARACTERS = 40


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
            run, best = run_from_json(part(data, "run", dict)), part(data, "best", bool)
            machine = part(part(data, "facts", dict), "machine", str)
        except ValueError as error:
            raise DataError(f"run file '{path}' is damaged ({error}); delete it and measure again") from error
        if found.machine and machine != found.machine:
            raise DataError(
                f"run file '{path}' is of another machine: expected {found.machine}, got {machine}; keep the runs of "
                "each machine in a folder of their own and put them side by side with 'vdnn tables compare'"
            )
        found.add(run, best, machine)
    return found


def run_from_json(data: Mapping[str, Any]) -> Run:
    """The run that `asdict` described; ValueError if a field is missing, unknown or of another type."""
    for name in (categories := part(data, "by_category", dict)):
        part(categories, name, float)
    rows = tuple(_made(LayerRun, row) for row in part(data, "layers", list))
    return _made(Run, {**data, "case": _made(Case, part(data, "case", dict)), "layers": rows})


def _made(kind: type[Made], data: Mapping[str, Any]) -> Made:
    """An object of a dataclass from just its fields; those with a unit in the name must be numbers."""
    names = [item.name for item in fields(kind)]
    for name in names:
        if name.endswith(("_bytes", "_ms")):
            part(data, name, float)
        elif name in TYPES:
            part(data, name, TYPES[name])
        else:
            part(data, name)
    unknown = sorted(data.keys() - set(names))
    if unknown:
        raise ValueError(f"unknown field '{unknown[0]}'")
    return kind(**data)


def part(data: Any, name: str, kind: type[Any] = object) -> Any:
    """Field `name` of a JSON object; ValueError in words unless it is there and of `kind` (float: finite numbers)."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object with a field '{name}', got {_short(data)}")
    if name not in data:
        raise ValueError(f"field '{name}' is missing")
    value = data[name]
    if kind is float:
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    else:
        right = isinstance(value, kind)
    if not right:
        raise ValueError(f"{name}: expected {KINDS[kind]}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


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
        if (path.parent / "study.json").is_file():
            raise ConfigError(
                f"'{path.parent}' holds the memory-efficiency study's tables only, which cannot be compared; expected "
                "a folder with figures of the vDNN paper, such as 'vdnn tables fig11 --out' writes"
            )
        raise ConfigError(f"'{path}' does not exist: expected a folder that 'vdnn tables --out' has written")
    data = _read(path, TABLES_FORMAT, EXPECTED_TABLES)
    try:
        rows = [(part(table, "figure", str), row) for table in part(data, "tables", list) for row in _rows(table)]
        column = MEASURED if any(MEASURED in row for _, row in rows) else SIMULATED
        numbers = {
            (figure, part(row, "network", str), part(row, "bar", str), part(row, "quantity", str)): (
                part(row, "unit", str),
                float(part(row, "paper", float)),
                float(part(row, column, float)),
            )
            for figure, row in rows
            if column in row
        }
        return Kept(part(part(data, "facts", dict), column, str), numbers)
    except ValueError as error:
        raise DataError(f"tables file '{path}' is damaged ({error}); write it again") from error


def read_whole(path: Path) -> tuple[dict[str, Table], dict[str, str]]:
    """The tables of a tables file by key, and its facts; DataError if it is damaged."""
    data = _read(path, TABLES_FORMAT, EXPECTED_TABLES)
    try:
        facts = part(data, "facts", dict)
        tables = [_table(table) for table in part(data, "tables", list)]
        return {table.key: table for table in tables}, {name: part(facts, name, str) for name in facts}
    except ValueError as error:
        raise DataError(f"tables file '{path}' is damaged ({error}); delete it, or choose another folder") from error


def _table(data: Any) -> Table:
    """The table that `Table.to_json` described; what is said about its figure is that of now."""
    key, columns = part(data, "figure", str), part(data, "columns", dict)
    if key not in FIGURES:
        raise ValueError(f"figure: expected one of {', '.join(FIGURES)}, got {_short(key)}")
    figure = load_figure(key)
    rows = [
        Row(
            part(row, "network", str),
            part(row, "bar", str),
            part(row, "quantity", str),
            part(row, "unit", str),
            part(row, "paper", float),
            {column: part(row, column, float) for column in columns if column in row},
            part(row, "note", str),
        )
        for row in _rows(data)
    ]
    return Table(
        key,
        part(data, "title", str),
        figure.about,
        part(data, "source", str),
        {column: part(columns, column, str) for column in columns},
        figure.compared,
        tuple(rows),
        remarks_on(figure, rows),
    )


def _rows(table: Any) -> list[Any]:
    """The rows of a table; ValueError if one is of a unit that is never written."""
    rows: list[Any] = part(table, "rows", list)
    for row in rows:
        unit = part(row, "unit", str)
        if unit not in DIGITS:
            raise ValueError(f"unit: expected one of {', '.join(DIGITS)}, got {_short(unit)}")
    return rows


def _read(path: Path, form: str, expected: str) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reasons = {UnicodeDecodeError: "it is not UTF-8 text", RecursionError: "it is nested too deeply"}
        reason = error.strerror if isinstance(error, OSError) else reasons.get(type(error), str(error))
        raise DataError(f"file '{path}' cannot be read as JSON: {reason}; expected {expected}") from error
    if not isinstance(data, dict) or data.get("format") != form:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise DataError(f"file '{path}': expected {expected} (format {form}), got format {got}")
    return data
