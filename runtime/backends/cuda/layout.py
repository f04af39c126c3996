"""From one layout to another on the GPU: pixels to numbers, and images to vectors and back; see layout.cu.

layout_transform(op, {"x": x, "y": y}, kernels, stream)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import THREADS, Arrays, Kernels, Rows, check_index, operands
from vdnn.runtime.backends.cuda.source import constants, source

TILE = constants(source())["TILE"]
CHANNELS = 4
"""Of one launch of normalize_pixels."""


def input_normalize(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y[n,c] = (x[n,c] / 255 - mean[c]) / std[c].

    x: (N, C, H, W) uint8, NCHW; y: the same in float32, NCHW (one launch a channel) or NHWC (one for four of them);
    op.attrs: mean and std, a number for each channel.
    """
    (x,), (y,) = operands(op, arrays, "x", dtype="uint8"), operands(op, arrays, "y")
    (n, channels), hw = y.shape[:2], y.image_size // y.shape[1]
    if y.is_channels_last:
        pixels = check_index(n * hw, "pixels of a batch")
        for c in range(0, channels, CHANNELS):
            count = min(CHANNELS, channels - c)
            args: list[float] = [x.ptr + c * hw, x.image_stride, y.ptr + y.itemsize * c, y.pixel_stride]
            args += [hw, pixels, count]
            for key, unused in (("mean", 0.0), ("std", 1.0)):
                args += [*op.attrs[key][c : c + count], *[unused] * (CHANNELS - count)]
            kernels.launch("normalize_pixels", -(-pixels // THREADS), args, stream)
        return
    rows = Rows.channel(hw, x, y)
    for c, (mean, std) in enumerate(zip(op.attrs["mean"], op.attrs["std"], strict=True)):
        args = [x.ptr + c * hw, x.image_stride, y.ptr + y.itemsize * c * hw, y.image_stride, *rows.args, mean, std]
        kernels.launch("normalize_channel", rows.blocks, args, stream)


def layout_transform(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x, or y += x if op accumulates y: float32, one of them (N, C, H, W) in NHWC, the other in order c, h, w.

    The other has the same shape in NCHW, or is (N, C * H * W).
    """
    x, y = operands(op, arrays, "x", "y")
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
