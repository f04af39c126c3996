"""Fit the profile titan-x-maxwell to figures 5 and 6 and one bar of figure 14 of the vDNN paper, and show what is left.

    python -m vdnn.bench.calibrate_titan_x

Fitted are eleven numbers, the same for every layer and network. Ends with status 1 if the packaged profile is not what
was fitted. Nothing here looks at another network than the paper's VGG-16.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from vdnn.bench.command import command
from vdnn.layers.lower import lower
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate
from vdnn.memory.paper_count import feature_layers
from vdnn.networks import build
from vdnn.runtime.profile import Profile, make_profile, model_candidates, operands
from vdnn.units import MIB

START: Mapping[str, float] = {
    "streaming": 0.7,
    "pooling": 0.4,
    "linear": 0.2,
    "gemm": 0.85,
    "wgrad": 0.9,
    "thin": 0.5,
    "depth": 140.0,
    "no workspace": 0.5,
    "fft passes": 1.5,
    "tiling passes": 3.0,
    "sum depth": 30.0,
}
"""First guesses of what is fitted. Of memory bandwidth: streaming, pooling. Of the peak: linear, gemm (forward and
dgrad), wgrad; thin is a factor on it for first layers. Depths of half speed: "depth" of matrix products, "sum depth" of
spectra. "no workspace" is the speed of algorithms without workspace as a share of that of their kin with indices."""
FORWARD = {**dict.fromkeys(range(1, 4), "IMPLICIT_PRECOMP_GEMM"), **dict.fromkeys(range(4, 9), "FFT_TILING")}
"""Fastest forward algorithm of CONV01, CONV02, … by figure 5's workspaces; FFT for the others."""
BASE_BAR = 0.47
"""Figure 14, VGG-16 (64): base(p) against base(m)."""
BETWEEN_MS = 22.0
"""Error of the time between two convolutions that counts as much as a factor of e in one time of a convolution."""
CHOICE_WEIGHT, CHOICE_MARGIN = 4.0, 0.03
"""How much a wrong algorithm counts, and by how much (logarithm of times) the right one should win."""
BAR_WEIGHT = 20.0
FIRST_STEP, SMALLEST_STEP = 0.2, 5e-4
TOLERANCE = 0.01
"""Relative, of the packaged numbers, which are rounded."""


class Row(NamedTuple):
    """A number of the paper and ours."""

    name: str
    paper: float
    ours: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a profile gives for the calibrating numbers.

    Args:
        times: ms of each layer, forward and backward. between: ms of ReLU and pools between convolutions.
        workspaces: MiB of the fastest forward algorithm. choices: logarithm of the right algorithm's time against the
            best other's. bar: base(p) against base(m).
    """

    times: tuple[Row, ...]
    between: tuple[Row, ...]
    workspaces: tuple[Row, ...]
    choices: tuple[float, ...]
    bar: float

    @property
    def loss(self) -> float:
        """Weighted sum of squares."""
        return (
            sum(math.log(row.ours / row.paper) ** 2 for row in self.times)
            + sum(((row.ours - row.paper) / BETWEEN_MS) ** 2 for row in self.between)
            + CHOICE_WEIGHT * sum(max(0.0, late + CHOICE_MARGIN) ** 2 for late in self.choices)
            + BAR_WEIGHT * math.log(self.bar / BASE_BAR) ** 2
        )


class _Ops:
    """The timed ops of a program, with the candidates of equal ones found once."""

    def __init__(self, program: Program, kinds: str = ""):
        self._cases: dict[tuple[Any, ...], tuple[Op, dict[str, TensorSpec]]] = {}
        self._rows: list[tuple[Op, tuple[Any, ...]]] = []
        for op in program.ops:
            if op.phase == "update" or op.kind.startswith("input.") or not op.kind.startswith(kinds):
                continue
            specs = operands(op, program)
            key = (op.kind, tuple(spec.shape for spec in specs.values()), str(op.attrs))
            self._cases.setdefault(key, (op, specs))
            self._rows.append((op, key))

    def candidates(self, profile: Profile) -> list[tuple[Op, tuple[Candidate, ...]]]:
        found = {key: model_candidates(op, specs, profile) for key, (op, specs) in self._cases.items()}
        return [(op, found[key]) for op, key in self._rows]


class Calibration:
    """The paper's numbers beside those of a profile."""

    def __init__(self) -> None:
        graph = build("vgg19", dropout=0.0)
        timed = lower(graph, 64)
        self._features = feature_layers(timed)
        self._timed, self._sized = _Ops(timed), _Ops(lower(graph, 256), "conv.forward")
        self._times: dict[str, Any] = _data("vdnn.bench", "paper_data/fig6")["bars"]["VGG-16 (64)"]
        self._workspaces: dict[str, Any] = _data("vdnn.bench", "paper_data/fig5")["bars"]["VGG-16 (256)"]
        self.packaged = _data("vdnn.runtime.profiles", "titan-x-maxwell")

    def profile_data(self, v: Mapping[str, float]) -> dict[str, Any]:
        """The packaged profile's data with the fitted numbers `v`."""
        data = copy.deepcopy(self.packaged)
        data["memory_efficiency"], data["linear_efficiency"] = v["streaming"], v["linear"]
        data["kernels"] = {"pool": v["pooling"], "lrn": v["pooling"]}
        for kind, methods in data["algorithms"].items():
            efficiency = v["wgrad" if kind == "conv.wgrad" else "gemm"]
            for method in methods.values():
                if method["workspace"].startswith("fft"):
                    method["depth"] = v["sum depth"]
                    method["passes"][32] = v["fft passes" if method["workspace"] == "fft" else "tiling passes"]
                    continue
                share = 1.0 if method["workspace"] == "indices" else v["no workspace"]
                method.update(efficiency=efficiency * share, depth=v["depth"])
                if "thin" in method:
                    method["thin"] = v["thin"]
        return data

    def fit(self, profile: Profile) -> Fit:
        """Everything that is compared, for `profile`."""
        layers: dict[str, dict[str, float]] = {}
        fastest = smallest = 0.0
        for op, options in self._timed.candidates(profile):
            layers.setdefault(op.layer, {"forward": 0.0, "backward": 0.0})[op.phase] += options[0].time_ms
            if op.layer in self._features:
                fastest += options[0].time_ms
                smallest += min(options, key=lambda c: (c.workspace_bytes, c.time_ms)).time_ms
        return Fit(*self._layer_rows(layers), *self._forward_rows(profile), fastest / smallest)

    def _layer_rows(self, layers: Mapping[str, Mapping[str, float]]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        order = list(layers)
        names = dict(zip(self._times, (n for n in order if n.startswith(("conv", "fc"))), strict=True))
        times, between = [], []
        for label, paper in self._times.items():
            times += [Row(f"{label} {way}", paper[way], layers[names[label]][way]) for way in ("forward", "backward")]
        convolutions = [label for label in self._times if label.startswith("CONV")]
        for label, after in pairwise(convolutions):
            # of the distance from a layer's forward to its backward, what the next convolution does not explain
            paper, later = self._times[label], self._times[after]
            away = paper["reuse distance"] - later["reuse distance"] - later["forward"] - later["backward"]
            passed = order[order.index(names[label]) + 1 : order.index(names[after])]
            between.append(Row(f"{label} to {after}", away, sum(sum(layers[name].values()) for name in passed)))
        return tuple(times), tuple(between)

    def _forward_rows(self, profile: Profile) -> tuple[tuple[Row, ...], tuple[float, ...]]:
        workspaces, choices = [], []
        for number, (_, options) in enumerate(self._sized.candidates(profile), 1):
            label, right = f"CONV{number:02d}", FORWARD.get(number, "FFT")
            workspaces.append(Row(label, self._workspaces[label]["workspace"], options[0].workspace_bytes / MIB))
            wanted = next(c.time_ms for c in options if c.algorithm == right)
            choices.append(math.log(wanted / min(c.time_ms for c in options if c.algorithm != right)))
        return tuple(workspaces), tuple(choices)

    def search(self) -> dict[str, float]:
        """The numbers with the least loss, from START: Hooke and Jeeves' pattern search (1961) over logarithms."""
        here = [math.log(value) for value in START.values()]
        loss, step = self._loss(here), FIRST_STEP
        while step > SMALLEST_STEP:
            tried, found = self._explore(here, loss, step)
            if found >= loss:
                step /= 2
            while found < loss:  # as long as going on in the same direction helps
                ahead = [2 * b - a for a, b in zip(here, tried, strict=True)]
                here, loss = tried, found
                tried, found = self._explore(ahead, self._loss(ahead), step)
        return _numbers(here)

    def _explore(self, point: list[float], loss: float, step: float) -> tuple[list[float], float]:
        """The best of each number a step up, down and unmoved, one after the other."""
        for i in range(len(point)):
            for move in (step, -step):
                tried = [*point[:i], point[i] + move, *point[i + 1 :]]
                found = self._loss(tried)
                if found < loss:
                    point, loss = tried, found
                    break
        return point, loss

    def _loss(self, point: list[float]) -> float:
        return self.fit(make_profile(self.profile_data(_numbers(point)))).loss


def differences(packaged: Any, fitted: Any, place: str = "") -> list[str]:
    """Numbers of two profiles' data that differ by more than TOLERANCE, with their place."""
    if isinstance(fitted, Mapping):
        inner = ((packaged[key], value, f"{place}.{key}".strip(".")) for key, value in fitted.items())
        return [text for known, value, where in inner for text in differences(known, value, where)]
    if isinstance(fitted, float) and abs(fitted / packaged - 1) > TOLERANCE:
        return [f"{place}: packaged {packaged}, fitted {fitted:.3g}"]
    return []


def _numbers(point: list[float]) -> dict[str, float]:
    return {name: math.exp(value) for name, value in zip(START, point, strict=True)}


def _data(package: str, name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((resources.files(package) / f"{name}.yaml").read_text(encoding="utf-8"))
    return data


def main() -> int:
    """Print the fitted numbers and what the packaged profile leaves; 1 if it is not the fitted one."""
    calibration = Calibration()
    values = calibration.search()
    print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    fit = calibration.fit(make_profile(calibration.packaged))
    for title, rows in (
        ("figure 6, VGG-16 (64), ms", fit.times),
        ("figure 6, between convolutions (ReLU, pools), ms", fit.between),
        ("figure 5, VGG-16 (256), workspace, MiB", fit.workspaces),
    ):
        print(f"\n{title}: paper, ours, ratio")
        for row in rows:
            ratio = f"{row.ours / row.paper:.2f}" if row.paper else ""
            print(f"  {row.name:17} {row.paper:8.1f} {row.ours:8.1f} {ratio:>5}")
    print(f"\nfigure 14, VGG-16 (64), base(m): paper {BASE_BAR}, ours {fit.bar:.3f}")
    wrong = differences(calibration.packaged, calibration.profile_data(values))
    print("\n" + ("\n".join(wrong) or "the packaged profile is the fitted one"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(command(main))
