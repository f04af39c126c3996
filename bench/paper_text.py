"""Tables of the paper's figures as text: Markdown for people, CSV with all digits.

print(markdown(table))
header, rows = cells(table)
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from io import StringIO

from vdnn.bench.paper_tables import UNJOINED, Row, Table

DIGITS: Mapping[str, int] = {"MiB": 0, "ms": 1, "%": 0, "% of base": 0, "of base": 2, "GB": 1, "GB/s": 0, "1 = yes": 0}
"""Decimals that are shown of a number with this unit."""
SMALL = 10
"""Below it, sizes and shares get one decimal more."""
NONE = ""
PUBLISHED = "the paper"


def number(value: float, unit: str) -> str:
    """A value as people read it: 1,121 MiB → "1,121"."""
    digits = DIGITS[unit] + (1 if unit in ("MiB", "%") and 0 < abs(value) < SMALL else 0)
    return f"{value:,.{digits}f}"


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what is shown: every column of ours is followed by its ratio to the paper's."""
    header = ["network", "bar", "quantity", PUBLISHED]
    for column, heading in table.columns.items():
        header += [heading, *_beside(column, table)]
    header.append("note")
    return header, [_row(table, row) for row in table.rows]


def _beside(column: str, table: Table) -> list[str]:
    if column == UNJOINED:
        return ["gain"]
    return ["ours / paper"] if table.compared else []


def _row(table: Table, row: Row) -> list[str]:
    found = [row.network, row.bar, f"{row.quantity}, {row.unit}", number(row.paper, row.unit)]
    for column in table.columns:
        value = row.values.get(column)
        found.append(NONE if value is None else number(value, row.unit))
        for what in _beside(column, table):
            if what == "gain":
                gain = table.gain(row)
                found.append(NONE if gain is None else f"{gain - 1:+.0%}")
            else:
                ratio = table.ratio(row, column)
                found.append(NONE if ratio is None else f"{ratio:.2f}")
    return [*found, row.note]


def markdown(table: Table) -> str:
    """A section with its heading, explanation, table and source."""
    header, rows = cells(table)
    if all(row[-1] == NONE for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    words = 3 if header[-1] != "note" else 4
    right = ["---"] * 3 + ["---:"] * (len(header) - words) + ["---"] * (words - 3)
    lines = [f"## {table.title}", "", table.about, ""]
    lines += [_line(header), _line(right), *map(_line, rows), ""]
    lines += [f"- {remark}" for remark in table.remarks]
    lines += [f"- Source: {table.source}.", ""]
    return "\n".join(lines)


def _line(row: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def csv_text(table: Table) -> str:
    """One line a number, with all digits; ratios to the paper's, and in figure 14 the gain of not joining."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ratios = [column for column in table.columns if column != UNJOINED]
    header = ["figure", "network", "bar", "quantity", "unit", "paper", *table.columns]
    writer.writerow([*header, *(f"{column}/paper" for column in ratios), "gain", "note"])
    for row in table.rows:
        values = [row.values.get(column) for column in table.columns]
        beside = [*(table.ratio(row, column) for column in ratios), table.gain(row)]
        start = [table.key, row.network, row.bar, row.quantity, row.unit, row.paper]
        writer.writerow([*start, *map(_digits, values), *map(_digits, beside), row.note])
    return stream.getvalue()


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
