"""The ways in which vdnn's own kernels compute a convolution in CHWN: tiles, shares, and which come first.

    chwn_candidates(problem)                  # [("DIRECT_256x64", 0), ("DIRECT_128x64", 0), ...]
    shares_of(problem, GRADIENT_TILES["64x64"])

A label names how many outputs and filters a block has, of a filter gradient how many of (c, r, s) and filters. "TENSOR"
is on tensor cores. A filter gradient is summed over outputs in shares, which fill a GPU; "_SMALL" takes so few that
they need SMALL_BYTES of workspace at most. All of it depends on shapes alone, so that sums are the same on every GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem

LABEL, SMALL = "DIRECT_", "_SMALL"
SMALL_BYTES = 2**20
MOST = 4
"""Candidates for a convolution."""
GROUP = 4
"""Images that a thread loads at once, where their number is a multiple of it; filters as well."""
DEPTH = 16
"""Outputs that a block of a filter gradient takes at a time, as in chwn_wgrad.cu."""
PROCESSORS, RESIDENT = 132, 2
"""Of an H200, and blocks on each: how many fill a GPU. Part of the order of sums, so no fact of the GPU at hand."""
UNEVEN = 1 / 3
"""Of a block: what a processor has to do beyond its share, as blocks do not go into processors evenly."""
MOST_FILLS, WELL_FILLED = 4, 0.9
"""How many such fills a filter gradient takes at most, and which part of the last one is enough."""
LEAST_SHARE, MOST_SHARE = 16 * DEPTH, 2**17
"""Outputs of a share: less is not worth a block, more is too long for a float32 sum."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block has of a product of matrices.

    Attributes:
        rows, columns: numbers of its result.
        speed: how fast it is expected to be where nothing is left idle, relative to the largest; decides an order only.
        any_images: whether there is a kernel for numbers of images that are no multiple of GROUP.
        tensor: whether tensor cores multiply.
    """

    rows: int
    columns: int
    speed: float
    any_images: bool = False
    tensor: bool = False

    @property
    def name(self) -> str:
        """ "128x64", or "TENSOR_128x64"."""
        return f"{'TENSOR_' if self.tensor else ''}{self.rows}x{self.columns}"

    def kernel(self, family: str, grouped: bool) -> str:
        """Name of the kernel, by whether images are loaded GROUP at a time."""
        kind = "" if grouped else "any_"
        return f"{family}_{'tensor_' if self.tensor else kind}{self.rows}x{self.columns}"

    def blocks(self, rows: int, columns: int, groups: int = 1) -> int:
        """Blocks for `groups` results of so many numbers."""
        return -(-rows // self.rows) * -(-columns // self.columns) * groups


TILES: Mapping[str, Tile] = {
    tile.name: tile
    for tile in (
        Tile(128, 128, 1.0),
        Tile(256, 64, 1.0),
        Tile(128, 64, 0.9, any_images=True),
        Tile(256, 32, 0.9),
        Tile(64, 64, 0.75),
        Tile(128, 32, 0.75, any_images=True),
        Tile(256, 16, 0.7),
        Tile(128, 128, 4.0, tensor=True),
        Tile(128, 64, 3.5, tensor=True),
        Tile(256, 32, 3.0, tensor=True),
    )
}
"""Of convolutions and gradients by images: outputs by filters."""
GRADIENT_TILES: Mapping[str, Tile] = {
    tile.name: tile
    for tile in (
        Tile(128, 128, 1.0),
        Tile(128, 64, 0.9),
        Tile(64, 64, 0.75, any_images=True),
        Tile(32, 64, 0.5),
        Tile(128, 16, 0.5),
        Tile(128, 128, 3.0, tensor=True),
        Tile(64, 64, 2.0, tensor=True),
    )
}
"""Of filter gradients: (c, r, s) by filters."""


def chwn_candidates(problem: ConvProblem, most: int = MOST, *, tensor_cores: bool = False) -> list[tuple[str, int]]:
    """Labels for `problem`, `most` at most, the likely fastest first, each with its bytes of workspace.

    All are deterministic. tensor_cores: whether float32 operands may be rounded to TF32.
    """
    tensor_cores = tensor_cores or problem.dtype != "float32"
    tiles = GRADIENT_TILES if problem.direction == "wgrad" else TILES
    grouped = loads_groups(problem.x[0], problem.alignment // DTYPE_BYTES[problem.dtype], problem.strides())
    usable = [t for t in tiles.values() if (grouped or t.any_images) and (tensor_cores or not t.tensor)]
    order = sorted(usable, key=lambda tile: _expected(problem, tile))[:most]
    if problem.direction != "wgrad":
        return [(f"{LABEL}{tile.name}", filter_bytes(problem)) for tile in order]
    found = [(f"{LABEL}{tile.name}", share_bytes(problem, tile)) for tile in order]
    label, nbytes = found[0]
    if nbytes > SMALL_BYTES:
        found = [*found[: most - 1], (f"{label}{SMALL}", share_bytes(problem, order[0], SMALL_BYTES))]
    return found


def loads_groups(images: int, alignment: int, strides: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether images can be loaded GROUP at a time, from addresses that are multiples of `alignment` elements."""
    return images % GROUP == 0 and alignment >= GROUP and all(strides[role][3] % GROUP == 0 for role in "xy")


def _expected(problem: ConvProblem, tile: Tile) -> float:
    """Something that grows with the time that a tile takes: what a processor has to do with its blocks."""
    n, groups = problem.x[0], problem.groups
    if problem.direction == "wgrad":
        return tile.blocks(prod(problem.w[1:]), problem.w[0] // groups) * tile.rows * tile.columns / tile.speed
    image, channels = (problem.y, problem.w[0]) if problem.direction == "forward" else (problem.x, problem.x[1])
    blocks = tile.blocks(n * prod(image[2:]), channels // groups, groups)
    return max(1.0, blocks / PROCESSORS + UNEVEN) * tile.rows * tile.columns / tile.speed


def shares_of(problem: ConvProblem, tile: Tile, limit_bytes: int | None = None) -> tuple[int, int]:
    """Shares of a filter gradient, and outputs of each: the fewest that fill a GPU well, or the best that there are.

    limit_bytes: of their sums, if there are several shares.
    """
    outputs, nbytes = problem.x[0] * prod(problem.y[2:]), DTYPE_BYTES["float32"] * prod(problem.w)
    most, least = outputs // LEAST_SHARE, -(-outputs // MOST_SHARE)
    if limit_bytes is not None:
        most, least = min(most, limit_bytes // nbytes), 1
    blocks = tile.blocks(prod(problem.w[1:]), problem.w[0] // problem.groups, problem.groups)
    fill = PROCESSORS * RESIDENT
    best, wanted = 0.0, 1
    for shares in range(1, min(most, max(1, MOST_FILLS * fill // blocks)) + 1):
        fills = shares * blocks / fill
        part = fills / ceil(fills)
        if part > best:
            best, wanted = part, shares
        if fills >= 1 and part >= WELL_FILLED:
            break
    share = ceil(outputs / (max(wanted, least) * DEPTH)) * DEPTH
    return ceil(outputs / share), share


def share_bytes(problem: ConvProblem, tile: Tile, limit_bytes: int | None = None) -> int:
    """Workspace of a filter gradient: the sums of all shares, unless there is one."""
    shares, _ = shares_of(problem, tile, limit_bytes)
    return DTYPE_BYTES["float32"] * shares * prod(problem.w) if shares > 1 else 0


def filter_bytes(problem: ConvProblem) -> int:
    """Workspace of a convolution, none, and of its gradient by images: filters with channels and filters exchanged."""
    if problem.direction == "forward":
        return 0
    k, c, *taps = problem.w
    return DTYPE_BYTES[problem.dtype] * k * prod(taps) * rounded(c)


def rounded(channels: int) -> int:
    return -(-channels // GROUP) * GROUP
