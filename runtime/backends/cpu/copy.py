"""Copies, also to another layout or with more channels, sums, and the first op of every program: pixels to numbers.

    copy_forward(op, x=x, y=y)

Sizes of all arguments of a call are equal but for a stride and zeros in channels; x may differ from y in shape where a
Flatten lies between. Numbers go by their logical place, whatever the layouts are. See vdnn.layers.add, concat and
flatten.
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, chunked, image_slices
from vdnn.runtime.backends.cpu.fold import fold_filters, fold_images


def copy_forward(op: Op, *, x: Array, y: Array) -> None:
    """y = x, or y += x if op accumulates y; (N, ...), any strides."""
    for y_part, x_part in chunked(y, x):
        if op.accumulate:
            y_part += x_part
        else:
            np.copyto(y_part, x_part)


def add_forward(op: Op, *, a: Array, b: Array, y: Array) -> None:
    """y = a + b; (N, ...). y may be the bytes of a."""
    for y_part, a_part, b_part in chunked(y, a, b):
        np.add(a_part, b_part, out=y_part)


def input_normalize(op: Op, *, x: Array, y: Array) -> None:
    """y[n,c] = (x[n,c] / 255 - mean[c]) / std[c]; channels of y that x has not become 0.

    x: (N, C, H, W) uint8; y: (N, C or more, H, W) in float32 or float64; op.attrs: mean and std, a number for each
    channel of x, and if y has a stride in its channels (see vdnn.layers.images) fold and padding.
    """
    mean, std = (np.array(op.attrs[key], y.dtype)[:, None, None] for key in ("mean", "std"))
    if "fold" in op.attrs:
        vertical, horizontal = op.attrs["padding"]
        for images in image_slices(y):
            numbers = (np.divide(x[images], 255, dtype=y.dtype) - mean) / std
            fold_images(numbers, y[images], op.attrs["fold"], (vertical, horizontal))
        return
    y[:, x.shape[1] :] = 0
    for y_part, x_part in chunked(y[:, : x.shape[1]], x):
        np.divide(x_part, 255, out=y_part, dtype=y.dtype)
        y_part -= mean
        y_part /= std


def filter_prepare(op: Op, *, w: Array, y: Array) -> None:
    """y[k,c] = w[k,c], and 0 in the channels that w has not; w (K, C, R, S) or (K, C), y the same with C or more.

    With the attribute fold a stride goes into the channels of y (see vdnn.layers.images).
    """
    if "fold" in op.attrs:
        fold_filters(w, y, op.attrs["fold"])
        return
    y[:, : w.shape[1]] = w
    y[:, w.shape[1] :] = 0


def filter_prepare_all(op: Op, **arrays: Array) -> None:
    """filter_prepare of w0 to y0, w1 to y1, ..."""
    for argument in op.writes:
        filter_prepare(op, w=arrays[f"w{argument[1:]}"], y=arrays[argument])
