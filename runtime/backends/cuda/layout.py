"""From one layout to another on the GPU: images to vectors and back; see layout.cu.

layout_transform(op, {"x": x, "y": y}, kernels, stream)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, check_index, operands
from vdnn.runtime.backends.cuda.source import constants, source

TILE = constants(source())["TILE"]


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
