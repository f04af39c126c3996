"""Bars of several sources beside one another, in panels: the pictures of `vdnn tables`.

    series = Series("the paper", (Part("offloaded", (351.0, 155.0)),), style=0)
    draw_picture(Picture("Figure 12", "MiB", "", True, False, (Panel("", ("all", "conv"), (series,)),)), "fig12.png")

What goes into which bar is vdnn.bench.paper_pictures' matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vdnn.runtime.files import write_file
from vdnn.runtime.plots import DOTS_PER_INCH, check_picture_path

PART_COLORS = ("#0072B2", "#E69F00", "#56B4E9", "#CC79A7")
"""Colours that people with colour-blindness tell apart (Okabe and Ito 2008)."""
SOURCE_STYLES = ((0.4, "////"), (1.0, ""), (0.75, "..."), (0.6, "xx"), (0.5, "oo"))
"""Strength of the colour and hatch of bars, by the style of their series."""
GREY = "#777777"
MARKERS = ("o", "D", "s", "^", "v")
PANELS_ACROSS = 3
BAR_SHARE = 0.82
"""Of the room between two labels."""
ROOM = 130
"""Letters that fit side by side under a panel as wide as the picture."""


@dataclass(frozen=True, slots=True)
class Part:
    """One colour of the bars: a value a label, None where there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """The bars, or points, of one source; `style` is the same for a source in all pictures."""

    source: str
    parts: tuple[Part, ...]
    style: int


@dataclass(frozen=True, slots=True)
class Panel:
    """Labels along one axis, with a bar of every series at each, and points on an axis of their own."""

    title: str
    labels: tuple[str, ...]
    bars: tuple[Series, ...]
    points: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture.

    Args:
        unit: of the bars. right: quantity and unit of the points; "" if there are none.
        stacked: whether the parts of a bar lie one upon the other; else one before the other, the last in front.
        horizontal: whether the bars lie.
    """

    title: str
    unit: str
    right: str
    stacked: bool
    horizontal: bool
    panels: tuple[Panel, ...]


def draw_picture(picture: Picture, path: str) -> None:
    """Write `picture` to `path` (.png, .svg, .pdf); ConfigError for another suffix or a file that cannot be written."""
    suffix = check_picture_path(path)
    buffer = BytesIO()
    make_figure(picture).savefig(buffer, format=suffix[1:], dpi=DOTS_PER_INCH)
    write_file(path, buffer.getvalue())


def make_figure(picture: Picture) -> Figure:
    """The drawn picture."""
    count = max(1, len(picture.panels))
    across = min(PANELS_ACROSS, count)
    down = -(-count // across)
    longest = max((len(panel.labels) for panel in picture.panels), default=1)
    height = 0.9 + 0.34 * longest if picture.horizontal else 1.2 + (3.6 if down == 1 else 2.6 * down)
    figure = Figure(figsize=(11, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    axes = [axes for row in grid for axes in row]
    for panel, place in zip(picture.panels, axes, strict=False):
        (_draw_lying if picture.horizontal else _draw_standing)(place, panel, picture)
    for place in axes[len(picture.panels) :]:
        place.set_visible(False)
    figure.suptitle(picture.title, fontsize=11)
    handles = _legend(picture)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=8)
    return figure


def _draw_standing(axes: Axes, panel: Panel, picture: Picture) -> None:
    places, width = np.arange(len(panel.labels)), BAR_SHARE / max(1, len(panel.bars))
    for i, series in enumerate(panel.bars):
        at = places - BAR_SHARE / 2 + (i + 0.5) * width
        below = np.zeros(len(places))
        for color, part in zip(PART_COLORS, series.parts, strict=False):
            heights = _numbers(part.values)
            axes.bar(at, heights, width, bottom=below, **_style(color, series.style))
            if picture.stacked:
                below = below + heights
    axes.set_title(panel.title, fontsize=9)
    across = min(PANELS_ACROSS, len(picture.panels))
    long = len(places) * (2 + max(map(len, panel.labels), default=0)) > ROOM / across
    axes.set_xticks(places, panel.labels, rotation=40 if long else 0, ha="right" if long else "center", fontsize=7)
    axes.set_ylabel(picture.unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    if panel.points:
        _draw_points(axes, panel, picture, places)


def _draw_points(axes: Axes, panel: Panel, picture: Picture, places: Any) -> None:
    right = axes.twinx()
    for series in panel.points:
        marker = MARKERS[series.style]
        values = [np.nan if value is None else value for value in series.parts[0].values]
        right.plot(places, values, marker, color="black", markersize=4, fillstyle=_fill(marker))
    right.set_ylim(bottom=0)
    right.set_ylabel(picture.right, fontsize=8)
    right.tick_params(axis="y", labelsize=7)


def _draw_lying(axes: Axes, panel: Panel, picture: Picture) -> None:
    places, width = np.arange(len(panel.labels)), BAR_SHARE / max(1, len(panel.bars))
    for i, series in enumerate(panel.bars):
        at = places - BAR_SHARE / 2 + (i + 0.5) * width
        lengths = _numbers(series.parts[0].values)
        axes.barh(at, lengths, width, **_style(PART_COLORS[0], series.style))
    axes.set_yticks(places, panel.labels, fontsize=7)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlabel(picture.unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)


def _style(color: str, style: int) -> dict[str, Any]:
    """Opaque, so that what lies behind a bar does not change its colour."""
    strength, hatch = SOURCE_STYLES[style]
    mixed = tuple(1 - strength * (1 - share) for share in to_rgb(color))
    return {"facecolor": mixed, "hatch": hatch, "edgecolor": "black", "linewidth": 0.4}


def _numbers(values: Sequence[float | None]) -> Any:
    """Shape (labels,), 0 where there is no value."""
    return np.array([0.0 if value is None else value for value in values])


def _fill(marker: str) -> Any:
    return "none" if marker == MARKERS[0] else "full"


def _legend(picture: Picture) -> list[Patch | Line2D]:
    if not picture.panels:
        return []
    panel = picture.panels[0]
    handles: list[Patch | Line2D] = [Patch(label=series.source, **_style(GREY, series.style)) for series in panel.bars]
    names = [part.name for part in panel.bars[0].parts if part.name] if panel.bars else []
    handles += [Patch(color=color, label=name) for color, name in zip(PART_COLORS, names, strict=False)]
    handles += [
        Line2D(
            [],
            [],
            color="black",
            marker=MARKERS[series.style],
            linestyle="",
            fillstyle=_fill(MARKERS[series.style]),
            label=f"{picture.right.partition(',')[0]}: {series.source}",
        )
        for series in panel.points
    ]
    return handles
