"""Pictures of the study's tables as data: bars of the implementations side by side, a panel for each direction.

picture = picture_of(table)                            # None where nothing is measured
draw_picture(picture, "pooling.png")                   # vdnn.runtime.paper_plots draws
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vdnn.bench.study_table import StudyTable, Value
from vdnn.runtime.paper_plots import Panel, Part, Picture, Series


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn of a table.

    Args:
        panel, label: columns whose values name the panels, and the places on the axis.
        bars: columns that are drawn, at most as many as paper_plots has styles.
        over: a column that all bars are divided by, where their sizes differ too much; "" for none.
        unit: of the axis.
    """

    panel: str
    label: str
    bars: tuple[str, ...]
    unit: str
    over: str = ""


CHARTS: Mapping[str, Chart] = {
    "layouts": Chart("direction", "layer", ("nchw_mm", "nchw", "chwn", "nhwc_tf32", "nhwc_bf16"), "TFLOP/s"),
    "pooling": Chart("direction", "layer", ("caffe", "convnet", "cudnn_nchw", "ours_nchw", "ours_chwn"), "GB/s"),
    "networks": Chart("precision", "network", ("nchw", "nhwc", "chwn", "study", "auto"), "time, of auto's", "auto"),
}
"""By table; those of softmax and transforms have too many rows to be drawn."""


def picture_of(table: StudyTable) -> Picture | None:
    """The picture of a table; None if it has none, or nothing of it is measured. What is not measured is left out."""
    chart = CHARTS.get(table.key)
    if chart is None:
        return None
    headings = {column.key: column.heading for column in table.columns}
    known = [key for key in chart.bars if any(_height(row, key, chart) is not None for row in table.rows)]
    if not known:
        return None
    panels = []
    for title in dict.fromkeys(str(row[chart.panel]) for row in table.rows):
        rows = [row for row in table.rows if row[chart.panel] == title]
        if all(_height(row, key, chart) is None for row in rows for key in known):
            continue
        bars = tuple(
            Series(headings[key], (Part("", tuple(_height(row, key, chart) for row in rows)),), chart.bars.index(key))
            for key in known
        )
        panels.append(Panel(title, tuple(str(row[chart.label]) for row in rows), bars))
    return Picture(table.title, chart.unit, "", True, False, tuple(panels))


def _height(row: Mapping[str, Value], key: str, chart: Chart) -> float | None:
    if key not in row or (chart.over and chart.over not in row):
        return None
    return float(row[key]) / (float(row[chart.over]) if chart.over else 1.0)
