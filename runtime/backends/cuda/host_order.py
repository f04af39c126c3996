"""Arrays of the device as they lie on the host: which copies move one, and its numbers in the order of the shape.

    memory = np.empty(memory_shape(array), host_dtype(array.dtype))
    for target, source, nbytes in copies(array, memory): ...       # device address, host address, bytes
    numbers = in_order_of_shape(array, memory)

PlanError for a part of a larger tensor in NHWC or CHWN that does not lie in one piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import PlanError
from vdnn.layers.tensor import MEMORY_ORDERS, Shape
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.capture import Copy


def memory_shape(array: DeviceArray) -> Shape:
    """Of a host array whose bytes lie as those of `array`."""
    if array.is_channels_last and array.pixel_stride != array.shape[1]:
        got = f"{array.shape[1]} of {array.pixel_stride} channels: {array}"
        raise PlanError(f"expected a whole tensor in NHWC, got {got}")
    if array.is_images_last and not array.is_whole_chwn:
        raise PlanError(f"expected all images of a tensor in CHWN, got {array}")
    return tuple(array.shape[axis] for axis in _order(array))


def in_order_of_memory(array: DeviceArray, value: NDArray[Any]) -> NDArray[Any]:
    """`value`, of the shape of `array`, as it is to lie there."""
    memory_shape(array)  # or it cannot be written as a whole
    return value.transpose(_order(array))


def in_order_of_shape(array: DeviceArray, memory: NDArray[Any]) -> NDArray[Any]:
    """The way back: contiguous, of the shape of `array`."""
    return np.ascontiguousarray(memory.transpose(np.argsort(_order(array))))


def copies(array: DeviceArray, memory: NDArray[Any]) -> list[Copy]:
    """The copies between `array` and contiguous `memory` on the host: image by image where they lie apart."""
    whole = array.is_contiguous or array.is_channels_last or array.is_images_last
    images = memory.reshape(1, -1) if whole else memory.reshape(array.shape[0], -1)
    step = array.itemsize * array.image_stride
    return [(array.ptr + i * step, image.ctypes.data, image.nbytes) for i, image in enumerate(images)]


def _order(array: DeviceArray) -> tuple[int, ...]:
    return MEMORY_ORDERS[array.layout] if len(array.shape) == 4 else tuple(range(len(array.shape)))
