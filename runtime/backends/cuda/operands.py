"""Operands of a convolution that is tried out, the same on the device and on the host, without a copy back.

    operands = Operands(problem)
    operands.fill("x", address, runtime, stream)             # on the device
    operands.read("x", image, channel, channels)             # float32, shape (channels, rows, columns)

Normal numbers in a block of PERIOD elements, which is repeated as often as an operand is long: random enough for
timing, filled at copy speed, and every element is known from its place.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16

PERIOD = 2**20
"""Elements; a power of two, so that the place in the block is cheap to find."""
HALF_SCALE = 0.25
"""Of the numbers in float16, so that filter gradients, sums over 10^7 products, stay within its 65,504."""

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""What holds the bits of a dtype."""


def store(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """float32 numbers rounded to `dtype`, in the NumPy type of its bits."""
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(NUMPY_DTYPES[dtype])


def load(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The float32 numbers that `store` has rounded."""
    return from_bfloat16(bits) if dtype == "bfloat16" else bits.astype(np.float32)


@lru_cache(maxsize=8)
def _block(seed: int, count: int, size: float, dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Bits and values of `count` normal numbers times `size`; kept, as every problem of a search begins with them."""
    numbers = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * np.float32(size)
    bits = store(numbers, dtype)
    return bits, load(bits, dtype)


class Operands:
    """What "x", "w" and "y" of a problem hold, and the bias "b" of its epilogue."""

    def __init__(self, problem: ConvProblem):
        self.problem = problem
        scale = HALF_SCALE if problem.dtype == "float16" else 1.0
        # as large as the sums that it is added to, so that a bias that is left out shows
        scales = {"x": scale, "w": scale, "y": scale, "b": scale * scale * sqrt(prod(problem.w[1:]))}
        self._bits, self._values = {}, {}
        for seed, (role, size) in enumerate(scales.items()):
            count = PERIOD if role != "b" else problem.w[0]
            self._bits[role], self._values[role] = _block(seed, count, size, problem.dtypes()[role])

    @property
    def bias(self) -> NDArray[np.float32]:
        """The bias, shape (K,)."""
        return self._values["b"]

    @property
    def repeat(self) -> int:
        """Images after which both operands of a filter gradient begin anew; in CHWN, where all images lie side by
        side, that many that none does."""
        strides = self.problem.strides()
        return max(PERIOD // gcd(PERIOD, strides[role][0]) for role in OPERANDS["wgrad"][:2])

    def read(self, role: str, i: int, first: int, count: int) -> NDArray[np.float32]:
        """Elements [i, first:first + count] of an operand, shape (count, rows, columns)."""
        shape = {"x": self.problem.x, "w": self.problem.w, "y": self.problem.y}[role]
        image, channel, row, column = self.problem.strides()[role]
        places = i * image + channel * (first + np.arange(count))[:, None, None]
        places = places + row * np.arange(shape[2])[:, None] + column * np.arange(shape[3])
        found: NDArray[np.float32] = self._values[role][places & (PERIOD - 1)]
        return found

    def fill(self, role: str, address: int, count: int, runtime: Any, stream: Any) -> None:
        """Put `count` elements of an operand, those between its own among them, to `address` on the device."""
        bits = self._bits[role]
        size, filled = bits.itemsize, min(count, bits.size)
        runtime.memcpy(address, bits.ctypes.data, size * filled, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()  # else another stream may read what has not arrived yet
        while filled < count:
            part = min(filled, count - filled)
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(address + size * filled, address, size * part, kind, stream.ptr)
            filled += part
