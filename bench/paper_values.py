"""What a bar of the vDNN paper is in terms of our runs: the same definition for simulated and for measured ones.

bar_values("fig11", "VGG-16 (64)", "all(m)", runs)    # {"average": 563.0, "maximum": 2451.2, "saved": 93.4}

Sizes are in MiB, which the paper's plots call MB; a quantity whose runs are not there is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from vdnn.bench.paper_runs import LayerRun, Run
from vdnn.units import MIB

SIX = ("AlexNet (128)", "OverFeat (128)", "GoogLeNet (128)", "VGG-16 (64)", "VGG-16 (128)", "VGG-16 (256)")
VERY_DEEP = ("VGG-116 (32)", "VGG-216 (32)", "VGG-316 (32)", "VGG-416 (32)")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Six networks": SIX,
    "Six large networks": ("VGG-16 (128)", "VGG-16 (256)", *VERY_DEEP),
    "Four very deep networks": VERY_DEEP,
}
"""Networks that the paper speaks of together."""
BASE, ORACLE = "base(p)", "oracle"


class MissingRun(Exception):
    """A run that a value needs, or a layer of it, is not there."""


class Runs(Protocol):
    """Where runs come from: a simulation, or files of measured ones.

    Args:
        copy_share: of the DRAM bandwidth, what a copy to the host takes; None if that is not known.
    """

    copy_share: float | None

    def run(self, network: str, bar: str) -> Run:
        """The run of a bar, such as "all(m)", of a network, such as "VGG-16 (64)"; MissingRun if there is none."""


def bar_values(figure: str, network: str, bar: str, runs: Runs, quantities: Sequence[str]) -> dict[str, float]:
    """The values of one bar that these `runs` give, by quantity."""
    found: dict[str, float] = {}
    for quantity in quantities:
        try:
            found[quantity] = VALUES[figure](network, bar, quantity, runs)
        except MissingRun:
            continue
    return found


def speed(network: str, bar: str, runs: Runs) -> float:
    """Of the feature-extraction layers, against base(p), or the oracle where base(p) does not fit."""
    return reference(network, runs).feature_ms / runs.run(network, bar).feature_ms


def choice(network: str, bar: str, runs: Runs) -> str:
    """What dyn took, in words, without what it tried before; "" for other bars."""
    try:
        return runs.run(network, bar).choice.partition(";")[0] if bar == "dyn" else ""
    except MissingRun:
        return ""


def reference(network: str, runs: Runs) -> Run:
    """What speeds are normalised to; base(p) too where it was run without a limit and there is no oracle."""
    base = runs.run(network, BASE)
    if base.fits:
        return base
    try:
        return runs.run(network, ORACLE)
    except MissingRun:
        return base


def layer_runs(run: Run) -> dict[str, LayerRun]:
    """The convolutions as CONV01, CONV02, … and the fully connected layers as FC1, … in the order of the network."""
    kinds = {"conv": "CONV{:02d}", "linear": "FC{}"}
    counts = dict.fromkeys(kinds, 0)
    found = {}
    for row in run.layers:
        if row.kind in kinds:
            counts[row.kind] += 1
            found[kinds[row.kind].format(counts[row.kind])] = row
    return found


def _fig1(network: str, bar: str, quantity: str, runs: Runs) -> float:
    base = runs.run(network, bar).peak_bytes
    if quantity == "allocation":
        return base / MIB
    return 100 * runs.run(network, "all(p)").peak_bytes / base


def _fig4(network: str, bar: str, quantity: str, runs: Runs) -> float:
    parts = runs.run(network, bar).by_category
    total = sum(parts.values())
    if quantity == "total":
        return total / MIB
    if quantity == "feature share":
        return 100 * parts["feature_maps"] / total
    return parts[quantity.replace(" ", "_")] / MIB


def _fig5(network: str, bar: str, quantity: str, runs: Runs) -> float:
    row = _layer(network, bar, runs)
    sizes = {"x and y": row.x_bytes + row.y_bytes, "workspace": row.workspace_bytes, "weights": row.weight_bytes}
    return sizes[quantity] / MIB


def _fig6(network: str, bar: str, quantity: str, runs: Runs) -> float:
    row = _layer(network, bar, runs)
    return {"forward": row.forward_ms, "backward": row.backward_ms, "reuse distance": row.reuse_distance_ms}[quantity]


def _fig11(network: str, bar: str, quantity: str, runs: Runs) -> float:
    run = runs.run(network, bar)
    if quantity == "saved":
        return _saved(runs.run(network, BASE), run, "average_bytes")
    return (run.average_bytes if quantity == "average" else run.peak_bytes) / MIB


def _fig12(network: str, bar: str, quantity: str, runs: Runs) -> float:
    return runs.run(network, bar).offloaded_bytes / MIB


def _fig13(network: str, bar: str, quantity: str, runs: Runs) -> float:
    """Every operand once: x, w and y in forward; dy, w and dx, dy, x and dw in the two products of backward."""
    row = _layer(network, bar, runs)
    once = row.x_bytes + row.y_bytes + row.weight_bytes
    moved, time_ms = (once, row.forward_ms) if quantity == "forward" else (2 * once, row.backward_ms)
    return moved / time_ms / 1e6


def _fig14(network: str, bar: str, quantity: str, runs: Runs) -> float:
    return speed(network, bar, runs)


def _fig15(network: str, bar: str, quantity: str, runs: Runs) -> float:
    run = runs.run(network, bar)
    if quantity == "speed":
        return speed(network, bar, runs)
    sizes = {
        "GPU side": run.peak_bytes,
        "host side": run.offloaded_bytes,
        "allocation": run.peak_bytes,
    }
    return sizes[quantity] / MIB


def _layer(network: str, bar: str, runs: Runs) -> LayerRun:
    found = layer_runs(runs.run(network, BASE))
    if bar not in found:
        raise MissingRun(f"{network} has no {bar}")
    return found[bar]


def _saved(base: Run, run: Run, size: str) -> float:
    return float(100 * (1 - getattr(run, size) / getattr(base, size)))


def _average_saved(network: str, bar: str, runs: Runs) -> float:
    return _saved(runs.run(network, BASE), runs.run(network, bar), "average_bytes")


def _maximum_saved(network: str, bar: str, runs: Runs) -> float:
    return _saved(runs.run(network, BASE), runs.run(network, bar), "peak_bytes")


def _slowdown(network: str, bar: str, runs: Runs) -> float:
    return 100 * (1 - speed(network, bar, runs))


def _gb(nbytes: int) -> float:
    """GB as the paper's text has them: a thousand of its plots' MB."""
    return nbytes / MIB / 1000


def _unused(network: str, bar: str, runs: Runs) -> float:
    return 100 - _fig1(network, bar, "used by one layer", runs)


def _on_host(network: str, bar: str, runs: Runs) -> float:
    return 100 * runs.run(network, bar).offloaded_bytes / runs.run(network, BASE).peak_bytes


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


OfNetwork = Callable[[str, str, Runs], float]
HEADLINE: Mapping[str, tuple[Callable[[Sequence[float]], float], OfNetwork]] = {
    "average memory saved": (_mean, _average_saved),
    "maximum memory saved": (_mean, _maximum_saved),
    "least average memory saved": (min, _average_saved),
    "most average memory saved": (max, _average_saved),
    "allocation": (_mean, lambda network, bar, runs: _gb(runs.run(network, bar).peak_bytes)),
    "peak": (_mean, lambda network, bar, runs: _gb(runs.run(network, bar).peak_bytes)),
    "GPU side": (_mean, lambda network, bar, runs: _fig15(network, bar, "GPU side", runs) / 1000),
    "fits in 12 GB": (_mean, lambda network, bar, runs: float(runs.run(network, bar).fits)),
    "slowdown": (_mean, _slowdown),
    "largest slowdown": (max, _slowdown),
    "least slowdown": (min, _slowdown),
    "most slowdown": (max, _slowdown),
    "speed": (_mean, lambda network, bar, runs: 100 * speed(network, bar, runs)),
    "least unused": (min, _unused),
    "most unused": (max, _unused),
    "offloaded": (_mean, lambda network, bar, runs: _gb(runs.run(network, bar).offloaded_bytes)),
    "least on the host": (min, _on_host),
    "most on the host": (max, _on_host),
    "first reuse distance": (
        _mean,
        lambda network, bar, runs: layer_runs(runs.run(network, bar))["CONV01"].reuse_distance_ms,
    ),
}
"""How a number of the text comes from those of its networks, and what it is of one of them."""


def _headline(network: str, bar: str, quantity: str, runs: Runs) -> float:
    if quantity == "bandwidth taken":
        if runs.copy_share is None:
            raise MissingRun(quantity)
        return 100 * runs.copy_share
    over, value = HEADLINE[quantity]
    return over([value(name, bar, runs) for name in GROUPS.get(network, (network,))])


VALUES: Mapping[str, Callable[[str, str, str, Runs], float]] = {
    "fig1": _fig1,
    "fig4": _fig4,
    "fig5": _fig5,
    "fig6": _fig6,
    "fig11": _fig11,
    "fig12": _fig12,
    "fig13": _fig13,
    "fig14": _fig14,
    "fig15": _fig15,
    "headline": _headline,
}
"""By figure, the value of (network, bar, quantity)."""
