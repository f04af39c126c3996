"""How a tensor becomes arguments of a kernel: checks, rows, alignment, and the grid.

x, y = rows_of(op, arrays, "x", "y")       # batches in NHWC as (N * H * W, C), in CHWN as one image
rows = Rows.of(x, y)                       # one long row if no tensor has gaps, else a row an image or pixel
kernels.launch("copy_rows", rows.blocks, [x.ptr, rows.stride(x), y.ptr, rows.stride(y), *rows.args, 0], stream)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.source import constants, source

Arrays = Mapping[str, DeviceArray]

_CONSTANTS = constants(source())
THREADS, UNROLL, LANES, COLUMNS = (_CONSTANTS[name] for name in ("THREADS", "UNROLL", "LANES", "COLUMNS"))
POOL_GROUP, POOL_ROWS = (_CONSTANTS[name] for name in ("POOL_GROUP", "POOL_ROWS"))
WIDE_BYTES = 16
"""Of a load or store of a thread, where alignment allows it."""
INDEX_LIMIT = 2**31
"""Numbers of one image, or of one channel of a batch, must be fewer."""


class Kernels(Protocol):
    """What runs kernels by name: `KernelSet` on a GPU."""

    @property
    def dtype(self) -> str:
        """Of activations and their gradients, for which the kernels are compiled."""

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
        """Queue kernel `name` in `blocks` blocks of THREADS threads; args in the order of its signature."""


def operands(op: Op, arrays: Arrays, *names: str, dtype: str = "float32") -> list[DeviceArray]:
    """The arrays of these arguments; VdnnError if one has another dtype, or gaps within its images or pixels.

    dtype: kernels.dtype for activations and their gradients; parameters, their gradients and sums are float32.
    """
    found = [arrays[name] for name in names]
    for name, array in zip(names, found, strict=True):
        if array.is_images_last:
            whole = array.is_whole_chwn
        else:
            whole = array.has_whole_pixels if array.is_channels_last else array.has_whole_images
        if array.dtype != dtype or not whole:
            got = f"{array.dtype} {array.layout} with strides {array.strides} for shape {array.shape}"
            raise VdnnError(
                f"op '{op.name}' (layer '{op.layer}'), tensor '{name}': expected {dtype} whose images lie without gaps "
                f"in NCHW order, whose pixels do in NHWC order, or without any in CHWN order, got {got}; the cuda "
                "backend has no other"
            )
    return found


def rows_of(op: Op, arrays: Arrays, *names: str, dtype: str = "float32") -> list[DeviceArray]:
    """`operands`, batches of one layout. Those in NHWC become rows of channels, (N * H * W, C): a pixel is an image of
    one. Those in CHWN become one image each, (1, C, H * W * N, 1)."""
    found = operands(op, arrays, *names, dtype=dtype)
    layout = common_layout(op, *found)
    if layout == "CHWN":
        return [array.one_image() for array in found]
    return [array.pixels() for array in found] if layout == "NHWC" else found


def common_layout(op: Op, *tensors: DeviceArray) -> str:
    """The layout that these batches lie in, one for all of them, else VdnnError.

    Vectors, and images of one pixel in NHWC, lie in NCHW.
    """
    layouts = [layout_of(tensor) for tensor in tensors]
    if len(set(layouts)) > 1:
        got = " and ".join(dict.fromkeys(layouts))
        raise VdnnError(f"op '{op.name}' (layer '{op.layer}'): expected batches of one layout, got {got}")
    return layouts[0]


def layout_of(tensor: DeviceArray) -> str:
    """In which layout its numbers lie, NCHW where it is one of several."""
    if tensor.is_images_last:
        return "CHWN"
    return "NHWC" if tensor.is_channels_last else "NCHW"


def all_channels_last(op: Op, *tensors: DeviceArray) -> bool:
    """Whether these batches are all in NHWC; VdnnError if only some are."""
    return common_layout(op, *tensors) == "NHWC"


def wide(*tensors: DeviceArray) -> int:
    """Numbers that a thread loads at once where it can: WIDE of real.cuh, 16 bytes of the largest type among these."""
    return WIDE_BYTES // max(tensor.itemsize for tensor in tensors)


def pixel_width(*tensors: DeviceArray, width: int | None = None) -> int:
    """How many channels of a pixel a thread loads at once, `width` (`wide` if None) or 1, of batches in NHWC of as many
    channels."""
    width = width or wide(*tensors)
    aligned = all(t.ptr % (width * t.itemsize) == 0 and t.pixel_stride % width == 0 for t in tensors)
    return width if aligned and tensors[0].shape[1] % width == 0 else 1


def by_wide(*tensors: DeviceArray, rows: int) -> bool:
    """Whether every one of `rows` images of each tensor begins where `wide` numbers can be loaded at once."""
    return by(wide(*tensors), *tensors, rows=rows)


def by(width: int, *tensors: DeviceArray, rows: int) -> bool:
    """Whether every one of `rows` images of each tensor begins where `width` numbers can be loaded at once."""
    return all(t.ptr % (width * t.itemsize) == 0 and (rows == 1 or t.image_stride % width == 0) for t in tensors)


@dataclass(frozen=True, slots=True)
class Rows:
    """The numbers of a few tensors of equal size as rows, each cut into chunks of one block.

    Attributes:
        count: rows: the images, or pixels, or 1.
        inner: numbers of a row.
        width: numbers that a thread loads at once, `wide` or 1.
        short: whether several rows are one block's.
    """

    count: int
    inner: int
    width: int
    short: bool = False

    @classmethod
    def of(cls, *tensors: DeviceArray) -> Rows:
        """One row if no tensor has gaps between its images, else a row an image."""
        if all(tensor.is_contiguous for tensor in tensors):
            return cls(1, tensors[0].size, wide(*tensors) if by_wide(*tensors, rows=1) else 1)
        return cls.images(*tensors)

    @classmethod
    def images(cls, *tensors: DeviceArray) -> Rows:
        """A row an image, of fewer than INDEX_LIMIT numbers each; rows of vectors and of pixels are short."""
        count, inner = tensors[0].shape[0], tensors[0].image_size
        check_index(inner, "numbers of one image")
        check_index(count, "pixels of a batch")
        short = all(len(tensor.shape) == 2 for tensor in tensors)
        width = wide(*tensors)
        aligned = by_wide(*tensors, rows=count) and not (short and inner % width)
        return cls(count, inner, width if aligned else 1, short)

    @classmethod
    def channel(cls, hw: int, *tensors: DeviceArray) -> Rows:
        """A row an image, of the `hw` numbers of one channel of it, whichever that is."""
        count = tensors[0].shape[0]
        width = wide(*tensors)
        return cls(count, hw, width if hw % width == 0 and by_wide(*tensors, rows=count) else 1)

    def chunks(self, each: int | None = None) -> int:
        """Blocks a row, of `each` numbers (THREADS * UNROLL * width if None)."""
        return -(-self.inner // (each or THREADS * UNROLL * self.width))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        if self.short:
            threads = -(-self.count // UNROLL) * (self.inner // self.width)
            return -(-check_index(threads, "threads of a kernel") // THREADS)
        return self.count * self.chunks()

    @property
    def args(self) -> tuple[int, int, int]:
        """inner, chunks, width: what kernels take; of short rows inner, how many, and -width."""
        return (self.inner, self.count, -self.width) if self.short else (self.inner, self.chunks(), self.width)


@dataclass(frozen=True, slots=True)
class Channels:
    """The numbers of each channel of a batch, shared out among `splits` blocks a channel, and added up in two steps.

    Where a channel has one number an image, as in rows of pixels, a block has COLUMNS * width channels at most. The cut
    depends on shapes only, never on the GPU or a limit: sums are the same bits everywhere.

    Attributes:
        channels: C.
        hw: numbers of a channel in one image.
        count: N * hw.
        splits, share: blocks a channel, and numbers that each of them sums.
        width: numbers that a thread loads at once, `wide` or 1.
    """

    channels: int
    hw: int
    count: int
    splits: int
    share: int
    width: int

    TARGET_BLOCKS = 2048
    LEAST_SHARE = 4096
    COLUMN_BLOCKS = 256, 1024
    """Where channels are columns: few blocks, which may have little to do each, and as many as are wanted."""
    BLOCK_NUMBERS = 2**13, 2**14, 2**19
    """Of such a block: at least if there are few, at least, and at most, which is a few hundred to a float32 sum."""

    @classmethod
    def of(cls, *tensors: DeviceArray) -> Channels:
        """Of tensors (N, C, ...) of equal size; C and hw are the first one's."""
        n, c = tensors[0].shape[:2]
        hw = tensors[0].image_size // c
        width = wide(*tensors)
        splits, share = cls.split(n, c, hw, width)
        aligned = (c if hw == 1 else hw) % width == 0 and by_wide(*tensors, rows=n)
        return cls(c, hw, n * hw, splits, share, width if aligned else 1)

    @classmethod
    def split(cls, n: int, channels: int, hw: int, width: int = 4) -> tuple[int, int]:
        """Blocks a channel, enough to fill a GPU, and their share of its `n` * `hw` numbers, which may be loaded
        `width` at once: with more at once there are never more blocks."""
        count = check_index(n * hw, "numbers of one channel of a batch")
        if hw == 1:
            numbers, (least, enough, most) = count * min(channels, 8 * COLUMNS), cls.BLOCK_NUMBERS
            few, many = (-(-blocks // -(-channels // (4 * COLUMNS))) for blocks in cls.COLUMN_BLOCKS)
            splits = min(many, max(numbers // enough, min(few, numbers // least)))
            splits = max(1, splits, -(-numbers // most))
            share = -(-count // splits)
        else:
            splits = max(1, min(-(-cls.TARGET_BLOCKS // channels), count // cls.LEAST_SHARE))
            share = -(-count // (width * splits)) * width
        return -(-count // share), share

    @property
    def blocks(self) -> int:
        """Blocks of the grid of the first step."""
        return self.splits * (-(-self.channels // (COLUMNS * self.width)) if self.hw == 1 else self.channels)

    @property
    def args(self) -> tuple[int, int, int, int, int, int]:
        """channels, hw, count, splits, share, width: what the kernels of the first step take."""
        width = -self.width if self.hw == 1 else self.width
        return self.channels, self.hw, self.count, self.splits, self.share, width

    @property
    def partial_bytes(self) -> int:
        """Bytes of the sums between the two steps: two float64 a channel and split."""
        return 16 * self.channels * self.splits


def join_blocks(channels: int) -> int:
    """Blocks of a kernel that joins the sums of `channels` channels."""
    return -(-channels * LANES // THREADS)


def workspace(op: Op, arrays: Arrays, nbytes: int) -> int:
    """Address of the op's workspace; VdnnError if it is not there or has fewer than `nbytes` bytes."""
    given = arrays.get("workspace")
    if given is None or given.nbytes < nbytes:
        raise VdnnError(
            f"op '{op.name}' (layer '{op.layer}'), tensor 'workspace': expected {nbytes} bytes or more, "
            f"got {0 if given is None else given.nbytes}; plan it with kernels.workspace_bytes"
        )
    return given.ptr


def check_index(count: int, what: str) -> int:
    """`count`, if 31 bits hold it; else VdnnError."""
    if count >= INDEX_LIMIT:
        raise VdnnError(f"expected fewer than {INDEX_LIMIT} {what}, got {count}; use a smaller batch or image")
    return count
