"""The vDNN paper's figures as data: what each bar is, its value, where it was read and how exactly.

figure = load_figure("fig11")
figure.bars["VGG-16 (64)"]["all(m)"]["average"]       # 584 MiB

The numbers are in paper_data/*.yaml, one file a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from vdnn.errors import ConfigError

FIGURES = ("fig1", "fig4", "fig5", "fig6", "fig11", "fig12", "fig13", "fig14", "fig15", "headline")
"""In the order in which they are shown."""
ALL = "all"
PAPER = "Rhu, Gimelshein, Clemons, Zulfiqar, Keckler: vDNN (MICRO 2016, arXiv 1602.08124)"
NO_POWER = (
    "Power is left out: the paper states in words that the average hardly changes and that dyn raises the maximum by 1 "
    "to 7%, but no number per network was published in a form that can be read, and a simulated machine has no power "
    "meter."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the paper, or what its text says.

    Args:
        key: "fig11". title, about: for people.
        source: where the numbers were read. recalled: whether from memory only. read_to: how exactly, by unit.
        compared: whether ours is the same quantity, so that a ratio means something.
        quantities: unit by quantity.
        bars: value by network, bar and quantity.
        does_not_fit: bars that the paper shows although they do not fit in its GPU ("*"), by network.
        notes: what a reader must know of a bar: by network, by bar or quantity.
    """

    key: str
    title: str
    about: str
    source: str
    recalled: bool
    read_to: Mapping[str, float]
    compared: bool
    quantities: Mapping[str, str]
    bars: Mapping[str, Mapping[str, Mapping[str, float]]]
    does_not_fit: Mapping[str, Sequence[str]]
    notes: Mapping[str, Mapping[str, str]]

    def note(self, network: str, bar: str, quantity: str) -> str:
        """What there is to say of one number; "" if nothing."""
        known = self.notes.get(network, {})
        texts = [known[key] for key in (bar, quantity) if key in known]
        if bar in self.does_not_fit.get(network, ()):
            texts.insert(0, "(*) does not fit in 12 GB; the paper shows the bar all the same")
        return "; ".join(texts)


def load_figure(key: str) -> Figure:
    """A figure by its key in FIGURES."""
    text = (resources.files("vdnn.bench") / "paper_data" / f"{key}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    defaults = {"compared": True, "does_not_fit": {}, "notes": {}}
    return Figure(**{**defaults, **data, "key": key, "about": data["about"].strip()})


def choose_figures(words: Sequence[str]) -> tuple[str, ...]:
    """The figures that `words` name, in their own order; all for "all" or nothing; ConfigError for an unknown one."""
    for word in words:
        if word not in (*FIGURES, ALL):
            expected = f"expected {ALL}, {', '.join(FIGURES)}"
            raise ConfigError(f"unknown figure '{word}', {expected}", key=word, known=(*FIGURES, ALL))
    if not words or ALL in words:
        return FIGURES
    return tuple(key for key in FIGURES if key in words)
