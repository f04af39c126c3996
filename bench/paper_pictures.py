"""What the picture of a figure shows, as data: the paper's kind of chart with our bars beside the paper's.

draw_picture(picture_of(table), "fig14.png")          # vdnn.runtime.paper_plots draws
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vdnn.bench.paper_tables import BEST, MEASURED, SIMULATED, UNJOINED, Row, Table
from vdnn.bench.paper_text import PUBLISHED
from vdnn.runtime.paper_plots import Panel, Part, Picture, Series

PAPER_COLUMN = "paper"
STYLES = (PAPER_COLUMN, SIMULATED, MEASURED, BEST, UNJOINED)
"""Columns by the style of their bars and points, which is the same in all figures, whichever of them one has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a table become panels, labels and parts of bars.

    Args:
        panel, label: fields of a row that name its panel and its place on the axis.
        parts: quantities drawn as bars; () for whatever there is, one quantity a panel.
        points: quantities drawn as points on an axis of their own.
        stacked: parts one upon the other; else one before the other.
        horizontal: long labels, so bars lie.
        unit: only rows of this unit; "" for all.
    """

    panel: tuple[str, ...] = ()
    label: tuple[str, ...] = ("network",)
    parts: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    stacked: bool = True
    horizontal: bool = False
    unit: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "fig1": Layout(parts=("allocation",), points=("used by one layer",)),
    "fig4": Layout(parts=("weights", "feature maps", "gradient maps", "workspace")),
    "fig5": Layout(label=("bar",), parts=("x and y", "workspace", "weights")),
    "fig6": Layout(label=("bar",), parts=("forward", "backward"), points=("reuse distance",)),
    "fig11": Layout(panel=("network",), label=("bar",), parts=("maximum", "average"), stacked=False),
    "fig12": Layout(panel=("bar",), parts=("offloaded",)),
    "fig13": Layout(panel=("quantity",), label=("bar",)),
    "fig14": Layout(panel=("network",), label=("bar",), parts=("speed",)),
    "fig15": Layout(label=("network", "bar"), parts=("GPU side", "host side", "allocation")),
    "headline": Layout(label=("network", "bar", "quantity"), horizontal=True, unit="%"),
}
"""By figure: the kind of chart that the paper has; for what the text says, lying bars of its percentages."""


def picture_of(table: Table) -> Picture:
    """The picture of a table; columns in which nothing is known are left out."""
    layout = LAYOUTS[table.key]
    rows = [row for row in table.rows if not layout.unit or row.unit == layout.unit]
    known = [column for column in table.columns if any(column in row.values for row in rows)]
    headings = {PAPER_COLUMN: PUBLISHED, **{column: table.columns[column] for column in known}}
    panels = []
    for name in dict.fromkeys(_field(row, layout.panel) for row in rows):
        inner = [row for row in rows if _field(row, layout.panel) == name]
        labels = tuple(dict.fromkeys(_field(row, layout.label) for row in inner))
        found = {(_field(row, layout.label), row.quantity): row for row in inner}
        if not layout.parts:  # a label has one quantity here, whichever that is
            found = {(_field(row, layout.label), ""): row for row in inner}
        bars = _series(headings, labels, layout.parts or ("",), found)
        points = _series(headings, labels, layout.points, found) if layout.points else ()
        panels.append(Panel(name, labels, bars, points))
    units = {row.quantity: row.unit for row in rows}
    first = layout.parts[0] if layout.parts else next(iter(units), "")
    right = f"{layout.points[0]}, {units[layout.points[0]]}" if layout.points and layout.points[0] in units else ""
    return Picture(table.title, units.get(first, ""), right, layout.stacked, layout.horizontal, tuple(panels))


def _field(row: Row, names: tuple[str, ...]) -> str:
    return " ".join(getattr(row, name) for name in names)


def _series(
    headings: Mapping[str, str],
    labels: Sequence[str],
    parts: Sequence[str],
    found: Mapping[tuple[str, str], Row],
) -> tuple[Series, ...]:
    """One series a column, the paper's first; parts in the order of `parts`."""

    def value(column: str, label: str, part: str) -> float | None:
        row = found.get((label, part))
        if row is None:
            return None
        return row.paper if column == PAPER_COLUMN else row.values.get(column)

    return tuple(
        Series(
            heading,
            tuple(Part(part, tuple(value(column, label, part) for label in labels)) for part in parts),
            STYLES.index(column),
        )
        for column, heading in headings.items()
    )
