"""From one layout to another on the GPU: a transposition, in one of several ways; see matrices.py, and the
four files layout*.cu.

    layout_transform(op, {"x": x, "y": y}, kernels, stream)       # op.attrs["algorithm"]: a key of ALGORITHMS, or none
    transform_candidates(op, program)                             # ("VECTOR", "TILED")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, element_strides, first_element
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.copy import copy_forward
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, THREADS, WIDE_BYTES, Arrays, Kernels, operands
from vdnn.runtime.backends.cuda.matrices import Axes, Matrix, Side, plain
from vdnn.runtime.backends.cuda.source import constants, source

_CONSTANTS = constants(source())
TILE, SQUARES, STRIP_WORDS, WIDE_STRIP_WORDS = (
    _CONSTANTS[name] for name in ("TILE", "SQUARES", "STRIP_WORDS", "WIDE_STRIP_WORDS")
)
BRICK_PIECES, ROW_WORDS = (_CONSTANTS[name] for name in ("BRICK_PIECES", "ROW_WORDS"))
COPY = "COPY"
"""The one way between layouts that are the same for a shape, as NCHW and NHWC are for images of one pixel."""
LINE_BYTES, SECTOR_BYTES = 128, 32
"""Of memory. A strip reads or writes a line of each row at least, two where rows do not begin on a sector."""
GROUP = 8
"""Squares in a column of a tile come in groups of so many."""
SHORT = 16
"""Below so many rows or columns one thread a number may be as good as a tile, and spans of rows are no use."""
SPARE_WORDS = 4
"""Of a slot of transform_from_rows: the piece with the first number of a row begins up to so much before it."""
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Pixels, or images, that a brick may have."""
IDLE_COST = 0.05
"""Part of its time that a launch loses for as many idle threads as busy ones."""
READ_COST, WRITE_COST, PIECE_COST = 0.06, 0.08, 0.05
"""And one of bricks where what lies together of x, or of y, is one line of memory, half as much if it is two; and one
of spans of rows that has a line of each. On an H200 bricks of 16 or 48 KiB, or of longer runs on one side, differ by
1%."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its blocks, and its arguments but for `accumulate`, which comes before `last`."""

    kernel: str
    blocks: int
    args: list[int]
    last: tuple[int, ...] = ()


def layout_transform(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x, or y += x if op accumulates y: activations (N, C, H, W) of any two layouts, or in NCHW (N, C * H * W)."""
    x, y = (plain(array) for array in operands(op, arrays, "x", "y", dtype=kernels.dtype))
    if x.size != y.size:
        raise VdnnError(f"op '{op.name}' (layer '{op.layer}'): expected as many numbers in y as in x, got {x} and {y}")
    matrix = Matrix.of(x, y)
    if matrix is None:
        _copy(op, x, y, kernels, stream)
        return
    adds = bool(op.accumulate)
    label = str(op.attrs.get("algorithm"))
    launch = ALGORITHMS[label if label in ALGORITHMS else best_guess(matrix)](matrix, adds)
    if launch is None:
        raise VdnnError(
            f"op '{op.name}' (layer '{op.layer}'): '{label}' cannot transpose {matrix}; choose another algorithm"
        )
    kernels.launch(launch.kernel, launch.blocks, [*launch.args, adds, *launch.last], stream)


def transform_candidates(op: Op, program: Program) -> tuple[str, ...]:
    """Labels of the ways that may be the fastest for this op, the likeliest first."""
    x, y = (_placed(program, names["x" if i == 0 else "y"]) for i, names in enumerate((op.reads, op.writes)))
    matrix = Matrix.of(x, y)
    if matrix is None:
        return (COPY,)
    first, short = best_guess(matrix), min(matrix.rows, matrix.columns)
    useful = {
        "VECTOR": True,
        "TILED": True,
        "STRIPS": not all(_on_sectors(matrix, side) for side in (matrix.x, matrix.y)),
        "ROWS": True,
        "BRICKS": True,
        "NAIVE": short < SHORT,
    }
    apply = different_ways(matrix)
    return first, *(label for label, is_useful in useful.items() if is_useful and label in apply and label != first)


def different_ways(matrix: Matrix) -> list[str]:
    """Labels that apply, without those that launch the same as one before."""
    found: list[Launch] = []
    labels = []
    for label, way in ALGORITHMS.items():
        launch = way(matrix, False)
        if launch is not None and launch not in found:
            found.append(launch)
            labels.append(label)
    return labels


def best_guess(matrix: Matrix) -> str:
    """The label for a shape that was not measured."""
    short = min(matrix.rows, matrix.columns)
    aligned = matrix.x_wide and matrix.y_wide
    if (matrix.y_wide or matrix.images > 1) and _rows(matrix, False) is not None:
        return "ROWS"
    if (not aligned or short < 4 * matrix.wide) and _strips(matrix, False) is not None:
        return "STRIPS"
    return "NAIVE" if short < 4 and matrix.size < INDEX_LIMIT else "VECTOR"


def _copy(op: Op, x: DeviceArray, y: DeviceArray, kernels: Kernels, stream: Any) -> None:
    """Numbers in the same order: images of one pixel, or one image; then the others are vectors."""
    if not (x.is_channels_last or x.is_images_last):
        x, y = (_vectors(array) for array in (x, y))
    copy_forward(op, {"x": x, "y": y}, kernels, stream)


def _vectors(array: DeviceArray) -> DeviceArray:
    shape, strides = (array.shape[0], array.image_size), (array.image_stride, 1)
    return DeviceArray(array.ptr, shape, strides, array.dtype, array.nbytes)


def _placed(program: Program, name: str) -> DeviceArray:
    """A tensor in a storage at address 0."""
    spec = program.tensors[name]
    root = program.tensors[spec.storage]
    start = DTYPE_BYTES[spec.dtype] * first_element(spec, root)
    return DeviceArray(start, spec.shape, element_strides(spec, root), spec.dtype, spec.nbytes, spec.layout)


# ---- ways


def _naive(matrix: Matrix, adds: bool) -> Launch | None:
    """A thread a number."""
    if matrix.size >= INDEX_LIMIT:
        return None
    return Launch("transform_naive", matrix.images * -(-matrix.size // THREADS), matrix.args)


def _tiled(matrix: Matrix, adds: bool) -> Launch | None:
    """Tiles through shared memory, number by number."""
    blocks = matrix.images * -(-matrix.rows // TILE) * -(-matrix.columns // TILE)
    return Launch("transform_tiles", blocks, matrix.args)


def _vector(matrix: Matrix, adds: bool) -> Launch | None:
    """Tiles of squares, of 16 bytes where a side is aligned."""
    high, broad = (-(-size // matrix.wide) for size in (matrix.rows, matrix.columns))
    whole = matrix.x_wide and matrix.y_wide
    tall, across = _tile(high, broad) if whole else (SQUARES, SQUARES)
    blocks = matrix.images * -(-high // tall) * -(-broad // across)
    if whole:
        return Launch("transform_blocks", blocks, matrix.args, (tall, across))
    return Launch("transform_ragged", blocks, matrix.args, (matrix.x_wide, matrix.y_wide))


def _tile(high: int, broad: int) -> tuple[int, int]:
    """Squares in a column and in a row of a tile, so that few threads have none of the `high` x `broad`.

    Lines of memory are whole, if there are as many squares: GROUP of them are LINE_BYTES.
    """
    found: list[tuple[float, int, int, int]] = []
    for tall in (SQUARES, GROUP, 2 * SQUARES, 3 * GROUP):
        across = THREADS // tall
        tiles = -(-broad // across)
        even = -(-broad // (2 * tiles)) * 2
        down = -(-high // tall)
        found.append((-high * broad / (down * tiles * THREADS), len(found), tall, min(across, even)))
    most = min(found)[0]
    return next((tall, across) for share, _, tall, across in found if share <= 0.95 * most)


def _strips(matrix: Matrix, adds: bool) -> Launch | None:
    """Whole images, or strips of them, through shared memory, if they fit."""
    wide, packed = matrix.wide, 4 // matrix.itemsize
    room = STRIP_WORDS * packed - wide
    if matrix.follow_each_other and matrix.size <= room:
        group = min(matrix.images, room // matrix.size)
        args = [matrix.x.ptr, matrix.y.ptr, matrix.images, group, matrix.rows, matrix.columns]
        return Launch("transform_images", -(-matrix.images // group), args)
    from_line = matrix.columns <= matrix.rows
    line, across = (matrix.x, matrix.y) if from_line else (matrix.y, matrix.x)
    width, length = sorted((matrix.rows, matrix.columns))
    if matrix.permuted or line.row != width:
        return None
    least = LINE_BYTES if _on_sectors(matrix, across) else 2 * LINE_BYTES
    small, large = ("transform_strips", STRIP_WORDS), ("transform_wide_strips", WIDE_STRIP_WORDS)
    for (kernel, words), nbytes in ((small, least), (large, least), (large, LINE_BYTES)):
        fits = (words * packed - wide) // width
        log_span = min(max(fits, 1).bit_length() - 1, (length - 1).bit_length())
        if fits and (1 << log_span) * matrix.itemsize >= min(nbytes, length * matrix.itemsize):
            paired = not adds and _has_pairs(across, length, packed, matrix.images)
            args = [matrix.x.ptr, matrix.x.stride, matrix.y.ptr, matrix.y.stride, across.row, length, width]
            blocks = matrix.images * -(-length // (1 << log_span))
            return Launch(kernel, blocks, [*args, log_span, from_line, paired])
    return None


def _bricks(matrix: Matrix, adds: bool) -> Launch | None:
    """Three-dimensional tiles, where both sides go by 16 bytes and CHWN has no gaps between its channels."""
    axes, wide = matrix.axes, matrix.wide
    gaps = matrix.images * matrix.size != axes.a * axes.p * axes.b
    if gaps or not (matrix.x_wide and matrix.y_wide) or axes.a % wide or axes.b % wide:
        return None
    a, p, b = _brick(axes, wide)
    sizes = [axes.a, axes.p, axes.b]
    blocks = -(-axes.a // (a * wide)) * -(-axes.p // p) * -(-axes.b // (b * wide))
    args = [matrix.x.ptr, axes.x_a, axes.x_p, matrix.y.ptr, axes.y_b, axes.y_p, *sizes, a, p, b]
    return Launch("transform_bricks", blocks, args)


@cache
def _brick(axes: Axes, wide: int) -> tuple[int, int, int]:
    """Pieces of a, numbers of p and pieces of b of the brick that costs least."""
    high, broad = axes.a // wide, axes.b // wide
    follows_x, follows_y = axes.x_p == axes.b, axes.y_p == axes.a

    def cost(brick: tuple[int, int, int]) -> float:
        a, p, b = brick
        lines_x, lines_y = b / GROUP, a / GROUP
        if b == broad:
            lines_x *= p if follows_x else a * wide if axes.x_a == axes.b else 1
        if a == high:
            lines_y *= p if follows_y else b * wide if axes.y_b == axes.a else 1
        squares = a * p * b
        threads = -(-high // a) * -(-broad // b) * -(-axes.p // p) * -(-squares // THREADS) * THREADS
        return READ_COST / lines_x + WRITE_COST / lines_y + IDLE_COST * (threads / (high * broad * axes.p) - 1)

    depths = [p for p in DEPTHS if p <= axes.p]
    found = product(_sizes(high), depths, _sizes(broad))
    fit = (brick for brick in found if _held(*brick, wide) <= BRICK_PIECES)
    return min(fit, key=cost)


def _sizes(pieces: int) -> Iterator[int]:
    """How many pieces along a side a tile may have: whole lines of memory, or the side."""
    yield from range(GROUP, min(pieces, 8 * GROUP), GROUP)
    yield min(pieces, 8 * GROUP)


def _held(a: int, p: int, b: int, wide: int) -> int:
    """Pieces of shared memory that a brick takes."""
    return b * wide * (-(-a * p // GROUP) * GROUP)


def _rows(matrix: Matrix, adds: bool) -> Launch | None:
    """Spans of rows at any address on one side, 16 bytes on the other."""
    if matrix.permuted or matrix.x_wide == matrix.y_wide:
        return None
    reads = matrix.y_wide
    wide, other = matrix.wide, matrix.y if reads else matrix.x
    across, length = (matrix.rows, matrix.columns) if reads else (matrix.columns, matrix.rows)
    if length < SHORT:
        return None
    squares, span, words = _span(across // wide, length, matrix.itemsize, other.row == across)
    blocks = matrix.images * -(-across // (squares * wide)) * -(-length // span)
    sides = [value for side in (matrix.x, matrix.y) for value in (side.ptr, side.stride, side.row)]
    args = [*sides, matrix.rows, matrix.columns, squares, span, words]
    return Launch("transform_from_rows" if reads else "transform_to_rows", blocks, args)


@cache
def _span(pieces: int, length: int, itemsize: int, follow: bool) -> tuple[int, int, int]:
    """Pieces of a tile, numbers of its span of rows that are `length` long, and words of its slots.

    A row's sectors at the ends of a span are read by two blocks; so are, unless pieces follow each other, lines.
    """
    wide, packed = WIDE_BYTES // itemsize, 4 // itemsize
    found = []
    for squares in _sizes(pieces):
        odd = (ROW_WORDS // (squares * wide) - 1) // 2 * 2 + 1
        most = (odd - SPARE_WORDS) * packed // wide
        if most < 1:
            continue
        whole = -(-length // wide)
        spans = -(-whole // most)
        span = -(-whole // spans)
        runs = 0.0 if follow and squares == pieces else PIECE_COST * GROUP / squares
        ends = 0.0 if spans == 1 else SECTOR_BYTES / (span * WIDE_BYTES) / 2
        threads = -(-pieces // squares) * spans * -(-squares * span // THREADS) * THREADS
        cost = runs + ends + IDLE_COST * (threads / (pieces * whole) - 1)
        found.append((cost, squares, span * wide, (span * wide // packed + SPARE_WORDS) | 1))
    return min(found)[1:]


def _on_sectors(matrix: Matrix, side: Side) -> bool:
    """Whether every row of a side begins on a sector of memory."""
    return side.by_pieces(SECTOR_BYTES // matrix.itemsize, SECTOR_BYTES, matrix.images)


def _has_pairs(side: Side, length: int, packed: int, images: int) -> bool:
    """Whether rows of `length` numbers can be read and written by words."""
    return length % packed == 0 and side.by_pieces(packed, 4, images)


ALGORITHMS: Mapping[str, Callable[[Matrix, bool], Launch | None]] = {
    "NAIVE": _naive,
    "TILED": _tiled,
    "VECTOR": _vector,
    "STRIPS": _strips,
    "ROWS": _rows,
    "BRICKS": _bricks,
}
"""Label → its launch, None where it does not apply."""
