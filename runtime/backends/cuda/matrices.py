"""A transform between two layouts as transpositions: y[image][j][i] = x[image][i][j].

    matrix = Matrix.of(x, y)          # x (64, 3, 32, 32) in NCHW, y in CHWN
    matrix.rows, matrix.columns       # 64, 3072; None for the matrix if both lie in one order
    matrix.axes                       # the same as y[b][p][a] = x[a][p][b], with pixels apart from channels

Between NCHW and CHWN one matrix is N x (C * H * W); between NCHW and NHWC each image is one, C x (H * W); between NHWC
and CHWN it is N x (H * W * C), whose rows CHWN has in its own order, or one N x C a pixel where NHWC has gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.launch import WIDE_BYTES, check_index, layout_of

ORDERS = ("NCHW", "NHWC", "CHWN")


@dataclass(frozen=True, slots=True)
class Side:
    """Where matrices lie: address, elements from one to the next, and from row to row."""

    ptr: int
    stride: int
    row: int

    def by_pieces(self, width: int, nbytes: int, images: int) -> bool:
        """Whether every row begins where `width` numbers of `nbytes` together can be loaded at once."""
        return self.ptr % nbytes == 0 and self.row % width == 0 and (images == 1 or self.stride % width == 0)


@dataclass(frozen=True, slots=True)
class Axes:
    """y[b][p][a] = x[a][p][b]: sizes, and elements from one to the next of those that are not contiguous on a side."""

    a: int
    p: int
    b: int
    x_a: int
    x_p: int
    y_b: int
    y_p: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """`images` matrices of x, rows x columns, and the other way round in y.

    Attributes:
        channels: C where rows, or columns, are numbers of an image with its channels fastest, which one side has in the
            order of CHWN; else 0.
        pixels: H * W then.
        permuted: which side that is.
    """

    x: Side
    y: Side
    images: int
    rows: int
    columns: int
    itemsize: int
    channels: int = 0
    pixels: int = 0
    permuted: str = ""

    @classmethod
    def of(cls, x: DeviceArray, y: DeviceArray) -> Matrix | None:
        """Of two batches of one shape, one of which may be vectors; None if both lie in one order."""
        x, y = plain(x), plain(y)
        places = [ORDERS.index(layout_of(array)) for array in (x, y)]
        if places[0] == places[1]:
            return None
        return cls._forward(x, y) if places[0] < places[1] else cls._forward(y, x)._turned()

    @classmethod
    def _forward(cls, x: DeviceArray, y: DeviceArray) -> Matrix:
        """From the one that comes first in ORDERS."""
        n, c, h, w = (x if len(x.shape) == 4 else y).shape
        hw, chw = h * w, check_index(c * h * w, "numbers of one image")
        if not y.is_images_last:
            sides = Side(x.ptr, x.image_stride, hw), Side(y.ptr, hw * y.pixel_stride, y.pixel_stride)
            return cls(*sides, n, c, hw, x.itemsize)
        if not x.is_channels_last:
            return cls(Side(x.ptr, 0, x.image_stride), Side(y.ptr, 0, n), 1, n, chw, x.itemsize)
        if x.pixel_stride == c:
            return cls(Side(x.ptr, 0, chw), Side(y.ptr, 0, n), 1, n, chw, x.itemsize, c, hw, "y")
        sides = Side(x.ptr, x.pixel_stride, hw * x.pixel_stride), Side(y.ptr, n, hw * n)
        return cls(*sides, hw, n, c, x.itemsize)

    def _turned(self) -> Matrix:
        permuted = {"x": "y", "y": "x", "": ""}[self.permuted]
        return replace(self, x=self.y, y=self.x, rows=self.columns, columns=self.rows, permuted=permuted)

    @property
    def size(self) -> int:
        """Numbers of one matrix."""
        return self.rows * self.columns

    @property
    def wide(self) -> int:
        """Numbers of 16 bytes."""
        return WIDE_BYTES // self.itemsize

    @property
    def x_wide(self) -> bool:
        """Whether rows of x can be read by 16 bytes."""
        return self.columns % self.wide == 0 and self.x.by_pieces(self.wide, WIDE_BYTES, self.images)

    @property
    def y_wide(self) -> bool:
        """Whether rows of y can be written by 16 bytes."""
        return self.rows % self.wide == 0 and self.y.by_pieces(self.wide, WIDE_BYTES, self.images)

    @property
    def follow_each_other(self) -> bool:
        """Whether neither side has gaps, within a matrix or between them, or rows in another order."""
        rows = self.x.row == self.columns and self.y.row == self.rows and not self.permuted
        return rows and (self.images == 1 or self.x.stride == self.y.stride == self.size)

    @property
    def axes(self) -> Axes:
        """With pixels for `p` where one side is permuted, else images."""
        x, y, channels, pixels = self.x.row, self.y.row, self.channels, self.pixels
        if self.permuted == "y":
            return Axes(self.rows, pixels, channels, x, channels, pixels * y, y)
        if self.permuted == "x":
            return Axes(channels, pixels, self.columns, pixels * x, x, y, channels)
        return Axes(self.rows, self.images, self.columns, x, self.x.stride, y, self.y.stride)

    @property
    def args(self) -> list[int]:
        """What kernels of any shape take first."""
        channels = [self.channels if self.permuted == side else 0 for side in ("x", "y")]
        ends = [value for side in (self.x, self.y) for value in (side.ptr, side.stride, side.row)]
        return [*ends, self.rows, self.columns, *channels, self.pixels]


def plain(array: DeviceArray) -> DeviceArray:
    """The same, but for one image in CHWN, which lies as in NCHW."""
    if array.is_images_last and array.shape[0] == 1:
        return contiguous(array.ptr, array.shape, array.dtype)
    return array
