"""From one layout to another on the GPU: a transposition, in one of several ways; see matrices.py, and layout.cu and
layout_strips.cu.

    layout_transform(op, {"x": x, "y": y}, kernels, stream)       # op.attrs["algorithm"]: a key of ALGORITHMS, or none
    transform_candidates(op, program)                             # ("VECTOR", "TILED")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, element_strides, first_element
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.copy import copy_forward
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, THREADS, Arrays, Kernels, operands
from vdnn.runtime.backends.cuda.matrices import Matrix, Side, plain
from vdnn.runtime.backends.cuda.source import constants, source

TILE, SQUARES, STRIP_WORDS, WIDE_STRIP_WORDS = (
    constants(source())[name] for name in ("TILE", "SQUARES", "STRIP_WORDS", "WIDE_STRIP_WORDS")
)
COPY = "COPY"
"""The one way between layouts that are the same for a shape, as NCHW and NHWC are for images of one pixel."""
LINE_BYTES, SECTOR_BYTES = 128, 32
"""Of memory. A strip reads or writes a line of each row at least, two where rows do not begin on a sector."""
GROUP = 8
"""Squares in a column of a tile come in groups of so many."""
SHORT = 16
"""Below so many rows or columns one thread a number may be as good as a tile."""


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
        "STRIPS": _strips(matrix, False) is not None and not all(_on_sectors(matrix, s) for s in (matrix.x, matrix.y)),
        "NAIVE": short < SHORT and matrix.size < INDEX_LIMIT,
    }
    return first, *(label for label, is_useful in useful.items() if is_useful and label != first)


def best_guess(matrix: Matrix) -> str:
    """The label for a shape that was not measured."""
    short = min(matrix.rows, matrix.columns)
    aligned = matrix.x_wide and matrix.y_wide
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
}
"""Label → its launch, None where it does not apply."""
