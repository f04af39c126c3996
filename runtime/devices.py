"""Which machine a run gets: the device asked for, or the best there is, with the reason in words.

    backend, reason = open_device("auto")
    print(backend.caps.description, "because", reason)
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from vdnn.errors import BackendUnavailable
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.profile import load_profile

DEFAULT_PROFILE = "h200"


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


def open_device(
    device: str, profile: str | None = None, *, poison: bool = False, order: tuple[str, ...] | None = None
) -> tuple[Backend, str]:
    """The backend for "auto", "cpu", "cuda" or "simulated", and why it is this one.

    Args:
        profile: of the simulated machine.
        poison, order: debug options of the cpu backend.
    """
    if device == "simulated":
        return SimulatedBackend(load_profile(profile or DEFAULT_PROFILE)), "simulated was asked for"
    if device == "cpu":
        return CpuBackend(poison, order), "cpu was asked for"
    driver = find_driver()
    if device == "cuda":
        missing = driver.finding if not driver.gpus else f"{driver.finding}, but this version has no CUDA backend yet"
        raise BackendUnavailable(
            f"device 'cuda' is not available: {missing}; use --device cpu to train here, or --device simulated "
            "--profile h200 to see what a GPU would do"
        )
    reason = driver.finding if not driver.gpus else f"{driver.finding}, but this version has no CUDA backend yet"
    return CpuBackend(poison, order), f"auto: {reason}"
