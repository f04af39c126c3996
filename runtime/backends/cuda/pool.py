"""Pooling on the GPU; see vdnn.layers.pool, pool.cu, pool_fixed.cu for the usual windows, and pool_pixels.cu and
pool_pixels_fixed.cu for NHWC.

    pool_forward(op, {"x": x, "y": y}, kernels, stream)

x, dx (N, C, H, W), y, dy (N, C, P, Q), activations, any of them channels of a larger tensor; indices (N, C, P, Q)
uint8; all NCHW or all NHWC. op.attrs: mode "max" or "average", kernel, stride, padding (pairs, vertical first),
count_include_pad. Backward gathers: each pixel looks up the windows that hold it, so that sums have one order.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.launch import (
    POOL_GROUP,
    POOL_ROWS,
    THREADS,
    Arrays,
    Kernels,
    Rows,
    all_channels_last,
    by,
    check_index,
    operands,
    wide,
)

MAXIMUM, AVERAGE, AVERAGE_INSIDE = range(3)
"""enum Mode of pool.cu."""
PIXELS, OUTPUTS = 1, 2
"""enum Aligned of pool_fixed.cu."""
FIXED = frozenset(((2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 1, 1)))
"""Size, stride and padding of the square windows of pool_fixed.cu."""
NOTHING = contiguous(0, (1,))
"""In place of an operand that the op has not."""


def pool_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = maximum or average over each window; indices, if the op has them, the places of the maxima."""
    x, y = operands(op, arrays, "x", "y", dtype=kernels.dtype)
    indices = _optional(op, arrays, "indices", "uint8")
    if _by_pixels(op, x, y, indices):
        if _is_fixed_maximum(op, x, y, indices):
            blocks, args = _strips(op, x, y, [x, y, indices], y, 1)
            kernels.launch(f"pool_pixels_forward_{_fixed(op)}", blocks, args, stream)
            return
        groups, args = _pixel_args(op, x, y, [x, y, indices])
        kernels.launch("pool_pixels_forward", _pixel_blocks(y, groups), [*args, _mode(op)], stream)
        return
    inputs, outputs, fixed = Rows.images(x), Rows.images(y), _fixed(op)
    args = _places(x, y, indices)
    if fixed is None:
        chunks = outputs.chunks(THREADS)
        args += [*_windows(op, x, y), outputs.inner, chunks, _mode(op)]
        kernels.launch("pool_forward", inputs.count * chunks, args, stream)
        return
    aligned = _aligned([x], [y, indices])
    blocks, chunks = _cut(y, 1, _group(aligned))
    args += [*x.shape[2:], *y.shape[2:], blocks, chunks, aligned, _mode(op)]
    kernels.launch(f"pool_forward_{fixed}", inputs.count * chunks, args, stream)


def pool_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = dy at the first largest pixel of each window in row order, or its share of an average's dy.

    Added to dx if op accumulates it. For mode "max": x and y of forward; or its indices, and y where ReLUs below leave
    their mask to this op: then dy counts as 0 where y <= 0.
    """
    dy, dx = operands(op, arrays, "dy", "dx", dtype=kernels.dtype)
    indices, y = _optional(op, arrays, "indices", "uint8"), _optional(op, arrays, "y", kernels.dtype)
    x = operands(op, arrays, "x", dtype=kernels.dtype)[0] if _mode(op) == MAXIMUM and indices is NOTHING else NOTHING
    if _by_pixels(op, x, y, indices, dy, dx):
        if indices is not NOTHING and _is_fixed_maximum(op, dx, y, indices, dy):
            blocks, args = _strips(op, dx, dy, [indices, y, dy, dx], dx, int(op.attrs["stride"][0]))
            kernels.launch(f"pool_pixels_indexed_{_fixed(op)}", blocks, [*args, bool(op.accumulate)], stream)
            return
        groups, args = _pixel_args(op, dx, dy, [x, y, indices, dy, dx])
        args += [_mode(op), bool(op.accumulate)]
        kernels.launch("pool_pixels_backward", _pixel_blocks(dx, groups), args, stream)
        return
    rows, fixed, adds = Rows.images(dx), _fixed(op), bool(op.accumulate)
    if _is_global_average(op, dx):
        args = [*_places(dy, dx), dx.shape[2] * dx.shape[3], *rows.args, adds]
        kernels.launch("pool_spread", rows.blocks, args, stream)
    elif fixed is None:
        chunks = rows.chunks(THREADS)
        args = [*_places(x, y, indices, dy, dx), *_windows(op, dx, dy), rows.inner, chunks, _mode(op), adds]
        kernels.launch("pool_backward", rows.count * chunks, args, stream)
    else:
        aligned, step = _aligned([x, dx], [y, indices, dy]), int(op.attrs["stride"][0])
        indexed = indices is not NOTHING
        tall = 2 * POOL_ROWS if indexed and step == 1 else POOL_ROWS
        blocks, chunks = _cut(dx, tall, step * _group(aligned))
        args = _places(indices if indexed else x, y, dy, dx)
        args += [*dx.shape[2:], *dy.shape[2:], blocks, chunks, aligned]
        args += [adds] if indexed else [_mode(op), adds]
        name = "indexed" if indexed else "backward"
        kernels.launch(f"pool_{name}_{fixed}", rows.count * chunks, args, stream)


def _by_pixels(op: Op, *arrays: DeviceArray) -> bool:
    """Whether these are in NHWC; of images of one pixel, as a global pool gives, that is not to be seen."""
    given = [array for array in arrays if array is not NOTHING]
    if not any(array.is_channels_last for array in given):
        return False
    return all_channels_last(op, *(array for array in given if array.shape[2:] != (1, 1)))


def _is_fixed_maximum(op: Op, *arrays: DeviceArray) -> bool:
    """Whether pool_pixels_fixed.cu has these windows, and every pixel can be loaded 16 bytes at once."""
    given = [array for array in arrays if array is not NOTHING]
    width = wide(*given)
    aligned = given[0].shape[1] % width == 0 and all(_pixels_by(width, array) for array in given)
    return aligned and _mode(op) == MAXIMUM and _fixed(op) is not None


def _strips(
    op: Op, x: DeviceArray, y: DeviceArray, arrays: list[DeviceArray], made: DeviceArray, columns: int
) -> tuple[int, list[int]]:
    """Blocks and arguments of a kernel in pool_pixels_fixed.cu, a thread of which makes rows of `columns` of `made`.

    x: the images or their gradient; y: the outputs or theirs; arrays: what the kernel takes, in order.
    """
    n, channels, height, width = made.shape
    rows, groups = POOL_ROWS * (2 if int(op.attrs["stride"][0]) == 1 else 1), channels // wide(made)
    threads = check_index(n * -(-height // rows) * -(-width // columns) * groups, "groups of channels of a batch")
    args = [value for array in arrays for value in (array.ptr, 0 if array is NOTHING else _pixel_step(array))]
    return -(-threads // THREADS), [*args, *x.shape[2:], *y.shape[2:], n, groups]


def _pixel_args(op: Op, x: DeviceArray, y: DeviceArray, arrays: list[DeviceArray]) -> tuple[int, list[int]]:
    """Threads for the channels of a pixel, and the arguments up to `width` of the kernels in pool_pixels.cu.

    x: the images or their gradient; y: the outputs or theirs; arrays: what the kernel takes, in order.
    """
    given = [array for array in arrays if array is not NOTHING]
    n, channels = x.shape[:2]
    width = wide(*given)
    if channels % width or not all(_pixels_by(width, array) for array in given):
        width = 1
    args = [value for array in arrays for value in (array.ptr, 0 if array is NOTHING else _pixel_step(array))]
    return channels // width, [*args, *_windows(op, x, y), n, channels, width]


def _pixel_step(array: DeviceArray) -> int:
    return array.pixel_stride if array.is_channels_last else array.image_stride


def _pixels_by(width: int, array: DeviceArray) -> bool:
    return array.ptr % (width * array.itemsize) == 0 and _pixel_step(array) % width == 0


def _pixel_blocks(array: DeviceArray, groups: int) -> int:
    n, _, height, width = array.shape
    return -(-check_index(n * height * width * groups, "groups of channels of a batch") // THREADS)


def _places(*arrays: DeviceArray) -> list[int]:
    """Address and elements between images of each, as every kernel takes them."""
    return [value for array in arrays for value in (array.ptr, array.image_stride)]


def _cut(array: DeviceArray, rows: int, columns: int) -> tuple[int, int]:
    """Threads for an image of `array` if each has so many rows and columns of a plane, and blocks for these."""
    _, planes, height, width = array.shape
    threads = planes * -(-height // rows) * -(-width // columns)
    return threads, -(-threads // THREADS)


def _group(aligned: int) -> int:
    """GROUP of pool_fixed.cu."""
    return POOL_GROUP if aligned & PIXELS else 1


def _optional(op: Op, arrays: Arrays, name: str, dtype: str) -> DeviceArray:
    return operands(op, arrays, name, dtype=dtype)[0] if name in arrays else NOTHING


def _fixed(op: Op) -> str | None:
    """What the names of the kernels for this op's windows end in; None if there are none of their own."""
    pairs = [tuple(op.attrs[key]) for key in ("kernel", "stride", "padding")]
    sizes = tuple(pair[0] for pair in pairs)
    return "_".join(map(str, sizes)) if sizes in FIXED and all(a == b for a, b in pairs) else None


def _aligned(pixels: list[DeviceArray], outputs: list[DeviceArray]) -> int:
    """Which rows begin where four numbers can be loaded at once, as bits; outputs only if pixels do."""
    if not _rows_by_fours(pixels):
        return 0
    return PIXELS | (OUTPUTS if _rows_by_fours(outputs) else 0)


def _rows_by_fours(arrays: list[DeviceArray]) -> bool:
    given = (array for array in arrays if array is not NOTHING)
    return all(array.shape[3] % 4 == 0 and by(4, array, rows=array.shape[0]) for array in given)


def _is_global_average(op: Op, x: DeviceArray) -> bool:
    return _mode(op) != MAXIMUM and tuple(op.attrs["kernel"]) == x.shape[2:] and not any(op.attrs["padding"])


def _windows(op: Op, x: DeviceArray, y: DeviceArray) -> list[int]:
    """struct Windows of pool.cu."""
    return [*x.shape[2:], *y.shape[2:], *op.attrs["kernel"], *op.attrs["stride"], *op.attrs["padding"]]


def _mode(op: Op) -> int:
    if op.attrs["mode"] == "max":
        return MAXIMUM
    return AVERAGE if op.attrs["count_include_pad"] else AVERAGE_INSIDE
