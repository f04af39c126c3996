"""From one layout to another on the GPU: pixels to numbers, and images to vectors and back; see layout.cu.

layout_transform(op, {"x": x, "y": y}, kernels, stream)
"""

from __future__ import annotations

from math import inf
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import (
    THREADS,
    UNROLL,
    WIDE_BYTES,
    Arrays,
    Kernels,
    Rows,
    by_wide,
    check_index,
    operands,
    wide,
)
from vdnn.runtime.backends.cuda.source import constants, source

TILE = constants(source())["TILE"]
CHANNELS = 4
"""Of one launch of normalize_pixels."""


def input_normalize(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y[n,c] = (x[n,c] / 255 - mean[c]) / std[c].

    x: (N, C, H, W) uint8, NCHW; y: the same in the activations' dtype, NCHW (one launch a channel) or NHWC (one for
    four of them), maybe with more channels, which become 0; op.attrs: mean and std, a number for each channel of x.
    """
    (x,), (y,) = operands(op, arrays, "x", dtype="uint8"), operands(op, arrays, "y", dtype=kernels.dtype)
    (n, channels), hw = x.shape[:2], y.image_size // y.shape[1]
    if y.is_channels_last:
        step = y.pixel_stride
        pixels, whole = check_index(n * hw, "pixels of a batch"), y.shape[1] * y.itemsize == WIDE_BYTES
        for c in range(0, channels, CHANNELS):
            count = min(CHANNELS, channels - c)
            filled = count if c + count < channels else y.shape[1] - c
            at_once = whole and c == 0 and filled == y.shape[1] and by_wide(y, rows=1) and step % wide(y) == 0
            args: list[float] = [x.ptr + c * hw, x.image_stride, y.ptr + y.itemsize * c, step]
            args += [hw, pixels, count, filled, wide(y) if at_once else 1]
            for key, unused in (("mean", 0.0), ("std", 1.0)):
                args += [*op.attrs[key][c : c + count], *[unused] * (CHANNELS - count)]
            kernels.launch("normalize_pixels", -(-pixels // (THREADS * UNROLL)), args, stream)
        return
    rows = Rows.channel(hw, x, y)
    added = [(0, 0.0, inf)] * (y.shape[1] - channels)  # any number, divided by infinity
    channel_rules = [*zip(range(channels), op.attrs["mean"], op.attrs["std"], strict=True), *added]
    for c, (of_x, mean, std) in enumerate(channel_rules):
        args = [x.ptr + of_x * hw, x.image_stride, y.ptr + y.itemsize * c * hw, y.image_stride, *rows.args, mean, std]
        kernels.launch("normalize_channel", rows.blocks, args, stream)


def layout_transform(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x, or y += x if op accumulates y: activations, one (N, C, H, W) in NHWC, the other in order c, h, w.

    The other has the same shape in NCHW, or is (N, C * H * W).
    """
    x, y = operands(op, arrays, "x", "y", dtype=kernels.dtype)
    if x.is_channels_last == y.is_channels_last:
        raise VdnnError(f"op '{op.name}' (layer '{op.layer}'): expected x or y in NHWC, got {x} and {y}")
    images = x if x.is_channels_last else y
    n, c, h, w = images.shape
    hw = check_index(h * w, "pixels of one image")
    rows, columns = (hw, c) if images is x else (c, hw)
    args = [*_steps(x, hw), *_steps(y, hw), rows, columns, bool(op.accumulate)]
    kernels.launch("transpose_images", n * -(-rows // TILE) * -(-columns // TILE), args, stream)


def _steps(array: DeviceArray, hw: int) -> list[int]:
    """Address, elements from image to image, and from row to row: pixels in NHWC, else planes."""
    if array.is_channels_last:
        return [array.ptr, hw * array.pixel_stride, array.pixel_stride]
    return [array.ptr, array.image_stride, hw]
