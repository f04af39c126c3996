"""Local response normalisation across channels on the GPU; see vdnn.layers.lrn and lrn.cu.

    lrn_forward(op, {"x": x, "y": y}, kernels, stream)

x, y, dy, dx (N, C, H, W), float32, any of them channels of a larger tensor; op.attrs: size, alpha, beta, k. Formulas of
the gradient: vdnn.runtime.backends.cpu.lrn.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import THREADS, Arrays, Kernels, check_index, operands
from vdnn.runtime.backends.cuda.source import constants, source

GROUP = constants(source())["GROUP"]


def lrn_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = x * scale^-beta."""
    x, y = operands(op, arrays, "x", "y")
    blocks, shape = _columns(x)
    args = [x.ptr, x.image_stride, y.ptr, y.image_stride, *shape, *_formula(op)]
    kernels.launch("lrn_forward", blocks, args, stream)


def lrn_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx from x, y and dy; added to dx if op accumulates it."""
    found = operands(op, arrays, "x", "y", "dy", "dx")
    blocks, shape = _columns(found[0])
    pointers = [value for array in found for value in (array.ptr, array.image_stride)]
    slope = 2 * op.attrs["alpha"] * op.attrs["beta"] / op.attrs["size"]
    args = [*pointers, *shape, *_formula(op), slope, bool(op.accumulate)]
    kernels.launch("lrn_backward", blocks, args, stream)


def _columns(x: DeviceArray) -> tuple[int, tuple[int, int, int]]:
    """The grid, and (C, H * W, N * H * W)."""
    channels = x.shape[1]
    hw = x.image_size // channels
    pixels = check_index(x.shape[0] * hw, "pixels of a batch")
    return -(-pixels // THREADS) * -(-channels // GROUP), (channels, hw, pixels)


def _formula(op: Op) -> tuple[int, float, float, float]:
    attrs = op.attrs
    return attrs["size"], attrs["alpha"] / attrs["size"], attrs["beta"], attrs["k"]
