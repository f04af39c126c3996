"""The layers of the memory-efficiency study's table 1, with what is known of each number.

    convolutions()["CONV6"].y                 # (64, 256, 26, 26)
    pools()["POOL3"].y                        # (128, 64, 12, 12): outputs of pools round up, as in Caffe

The numbers are in paper_data/study_layers.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import prod
from typing import Any

import yaml

PARTS = ("layouts", "pooling", "softmax", "transforms", "networks")
"""Tables of the study, in the order in which they are shown."""
STUDY = "study"
"""The name of all of them."""
CHWN, NCHW, NHWC = "CHWN", "NCHW", "NHWC"
LAYOUTS = (NCHW, CHWN, NHWC)
FEW_CHANNELS = 4
"""Of a batch with fewer channels, images, training needs no gradient."""


@dataclass(frozen=True, slots=True)
class ConvCase:
    """A convolution of N images of C channels and size x size pixels with K filters; output sizes round down."""

    name: str
    n: int
    c: int
    size: int
    k: int
    window: int
    stride: int
    padding: int
    network: str
    evidence: str

    @property
    def x(self) -> tuple[int, int, int, int]:
        """Shape (N, C, H, W)."""
        return (self.n, self.c, self.size, self.size)

    @property
    def w(self) -> tuple[int, int, int, int]:
        """Shape (K, C, R, S)."""
        return (self.k, self.c, self.window, self.window)

    @property
    def y(self) -> tuple[int, int, int, int]:
        """Shape (N, K, P, Q); rounded down, as cuDNN does and vdnn's layers do."""
        side = (self.size + 2 * self.padding - self.window) // self.stride + 1
        return (self.n, self.k, side, side)

    @property
    def operations(self) -> int:
        """Multiplications and sums of one direction, those with padding counted."""
        return 2 * prod(self.y) * self.c * self.window**2

    @property
    def directions(self) -> tuple[str, ...]:
        """Those that training computes: there is no gradient of images."""
        return ("forward", "dgrad", "wgrad") if self.c >= FEW_CHANNELS else ("forward", "wgrad")

    @property
    def words(self) -> str:
        """ "64x96x55x55, 256 of 5x5 / 2"."""
        padding = f" pad {self.padding}" if self.padding else ""
        images = "x".join(map(str, self.x))
        return f"{images}, {self.k} of {self.window}x{self.window} / {self.stride}{padding}"

    def rule(self, channels: int, images: int) -> str:
        """The layout that the study's rule picks with thresholds (Ct, Nt): CHWN if C < Ct or N >= Nt."""
        return CHWN if self.c < channels or self.n >= images else NCHW


@dataclass(frozen=True, slots=True)
class PoolCase:
    """A maximum over square windows of N images of C channels and size x size pixels, without padding."""

    name: str
    n: int
    c: int
    size: int
    window: int
    stride: int
    network: str
    evidence: str

    @property
    def x(self) -> tuple[int, int, int, int]:
        """Shape (N, C, H, W)."""
        return (self.n, self.c, self.size, self.size)

    @property
    def y(self) -> tuple[int, int, int, int]:
        """Shape (N, C, P, Q), rounded up as Caffe and cuda-convnet do."""
        side = -(-(self.size - self.window) // self.stride) + 1
        return (self.n, self.c, side, side)

    @property
    def whole_windows(self) -> tuple[int, int, int, int]:
        """Shape of the outputs whose windows lie inside, rounded down as cuDNN does."""
        side = (self.size - self.window) // self.stride + 1
        return (self.n, self.c, side, side)

    @property
    def words(self) -> str:
        """ "128x64x24x24, 3x3 / 2"."""
        return f"{'x'.join(map(str, self.x))}, {self.window}x{self.window} / {self.stride}"


@dataclass(frozen=True, slots=True)
class ClassCase:
    """Softmax of N images over K categories."""

    name: str
    n: int
    k: int
    network: str
    evidence: str


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """The packaged network that stands for one of the study's.

    Args:
        note: in what it is another one.
    """

    name: str
    network: str
    batch: int
    evidence: str
    note: str
    options: Mapping[str, Any] = field(default_factory=dict)


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("vdnn.bench") / "paper_data" / "study_layers.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def convolutions() -> dict[str, ConvCase]:
    """CONV1 to CONV12."""
    return {name: ConvCase(name, **row) for name, row in _data()["convolutions"].items()}


def pools() -> dict[str, PoolCase]:
    """POOL1 to POOL10."""
    return {name: PoolCase(name, **row) for name, row in _data()["pools"].items()}


def classifiers() -> dict[str, ClassCase]:
    """CLASS1 to CLASS5."""
    return {name: ClassCase(name, **row) for name, row in _data()["classifiers"].items()}


def networks() -> dict[str, NetworkCase]:
    """The five networks."""
    return {name: NetworkCase(name, **row) for name, row in _data()["networks"].items()}


def thresholds() -> dict[str, dict[str, Any]]:
    """By GPU of the study: `channels`, `images` and `evidence` of its rule."""
    return dict(_data()["thresholds"])


def better_in_chwn() -> tuple[frozenset[str], str]:
    """The convolutions that the study has faster in CHWN than in NCHW, and the evidence for it."""
    row = _data()["better_in_chwn"]
    return frozenset(row["layers"]), row["evidence"]


def source() -> str:
    """Where the numbers come from."""
    return str(_data()["source"])


def choose_parts(words: Sequence[str]) -> tuple[str, ...]:
    """The tables that are among `words`, in their own order; all for "study"."""
    return PARTS if STUDY in words else tuple(part for part in PARTS if part in words)
