"""Runs of the paper's cases made up by hand, for tests of what is made of them.

runs = Fakes(); runs.run("VGG-16 (64)", "all(m)").peak_bytes
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.bench.paper_figures import load_figure
from vdnn.bench.paper_runs import Case, LayerRun, Run
from vdnn.bench.paper_sources import case_of
from vdnn.bench.paper_tables import BEST, MEASURED, SIMULATED, UNJOINED, Sources, Table, make_table
from vdnn.bench.paper_values import MissingRun, Runs

MIB = 2**20
BASE_MIB, STEP_MS = 1000, 100.0
SHARES = {
    "all": (0.1, 0.2, 0.8),
    "conv": (0.2, 0.3, 0.5),
    "dyn": (0.4, 0.5, 0.0),
    "base": (1.0, 1.0, 0.0),
    "oracle": (1.0, 1.0, 0.0),
}
"""Average, peak and offloaded bytes of base's, by policy."""


def layer(name: str, kind: str, **changes: float) -> LayerRun:
    """A layer of 1 ms forward and 2 ms backward on 3 MiB in and 5 MiB out."""
    made = LayerRun(name, kind, 1.0, 2.0, 70.0, 3 * MIB, 5 * MIB, 7 * MIB, 2 * MIB, 0)
    return replace(made, **changes)


LAYERS = (
    layer("conv1", "conv"),
    layer("relu1", "relu"),
    layer("pool1", "pool"),
    layer("conv2", "conv", forward_ms=4.0),
    *(layer(f"conv{i}", "conv") for i in range(3, 17)),
    layer("fc1", "linear", weight_bytes=11 * MIB),
    layer("fc2", "linear", weight_bytes=13 * MIB),
    layer("fc3", "linear", weight_bytes=0),
)


def run_of(case: Case, **changes: object) -> Run:
    """A run whose numbers follow from SHARES; memory-optimal algorithms take twice as long."""
    average, peak, offloaded = (int(share * BASE_MIB * MIB) for share in SHARES[case.policy])
    slow = 2.0 if case.algorithms == "memory-optimal" else 1.0
    parts = {"weights": 100 * MIB, "feature_maps": 600 * MIB, "gradient_maps": 200 * MIB, "workspace": 100 * MIB}
    made = Run(case, peak, average, offloaded, parts, slow * STEP_MS, slow * STEP_MS + 9, True, "", LAYERS, offloaded)
    return replace(made, **changes)  # type: ignore[arg-type]


class Fakes:
    """Runs of every case; `changed` are put in their places, by (network, bar)."""

    copy_share: float | None = 0.04

    def __init__(self, changed: dict[tuple[str, str], dict[str, object]] | None = None, missing: str = ""):
        self.changed, self.missing = changed or {}, missing

    def run(self, network: str, bar: str) -> Run:
        if bar == self.missing:
            raise MissingRun(bar)
        return run_of(case_of(network, bar), **self.changed.get((network, bar), {}))


HEADINGS = {SIMULATED: "simulated, test", UNJOINED: "not joined", MEASURED: "measured here", BEST: "best here"}


def table_of(key: str, **runs: Runs) -> Table:
    """The table of a figure from made-up runs by column; simulated ones only if none are given."""
    return make_table(load_figure(key), Sources(runs or {SIMULATED: Fakes()}, HEADINGS))
