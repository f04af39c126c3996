"""How steps compare with what was predicted from their parts: measured in a run, told, kept, and used by the next.

    factor = known_factor(calibration_key(caps, "vgg16", plans))       # 1.04 of an earlier run, or None
    found = Calibration(predicted_ms=39.6, measured_ms=41.2, steps=10)
    keep_factor(key, found)

Prediction adds up what was measured of each op alone; what is not in that sum shows only in whole steps, and is much
the same in every run of a network on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from vdnn.layers.lower import IMAGES
from vdnn.layers.op import Program
from vdnn.runtime.backend import Caps
from vdnn.runtime.files import user_cache
from vdnn.units import format_ms

CALIBRATION = "timing.json"
"""In a run folder."""
COUNTED_MS = 1500.0
LEAST, MOST = 10, 200
"""Full steps at the beginning of a run whose median counts: so many as take COUNTED_MS, within these bounds."""


def counted(step_ms: float, least: int = LEAST) -> tuple[int, int]:
    """Steps, of `step_ms` each, that do not count, and those after them that do, `least` at least.

    During the first ones threads begin to read images, and the clock of a GPU settles.
    """
    count = min(MOST, max(least, round(COUNTED_MS / step_ms)))
    return max(2, count // 4), count


@dataclass(frozen=True, slots=True)
class Calibration:
    """Times of a whole step in ms: added up from its parts, and the median of so many `steps` of a run."""

    predicted_ms: float
    measured_ms: float
    steps: int

    @property
    def factor(self) -> float:
        """How many times as long a step takes as its parts."""
        return self.measured_ms / self.predicted_ms

    def words(self) -> str:
        """In a sentence."""
        return (
            f"measured: {format_ms(self.measured_ms)} per step (median of {self.steps}), {self.factor:.2f} times the "
            f"{format_ms(self.predicted_ms)} that its parts add up to"
        )

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON object."""
        times = {"predicted_ms": self.predicted_ms, "measured_ms": self.measured_ms}
        return {**times, "steps": self.steps, "calibration": self.factor}


def calibration_key(caps: Caps, network: str, policy: str, programs: Sequence[Program]) -> dict[str, Any]:
    """What a factor belongs to: device, precision, network, policy, parts of a step, their layouts and kinds of ops.

    The limit is none of it: it changes algorithms and slices, whose times are in the sum.
    """
    images = [(program.mode, program.tensors[IMAGES].shape) for program in programs]
    layouts = sorted({spec.layout for program in programs for spec in program.tensors.values()})
    kinds = sorted({op.kind for program in programs for op in program.ops})
    return {
        "device": caps.description,
        "precision": caps.precision,
        "network": network,
        "policy": policy,
        "parts": images,
        "layouts": layouts,
        "kinds": kinds,
    }


def known_factor(key: Mapping[str, Any]) -> float | None:
    """The factor that was kept under `key`; None if there is none, or it cannot be read."""
    try:
        found = float(json.loads(_path(key).read_text(encoding="utf-8"))["calibration"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isfinite(found) and found > 0 else None


def keep_factor(key: Mapping[str, Any], found: Calibration) -> None:
    """Keep the factor under `key`; where nothing can be written, the next run predicts without it."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"key": key, **found.to_json()}), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        return


def calibrated_words(factor: float) -> str:
    """What is said beside a prediction that `factor` is in."""
    return f"calibrated by {factor:.2f} on an earlier run"


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache() / "calibration" / f"{digest}.json"
