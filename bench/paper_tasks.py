"""Which runs the figures need, in the order in which they are worth measuring.

for task in tasks(("fig14",), None): print(task.case, task.best)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vdnn.bench.paper_figures import load_figure
from vdnn.bench.paper_runs import Case
from vdnn.bench.paper_sources import POLICY_BARS, REUSE, case_of
from vdnn.bench.paper_tables import BEST, SHOWN
from vdnn.bench.paper_values import BASE, GROUPS, SIX, VERY_DEEP

MEASURED = (*SIX, "VGG-416 (32)")
"""Networks that are measured unless others are named: the other deep ones take time and tell nothing more."""
DYN = "dyn"
ORDER = (BASE, DYN, "conv(p)", "all(p)", "conv(m)", "all(m)", "base(m)")
"""Bars of a network, first what every ratio needs."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run to measure; `best`: our best configuration, rather than the paper's way."""

    case: Case
    best: bool = False


def tasks(figures: Sequence[str], networks: Sequence[str] | None) -> tuple[Task, ...]:
    """The runs that `figures` show of `networks`; of MEASURED if that is None."""
    chosen = MEASURED if networks is None else networks
    wanted: dict[str, set[str]] = {}
    best: set[str] = set()
    for key in figures:
        for network, bar in _bars(key):
            wanted.setdefault(network, {BASE}).add(bar)
            if bar == DYN and BEST in SHOWN.get(key, ()):
                best.add(network)
    found = []
    for network in (name for name in chosen if name in wanted):
        bars = [bar for bar in ORDER if bar in wanted[network]]
        found += [Task(case_of(network, bar)) for bar in bars]
        if network in best:
            found.insert(len(found) - max(0, len(bars) - 2), Task(case_of(network, DYN, REUSE), best=True))
    return tuple(found)


def _bars(key: str) -> Iterator[tuple[str, str]]:
    """Network and bar of every run that a figure needs; where its bars are layers, base(p)."""
    for shown, bars in load_figure(key).bars.items():
        for network in GROUPS.get(shown, (shown,)):
            if network in VERY_DEEP:  # without a limit and with dyn: a step takes seconds
                yield from ((network, bar) for bar in bars if bar == DYN)
                continue
            if key == "fig1":
                yield network, "all(p)"
            for bar in bars:
                yield network, bar if bar in POLICY_BARS else BASE
