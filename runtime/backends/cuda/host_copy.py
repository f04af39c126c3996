"""Copies within host memory by several threads: one core fills a pinned batch slower than the link empties it.

    copy(stage.array, images)           # as np.copyto(..., casting="no")

128 images of 227x227 are 20 MB: 2 to 3 ms for one thread, more than a whole step of AlexNet in bf16 takes on an H200.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 2**21
"""A thread is not woken for less."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That copy at the same time, the caller's among them; the other cores read images and compute."""


def copy(target: NDArray[Any], value: NDArray[Any]) -> None:
    """Fill `target` with `value` of the same shape and dtype, large arrays cut along their first axis; TypeError of
    another dtype, ValueError of another shape."""
    count = min(THREADS, value.nbytes // PART_BYTES, len(value) if value.ndim else 0)
    if count < 2 or target.shape != value.shape:
        np.copyto(target, value, casting="no")
        return
    size = -(-len(value) // count)
    parts = [(target[start : start + size], value[start : start + size]) for start in range(0, len(value), size)]
    others = [_threads().submit(np.copyto, *part, casting="no") for part in parts[1:]]
    try:
        np.copyto(*parts[0], casting="no")
    finally:  # nobody writes to the stage any more when this returns or raises
        for other in others:
            other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS - 1, thread_name_prefix="stage")
