"""A table of one figure: the paper's numbers, ours on the simulated GPU of the paper, and ours measured on a GPU.

table = make_table(load_figure("fig14"), sources)
table.rows[0].paper, table.rows[0].values["simulated"], table.ratio(table.rows[0], "simulated")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.bench.paper_figures import Figure
from vdnn.bench.paper_remarks import Number, remarks
from vdnn.bench.paper_values import Runs, bar_values, choice

SIMULATED, UNJOINED, MEASURED, BEST = "simulated", "unjoined", "measured", "best"
USUAL = (SIMULATED, MEASURED)
SHOWN: Mapping[str, tuple[str, ...]] = {
    "fig11": (SIMULATED, MEASURED, BEST),
    "fig14": (SIMULATED, UNJOINED, MEASURED, BEST),
    "fig15": (SIMULATED, MEASURED, BEST),
}
"""Columns besides the paper's of figures that have more than the USUAL two."""
CHOICES = ("fig14", "fig15")
"""Figures that say what dyn chose."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Runs by column, and the words that head the column."""

    runs: Mapping[str, Runs]
    headings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the paper with ours beside it; a column that has none is not in `values`."""

    network: str
    bar: str
    quantity: str
    unit: str
    paper: float
    values: Mapping[str, float]
    note: str


@dataclass(frozen=True, slots=True)
class Table:
    """All numbers of one figure.

    Args:
        columns: heading by column, in the order in which they are shown.
        compared: whether ours and the paper's are the same quantity.
        remarks: sentences on how well they agree.
    """

    key: str
    title: str
    about: str
    source: str
    columns: Mapping[str, str]
    compared: bool
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]

    def ratio(self, row: Row, column: str) -> float | None:
        """Ours over the paper's; None where one is missing or 0, or they are not the same quantity."""
        value = row.values.get(column)
        return value / row.paper if self.compared and value is not None and row.paper else None

    def gain(self, row: Row) -> float | None:
        """Speed without joining streams at the end of layers over that with; None in other tables."""
        joined, free = row.values.get(SIMULATED), row.values.get(UNJOINED)
        return free / joined if joined and free is not None else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every number."""
        return {
            "figure": self.key,
            "title": self.title,
            "source": self.source,
            "columns": dict(self.columns),
            "remarks": list(self.remarks),
            "rows": [
                {
                    "network": row.network,
                    "bar": row.bar,
                    "quantity": row.quantity,
                    "unit": row.unit,
                    "paper": row.paper,
                    **row.values,
                    "ratios": {column: self.ratio(row, column) for column in row.values},
                    "note": row.note,
                }
                for row in self.rows
            ],
        }


def make_table(figure: Figure, sources: Sources, networks: tuple[str, ...] | None = None) -> Table:
    """The table of `figure` from the runs of every column; of some `networks` only, if they are given."""
    columns = [column for column in SHOWN.get(figure.key, USUAL) if column in sources.headings]
    rows = []
    for network, bars in figure.bars.items():
        if networks is not None and network not in networks:
            continue
        for bar, paper in bars.items():
            values = {
                column: bar_values(figure.key, network, bar, sources.runs[column], tuple(paper))
                for column in columns
                if column in sources.runs
            }
            taken = choice(network, bar, sources.runs[SIMULATED]) if figure.key in CHOICES else ""
            for quantity, number in paper.items():
                ours = {column: found[quantity] for column, found in values.items() if quantity in found}
                note = "; ".join(text for text in (taken, figure.note(network, bar, quantity)) if text)
                rows.append(Row(network, bar, quantity, figure.quantities[quantity], number, ours, note))
    exact = ", ".join(f"±{most:g} {unit}" for unit, most in figure.read_to.items())
    source = f"{figure.source}; read to {exact}" + ("; from memory only" if figure.recalled else "")
    headings = {column: sources.headings[column] for column in columns}
    told = remarks_on(figure, rows)
    return Table(figure.key, figure.title, figure.about, source, headings, figure.compared, tuple(rows), told)


def remarks_on(figure: Figure, rows: Sequence[Row]) -> tuple[str, ...]:
    """How well the simulated numbers in `rows` of `figure` agree with the paper's, in sentences."""
    numbers = [
        Number(row.network, row.bar, row.quantity, row.paper, row.values[SIMULATED], row.note)
        for row in rows
        if SIMULATED in row.values
    ]
    return remarks(figure, numbers)
