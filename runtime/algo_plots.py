"""The convolutions of a network under workspace limits as a picture: total time against the limit.

    draw_study(study, [0, 64 * MIB, None], "vgg16_algos.png")

Every step of the curve is a limit at which one of the convolutions gets another algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from vdnn.runtime.algos import DIRECTIONS, Study, limit_text, ms_text
from vdnn.runtime.files import write_output
from vdnn.runtime.plots import DOTS_PER_INCH, check_picture_path
from vdnn.units import MIB, format_bytes

COLORS = {"forward": "#56B4E9", "dgrad": "#E69F00", "wgrad": "#009E73", "divided": "#D55E00", "limit": "#606060"}
"""Colours that people with colour-blindness tell apart (Okabe and Ito 2008)."""
ROOM = 1.6
"""How far the last level is drawn beyond the largest workspace, as a factor."""


def draw_study(study: Study, limits: Sequence[int | None], path: str) -> None:
    """Write the picture to `path`; ConfigError if its suffix is none of a picture or it cannot be written."""
    suffix = check_picture_path(path)
    totals = study.curve()
    edges = np.array([total.limit_bytes or 0 for total in totals], float)
    edges = np.append(edges, max(edges[-1] * ROOM, MIB)) / MIB
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    below = np.zeros(len(totals))
    for direction in DIRECTIONS:
        above = below + [total.by_direction[direction] for total in totals]
        axes.stairs(above, edges, baseline=below, fill=True, color=COLORS[direction], linewidth=0, label=direction)
        below = above
    divided = [total.time_ms if total.divided_ms is None else total.divided_ms for total in totals]
    if any(total.divided_ms is not None for total in totals):
        label = micro_label(study)
        axes.stairs(divided, edges, baseline=None, color=COLORS["divided"], linewidth=1.8, label=label)
    for limit in limits:
        if limit is not None and limit / MIB < edges[-1]:
            axes.axvline(limit / MIB, color=COLORS["limit"], linewidth=0.8, linestyle=":")
    # linear up to the first MiB, so that no workspace at all has its place
    axes.set_xscale("symlog", linthresh=1.0, base=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda mib, _: format_bytes(mib * MIB) if mib else "0"))
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, max(below) * 1.08)
    axes.set_xlabel("most workspace of one convolution")
    axes.set_ylabel("all convolutions of a step, ms")
    axes.legend(loc="upper right")
    figure.suptitle(title(study), fontsize=11)
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix[1:], dpi=DOTS_PER_INCH)
    write_output(path, buffer.getvalue())


def micro_label(study: Study) -> str:
    """What the line of micro-batches is, and of how many convolutions if not of all."""
    known, convs = sum(bool(conv.known_slices()) for conv in study.convs), len(study.convs)
    return "with micro-batching" + (f" of {known} of {convs} convolutions" if known < convs else "")


def title(study: Study) -> str:
    """What is shown, from the smallest workspace to no limit, and where the times come from."""
    least, most = study.total(0), study.total(None)
    kind = "modelled, not measured: " if study.source.modelled else ""
    return (
        f"{study.network}, batch size {study.batch}, {study.source.precision}, {study.source.layout}"
        f"{study.only_words()}: "
        f"{ms_text(least.time_ms)} at {limit_text(0)}, {ms_text(most.time_ms)} at "
        f"{format_bytes(most.workspace_bytes)}\n{kind}{study.source.words}"
    )
