"""bfloat16 for NumPy, which has none: arrays of uint16 with the upper halves of float32 numbers.

    bits = to_bfloat16(np.float32([1.0, 3.14159]))
    from_bfloat16(bits)     # [1.0, 3.140625]

Format: 1 sign bit, 8 bits of exponent, 7 of fraction, as in the upper half of an IEEE 754 binary32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]


def host_dtype(name: str) -> np.dtype[Any]:
    """Of the arrays in which NumPy holds numbers of `name`, a key of vdnn.layers.tensor.DTYPE_BYTES."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def as_stored(values: NDArray[Any], name: str) -> NDArray[Any]:
    """`values` as an array of numbers of `name`: float32 is rounded for bfloat16, all else is of that dtype already."""
    return to_bfloat16(values) if name == "bfloat16" and values.dtype == np.float32 else values


def as_numbers(stored: NDArray[Any], name: str) -> NDArray[Any]:
    """The numbers of `name` in an array of them: bfloat16 as float32, all else as it is."""
    return from_bfloat16(stored) if name == "bfloat16" else stored


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """float32 numbers of any shape and strides, rounded to the nearest, of two equally near to the even one; a NaN
    stays a NaN, and what is beyond the largest becomes an infinity."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> 16).astype(np.uint16)
    quiet = (bits >> 16).astype(np.uint16) | np.uint16(0x0040)
    return np.where(np.isnan(values), quiet, rounded)


def from_bfloat16(bits: Bits) -> NDArray[np.float32]:
    """The numbers as float32, exactly; any shape and strides."""
    wide: NDArray[Any] = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)
