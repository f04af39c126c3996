"""What a folder of tables holds already and is not made anew stays in it: other figures, and other networks of these.

whole, kept = merge(outcome, Path("runs/tables"))
write_study(Path("runs/tables"), whole)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from vdnn.bench.paper_figures import FIGURES, load_figure
from vdnn.bench.paper_files import TABLES_FILE, read_whole
from vdnn.bench.paper_study import NOT_MEASURED, Outcome
from vdnn.bench.paper_tables import SHOWN, USUAL, Row, Table, remarks_on
from vdnn.errors import ConfigError

ALL_OF_IT = "write every figure anew with 'vdnn tables all', or choose another folder with --out"


def merge(outcome: Outcome, folder: Path) -> tuple[Outcome, tuple[str, ...]]:
    """`outcome` with what else `folder` holds, and the keys of the figures of which something was kept.

    Raises DataError if the tables file there is damaged, ConfigError if its numbers are of another machine.
    """
    path = folder / TABLES_FILE
    made = {table.key: table for table in outcome.tables}
    if not path.is_file() or all(key in made and _is_whole(made[key]) for key in FIGURES):
        return outcome, ()
    old, facts = read_whole(path)
    kept = {key: _rows_to_keep(table, made.get(key)) for key, table in old.items()}
    machines = {**outcome.machines, **_machines(path, outcome.machines, facts, kept)}
    tables = {**{key: old[key] for key in old if key not in made}, **made}
    tables |= {key: _joined(made[key], old[key], kept[key]) for key in made if kept.get(key)}
    headings = {column: name for table in old.values() for column, name in table.columns.items()}
    return (
        Outcome(tuple(tables[key] for key in FIGURES if key in tables), {**headings, **outcome.headings}, machines),
        tuple(key for key in FIGURES if kept.get(key)),
    )


def _is_whole(table: Table) -> bool:
    """Whether it has every number of its figure."""
    return len(table.rows) == sum(
        len(found) for bars in load_figure(table.key).bars.values() for found in bars.values()
    )


def _rows_to_keep(old: Table, new: Table | None) -> tuple[Row, ...]:
    """The rows of networks that are not in `new`."""
    networks = {row.network for row in new.rows} if new is not None else set()
    return tuple(row for row in old.rows if row.network not in networks)


def _machines(
    path: Path, now: Mapping[str, str], before: Mapping[str, str], kept: Mapping[str, Iterable[Row]]
) -> dict[str, str]:
    """What the columns of kept rows are of, by column; ConfigError if those of now are of something else."""
    used = {column for rows in kept.values() for row in rows for column in row.values if column in before}
    for column in sorted(used):
        words = now.get(column, NOT_MEASURED)
        if words not in (NOT_MEASURED, before[column]):
            figures = ", ".join(key for key, rows in kept.items() if any(column in row.values for row in rows))
            raise ConfigError(
                f"'{path}' holds {column} numbers of {figures} that would stay beside those of now, but are of another "
                f"machine: {before[column]}; now: {words}; {ALL_OF_IT}"
            )
    return {column: before[column] for column in used}


def _joined(new: Table, old: Table, kept: tuple[Row, ...]) -> Table:
    """`new` with the rows `kept` of `old`, by networks in the order of the figure."""
    figure = load_figure(new.key)
    order = list(figure.bars)
    rows = sorted((*new.rows, *kept), key=lambda row: order.index(row.network) if row.network in order else len(order))
    names = {**old.columns, **new.columns}
    columns = {column: names[column] for column in SHOWN.get(new.key, USUAL) if column in names}
    return replace(new, columns=columns, rows=tuple(rows), remarks=remarks_on(figure, rows))
