"""A table of the memory-efficiency study: named columns with units, rows of values, and the study's claims beside ours.

    table = StudyTable("pooling", title, about, source, machine, columns, rows, claims)
    print(markdown(table)); csv_text(table); table.to_json()

A value that is not known, of the paper or of ours, is not in its row; its cell stays empty.
"""

from __future__ import annotations

import csv
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from io import StringIO
from typing import Any

import yaml

from vdnn.bench.study_cases import source

Value = str | float
TEXT = ""
PERCENT = {"%": "+.1%", "% of copy": ".0%"}
"""Units of values that are stored as a share of 1, and how they are shown."""
TIMES = "x"
"""Unit of a ratio."""
EMPTY = ""
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its key in rows, its heading, and its unit, TEXT for words."""

    key: str
    heading: str
    unit: str = TEXT

    @property
    def full_heading(self) -> str:
        """With the unit, where it is not told by every cell."""
        return f"{self.heading}, {self.unit}" if self.unit not in (TEXT, TIMES) else self.heading


@dataclass(frozen=True, slots=True)
class Claim:
    """A number or statement of the study, how well it is known, and what this GPU says to it; "" where nothing."""

    what: str
    study: str
    evidence: str
    ours: str = EMPTY


@dataclass(frozen=True, slots=True)
class StudyTable:
    """One table.

    Args:
        about: for people. source: of the paper's numbers and shapes.
        machine: where ours were measured, in words; NOT_MEASURED if nothing was.
        rows: values by column key.
        remarks: sentences about the rows.
    """

    key: str
    title: str
    about: str
    source: str
    machine: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    claims: tuple[Claim, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every number."""
        return {
            "table": self.key,
            "title": self.title,
            "about": self.about,
            "source": self.source,
            "machine": self.machine,
            "columns": {c.key: {"heading": c.heading, "unit": c.unit} for c in self.columns},
            "rows": [dict(row) for row in self.rows],
            "claims": [{"what": c.what, "study": c.study, "evidence": c.evidence, "ours": c.ours} for c in self.claims],
            "remarks": list(self.remarks),
        }


def words_of(key: str) -> dict[str, Any]:
    """Title, text and claims of a table, from paper_data/study_tables.yaml."""
    text = (resources.files("vdnn.bench") / "paper_data" / "study_tables.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)[key]
    return found


def claims_of(key: str, ours: Mapping[str, str]) -> tuple[Claim, ...]:
    """The study's claims of a table; `ours` by their keys."""
    return tuple(
        Claim(row["what"], row.get("study", EMPTY), row["evidence"], ours.get(name, EMPTY))
        for name, row in words_of(key)["claims"].items()
    )


def table_of(
    key: str,
    machine: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Value]],
    ours: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> StudyTable:
    """The table `key` with its words and the study's claims; `ours` says to them what was measured, by their keys."""
    words = words_of(key)
    head = (key, words["title"], words["about"], source(), machine)
    return StudyTable(*head, tuple(columns), tuple(rows), claims_of(key, ours), tuple(remarks))


def shown(value: Value | None, unit: str) -> str:
    """A value as people read it: 0.914 % → "91%", 12.345 µs → "12.3", 3.456 x → "3.46x"."""
    if value is None or isinstance(value, str):
        return value or EMPTY
    if unit in PERCENT:
        return format(value, PERCENT[unit])
    if unit == TIMES:
        return f"{value:.2f}x"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def cells(table: StudyTable) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what is shown."""
    header = [column.full_heading for column in table.columns]
    rows = [[shown(row.get(column.key), column.unit) for column in table.columns] for row in table.rows]
    return header, rows


def markdown(table: StudyTable) -> str:
    """A section with its heading, explanation, table, claims and source."""
    header, rows = cells(table)
    right = ["---" if column.unit == TEXT else "---:" for column in table.columns]
    lines = [f"## {table.title}", "", table.about, "", f"Ours: {table.machine}.", ""]
    lines += [_line(header), _line(right), *map(_line, rows), ""]
    if table.claims:
        lines += [_line(["the study says", "its number", "evidence", "here"]), _line(["---"] * 4)]
        lines += [_line([c.what, c.study, c.evidence, c.ours or NOT_MEASURED]) for c in table.claims]
        lines += [""]
    lines += [*(f"- {remark}" for remark in table.remarks), f"- Source: {table.source}.", ""]
    return "\n".join(lines)


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def csv_text(table: StudyTable) -> str:
    """One line a row, with all digits; units are in the header."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([f"{c.key} ({c.unit})" if c.unit else c.key for c in table.columns])
    for row in table.rows:
        writer.writerow([_digits(row.get(column.key)) for column in table.columns])
    return stream.getvalue()


def _digits(value: Value | None) -> str:
    if value is None or isinstance(value, str):
        return value or EMPTY
    return f"{value:.6g}"


def section(table: StudyTable, picture: bytes | None = None) -> str:
    """The table, and a PNG of it, as a section of an HTML page in the style of vdnn.bench.paper_page."""
    image = ""
    if picture is not None:
        text, data = escape(f"{table.title}; its numbers are in the table", quote=True), b64encode(picture).decode()
        image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    header, rows = cells(table)
    kinds = ["" if column.unit == TEXT else ' class="number"' for column in table.columns]
    claims = [["the study says", "its number", "evidence", "here"]]
    claims += [[c.what, c.study, c.evidence, c.ours or NOT_MEASURED] for c in table.claims]
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in table.remarks)
    return f"""<section id="{table.key}">
<h2>{escape(table.title)}</h2>
<p>{escape(table.about)}</p>
<p>Ours: {escape(table.machine)}.</p>
{image}
<div class="scroll">{_html(header, rows, kinds)}</div>
{_html(claims[0], claims[1:], [""] * 4) if table.claims else ""}
{f"<ul>{remarks}</ul>" if remarks else ""}
<p class="source">Source: {escape(table.source)}. Files: <a href="{table.key}.csv">CSV</a>,
<a href="{table.key}.md">Markdown</a>.</p>
</section>"""


def _html(header: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(header, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
