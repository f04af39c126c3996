"""Where the runs behind the tables come from: a simulated machine, or files of runs measured on a GPU.

simulated = SimulatedRuns(load_profile("titan-x-maxwell"))
simulated.run("VGG-16 (64)", "all(m)").peak_bytes
not_joined = simulated.joined("reuse")
"""

from __future__ import annotations

from collections.abc import Mapping

from vdnn.bench.paper_runs import NETWORKS, Case, Run, run_case
from vdnn.bench.paper_values import BASE, MissingRun
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL
from vdnn.runtime.profile import Profile

POLICY_BARS: Mapping[str, tuple[str, str]] = {
    "all(m)": ("all", MEMORY_OPTIMAL),
    "all(p)": ("all", PERFORMANCE_OPTIMAL),
    "conv(m)": ("conv", MEMORY_OPTIMAL),
    "conv(p)": ("conv", PERFORMANCE_OPTIMAL),
    "dyn": ("dyn", PERFORMANCE_OPTIMAL),
    "base(m)": ("base", MEMORY_OPTIMAL),
    BASE: ("base", PERFORMANCE_OPTIMAL),
    "oracle": ("oracle", PERFORMANCE_OPTIMAL),
}
"""Policy and algorithms by the name of a bar."""
LAYER, REUSE = "layer", "reuse"


def case_of(network: str, bar: str, join: str = LAYER) -> Case:
    """The case of a bar of the paper; where nothing is offloaded there is nothing to join."""
    policy, algorithms = POLICY_BARS[bar]
    name, batch = NETWORKS[network]
    return Case(name, batch, policy, algorithms, LAYER if policy in ("base", "oracle") else join)


class SimulatedRuns:
    """Runs on the machine of `profile`, each made once, when it is asked for first."""

    def __init__(self, profile: Profile, join: str = LAYER, made: dict[Case, Run] | None = None):
        self.profile, self._join = profile, join
        self._made: dict[Case, Run] = {} if made is None else made
        self.copy_share: float | None = profile.copies.d2h_gbps / profile.memory_gbps

    def joined(self, join: str) -> SimulatedRuns:
        """The same machine with streams joined as `join` says; runs are made once for both."""
        return SimulatedRuns(self.profile, join, self._made)

    def run(self, network: str, bar: str) -> Run:
        """Simulate the bar, or tell again what was found."""
        case = case_of(network, bar, self._join)
        if case not in self._made:
            self._made[case] = run_case(case, self.profile)
        return self._made[case]


class KeptRuns:
    """Runs that are there already, by case; for a bar whose case is not among them, MissingRun.

    Args:
        best: runs of our best configuration by network, which then stand for dyn.
    """

    copy_share: float | None = None

    def __init__(self, runs: Mapping[Case, Run], join: str = LAYER, best: Mapping[tuple[str, int], Run] | None = None):
        self._runs, self._join, self._best = runs, join, best

    def run(self, network: str, bar: str) -> Run:
        """The run of a bar."""
        found = self._runs.get(case_of(network, bar, self._join))
        if self._best is not None and bar not in (BASE, "oracle"):
            found = self._best.get(NETWORKS[network]) if bar == "dyn" else None
        if found is None:
            raise MissingRun(f"{network} {bar}")
        return found
