"""Filters as the products read them, and filter gradients as the products write them, on the GPU; see prepare.cu.

    filter_prepare(op, {"w": w, "y": used}, kernels, stream)
    store_filter_gradient(dw, scratch, accumulate=True, kernels=kernels, stream=stream)

w, dw (K, C/groups, R, S) or (K, C), float32; y, scratch the same as activations are stored. Four dimensions lie without
gaps in any layout; in NHWC y and scratch may have more channels, with a stride in them (see vdnn.layers.images).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.images import fold_filters, unfold_gradient
from vdnn.runtime.backends.cuda.launch import THREADS, UNROLL, WIDE_BYTES, Arrays, Kernels, by, operands
from vdnn.runtime.backends.cuda.tables import tables


def filter_prepare(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = w as activations are stored; channels of y that w has not become 0. op.attrs: fold, the stride in them."""
    (w,), (y,) = operands(op, arrays, "w"), operands(op, arrays, "y", dtype=kernels.dtype)
    if w.shape != y.shape:
        fold_filters(w, y, op.attrs.get("fold", 1), kernels, stream)
        return
    chunks = _chunks(op.name, w, y)
    kernels.launch("filter_prepare", chunks, [w.ptr, y.ptr, y.size, chunks], stream)


def filter_prepare_all(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """filter_prepare of w0 to y0, w1 to y1, ..., of as many channels each, in a launch or a few."""
    for blocks, filters, table in tables("Filters", _filters(op, arrays, kernels)):
        kernels.launch("filter_prepare_all", blocks, [table, filters], stream)


def _filters(op: Op, arrays: Arrays, kernels: Kernels) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Blocks of each filter, and its row of struct Filters."""
    for made in (argument for argument in arrays if argument.startswith("y")):
        (w,), (y,) = operands(op, arrays, f"w{made[1:]}"), operands(op, arrays, made, dtype=kernels.dtype)
        yield _chunks(op.name, w, y), (w.ptr, y.ptr, y.size)


def store_filter_gradient(
    dw: DeviceArray, scratch: DeviceArray, accumulate: bool, kernels: Kernels, stream: Any, fold: int = 1
) -> None:
    """dw = scratch, or dw += scratch, in float32; channels of the scratch that dw has not are left out.

    scratch: what a product wrote, in the dtype of activations. fold: the stride in its channels.
    """
    if (dw.dtype, scratch.dtype) != ("float32", kernels.dtype):
        raise VdnnError(f"filter gradient: expected float32 from {kernels.dtype}, got {dw.dtype} from {scratch.dtype}")
    if dw.shape != scratch.shape:
        unfold_gradient(dw, scratch, fold, accumulate=accumulate, kernels=kernels, stream=stream)
        return
    chunks = _chunks("filter gradient", scratch, dw)
    args: list[float] = [scratch.ptr, dw.ptr, dw.size, chunks, accumulate]
    kernels.launch("filter_gradient_store", chunks, args, stream)


def _chunks(name: str, *arrays: DeviceArray) -> int:
    """Blocks for filters of one shape; VdnnError if they differ, or one has gaps or does not begin on 16 bytes."""
    for array in arrays:
        if array.is_images_last:
            whole = array.is_whole_chwn
        elif array.layout == "NHWC" and len(array.shape) == 4:
            whole = array.has_whole_pixels and array.pixel_stride == array.shape[1]
        else:
            whole = array.is_contiguous
        if not whole:
            raise VdnnError(f"'{name}': expected filters without gaps, got {array}")
    if len({(array.shape, array.layout) for array in arrays}) > 1:
        raise VdnnError(f"'{name}': expected filters of one shape and layout, got {arrays}")
    if not all(by(WIDE_BYTES // array.itemsize, array, rows=1) for array in arrays):
        raise VdnnError(f"'{name}': expected filters on {WIDE_BYTES} bytes, got {arrays}")
    return -(-arrays[0].size // (THREADS * UNROLL * (WIDE_BYTES // min(array.itemsize for array in arrays))))
