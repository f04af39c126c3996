"""Images and filters as the first convolution reads them, on the GPU; see vdnn.layers.images and images.cu.

input_normalize(op, {"x": pixels, "y": data}, kernels, stream)
fold_filters(w, used, 2, kernels, stream)                        # (K, C, R, S) to (K, C', R', S')
unfold_gradient(dw, scratch, 2, accumulate=True, kernels=kernels, stream=stream)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.images import folded_filters
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import (
    THREADS,
    Arrays,
    Kernels,
    Rows,
    by,
    check_index,
    operands,
    pixel_width,
    wide,
)
from vdnn.runtime.backends.cuda.source import constants, source

SCALED, STRIP, SQUARE = (constants(source())[name] for name in ("SCALED", "STRIP", "SQUARE"))
"""Channels of x that one launch of normalize_pixels scales, and pixels of a thread; images, and pixels of each, of a
block of normalize_columns."""


def input_normalize(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y[n,c] = (x[n,c] / 255 - mean[c]) / std[c].

    x: (N, C, H, W) uint8, NCHW; y: in the activations' dtype, NCHW or CHWN (one launch a channel) or NHWC (one for
    SCALED of them), maybe with more channels, which become 0; op.attrs: mean and std, a number for each channel of x,
    and if y, in NHWC, has a stride in its channels, fold and padding.
    """
    (x,), (y,) = operands(op, arrays, "x", dtype="uint8"), operands(op, arrays, "y", dtype=kernels.dtype)
    scales = [(1 / (255 * std), -mean / std) for mean, std in zip(op.attrs["mean"], op.attrs["std"], strict=True)]
    if y.layout == "NHWC":
        _normalize_pixels(op, x, y, scales, kernels, stream)
        return
    hw = y.image_size // y.shape[1]
    places = [*enumerate(scales), *[(0, (0.0, 0.0))] * (y.shape[1] - len(scales))]  # any number, times 0
    if y.is_images_last:
        _normalize_columns(x, y, places, kernels, stream)
        return
    rows = Rows.channel(hw, x, y)
    for c, (of_x, scale) in enumerate(places):
        args = [x.ptr + of_x * hw, x.image_stride, y.ptr + y.itemsize * c * hw, y.image_stride, *rows.args, *scale]
        kernels.launch("normalize_channel", rows.blocks, args, stream)


def _normalize_columns(
    x: DeviceArray, y: DeviceArray, places: list[tuple[int, tuple[float, float]]], kernels: Kernels, stream: Any
) -> None:
    images, hw = y.shape[0], check_index(y.image_size // y.shape[1], "pixels of one image")
    by_words = hw % 4 == 0 and by(4, x, rows=images)
    by_pieces = images % wide(y) == 0 and by(wide(y), y, rows=1)
    blocks = -(-images // SQUARE) * -(-hw // SQUARE)
    for c, (of_x, scale) in enumerate(places):
        args = [x.ptr + of_x * hw, x.image_stride, y.ptr + y.itemsize * c * hw * images, images, hw]
        kernels.launch("normalize_columns", blocks, [*args, by_words, by_pieces, *scale], stream)


def _normalize_pixels(
    op: Op, x: DeviceArray, y: DeviceArray, scales: list[tuple[float, float]], kernels: Kernels, stream: Any
) -> None:
    n, channels, height, width = x.shape
    filled, rows, columns = y.shape[1:]
    check_index(n * rows * columns, "pixels of a batch")
    form = [n, height, width, channels, rows, columns, filled]
    form += [op.attrs.get("fold", 1), *op.attrs.get("padding", (0, 0))]
    at_once = pixel_width(y) if channels <= SCALED else 1
    units = check_index(n * -(-rows // STRIP) * columns * (filled // at_once), "threads of a kernel")
    for first in range(0, channels, SCALED):
        part = scales[first : first + SCALED]
        factors = [*part, *[(0.0, 0.0)] * (SCALED - len(part))]
        args: list[float] = [x.ptr, x.image_stride, y.ptr, y.pixel_stride, *form, first, len(part), at_once]
        args += [value for values in zip(*factors, strict=True) for value in values]
        kernels.launch("normalize_pixels", -(-units // THREADS), args, stream)


def fold_filters(w: DeviceArray, y: DeviceArray, fold: int, kernels: Kernels, stream: Any) -> None:
    """y (K, C', R', S') = filters w (K, C, R, S) with a stride in their channels, 0 in those that w has not; NHWC."""
    args = [w.ptr, y.ptr, y.size, *_forms(w, y, fold)]
    kernels.launch("filter_fold", -(-check_index(y.size, "numbers of a filter") // THREADS), args, stream)


def unfold_gradient(
    dw: DeviceArray, scratch: DeviceArray, fold: int, *, accumulate: bool, kernels: Kernels, stream: Any
) -> None:
    """dw (K, C, R, S) = what `fold_filters` makes `scratch` (K, C', R', S') of, or is added to it; NHWC."""
    args = [scratch.ptr, dw.ptr, dw.size, *_forms(dw, scratch, fold), accumulate]
    kernels.launch("filter_gradient_unfold", -(-check_index(dw.size, "numbers of a filter") // THREADS), args, stream)


def _forms(plain: DeviceArray, folded: DeviceArray, fold: int) -> list[int]:
    """R, S, C and R', S', C' and the stride; VdnnError if the shapes do not fit, or other numbers lie between."""
    for array in (plain, folded):
        last = array.layout == "NHWC" and len(array.shape) == 4
        if not (last and array.has_whole_pixels and array.pixel_stride == array.shape[1]):
            raise VdnnError(f"filters: expected other channels in NHWC, without gaps, got {array}")
    (_, c, r, s), (_, channels, rows, columns) = plain.shape, folded.shape
    if folded.shape != folded_filters(plain.shape, fold, channels) or channels < fold * fold * c:
        raise VdnnError(f"filters of stride {fold}: expected one shape to be that of the other, got {plain}, {folded}")
    return [r, s, c, rows, columns, channels, fold]
