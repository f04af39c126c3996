"""Sizes of convolutions, and what each algorithm needs for one: workspace formulas, spectra of the FFT algorithms.

    size = conv_size(op, operands(op, program))
    WORKSPACES["fft"](size)                      # bytes, or None where the algorithm does not apply

"fft" gives to the byte what cuDNN 9.19 asks for (bench/results/h200_binding.json), and as exactly as it can be read
what the vDNN paper shows of cuDNN 4 (MICRO'16, figure 5); "fft_tiling" is of cuDNN 4 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vdnn.layers.images import folded_filters
from vdnn.layers.op import Op
from vdnn.layers.tensor import TensorSpec

TILE = 32
"""Side of the planes of the tiled FFT."""
TILES_AT_ONCE = 1024
"""Tiles that cuDNN 4's tiled FFT transforms at a time: what makes figure 5's conv4 to conv8 come out to 0.3%."""


@dataclass(frozen=True, slots=True)
class ConvSize:
    """A convolution in numbers: N, C, H, W, K, R, S, P, Q, groups, its attributes and "forward", "dgrad" or "wgrad"."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    p: int
    q: int
    groups: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    direction: str

    @property
    def flops(self) -> float:
        """Operations of any of the three directions: 2 N K P Q (C / groups) R S."""
        return 2.0 * self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    @property
    def rows(self) -> int:
        """Channels per group of what is computed as rows of a matrix product: K, in dgrad C."""
        return (self.c if self.direction == "dgrad" else self.k) // self.groups

    @property
    def depth(self) -> int:
        """Columns of the filter matrix: C R S per group, in dgrad K R S."""
        return (self.k if self.direction == "dgrad" else self.c) // self.groups * self.r * self.s

    @property
    def products(self) -> int:
        """How many products each sum over a spectrum has: C, in dgrad K, in wgrad N."""
        return {"forward": self.c, "dgrad": self.k, "wgrad": self.n}[self.direction]


class Plane(NamedTuple):
    """Rows, columns and number of tiles of the transformed images; of the columns a half and one are kept."""

    rows: int
    columns: int
    tiles: int

    @property
    def kept(self) -> int:
        """Complex numbers of a plane."""
        return self.rows * (self.columns // 2 + 1)


def conv_size(op: Op, specs: Mapping[str, TensorSpec]) -> ConvSize:
    """Sizes of a conv.forward, conv.dgrad or conv.wgrad op from its operands by argument name."""
    shape = {arg: spec.shape for arg, spec in specs.items()}
    x, y = shape.get("x") or shape["dx"], shape.get("y") or shape["dy"]
    attrs = op.attrs
    k, _, r, s = shape.get("w") or folded_filters(shape["dw"], attrs.get("fold", 1), x[1])
    stride, dilation = tuple(attrs["stride"]), tuple(attrs["dilation"])
    direction = op.kind.split(".")[1]
    return ConvSize(x[0], x[1], x[2], x[3], k, r, s, y[2], y[3], attrs["groups"], stride, dilation, direction)


def spectrum(size: ConvSize, workspace: str) -> Plane | None:
    """The planes that the FFT algorithm of this workspace formula transforms; None for others, or where it cannot."""
    if workspace not in ("fft", "fft_tiling"):
        return None
    if size.stride != (1, 1) or size.dilation != (1, 1) or max(size.r, size.s) > TILE or size.groups != 1:
        return None
    if workspace == "fft_tiling":
        high, wide = (size.h, size.w) if size.direction == "dgrad" else (size.p, size.q)
        return Plane(TILE, TILE, -(-high // (TILE - size.r + 1)) * -(-wide // (TILE - size.s + 1)))
    rows, columns = (1 << (n - 1).bit_length() for n in (size.h + size.r - 1, size.w + size.s - 1))
    return Plane(rows, columns, 1) if max(rows, columns) <= 256 else None


def spectra_bytes(size: ConvSize, plane: Plane) -> tuple[int, int, int]:
    """Bytes of the spectra of x, of w and of y, or of their gradients."""
    each = 8 * plane.kept
    images = each * plane.tiles * size.n
    return images * size.c, each * size.c * size.k, images * size.k


def spectrum_flops(size: ConvSize, plane: Plane) -> float:
    """Complex products (8 operations each) over the spectra."""
    return 8.0 * plane.kept * plane.tiles * size.n * size.c * size.k


def _fft_bytes(size: ConvSize) -> int | None:
    """Two buffers, each for both inputs or for the output; and a flipped copy of w, in wgrad a copy of dy."""
    plane = spectrum(size, "fft")
    if plane is None:
        return None
    x, w, y = spectra_bytes(size, plane)
    filters, maps = 4 * size.c * size.k * size.r * size.s, 4 * size.n * size.k * size.p * size.q
    first, second, result, copy = {
        "forward": (x, w, y, filters),
        "dgrad": (y, w, x, filters),
        "wgrad": (x, y, w, maps),
    }[size.direction]
    return 2 * max(first + second, result) + copy


def _fft_tiling_bytes(size: ConvSize) -> int | None:
    """The spectra of w, those of the tiles at hand of the input, and half of those of the output."""
    plane = spectrum(size, "fft_tiling")
    if plane is None or size.direction == "wgrad":
        return None
    read, written = (size.k, size.c) if size.direction == "dgrad" else (size.c, size.k)
    tiles = min(TILES_AT_ONCE, plane.tiles * size.n)
    return 8 * plane.kept * (size.c * size.k + tiles * read + tiles * written // 2)


def _winograd_bytes(size: ConvSize) -> int | None:
    """Non-fused F(4x4, 3x3): 6x6 transforms of x, w and y (Lavin and Gray 2016)."""
    if (size.r, size.s) != (3, 3) or size.stride != (1, 1) or size.dilation != (1, 1) or size.groups != 1:
        return None
    tiles = size.n * -(-size.p // 4) * -(-size.q // 4)
    return 4 * 36 * (tiles * (size.c + size.k) + size.c * size.k)


WORKSPACES: Mapping[str, Callable[[ConvSize], int | None]] = {
    "none": lambda size: 0,
    "indices": lambda size: 4 * (size.c // size.groups) * size.r * size.s,
    "columns": lambda size: 4 * size.n * size.c * size.r * size.s * size.p * size.q,
    "fft": _fft_bytes,
    "fft_tiling": _fft_tiling_bytes,
    "winograd": _winograd_bytes,
}
"""Workspace in bytes by formula name; None where the algorithm does not apply."""
