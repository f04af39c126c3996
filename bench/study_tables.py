"""The memory-efficiency study's tables by name: what is printed and what is written.

tables = make_tables(("layouts", "pooling"), folder)
write_tables(folder, tables)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from vdnn.bench.paper_page import STYLE
from vdnn.bench.study_cases import source
from vdnn.bench.study_files import Rows, read_rows
from vdnn.bench.study_layouts import layouts_table
from vdnn.bench.study_networks import networks_table
from vdnn.bench.study_pooling import pooling_table
from vdnn.bench.study_sweeps import softmax_table, transforms_table
from vdnn.bench.study_table import StudyTable, csv_text, markdown, section
from vdnn.runtime.files import write_file

TITLE = "Optimizing Memory Efficiency for Deep CNNs on GPUs (SC 2016, arXiv 1610.03618), rebuilt"
TABLES: Mapping[str, Callable[[Rows], StudyTable]] = {
    "layouts": layouts_table,
    "pooling": pooling_table,
    "softmax": softmax_table,
    "transforms": transforms_table,
    "networks": networks_table,
}
TABLES_FILE, PAGE = "study.json", "study.html"


def make_tables(names: Sequence[str], folder: Path | None = None) -> tuple[StudyTable, ...]:
    """From rows that were measured into `folder`, else those that come with vdnn; DataError for a damaged file."""
    return tuple(TABLES[name](read_rows(name, folder)) for name in names)


def text_of(tables: Sequence[StudyTable]) -> str:
    """All of them as Markdown."""
    return "\n".join([f"# {TITLE}", "", *(markdown(table) for table in tables)])


def json_of(tables: Sequence[StudyTable]) -> str:
    """All of them as JSON."""
    return json.dumps({"title": TITLE, "tables": [table.to_json() for table in tables]}, indent=1)


def write_tables(folder: Path, tables: Sequence[StudyTable]) -> Path:
    """Write Markdown, CSV and a picture a table, JSON and a page of all; returns the page's path."""
    from vdnn.bench.study_pictures import picture_of  # brings in matplotlib
    from vdnn.runtime.paper_plots import draw_picture

    pictures = {}
    for table in tables:
        write_file(folder / f"{table.key}.md", markdown(table).encode())
        write_file(folder / f"{table.key}.csv", csv_text(table).encode())
        picture = picture_of(table)
        if picture is not None:
            path = folder / f"{table.key}.png"
            draw_picture(picture, str(path))
            pictures[table.key] = path.read_bytes()
    write_file(folder / TABLES_FILE, json_of(tables).encode())
    write_file(folder / PAGE, page(tables, pictures).encode())
    return folder / PAGE


def page(tables: Sequence[StudyTable], pictures: Mapping[str, bytes]) -> str:
    """One HTML page that opens from disk; pictures: PNG by key of a table."""
    links = "".join(f'<a href="#{table.key}">{escape(table.key)}</a>' for table in tables)
    sections = "\n".join(section(table, pictures.get(table.key)) for table in tables)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(TITLE)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(TITLE)}</h1>
<p>{escape(source())}.</p>
<nav>{links}</nav>
</header>
<main>
{sections}
</main>
</body>
</html>
"""
