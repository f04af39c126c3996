"""Where a tensor lies on the device: an address, a shape, strides and a dtype, and no memory of its own.

x = DeviceArray(slab_ptr + 4096, (64, 3, 28, 28), (2352, 784, 28, 1), "float32", 602112)
x = contiguous(slab_ptr + 4096, (64, 3, 28, 28))      # the same
y = DeviceArray(slab_ptr, (64, 3, 28, 28), (2352, 1, 84, 3), "float32", 602112, "NHWC")
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vdnn.layers.tensor import DTYPE_BYTES, Shape, TensorSpec, element_strides


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A view of device memory.

    Args:
        ptr: address of the first element.
        shape: (N, ...) of a batch, or that of a parameter.
        strides: elements between neighbours of each dimension.
        dtype: a key of vdnn.layers.tensor.DTYPE_BYTES.
        nbytes: bytes of the elements, without those between images.
        layout: which order the strides mean, "NCHW", "NHWC" or "CHWN".
    """

    ptr: int
    shape: Shape
    strides: Shape
    dtype: str
    nbytes: int
    layout: str = "NCHW"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def image_size(self) -> int:
        """Elements of one image: of all dimensions but the first."""
        return prod(self.shape[1:])

    @property
    def image_stride(self) -> int:
        """Elements from one image to the next."""
        return self.strides[0] if self.shape[0] > 1 else self.image_size

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie without gaps in the order of the shape."""
        return self.has_whole_images and self.image_stride == self.image_size

    @property
    def is_channels_last(self) -> bool:
        """Whether this is a batch in NHWC of more than one pixel an image; with one both layouts are the same."""
        return self.layout == "NHWC" and len(self.shape) == 4 and prod(self.shape[2:]) > 1

    @property
    def is_images_last(self) -> bool:
        """Whether this is a batch in CHWN, or filters, whose first dimension is the fastest."""
        return self.layout == "CHWN" and len(self.shape) == 4

    @property
    def is_whole_chwn(self) -> bool:
        """Whether the elements lie without gaps in CHWN order, as all channels of a batch do, or some of them."""
        n, _, h, w = self.shape
        pairs = zip(self.shape, self.strides, (1, h * w * n, w * n, n), strict=True)
        return all(size == 1 or stride == want for size, stride, want in pairs)

    def one_image(self) -> DeviceArray:
        """A batch in CHWN as one image in NCHW, (1, C, H * W * N, 1): a plane holds a channel of all images."""
        n, c, h, w = self.shape
        return contiguous(self.ptr, (1, c, h * w * n, 1), self.dtype)

    def channel_images(self) -> DeviceArray:
        """A batch in CHWN as C images in NHWC of N channels each, (C, N, H, W)."""
        n, c, h, w = self.shape
        return contiguous(self.ptr, (c, n, h, w), self.dtype, "NHWC")

    @property
    def pixel_stride(self) -> int:
        """Elements from one pixel to the next in NHWC: channels, with those of a larger tensor that lie between."""
        return self.strides[3]

    @property
    def has_whole_pixels(self) -> bool:
        """Whether the channels of each pixel lie side by side, and pixels follow each other evenly, in NHWC order."""
        _, c, h, w = self.shape
        step = self.pixel_stride
        pairs = zip(self.shape, self.strides, (h * w * step, 1, w * step, step), strict=True)
        return step >= c and all(size == 1 or stride == want for size, stride, want in pairs)

    def pixels(self) -> DeviceArray:
        """A batch in NHWC as rows: (N * H * W, C)."""
        n, c, h, w = self.shape
        return DeviceArray(self.ptr, (n * h * w, c), (self.pixel_stride, 1), self.dtype, self.nbytes)

    @property
    def has_whole_images(self) -> bool:
        """Whether the elements of each image lie without gaps in the order of the shape."""
        expected = contiguous(self.ptr, self.shape, self.dtype).strides
        pairs = list(zip(self.shape, self.strides, expected, strict=True))[1:]
        return all(size == 1 or stride == want for size, stride, want in pairs)


def contiguous(ptr: int, shape: Shape, dtype: str = "float32", layout: str = "NCHW") -> DeviceArray:
    """The array at `ptr` without gaps; four dimensions lie in `layout`, fewer in the order of the shape."""
    spec = TensorSpec("whole", "aux", shape, dtype, layout if len(shape) == 4 else "NCHW")
    return DeviceArray(ptr, shape, element_strides(spec, spec), dtype, spec.nbytes, spec.layout)
