"""Where a tensor lies on the device: an address, a shape, strides and a dtype, and no memory of its own.

x = DeviceArray(slab_ptr + 4096, (64, 3, 28, 28), (2352, 784, 28, 1), "float32", 602112)
x = contiguous(slab_ptr + 4096, (64, 3, 28, 28))      # the same
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vdnn.layers.tensor import DTYPE_BYTES, Shape


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A view of device memory.

    Args:
        ptr: address of the first element.
        shape: (N, ...) of a batch, or that of a parameter.
        strides: elements between neighbours of each dimension.
        dtype: a key of vdnn.layers.tensor.DTYPE_BYTES.
        nbytes: bytes of the elements, without those between images.
    """

    ptr: int
    shape: Shape
    strides: Shape
    dtype: str
    nbytes: int

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
    def has_whole_images(self) -> bool:
        """Whether the elements of each image lie without gaps in the order of the shape."""
        expected = contiguous(self.ptr, self.shape, self.dtype).strides
        pairs = list(zip(self.shape, self.strides, expected, strict=True))[1:]
        return all(size == 1 or stride == want for size, stride, want in pairs)


def contiguous(ptr: int, shape: Shape, dtype: str = "float32") -> DeviceArray:
    """The array at `ptr` without gaps, the last dimension fastest."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DeviceArray(ptr, shape, strides, dtype, prod(shape) * DTYPE_BYTES[dtype])
