"""One HTML page of all figures that opens from disk: text, pictures and tables inside it, nothing fetched.

write_file("index.html", page(tables, {"fig14": png_bytes}, "simulated on ...").encode())
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from vdnn.bench.paper_figures import NO_POWER, PAPER
from vdnn.bench.paper_tables import Table
from vdnn.bench.paper_text import cells

STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #d9dee6; --paper: #ffffff; --tint: #f4f6f9; --link: #0b5cad; }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--tint); }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 1.2rem; margin: 0 0 8px; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 6px; margin: 18px 0; }
nav a { background: var(--paper); border: 1px solid var(--line); border-radius: 4px; padding: 2px 10px;
  text-decoration: none; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 6px;
  padding: 22px; margin: 0 0 22px; }
p, ul { max-width: 80ch; }
img { width: 100%; height: auto; margin: 10px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: 4px 8px; text-align: left; vertical-align: top; }
thead th { background: var(--tint); position: sticky; top: 0; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.first td { border-top: 2px solid var(--line); }
td.far { color: #a13d00; font-weight: 600; }
td.note { color: var(--soft); min-width: 24ch; }
summary { cursor: pointer; color: var(--link); margin: 8px 0; }
.source, footer { color: var(--soft); font-size: .86rem; }
footer { padding-bottom: 40px; }
"""
FAR = 0.10
"""A ratio that is farther than this from 1 is marked."""
OPEN_ROWS = 40
"""Tables up to this many rows are open at first."""


def page(tables: Sequence[Table], pictures: Mapping[str, bytes], machines: Mapping[str, str]) -> str:
    """The page.

    Args:
        pictures: PNG by key of a figure.
        machines: what each column of ours is of, in words.
    """
    links = "".join(f'<a href="#{table.key}">{escape(_short(table))}</a>' for table in tables)
    columns = "".join(f"<li><b>{escape(name)}</b>: {escape(words)}</li>" for name, words in machines.items())
    sections = "\n".join(_section(table, pictures.get(table.key)) for table in tables)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The figures of the vDNN paper, reproduced</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>The figures of the vDNN paper, reproduced</h1>
<p>{escape(PAPER)}. Every number of the paper beside ours. Sizes are in MiB, which the paper's plots call MB.
What the paper calls VGG-16 has 16 convolutions (others call it VGG-19); its AlexNet is the one-GPU form, its OverFeat
the accurate model. The policies: base sets everything aside at once; conv and all send the inputs of convolutions, or
of all feature-extraction layers, to host memory; dyn chooses. (m) takes the algorithms with the least workspace, (p)
the fastest.</p>
<ul>{columns}</ul>
<nav>{links}</nav>
</header>
<main>
{sections}
</main>
<footer><p>{escape(NO_POWER)}</p></footer>
</body>
</html>
"""


def _short(table: Table) -> str:
    return table.title.partition(":")[0]


def _section(table: Table, picture: bytes | None) -> str:
    image = ""
    if picture is not None:
        text, data = escape(f"{table.title}; its numbers are in the table", quote=True), b64encode(picture).decode()
        image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in table.remarks)
    unfolded = " open" if len(table.rows) <= OPEN_ROWS else ""
    return f"""<section id="{table.key}">
<h2>{escape(table.title)}</h2>
<p>{escape(table.about)}</p>
{f"<ul>{remarks}</ul>" if remarks else ""}
{image}
<details{unfolded}><summary>{len(table.rows)} numbers</summary><div class="scroll">{_table(table)}</div></details>
<p class="source">Source: {escape(table.source)}. Files: <a href="{table.key}.csv">CSV</a>,
<a href="{table.key}.md">Markdown</a>, <a href="tables.json">JSON</a>.</p>
</section>"""


def _table(table: Table) -> str:
    header, rows = cells(table)
    head = "".join(f"<th{_kind(i, header)}>{escape(name)}</th>" for i, name in enumerate(header))
    lines, network = [], ""
    for row in rows:
        first = ' class="first"' if row[0] != network else ""
        network = row[0]
        inner = "".join(f"<td{_kind(i, header, cell)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        lines.append(f"<tr{first}>{inner}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _kind(index: int, header: list[str], cell: str = "") -> str:
    name = header[index]
    if name == "note":
        return ' class="note"'
    if index < 3:
        return ""
    far = name == "ours / paper" and cell and abs(float(cell) - 1) > FAR
    return ' class="number far"' if far else ' class="number"'
