"""Filters as the products read them, and filter gradients as the products write them, on the GPU; see prepare.cu.

    filter_prepare(op, {"w": w, "y": used}, kernels, stream)
    store_filter_gradient(dw, scratch, accumulate=True, kernels=kernels, stream=stream)

w, dw (K, C/groups, R, S) or (K, C), float32; y, scratch the same as activations are stored, maybe with more channels,
which are 0 or not looked at. All four dimensions NCHW or NHWC, without gaps.
"""

from __future__ import annotations

from math import prod
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
    by,
    check_index,
    operands,
)


def filter_prepare(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = w as activations are stored; channels of y that w has not become 0."""
    (w,), (y,) = operands(op, arrays, "w"), operands(op, arrays, "y", dtype=kernels.dtype)
    from_inner, to_inner = _inner(op.name, w, y)
    if from_inner == to_inner:
        kernels.launch("filter_prepare", _chunks(w, y), [w.ptr, y.ptr, y.size, _chunks(w, y)], stream)
        return
    blocks = -(-check_index(y.size, "numbers of a filter") // THREADS)
    kernels.launch("filter_prepare_rows", blocks, [w.ptr, y.ptr, y.size, from_inner, to_inner], stream)


def store_filter_gradient(
    dw: DeviceArray, scratch: DeviceArray, accumulate: bool, kernels: Kernels, stream: Any
) -> None:
    """dw = scratch, or dw += scratch, in float32; channels of the scratch that dw has not are left out.

    scratch: what a product wrote, in the dtype of activations.
    """
    if (dw.dtype, scratch.dtype) != ("float32", kernels.dtype):
        raise VdnnError(f"filter gradient: expected float32 from {kernels.dtype}, got {dw.dtype} from {scratch.dtype}")
    from_inner, to_inner = _inner("filter gradient", scratch, dw)
    if from_inner == to_inner:
        chunks = _chunks(scratch, dw)
        args: list[float] = [scratch.ptr, dw.ptr, dw.size, chunks, accumulate]
        kernels.launch("filter_gradient_store", chunks, args, stream)
        return
    blocks = -(-check_index(dw.size, "numbers of a filter") // THREADS)
    args = [scratch.ptr, dw.ptr, dw.size, from_inner, to_inner, accumulate]
    kernels.launch("filter_gradient_store_rows", blocks, args, stream)


def _inner(name: str, source: DeviceArray, target: DeviceArray) -> tuple[int, int]:
    """Numbers of a row of each: the channels of one place of a filter in NHWC, else a whole filter."""
    found = []
    for array in (source, target):
        last = array.layout == "NHWC" and len(array.shape) == 4
        if not (array.has_whole_pixels and array.pixel_stride == array.shape[1] if last else array.is_contiguous):
            raise VdnnError(f"'{name}': expected filters without gaps, got {array}")
        found.append(array.shape[1] if last else prod(array.shape[1:]))
    outer = (source.shape[0], *source.shape[2:])
    if outer != (target.shape[0], *target.shape[2:]) or source.layout != target.layout:
        raise VdnnError(f"'{name}': expected filters that differ in channels only, got {source} and {target}")
    return found[0], found[1]


def _chunks(*arrays: DeviceArray) -> int:
    """Blocks for filters of equal size; VdnnError if one does not begin on 16 bytes."""
    if not all(by(WIDE_BYTES // array.itemsize, array, rows=1) for array in arrays):
        raise VdnnError(f"expected filters on {WIDE_BYTES} bytes, got {arrays}")
    return -(-arrays[0].size // (THREADS * UNROLL * (WIDE_BYTES // min(array.itemsize for array in arrays))))
