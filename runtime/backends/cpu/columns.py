"""The column matrix of a part of a convolution (im2col), the way back (col2im), and the outputs as a matrix.

    work = Work.of(op, split, workspace, x.dtype)
    np.matmul(filters, fill_columns(g, x, part, work), out=...)

Rows of the column matrix are (channel, r, s), or (r, s, channel) where filters lie so in memory; its columns are
(image, p, q) of the part, or (p, q, image) under the algorithms of vdnn.runtime.backends.cpu.geometry that say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import DTypeLike

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.memory.plan import align
from vdnn.runtime.backends.cpu.chunks import Array, planes
from vdnn.runtime.backends.cpu.geometry import Geometry, Part, Split
from vdnn.runtime.backends.cpu.windows import Tap, taps
from vdnn.units import format_bytes

FEW, LONG = 1024, 512
"""Numbers of a product, and terms of a piece of its sums."""


@dataclass(frozen=True, slots=True)
class Work:
    """The workspace of one call in its three pieces, flat, in the dtype of the operands.

    `images_last`: columns are (p, q, image), not (image, p, q).
    """

    columns: Array
    stage: Array
    scratch: Array
    images_last: bool = False

    @classmethod
    def of(cls, op: Op, split: Split, workspace: Array | None, dtype: DTypeLike) -> Work:
        """Cut `workspace` (uint8, at least split.nbytes; None counts as none)."""
        given = given_workspace(op, split.nbytes, workspace)
        pieces, start = [], 0
        for nbytes in (split.columns_bytes, split.stage_bytes, split.scratch_bytes):
            pieces.append(given[start : start + nbytes].view(dtype))
            start += align(nbytes)
        columns, stage, scratch = pieces
        return cls(columns, stage, scratch, split.images_last)


def given_workspace(op: Op, nbytes: int, workspace: Array | None) -> Array:
    """The workspace of `op`, None as an empty one; VdnnError if it has fewer bytes."""
    given = np.empty(0, np.uint8) if workspace is None else workspace
    if given.nbytes < nbytes:
        raise VdnnError(
            f"op '{op.name}' (layer '{op.layer}', algorithm {op.attrs['algorithm']}): expected a workspace of "
            f"{nbytes} bytes ({format_bytes(nbytes)}), got {given.nbytes}; "
            "ask vdnn.runtime.backends.cpu.geometry.workspace_bytes for the size"
        )
    return given


def fill_columns(g: Geometry, x: Array, part: Part, work: Work) -> Array:
    """The column matrix (C/groups*R*S, images*rows*Q) of `part` of x (N, C, H, W); no copy for algorithm GEMM."""
    if not work.columns.size:
        return planes(x)[part.images.start, part.channels]
    matrix = column_matrix(g, part, work)
    columns = logical_columns(g, part, matrix, work)
    pixels = x[part.images, part.channels].transpose(1, 0, 2, 3)
    vertical, horizontal = _taps(g, part)
    if any(g.padding):
        for row in vertical:
            columns[:, row.offset, :, :, : row.outputs.start] = 0
            columns[:, row.offset, :, :, row.outputs.stop :] = 0
        for column in horizontal:
            columns[:, :, column.offset, :, :, : column.outputs.start] = 0
            columns[:, :, column.offset, :, :, column.outputs.stop :] = 0
    for row, column in product(vertical, horizontal):
        into = columns[:, row.offset, column.offset, :, row.outputs, column.outputs]
        np.copyto(into, pixels[:, :, row.pixels, column.pixels])
    return matrix


def add_columns(g: Geometry, matrix: Array, dx: Array, part: Part, work: Work) -> None:
    """Add each number of a column matrix to the pixel of dx (N, C, H, W) that it stands for."""
    columns = logical_columns(g, part, matrix, work)
    pixels = dx[part.images, part.channels].transpose(1, 0, 2, 3)
    for row, column in product(*_taps(g, part)):
        into = pixels[:, :, row.pixels, column.pixels]
        into += columns[:, row.offset, column.offset, :, row.outputs, column.outputs]


def column_matrix(g: Geometry, part: Part, work: Work) -> Array:
    """The workspace as the column matrix (C/groups*R*S, images*rows*Q) of `part`, content undefined."""
    images, rows = part.images.stop - part.images.start, part.rows[1] - part.rows[0]
    return work.columns[: g.taps * images * rows * g.q].reshape(g.taps, -1)


def logical_columns(g: Geometry, part: Part, matrix: Array, work: Work) -> Array:
    """A column matrix as (C/groups, R, S, images, rows, Q), a view."""
    images, rows = part.images.stop - part.images.start, part.rows[1] - part.rows[0]
    outputs = (rows, g.q, images) if work.images_last else (images, rows, g.q)
    if g.channels_last:
        columns = matrix.reshape(g.r, g.s, -1, *outputs).transpose(2, 0, 1, 3, 4, 5)
    else:
        columns = matrix.reshape(-1, g.r, g.s, *outputs)
    return columns.transpose(0, 1, 2, 5, 3, 4) if work.images_last else columns


def filter_matrix(g: Geometry, w: Array, part: Part) -> Array:
    """The filters of `part` in w (K, C/groups, R, S) as the matrix (K/groups, C/groups*R*S), a view."""
    filters = w[part.filters]
    return (filters.transpose(0, 2, 3, 1) if g.channels_last else filters).reshape(-1, g.taps)


def output_block(g: Geometry, y: Array, part: Part) -> Array:
    """The outputs of `part` in y (N, K, P, Q): a view (images, K/groups, rows*Q)."""
    return planes(y)[part.images, part.filters, part.rows[0] * g.q : part.rows[1] * g.q]


def stage_outputs(block: Array, work: Work) -> tuple[Array, Array]:
    """The workspace for the outputs `block`, twice: in its shape (images, K/groups, T), and as the matrix of a product,
    K/groups rows of (image, t), or of (t, image) where images are last."""
    images, filters, width = block.shape
    flat = work.stage[: block.size]
    if work.images_last:
        staged = flat.reshape(filters, width, images).transpose(2, 0, 1)
    else:
        staged = flat.reshape(filters, images, width).transpose(1, 0, 2)
    return staged, flat.reshape(filters, -1)


def output_matrix(g: Geometry, dy: Array, part: Part, work: Work) -> Array:
    """dy (N, K, P, Q) of `part` as the matrix (K/groups, images*rows*Q): for one image a view, where images are not
    last, else a copy."""
    block = output_block(g, dy, part)
    if len(block) == 1 and not work.images_last:
        return block.reshape(block.shape[1:])
    staged, matrix = stage_outputs(block, work)
    np.copyto(staged, block)
    return matrix


def multiply(a: Array, b: Array, out: Array, scratch: Array | None) -> None:
    """out = a b, or out += a b through `scratch` (flat, at least one column of the product), some columns at a time."""
    if scratch is None:
        _product(a, b, out)
        return
    height, width = out.shape
    step = scratch.size // height
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        part = scratch[: height * (columns.stop - start)].reshape(height, -1)
        _product(a, b[:, columns], part)
        out[:, columns] += part


def _product(a: Array, b: Array, out: Array) -> None:
    """out = a b; one of few numbers and a long sum, as the gradient of a first layer, in pieces of LONG terms.

    BLAS gives such a sum to several threads, which meet every few hundred terms: slower than one thread, and very slow
    where they have to share their cores. A piece is too small for that.
    """
    terms, pieces = a.shape[1], a.shape[1] // LONG
    if pieces < 2 or out.size > FEW:
        np.matmul(a, b, out=out)
        return
    whole = pieces * LONG
    heads = a[:, :whole].reshape(len(a), pieces, LONG).transpose(1, 0, 2)
    np.add.reduce(np.matmul(heads, b[:whole].reshape(pieces, LONG, -1)), axis=0, out=out)
    if whole < terms:
        out += np.matmul(a[:, whole:], b[whole:])


def _taps(g: Geometry, part: Part) -> tuple[tuple[Tap, ...], tuple[Tap, ...]]:
    return (
        taps(g.h, g.r, part.rows, g.stride[0], g.padding[0], g.dilation[0]),
        taps(g.w, g.s, (0, g.q), g.stride[1], g.padding[1], g.dilation[1]),
    )
