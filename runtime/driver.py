"""What the NVIDIA driver has to say, asked without any library of its.

find_driver().gpus, find_driver().finding
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Driver:
    """What the NVIDIA driver says: how many GPUs, or why none can be used."""

    gpus: int
    finding: str


def find_driver() -> Driver:
    """Ask the CUDA driver for its GPUs, without CuPy."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(0, "no NVIDIA driver (libcuda.so.1 is not there)")
    status = cuda.cuInit(0)
    if status:
        return Driver(0, f"the NVIDIA driver is there but does not start (cuInit returned {status})")
    count = ctypes.c_int(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Driver(count.value, f"the NVIDIA driver finds {count.value} GPU(s)")
