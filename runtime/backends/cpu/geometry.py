"""The sizes of one convolution: how it is cut into GEMMs, and the workspace that takes.

    g = Geometry.of(op.attrs, x.shape, w.shape, y.shape, itemsize=4)
    g.split("GEMM_BATCH", "conv.forward", accumulate=False).nbytes

Algorithms:
- GEMM: for 1x1 filters of stride 1 without padding; the images are the columns already, nothing is copied.
- GEMM_TILE: a few output rows of one image at a time; the columns take TILE_BYTES, or one row's if that is more.
- GEMM_BATCH: whole images, several at a time where they are small; BATCH_BYTES at most, or one row's if that is more.
- GEMM_WIDE, GEMM_WIDE_TILE: the same output rows of all images, whose columns lie image by image; CACHE_BYTES and
  TILE_BYTES at most, fewer images where a row of all takes more. For CHWN, where pixels and outputs lie so.

A pass that adds GEMM products to its output (a filter gradient taken in several parts, or anything that accumulates)
also needs scratch for the product. Cuts depend on shapes and dtype only, never on a memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from vdnn.layers.images import folded_filters
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, Shape
from vdnn.memory.plan import align
from vdnn.units import KIB, MIB

TILE_BYTES, TILE_SCRATCH_BYTES = 768 * KIB, 256 * KIB
BATCH_BYTES, BATCH_SCRATCH_BYTES = 28 * MIB, 4 * MIB
CACHE_BYTES = 8 * MIB
"""Columns and outputs that GEMM_BATCH takes at once if several images fit: larger pieces fall out of the cache."""

WIDE = {"GEMM_WIDE": CACHE_BYTES, "GEMM_WIDE_TILE": TILE_BYTES}
"""Algorithms with the images of a column side by side, fastest first: most bytes of columns and outputs at once."""

OPERANDS = {"conv.forward": ("x", "w", "y"), "conv.wgrad": ("x", "dw", "dy"), "conv.dgrad": ("dx", "w", "dy")}
"""Argument names of image, filter and output for the kinds that have a choice of algorithm."""


class Part(NamedTuple):
    """One GEMM: images, output rows (first, end), input channels and output channels."""

    images: slice
    rows: tuple[int, int]
    channels: slice
    filters: slice


@dataclass(frozen=True, slots=True)
class Split:
    """How a convolution is cut: images and output rows a part, and the bytes of the three pieces of workspace."""

    images: int
    rows: int
    columns_bytes: int
    stage_bytes: int
    scratch_bytes: int
    images_last: bool = False

    @property
    def nbytes(self) -> int:
        """The whole workspace."""
        return align(self.columns_bytes) + align(self.stage_bytes) + align(self.scratch_bytes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Letters as everywhere: n images of c x h x w, k filters of r x s, outputs p x q; pairs are vertical first.

    `channels_last`: filters lie in memory as (K, R, S, C/groups), not as (K, C/groups, R, S).
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    p: int
    q: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    itemsize: int
    channels_last: bool = False

    @classmethod
    def of(
        cls, attrs: Mapping[str, Any], x: Shape, w: Shape, y: Shape, itemsize: int, channels_last: bool = False
    ) -> Geometry:
        """From the attributes of a conv op and its shapes (N, C, H, W), (K, C/groups, R, S), (N, K, P, Q).

        Channels are counted by the filter: those that x has besides are zeros, of which no gradient is asked.
        """
        n, _, h, width = x
        k, depth, r, s = w
        c = depth * attrs["groups"]
        stride, padding, dilation = ((attrs[key][0], attrs[key][1]) for key in ("stride", "padding", "dilation"))
        sizes = (n, c, h, width, k, r, s, y[2], y[3])
        return cls(*sizes, stride, padding, dilation, attrs["groups"], itemsize, channels_last)

    @property
    def taps(self) -> int:
        """Rows of the column matrix of one group: C/groups * R * S."""
        return self.c // self.groups * self.r * self.s

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Fastest first. With GEMM alone the column matrix of an image is the image."""
        pointwise = (self.r, self.s, *self.stride, *self.padding) == (1, 1, 1, 1, 0, 0)
        return ("GEMM",) if pointwise else ("GEMM_BATCH", "GEMM_TILE")

    def split(self, algorithm: str, kind: str, *, accumulate: bool) -> Split:
        """The cut of the pass `kind` (a key of OPERANDS) under `algorithm`.

        Args:
            accumulate: whether the pass adds to what its output holds.
        """
        return _split(self, algorithm, kind, accumulate)

    def parts(self, split: Split) -> Iterator[Part]:
        """Every part in order: images, then rows, then groups."""
        channels, filters = self.c // self.groups, self.k // self.groups
        for n in range(0, self.n, split.images):
            for p in range(0, self.p, split.rows):
                for g in range(self.groups):
                    yield Part(
                        slice(n, min(n + split.images, self.n)),
                        (p, min(p + split.rows, self.p)),
                        slice(g * channels, (g + 1) * channels),
                        slice(g * filters, (g + 1) * filters),
                    )


def algorithms(op: Op, program: Program) -> tuple[str, ...]:
    """The algorithms of a conv op, fastest first; ("default",) for conv.bgrad, which has no choice."""
    if op.kind not in OPERANDS:
        return ("default",)
    x = program.tensors[{**op.reads, **op.writes}[OPERANDS[op.kind][0]]]
    return tuple(WIDE) if x.layout == "CHWN" else _geometry(op, program).algorithms


def workspace_bytes(op: Op, program: Program, algorithm: str) -> int:
    """Bytes of workspace that `op` needs under `algorithm`; 0 for other kinds than convolutions."""
    if op.kind not in OPERANDS:
        return 0
    geometry, folded = _geometry(op, program), "fold" in op.attrs
    nbytes = geometry.split(algorithm, op.kind, accumulate=bool(op.accumulate) and not folded).nbytes
    return nbytes + align(geometry.itemsize * geometry.k * geometry.taps) if folded else nbytes


def folded_gradient(dw: Shape, fold: int) -> Shape:
    """Shape of the gradient that is computed first of filters (K, C, R, S) whose stride is in the channels of x."""
    return folded_filters(dw, fold, fold * fold * dw[1])


def _geometry(op: Op, program: Program) -> Geometry:
    names = {**op.reads, **op.writes}
    x, w, y = (program.tensors[names[argument]] for argument in OPERANDS[op.kind])
    itemsize = max(DTYPE_BYTES[x.dtype], DTYPE_BYTES["float32"])  # 16-bit numbers are widened first
    filters = folded_gradient(w.shape, op.attrs["fold"]) if "fold" in op.attrs else w.shape
    return Geometry.of(op.attrs, x.shape, filters, y.shape, itemsize)


@lru_cache(maxsize=4096)
def _split(g: Geometry, algorithm: str, kind: str, accumulate: bool) -> Split:
    filters = g.k // g.groups
    wide = algorithm in WIDE
    row_bytes = g.taps * g.q * g.itemsize
    image_bytes = (g.taps + filters) * g.p * g.q * g.itemsize
    images, rows, scratch_limit = 1, g.p, TILE_SCRATCH_BYTES
    if wide:
        column_bytes = (g.taps + filters) * g.q * g.itemsize
        images = _even(g.n, WIDE[algorithm] // column_bytes)
        rows = _even(g.p, WIDE[algorithm] // (images * column_bytes))
    elif algorithm == "GEMM_TILE":
        rows = _even(g.p, TILE_BYTES // row_bytes)
    elif algorithm == "GEMM_BATCH":
        images, scratch_limit = _even(g.n, CACHE_BYTES // image_bytes), BATCH_SCRATCH_BYTES
        if images == 1:
            rows = _even(g.p, BATCH_BYTES // row_bytes)
    columns_bytes = 0 if algorithm == "GEMM" else images * rows * row_bytes
    stage_bytes = images * rows * g.q * filters * g.itemsize if images > 1 or wide else 0
    height, width = (filters, g.taps) if kind == "conv.wgrad" else (g.taps, rows * g.q)  # of the product added
    adds = {
        "conv.forward": False,
        "conv.wgrad": accumulate or images < g.n or rows < g.p,
        "conv.dgrad": accumulate and algorithm == "GEMM",
    }
    scratch_columns = min(width, max(1, scratch_limit // (height * g.itemsize)))
    scratch_bytes = height * scratch_columns * g.itemsize if adds[kind] else 0
    return Split(images, rows, columns_bytes, stage_bytes, scratch_bytes, wide)


def _even(count: int, limit: int) -> int:
    """The size of pieces of `count`, at most `limit` (at least 1) each, in as few equal pieces as possible."""
    pieces = -(-count // max(1, limit))
    return -(-count // pieces)
