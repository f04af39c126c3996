"""Pooling on the GPU; see vdnn.layers.pool, pool.cu for windows of any size, pool_pixels.cu for these in NHWC, and
pool_tiles.py for the usual ones.

    pool_forward(op, {"x": x, "y": y}, kernels, stream)
    pool_candidates(op, program)                     # ("TILE_2x1", "TILE_1x1"), to be told in op.attrs["algorithm"]

x, dx (N, C, H, W), y, dy (N, C, P, Q), activations, any of them channels of a larger tensor; indices (N, C, P, Q)
uint8; all of one layout. A batch in CHWN is C images of N channels in NHWC. op.attrs: mode "max" or "average", kernel,
stride, padding (pairs, vertical first), count_include_pad. Backward gathers: each pixel looks up the windows that hold
it, so that sums have one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, element_strides, first_element
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.launch import (
    COLUMNS,
    POOL_GROUP,
    POOL_ROWS,
    THREADS,
    UNROLL,
    Arrays,
    Kernels,
    Rows,
    check_index,
    common_layout,
    operands,
    wide,
)
from vdnn.runtime.backends.cuda.pool_tiles import FIXED, PIXELS, Pooled, aligned, cut, inverse, pixel_step, ways

MAXIMUM, AVERAGE, AVERAGE_INSIDE = range(3)
"""enum Mode of pool.cu."""
NOTHING = contiguous(0, (1,))
"""In place of an operand that the op has not."""
FORWARD, BACKWARD = ("x", "y", "indices"), ("dx", "dy", "x", "y", "indices")
"""Arguments, the images or their gradient first."""
MEAN_BYTES = 16384
"""Of planes that a block of pool_planes_mean takes at most."""


def pool_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = maximum or average over each window; indices, if the op has them, the places of the maxima."""
    found, by_pixels = _operands(op, arrays, kernels.dtype, FORWARD)
    x, y, indices = found["x"], found["y"], found.get("indices", NOTHING)
    pooled = _pooled(op, found, by_pixels)
    if pooled is not None:
        _launch(op, pooled, _mode(op), kernels, stream)
    elif _is_global_average(op, x) and by_pixels and _by_groups(x, y):
        groups = x.shape[1] // wide(x)
        across = min(groups, COLUMNS)
        args = [*_steps(x, y), prod(x.shape[2:]), groups, across]
        kernels.launch("pool_pixels_mean", x.shape[0] * -(-groups // across), args, stream)
    elif _is_global_average(op, x) and not by_pixels and x.image_size // x.shape[1] * x.itemsize <= MEAN_BYTES:
        hw, planes = prod(x.shape[2:]), x.shape[1]
        group = min(planes, THREADS, MEAN_BYTES // (hw * x.itemsize))
        args = [*_places(x, y), hw, planes, group]
        kernels.launch("pool_planes_mean", x.shape[0] * -(-planes // group), args, stream)
    elif by_pixels:
        groups, args = _pixel_args(op, x, y, [x, y, indices])
        kernels.launch("pool_pixels_forward", _pixel_blocks(y, groups), [*args, _mode(op)], stream)
    else:
        inputs, outputs = Rows.images(x), Rows.images(y)
        chunks = outputs.chunks(THREADS)
        args = [*_places(x, y, indices), *_windows(op, x, y), outputs.inner, chunks, _mode(op)]
        kernels.launch("pool_forward", inputs.count * chunks, args, stream)


def pool_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy at the first largest pixel of each window in row order, or its share of an average's dy.

    Added to dx if op accumulates it. For mode "max": x and y of forward; or its indices, and y where ReLUs below leave
    their mask to this op: then dy counts as 0 where y <= 0.
    """
    found, by_pixels = _operands(op, arrays, kernels.dtype, BACKWARD)
    dy, dx, adds = found["dy"], found["dx"], bool(op.accumulate)
    x, y, indices = (found.get(name, NOTHING) for name in ("x", "y", "indices"))
    x = x if indices is NOTHING else NOTHING
    pooled = _pooled(op, found, by_pixels)
    if pooled is not None:
        _launch(op, pooled, adds, kernels, stream)
    elif by_pixels and _is_global_average(op, dx) and _by_groups(dy, dx):
        hw, n, groups = prod(dx.shape[2:]), dx.shape[0], dx.shape[1] // wide(dx)
        chunks = -(-hw // UNROLL)
        threads = check_index(n * chunks * groups, "groups of channels of a batch")
        args = [*_steps(dy, dx), hw, n, groups, chunks, inverse(groups), inverse(chunks), adds]
        kernels.launch("pool_pixels_spread", -(-threads // THREADS), args, stream)
    elif by_pixels:
        groups, args = _pixel_args(op, dx, dy, [x, y, indices, dy, dx])
        kernels.launch("pool_pixels_backward", _pixel_blocks(dx, groups), [*args, _mode(op), adds], stream)
    elif _is_global_average(op, dx):
        rows = Rows.images(dx)
        hw = prod(dx.shape[2:])
        args = [*_places(dy, dx), hw, inverse(hw), *rows.args, adds]
        kernels.launch("pool_spread", rows.blocks, args, stream)
    else:
        _gather(op, [x, y, indices, dy, dx], kernels, stream)


def pool_candidates(op: Op, program: Program) -> tuple[str, ...]:
    """Labels of the ways in which this op can be computed, that for a shape that was not measured first; empty if there
    is one way."""
    names = {**op.reads, **op.writes}
    arrays = {argument: _unplaced(program, name) for argument, name in names.items()}
    given = FORWARD if op.kind == "pool.forward" else BACKWARD
    found, by_pixels = _operands(op, arrays, arrays[given[0]].dtype, given)
    pooled = _pooled(op, found, by_pixels)
    return () if pooled is None else tuple(ways(pooled))


def _unplaced(program: Program, name: str) -> DeviceArray:
    """The tensor as it would lie in storage that begins at address 0."""
    spec = program.tensors[name]
    root = program.tensors[spec.storage]
    start = DTYPE_BYTES[spec.dtype] * first_element(spec, root)
    return DeviceArray(start, spec.shape, element_strides(spec, root), spec.dtype, spec.nbytes, spec.layout)


def _operands(op: Op, arrays: Arrays, dtype: str, given: Sequence[str]) -> tuple[dict[str, DeviceArray], bool]:
    """Those of FORWARD or BACKWARD that are there, in NCHW or in NHWC, and whether in NHWC; images of one pixel are in
    either."""
    names = [name for name in given if name in arrays]
    found = {name: operands(op, arrays, name, dtype="uint8" if name == "indices" else dtype)[0] for name in names}
    pixels = found[given[0]]
    if pixels.is_images_last:
        common_layout(op, *found.values())
        found = {name: array.channel_images() for name, array in found.items()}
    elif pixels.is_channels_last:
        common_layout(op, *(array for array in found.values() if array.shape[2:] != (1, 1)))
    else:
        common_layout(op, *found.values())
    by_pixels = any(array.is_channels_last for array in found.values())
    if not by_pixels:
        for array in found.values():
            check_index(array.image_size, "numbers of one image")
    return found, by_pixels


def _pooled(op: Op, found: Mapping[str, DeviceArray], by_pixels: bool) -> Pooled | None:
    """The op, if it has square windows of which there are several in an image; None if no way of `ways` has them."""
    pairs = [tuple(op.attrs[key]) for key in ("kernel", "stride", "padding")]
    is_forward = "dx" not in found
    pixels = found["x" if is_forward else "dx"]
    if any(a != b for a, b in pairs) or _is_global_average(op, pixels):
        return None
    outputs, mask = found["y" if is_forward else "dy"], None if is_forward else found.get("y")
    size, step, pad = (pair[0] for pair in pairs)
    is_maximum = _mode(op) == MAXIMUM
    pooled = Pooled(pixels, outputs, found.get("indices"), mask, size, step, pad, is_maximum, not is_forward, by_pixels)
    return pooled if ways(pooled) else None


def _launch(op: Op, pooled: Pooled, last: int, kernels: Kernels, stream: Any) -> None:
    """In the way that the op is told, or the first if it is told none of those it has."""
    found = ways(pooled)
    launch = found.get(op.attrs.get("algorithm", ""), next(iter(found.values())))()
    args = launch.args if launch.kernel.startswith("pool_tile_") and not pooled.is_backward else [*launch.args, last]
    kernels.launch(launch.kernel, check_index(launch.blocks, "blocks"), args, stream)


def _gather(op: Op, arrays: list[DeviceArray], kernels: Kernels, stream: Any) -> None:
    """Backward in NCHW from x, y, indices, dy to dx, the last of `arrays`."""
    x, y, indices, dy, dx = arrays
    rows, adds = Rows.images(dx), bool(op.accumulate)
    fixed = _fixed(op) if indices is NOTHING else None
    if fixed is None:
        chunks = rows.chunks(THREADS)
        args = [*_places(*arrays), *_windows(op, dx, dy), rows.inner, chunks, _mode(op), adds]
        kernels.launch("pool_backward", rows.count * chunks, args, stream)
        return
    flags = aligned([a for a in (x, dx) if a is not NOTHING], [a for a in (y, dy) if a is not NOTHING])
    columns = int(op.attrs["stride"][0]) * (POOL_GROUP if flags & PIXELS else 1)
    blocks, chunks = cut(dx, POOL_ROWS, columns)
    args = [*_places(x, y, dy, dx), *dx.shape[2:], *dy.shape[2:], blocks, chunks, flags, _mode(op), adds]
    kernels.launch(f"pool_backward_{fixed}", rows.count * chunks, args, stream)


def _fixed(op: Op) -> str | None:
    """What the names of the kernels in pool_fixed.cu for this op's windows end in; None if there are none."""
    pairs = [tuple(op.attrs[key]) for key in ("kernel", "stride", "padding")]
    sizes = tuple(pair[0] for pair in pairs)
    return "_".join(map(str, sizes)) if sizes in FIXED and all(a == b for a, b in pairs) else None


def _pixel_args(op: Op, x: DeviceArray, y: DeviceArray, arrays: list[DeviceArray]) -> tuple[int, list[int]]:
    """Threads for the channels of a pixel, and the arguments up to `width` of the kernels in pool_pixels.cu.

    x: the images or their gradient; y: the outputs or theirs; arrays: what the kernel takes, in order.
    """
    given = [array for array in arrays if array is not NOTHING]
    n, channels = x.shape[:2]
    width = wide(*given) if _by_groups(*given) else 1
    return channels // width, [*_steps(*arrays), *_windows(op, x, y), n, channels, width]


def _by_groups(*arrays: DeviceArray) -> bool:
    """Whether the channels of every pixel can be loaded `wide` at once."""
    width = wide(*arrays)
    whole = arrays[0].shape[1] % width == 0
    return whole and all(a.ptr % (width * a.itemsize) == 0 and pixel_step(a) % width == 0 for a in arrays)


def _steps(*arrays: DeviceArray) -> list[int]:
    """Address and elements between pixels of each, as the kernels for NHWC take them."""
    return [value for a in arrays for value in (a.ptr, 0 if a is NOTHING else pixel_step(a))]


def _pixel_blocks(array: DeviceArray, groups: int) -> int:
    n, _, height, width = array.shape
    return -(-check_index(n * height * width * groups, "groups of channels of a batch") // THREADS)


def _places(*arrays: DeviceArray) -> list[int]:
    """Address and elements between images of each, as the kernels for NCHW take them."""
    return [value for array in arrays for value in (array.ptr, array.image_stride)]


def _is_global_average(op: Op, x: DeviceArray) -> bool:
    return _mode(op) != MAXIMUM and tuple(op.attrs["kernel"]) == x.shape[2:] and not any(op.attrs["padding"])


def _windows(op: Op, x: DeviceArray, y: DeviceArray) -> list[int]:
    """struct Windows of pool.cu."""
    return [*x.shape[2:], *y.shape[2:], *op.attrs["kernel"], *op.attrs["stride"], *op.attrs["padding"]]


def _mode(op: Op) -> int:
    if op.attrs["mode"] == "max":
        return MAXIMUM
    return AVERAGE if op.attrs["count_include_pad"] else AVERAGE_INSIDE
