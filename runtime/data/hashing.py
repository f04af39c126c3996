"""Random words without a state: a hash of integers, the same with every NumPy version and on every machine.

words(seed, stream=1, index=np.arange(5))      # five uint64, each a function of (seed, stream, its index) alone
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def words(seed: int, stream: int, index: NDArray[np.integer]) -> NDArray[np.uint64]:
    """One 64-bit word for every index, shape of `index`: SplitMix64 (Steele, Lea and Flood 2014) on a mixed key.

    Args:
        seed: of the run, 0 or more.
        stream: what the words are for; different streams are independent.
    """
    key = _mix_int(_mix_int(seed & _MASK) ^ (stream & _MASK))
    with np.errstate(over="ignore"):
        state = np.uint64(key) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def _mix_int(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
