"""Convolution on the CPU: columns of pixels (im2col) times the filters, part by part, with the workspace given.

    conv_forward(op, x=x, w=w, b=b, y=y, workspace=workspace)

For one group and one part of the batch, with columns X (C/groups*R*S, T) and outputs Y (K/groups, T):
forward Y = w X, filter gradient dw += dY X^T, image gradient dX = w^T dY, summed back into dx. See vdnn.layers.conv.

Shapes, in every function: x, dx (N, C, H, W); y, dy (N, K, P, Q); w, dw (K, C/groups, R, S); b, db (K,), all of one
dtype, float32 or float64, in any layout; x, y and their gradients may be channel slices of larger tensors.
workspace: uint8, (geometry.workspace_bytes,), may be left out where that is 0. op.attrs: stride, padding, dilation,
groups, algorithm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vdnn.layers.op import Op
from vdnn.memory.plan import align
from vdnn.runtime.backends.cpu.chunks import Array, plane_sums, planes
from vdnn.runtime.backends.cpu.columns import (
    Work,
    add_columns,
    column_matrix,
    fill_columns,
    filter_matrix,
    given_workspace,
    multiply,
    output_block,
    output_matrix,
    stage_outputs,
)
from vdnn.runtime.backends.cpu.fold import unfolded_filters
from vdnn.runtime.backends.cpu.geometry import Geometry, Split, folded_gradient


def conv_forward(
    op: Op, *, x: Array, w: Array, y: Array, b: Array | None = None, workspace: Array | None = None
) -> None:
    """y = conv(x, w) + b; with the activation "relu" its maximum with 0."""
    g, split, work = _prepare(op, x, w, y, workspace)
    for part in g.parts(split):
        columns = fill_columns(g, x, part, work)
        filters = filter_matrix(g, w, part)
        block = output_block(g, y, part)
        if len(block) == 1 and not split.images_last:
            np.matmul(filters, columns, out=block[0])
        else:
            staged, matrix = stage_outputs(block, work)
            np.matmul(filters, columns, out=matrix)
            np.copyto(block, staged)
        if b is not None:
            block += b[part.filters, None]
        if "activation" in op.attrs:
            np.maximum(block, 0, out=block)


def conv_wgrad(op: Op, *, x: Array, dy: Array, dw: Array, workspace: Array | None = None) -> None:
    """dw = sum over images and outputs of dy times the pixel under the filter; added to dw if op accumulates it.

    With the attribute fold, x has the stride in its channels (see vdnn.layers.images), dw has not.
    """
    if "fold" in op.attrs:
        _folded_wgrad(op, x, dy, dw, workspace)
        return
    g, split, work = _prepare(op, x, dw, dy, workspace)
    for part in g.parts(split):
        columns = fill_columns(g, x, part, work)
        gradient = output_matrix(g, dy, part, work)
        out = filter_matrix(g, dw, part)
        first = part.images.start == 0 and part.rows[0] == 0
        multiply(gradient, columns.T, out, None if first and not op.accumulate else work.scratch)


def conv_dgrad(op: Op, *, w: Array, dy: Array, dx: Array, workspace: Array | None = None) -> None:
    """dx = for each pixel, the sum of dy * w over the windows it lies in; added to dx if op accumulates it."""
    g, split, work = _prepare(op, dx, w, dy, workspace)
    direct = not work.columns.size  # the columns are dx itself
    if not (direct or op.accumulate):
        dx[...] = 0
    for part in g.parts(split):
        filters = filter_matrix(g, w, part).T
        gradient = output_matrix(g, dy, part, work)
        if direct:
            out = planes(dx)[part.images.start, part.channels]
            multiply(filters, gradient, out, work.scratch if op.accumulate else None)
        else:
            columns = column_matrix(g, part, work)
            np.matmul(filters, gradient, out=columns)
            add_columns(g, columns, dx, part, work)


def conv_bgrad(op: Op, *, dy: Array, db: Array) -> None:
    """db = sum of dy over N, P, Q; added to db if op accumulates it. No workspace and no choice of algorithm."""
    sums = plane_sums(dy).sum(axis=0)
    np.copyto(db, db + sums if op.accumulate else sums)


def _folded_wgrad(op: Op, x: Array, dy: Array, dw: Array, workspace: Array | None) -> None:
    """The gradient of the folded filters at the begin of the workspace, then its numbers to their places in dw."""
    fold = op.attrs["fold"]
    k, channels, rows, columns = folded_gradient(dw.shape, fold)
    nbytes = k * channels * rows * columns * dw.itemsize
    given = given_workspace(op, align(nbytes), workspace)
    folded = given[:nbytes].view(dw.dtype).reshape(k, rows, columns, channels).transpose(0, 3, 1, 2)
    attrs = {key: value for key, value in op.attrs.items() if key != "fold"}
    conv_wgrad(replace(op, attrs=attrs, accumulate=()), x=x, dy=dy, dw=folded, workspace=given[align(nbytes) :])
    found = unfolded_filters(folded, fold, dw.shape)
    np.copyto(dw, dw + found if op.accumulate else found)


def _prepare(op: Op, x: Array, w: Array, y: Array, workspace: Array | None) -> tuple[Geometry, Split, Work]:
    c, r, s = w.shape[1:]
    channels_last = c > 1 and r * s > 1 and w.strides[1] == w.itemsize
    g = Geometry.of(op.attrs, x.shape, w.shape, y.shape, x.itemsize, channels_last)
    split = g.split(op.attrs["algorithm"], op.kind, accumulate=bool(op.accumulate))
    return g, split, Work.of(op, split, workspace, x.dtype)
