"""How well a figure is reproduced, in sentences: how many numbers are near, the worst, the order of policies.

remarks(figure, [Number("VGG-16 (64)", "all(m)", "speed", 0.44, 0.46)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from vdnn.bench.paper_figures import Figure


class Number(NamedTuple):
    """A number of the paper and ours; `note` is what its row says of it."""

    network: str
    bar: str
    quantity: str
    paper: float
    ours: float
    note: str = ""


NEAR = 0.03
CALIBRATED: Mapping[str, str] = {
    "fig5": "The workspace formulas of the profile are fitted to this figure, so agreement here is no prediction.",
    "fig6": "The profile's algorithm speeds are fitted to this figure, so agreement here is no prediction.",
}
FITTED_BARS = frozenset((("VGG-16 (64)", "base(m)"),))
"""Bars of figure 14 that the profile is calibrated on."""
DISTINCT, ROUNDING = 0.02, 1e-9
"""Speeds in figure 14 that differ by no more than its reading error twice over have no order."""


def remarks(figure: Figure, numbers: Sequence[Number]) -> tuple[str, ...]:
    """What a reader should know first; of simulated numbers."""
    if not numbers or not figure.compared:
        return ()
    special = SPECIAL.get(figure.key, _near)
    return (*special(figure, numbers), *([CALIBRATED[figure.key]] if figure.key in CALIBRATED else []))


def speed_errors(numbers: Sequence[Number]) -> list[tuple[float, Number]]:
    """Ours - the paper's for bars of figure 14 that the profile is not calibrated on."""
    return [(each.ours - each.paper, each) for each in numbers if (each.network, each.bar) not in FITTED_BARS]


def inversions(numbers: Sequence[Number]) -> list[str]:
    """Pairs of policies of one network that come in another order than in the paper."""
    return [
        f"{one.network}: {one.bar} and {other.bar}"
        for one, other in combinations(numbers, 2)
        if one.network == other.network
        and abs(one.paper - other.paper) > DISTINCT + ROUNDING
        and (one.paper - other.paper) * (one.ours - other.ours) <= 0
    ]


def is_near(figure: Figure, quantity: str, paper: float, ours: float) -> bool:
    """Within NEAR of the paper's number, or as near as that could be read."""
    most = max(NEAR * abs(paper), figure.read_to.get(figure.quantities[quantity], 0.0))
    return abs(ours - paper) <= most


def _near(figure: Figure, numbers: Sequence[Number]) -> list[str]:
    known = [each for each in numbers if each.paper]
    far = [each for each in known if not is_near(figure, each.quantity, each.paper, each.ours)]
    if not far:
        return [
            f"Simulated: all {len(known)} numbers within {NEAR:.0%} of the paper's, or within what they were read to."
        ]
    worst = max(far, key=lambda each: abs(each.ours / each.paper - 1))
    unexplained = sum(not each.note for each in far)
    notes = "each of the others has a note" if not unexplained else f"others without a note: {unexplained}"
    return [
        f"Simulated: {len(known) - len(far)} of {len(known)} numbers within {NEAR:.0%} of the paper's, or within what "
        f"they were read to; {notes}. Farthest: {worst.network} {worst.bar} {worst.quantity}, "
        f"{worst.ours / worst.paper:.2f} times the paper's."
    ]


def _speeds(figure: Figure, numbers: Sequence[Number]) -> list[str]:
    errors = speed_errors(numbers)
    said = []
    if errors:
        worst, bar = max(errors, key=lambda row: abs(row[0]))
        mean = sum(abs(error) for error, _ in errors) / len(errors)
        said.append(
            f"Simulated: mean absolute error {mean:.3f} over {len(errors)} bars that the profile is not calibrated on, "
            f"worst {worst:+.2f} ({bar.network} {bar.bar})."
        )
    wrong = inversions([each for each in numbers if each.bar not in figure.does_not_fit.get(each.network, ())])
    order = "in the paper's order for every network" if not wrong else f"in another order: {', '.join(wrong)}"
    return [
        *said,
        f"Policies whose speeds differ by more than {DISTINCT:g} in the paper come {order}; "
        "(*) bars, which the paper cannot have measured, aside.",
    ]


SPECIAL: Mapping[str, Callable[[Figure, Sequence[Number]], list[str]]] = {"fig14": _speeds}
"""Figures on which something else is said than how many numbers are near."""
