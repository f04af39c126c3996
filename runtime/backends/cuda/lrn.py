"""Local response normalisation across channels on the GPU; see vdnn.layers.lrn, lrn.cu, and lrn_pixels.cu for NHWC.

    lrn_forward(op, {"x": x, "y": y}, kernels, stream)

x, y, dy, dx (N, C, H, W), activations, all in one layout, any of them channels of a larger tensor; op.attrs: size,
alpha, beta, k. Formulas of the gradient: vdnn.runtime.backends.cpu.lrn.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import (
    THREADS,
    Arrays,
    Kernels,
    check_index,
    common_layout,
    operands,
    pixel_width,
)
from vdnn.runtime.backends.cuda.source import constants, source

GROUP = constants(source())["GROUP"]
FIVE = 5
"""The window that has code of its own."""
FOUR = 4
"""Channels of a thread there."""


def lrn_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x * scale^-beta."""
    (x, y), by_pixels = _operands(op, arrays, kernels, "x", "y")
    if by_pixels:
        blocks, shape = _pixels(op, x, y)
        args = [x.ptr, x.pixel_stride, y.ptr, y.pixel_stride, *shape, *_formula(op)]
        kernels.launch("lrn_pixels_forward", blocks, args, stream)
        return
    blocks, shape = _columns(x)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *shape, *_formula(op)]
    kernels.launch("lrn_forward", blocks, args, stream)


def lrn_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx from x, y and dy; added to dx if op accumulates it."""
    found, by_pixels = _operands(op, arrays, kernels, "x", "y", "dy", "dx")
    blocks, shape = _pixels(op, *found) if by_pixels else _columns(found[0])
    steps = [array.pixel_stride if by_pixels else array.image_stride for array in found]
    pointers = [value for array, step in zip(found, steps, strict=True) for value in (array.ptr, step)]
    slope = 2 * op.attrs["alpha"] * op.attrs["beta"] / op.attrs["size"]
    args = [*pointers, *shape, *_formula(op), slope, bool(op.accumulate)]
    kernels.launch("lrn_pixels_backward" if by_pixels else "lrn_backward", blocks, args, stream)


def _operands(op: Op, arrays: Arrays, kernels: Kernels, *names: str) -> tuple[list[DeviceArray], bool]:
    """The batches, as one image each if they lie in CHWN, and whether they lie in NHWC."""
    found = operands(op, arrays, *names, dtype=kernels.dtype)
    layout = common_layout(op, *found)
    return [array.one_image() for array in found] if layout == "CHWN" else found, layout == "NHWC"


def _columns(x: DeviceArray) -> tuple[int, tuple[int, int, int]]:
    """The grid, and (C, H * W, N * H * W)."""
    channels = x.shape[1]
    hw = x.image_size // channels
    pixels = check_index(x.shape[0] * hw, "pixels of a batch")
    return -(-pixels // THREADS) * -(-channels // GROUP), (channels, hw, pixels)


def _pixels(op: Op, *tensors: DeviceArray) -> tuple[int, tuple[int, int, int]]:
    """The grid in NHWC, and (C, N * H * W, channels of a thread)."""
    n, channels, h, w = tensors[0].shape
    width = pixel_width(*tensors, width=FOUR) if op.attrs["size"] == FIVE else 1
    threads = check_index(n * h * w * (channels // width), "groups of channels of a batch")
    return -(-threads // THREADS), (channels, n * h * w, width)


def _formula(op: Op) -> tuple[int, float, float, float]:
    attrs = op.attrs
    return attrs["size"], attrs["alpha"] / attrs["size"], attrs["beta"], attrs["k"]
