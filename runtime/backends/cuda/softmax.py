"""Softmax on the GPU, by rows or by columns, and how many blocks share a row; see softmax.cu, softmax_parts.cu and
softmax_columns.cu.

    softmax_forward(op, {"x": x, "y": y, "workspace": workspace}, kernels, stream)
    launch_rows(op, arrays, x, Head(probs=probs), kernels, stream)

x, y (N, K) or (N, K, 1, 1), activations. Rows may have gaps between them, where they are channels of a larger tensor.
Columns, strides (1, N), are scores that lie as [K][N].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.debug import fill
from vdnn.runtime.backends.cuda.launch import THREADS, WIDE_BYTES, Arrays, Kernels, by, operands, wide, workspace
from vdnn.runtime.backends.cuda.source import constants, source

_CONSTANTS = constants(source())
SHORT_LANES, WARP = _CONSTANTS["SHORT_LANES"], _CONSTANTS["WARP"]
SHORT, MIDDLE = SHORT_LANES * _CONSTANTS["SHORT_HELD"], WARP * _CONSTANTS["WARP_HELD"]
ROW = THREADS * _CONSTANTS["BLOCK_HELD"]
PART, LOADS, LONG_LOADS = THREADS * _CONSTANTS["PART_HELD"], _CONSTANTS["PART_LOADS"], _CONSTANTS["LONG_LOADS"]
"""Most scores of a row that SHORT_LANES threads take, a warp, a block of softmax_rows, and a block of the others if it
loads one by one; loads of 16 bytes of a thread there."""
AHEAD = 192
"""Parts by which finding is ahead of storing, beside those of a row. A GPU has some 500 blocks at once; the more, the
less a block waits, and the more of what lies between must stay in the cache: 32 KiB a part."""
COLUMN_IMAGES = _CONSTANTS["COLUMN_IMAGES"]
COLUMN_BLOCKS, COLUMN_SPLITS, COLUMN_SHARE = 1024, 512, 32
"""Blocks that fill a GPU, most shares of a column, and fewest categories of one."""
PARTIAL_BYTES, WHOLE_BYTES, COUNT_BYTES = 16, 8, 4
"""Of what a block finds, of what is known of a row, and of a counter."""


@dataclass(frozen=True, slots=True)
class Head:
    """What becomes of a row beside or in place of its softmax: addresses, 0 of what is not wanted.

    Args:
        probs: float32 probabilities, (N, K). y: activations, the probabilities or, with labels, their gradient.
        smoothing, weight: of the loss. accumulate: whether y is added to.
    """

    labels: int = 0
    step: int = 0
    probs: int = 0
    loss: int = 0
    correct: int = 0
    y: DeviceArray | None = None
    smoothing: float = 0.0
    weight: float = 0.0
    accumulate: bool = False


def softmax_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """y = softmax(x), both (N, K) by rows, or both by columns."""
    x, y = arrays["x"], arrays["y"]
    if _by_columns(x) and _by_columns(y):
        _columns(op, arrays, x, y, kernels, stream)
        return
    x, y = operands(op, arrays, "x", "y", dtype=kernels.dtype)
    launch_rows(op, arrays, x, Head(y=y), kernels, stream)


def _by_columns(x: DeviceArray) -> bool:
    """Whether scores (N, K) lie as [K][N], and not as rows too."""
    return len(x.shape) == 2 and x.strides == (1, x.shape[0]) and min(x.shape) > 1


def launch_rows(op: Op, arrays: Arrays, x: DeviceArray, head: Head, kernels: Kernels, stream: Any) -> None:
    """Queue softmax of the rows of `x`, and of `head` what is wanted; arrays has the workspace."""
    if x.is_images_last:
        raise VdnnError(
            f"op '{op.name}' (layer '{op.layer}'), tensor 'x': expected vectors in the order of NCHW, got images in "
            "CHWN; flatten them first"
        )
    n, k = x.shape[0], x.image_size
    moved = [x] if head.y is None else [x, head.y]
    width = wide(*moved)
    aligned = k % width == 0 and by(width, *moved, rows=n) and head.probs % WIDE_BYTES == 0
    width = width if aligned else 1
    y, y_stride = (0, 0) if head.y is None else (head.y.ptr, head.y.image_stride)
    places = [head.labels, head.step, head.probs, head.loss, head.correct, y, y_stride]
    rule = [head.smoothing, head.smoothing / k, 1 - head.smoothing, head.weight, head.accumulate]
    args = [x.ptr, x.image_stride, *places, n, k, *rule]
    if k <= ROW:
        lanes = SHORT_LANES if k <= SHORT else WARP if k <= MIDDLE else THREADS
        kernels.launch("softmax_rows", -(-n * lanes // THREADS), [*args, lanes, width], stream)
        return
    most = PART if width == 1 else THREADS * LOADS * width
    args = args if head.labels else [x.ptr, x.image_stride, y, y_stride, n, k]
    if k <= most:
        kernels.launch("softmax_loss_block" if head.labels else "softmax_block", n, [*args, width], stream)
    elif width > 1 and k <= THREADS * LONG_LOADS * width and not head.labels:
        kernels.launch("softmax_long_block", n, args, stream)
    else:
        splits, part = _parts(k, most)
        whole = workspace(op, arrays, _rows_bytes(n, k))
        arrived = whole + WHOLE_BYTES * n
        partials = whole + _counts_bytes(n)
        fill(kernels, whole, _counts_bytes(n), 0, stream)
        ahead = min(splits + AHEAD, n * splits)
        args += [splits, ahead, part, whole, arrived, arrived + COUNT_BYTES * n, partials, width]
        name = "softmax_loss_parts" if head.labels else "softmax_parts"
        kernels.launch(name, n * splits + ahead, args, stream)


def _parts(k: int, most: int) -> tuple[int, int]:
    """Parts of a long row, of `most` scores at most, and scores of each but maybe the last; a multiple of what a thread
    loads at once."""
    splits = -(-k // most)
    part = -(-k // (splits * WIDE_BYTES)) * WIDE_BYTES
    return -(-k // part), part


def _rows_bytes(n: int, k: int) -> int:
    """Bytes in which the blocks of a row tell each other what they found, at most; 0 where a row has one block."""
    return 0 if k <= PART else _counts_bytes(n) + PARTIAL_BYTES * n * _parts(k, PART)[0]


def _counts_bytes(n: int) -> int:
    """Bytes of what is known of rows, of a counter of each, and of one of all blocks; a multiple of what a thread
    stores at once."""
    return -(-((WHOLE_BYTES + COUNT_BYTES) * n + COUNT_BYTES) // WIDE_BYTES) * WIDE_BYTES


def rows_bytes(shape: Shape, layout: str) -> int:
    """Workspace of softmax_loss.forward and softmax_loss.train for x of `shape`."""
    return _rows_bytes(shape[0], prod(shape[1:]))


def softmax_bytes(shape: Shape, layout: str) -> int:
    """Workspace of softmax.forward for x of `shape`, by rows or by columns."""
    n, k = shape[0], prod(shape[1:])
    return max(_rows_bytes(n, k), _columns_bytes(n, k))


def _columns(op: Op, arrays: Arrays, x: DeviceArray, y: DeviceArray, kernels: Kernels, stream: Any) -> None:
    n, k = x.shape
    if not x.dtype == y.dtype == kernels.dtype:
        raise VdnnError(
            f"op '{op.name}' (layer '{op.layer}'): expected x and y of {kernels.dtype}, got {x.dtype} and {y.dtype}; "
            "choose the precision for which the kernels are compiled"
        )
    splits, share = _shares(n, k)
    totals = workspace(op, arrays, _columns_bytes(n, k))
    mosts, tiles = totals + 8 * splits * n, -(-n // COLUMN_IMAGES)
    kernels.launch("softmax_columns_sum", tiles * splits, [x.ptr, n, k, tiles, share, totals, mosts], stream)
    args = [x.ptr, y.ptr, n, k, tiles, share, splits, totals, mosts]
    kernels.launch("softmax_columns", tiles * splits, args, stream)


def _shares(n: int, k: int) -> tuple[int, int]:
    """Shares of a column, and categories of each but maybe the last: by shapes alone, so that sums are equal bits."""
    wanted = min(COLUMN_SPLITS, -(-COLUMN_BLOCKS // -(-n // COLUMN_IMAGES)))
    share = max(COLUMN_SHARE, -(-k // wanted))
    return -(-k // share), share


def _columns_bytes(n: int, k: int) -> int:
    """Bytes of a sum (float64) and a largest score (float32) of every image and share."""
    return 12 * n * _shares(n, k)[0]
