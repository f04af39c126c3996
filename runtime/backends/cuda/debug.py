"""Poison and canaries on the GPU: bytes filled with a pattern, and whether they still hold it; see debug.cu.

fill(kernels, canary_ptr, 256, 0xC5, stream)
check(kernels, canary_ptr, 256, 0xC5, first_wrong_ptr, stream)     # first_wrong: uint64, 2^64 - 1 before
"""

from __future__ import annotations

from typing import Any

from vdnn.runtime.backends.cuda.launch import THREADS, Kernels
from vdnn.runtime.backends.cuda.source import constants, source

SHARE_BYTES = constants(source())["SHARE"]
INTACT = 2**64 - 1
"""What first_wrong holds as long as every byte checked is as it was filled."""


def fill(kernels: Kernels, ptr: int, nbytes: int, pattern: int, stream: Any) -> None:
    """`nbytes` bytes from `ptr` on become `pattern` (0 to 255)."""
    kernels.launch("fill_bytes", _blocks(nbytes), [ptr, nbytes, pattern], stream)


def check(kernels: Kernels, ptr: int, nbytes: int, pattern: int, first_wrong_ptr: int, stream: Any) -> None:
    """The uint64 at `first_wrong_ptr` becomes the number of the first byte that is not `pattern`, if it is less."""
    kernels.launch("check_bytes", _blocks(nbytes), [ptr, nbytes, pattern, first_wrong_ptr], stream)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // (THREADS * SHARE_BYTES))
