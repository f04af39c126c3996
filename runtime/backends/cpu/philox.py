"""Philox4x32-10, a counter-based random number generator (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), for many counters at once.

    words = philox((i, sample, step, layer), (seed & 0xFFFFFFFF, seed >> 32))   # four arrays of 32-bit words
"""

from __future__ import annotations

import numpy as np

from vdnn.runtime.backends.cpu.chunks import Array

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """The four words of each counter.

    Args:
        counter: four arrays of numbers below 2^32, uint64, that broadcast to one shape.
        key: two numbers below 2^32.

    Returns: four uint64 arrays of that shape, of numbers below 2^32.
    """
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * step) & 0xFFFFFFFF) for k, step in zip(key, _KEY_STEPS, strict=True))
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _LOW
    return c0, c1, c2, c3
