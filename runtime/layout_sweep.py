"""The study's one-off sweep: from which numbers of channels and images on CHWN is the better layout on this GPU.

    found = sweep(backend, progress=print)
    found.rule()                        # Rule(channels=32, images=128, source="found on NVIDIA H200, ...")
    keep(found); known_rule(backend.caps)

Li et al. (SC 2016) vary C and N of one layer, CONV7 of their table (N 64, K 384, H = W 13, R = S 3, C 256), and take
the points where the curves of the two layouts cross; which points they measured is not known. Here a time is that of
all three products of a training step, each by its fastest algorithm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate
from vdnn.memory.layout import Rule
from vdnn.runtime.backend import Backend, Caps
from vdnn.runtime.backends.cuda.search import cache_folder
from vdnn.runtime.config import PRECISIONS
from vdnn.runtime.files import write_file

IMAGES, CHANNELS, FILTERS, SIDE, WINDOW = 64, 256, 384, 13, 3
"""CONV7 of the study, with the padding of 1 that its network needs."""
SWEPT_CHANNELS = (3, 16, 32, 64, 96, 128, 192, 256)
SWEPT_IMAGES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Point:
    """ms of one size in both layouts."""

    channels: int
    images: int
    nchw_ms: float
    chwn_ms: float

    @property
    def faster(self) -> str:
        """The layout that takes less."""
        return "CHWN" if self.chwn_ms < self.nchw_ms else "NCHW"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was measured on one machine in one precision."""

    facts: dict[str, Any]
    by_channels: tuple[Point, ...]
    by_images: tuple[Point, ...]

    def rule(self) -> Rule:
        """CHWN below the channels, and from the images, where the curves cross."""
        where = f"found on {self.facts['gpu']} in {self.facts['precision']} by 'vdnn layouts calibrate'"
        return Rule(channels_of(self.by_channels), images_of(self.by_images), where)


def channels_of(points: Sequence[Point]) -> int:
    """The fewest swept channels from which on NCHW is faster; one more than were swept if it never is."""
    found = points[-1].channels + 1
    for point in reversed(points):
        if point.faster == "CHWN":
            break
        found = point.channels
    return 1 if found == points[0].channels else found


def images_of(points: Sequence[Point]) -> int:
    """The fewest swept images from which on CHWN is faster; one more than were swept if it never is."""
    found = points[-1].images + 1
    for point in reversed(points):
        if point.faster == "NCHW":
            break
        found = point.images
    return 1 if found == points[0].images else found


def sweep(backend: Backend, progress: Callable[[str], None] | None = None) -> Sweep:
    """Measure every point; ConfigError where the backend measures no algorithms."""
    caps = backend.caps
    if not caps.measured_costs or not caps.facts:
        raise ConfigError(
            f"device {caps.name} measures no algorithms of single convolutions: there is nothing to calibrate; run "
            "'vdnn layouts calibrate' where there is a GPU, or set memory.layout_channels and memory.layout_images"
        )

    def point(channels: int, images: int) -> Point:
        nchw_ms, chwn_ms = (_time_ms(backend, channels, images, layout) for layout in ("NCHW", "CHWN"))
        if progress is not None:
            progress(f"C {channels}, N {images}: {nchw_ms:.3f} ms in NCHW, {chwn_ms:.3f} ms in CHWN")
        return Point(channels, images, nchw_ms, chwn_ms)

    by_channels = tuple(point(channels, IMAGES) for channels in SWEPT_CHANNELS)
    by_images = tuple(point(CHANNELS, images) for images in SWEPT_IMAGES)
    return Sweep({**caps.facts, "precision": caps.precision}, by_channels, by_images)


def _time_ms(backend: Backend, channels: int, images: int, layout: str) -> float:
    program = products(channels, images, layout, PRECISIONS[backend.caps.precision][0])
    return sum((min(c.time_ms for c in _candidates(backend, op, program)) for op in program.ops), 0.0)


def _candidates(backend: Backend, op: Op, program: Program) -> Sequence[Candidate]:
    found = backend.candidates(op, program)
    if not found:
        raise ConfigError(f"{op.kind} of {program.batch} images: no algorithm within the memory limit", key="limit")
    return found


def products(channels: int, images: int, layout: str, dtype: str) -> Program:
    """The three products of the layer in a training step, as ops of a program that is never run."""
    specs = (
        TensorSpec("x", "act", (images, channels, SIDE, SIDE), dtype, layout),
        TensorSpec("w", "weight", (FILTERS, channels, WINDOW, WINDOW), dtype, layout),
        TensorSpec("y", "act", (images, FILTERS, SIDE, SIDE), dtype, layout),
        TensorSpec("dx", "grad", (images, channels, SIDE, SIDE), dtype, layout),
        TensorSpec("dw", "wgrad", (FILTERS, channels, WINDOW, WINDOW), "float32", layout),
        TensorSpec("dy", "grad", (images, FILTERS, SIDE, SIDE), dtype, layout),
    )
    padding = [WINDOW // 2] * 2
    attrs = {"stride": [1, 1], "padding": padding, "dilation": [1, 1], "groups": 1}
    ops = tuple(
        Op(f"conv7.{kind}", f"conv.{kind}", "conv7", phase, {name: name for name in reads}, {made: made}, attrs)
        for kind, phase, reads, made in (
            ("forward", "forward", "xw", "y"),
            ("wgrad", "backward", ("x", "dy"), "dw"),
            ("dgrad", "backward", ("w", "dy"), "dx"),
        )
    )
    return Program("conv7", images, "train", {spec.name: spec for spec in specs}, ops, (), (), (), "", "")


def keep(found: Sweep) -> None:
    """Put it beside the tables of algorithms, under its facts."""
    rule, path = found.rule(), _path(found.facts)
    data = {
        "facts": found.facts,
        "channels": rule.channels,
        "images": rule.images,
        "by_channels": [asdict(point) for point in found.by_channels],
        "by_images": [asdict(point) for point in found.by_images],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(data, indent=1).encode())


def known_rule(caps: Caps) -> Rule | None:
    """The rule that was found on this machine in this precision; None if none was, or it cannot be read."""
    if not caps.facts:
        return None
    try:
        data = json.loads(_path({**caps.facts, "precision": caps.precision}).read_text(encoding="utf-8"))
        points = ([Point(**row) for row in data[name]] for name in ("by_channels", "by_images"))
        rule = Sweep(data["facts"], *map(tuple, points)).rule()
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return rule


def _path(facts: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"layouts-{digest}.json"
