"""Which machine a run gets: the device asked for, or the best there is, with the reason in words.

backend, reason = open_device("auto")
print(backend.caps.description, "because", reason)
"""

from __future__ import annotations

from collections.abc import Callable

from vdnn.errors import BackendUnavailable
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.driver import find_driver
from vdnn.runtime.profile import load_profile

DEFAULT_PROFILE = "h200"
ADVICE = "use --device cpu to train here, or --device simulated --profile h200 to see what a GPU would do"


def open_device(
    device: str,
    profile: str | None = None,
    *,
    memory_limit: int | None = None,
    poison: bool = False,
    copy_repeats: int = 1,
    order: tuple[str, ...] | None = None,
    precision: str = "fp32",
    candidates: str = "all",
    layout: str = "NCHW",
    progress: Callable[[str], None] | None = None,
    advice: str = ADVICE,
) -> tuple[Backend, str]:
    """The backend for "auto", "cpu", "cuda" or "simulated", and why it is this one.

    Args:
        profile: of the simulated machine.
        memory_limit: bytes that the process may hold on a GPU, for what is allocated before planning.
        poison, copy_repeats, order: debug options; copies are repeated on a GPU, an order of streams is for the cpu.
        precision: of what is stored and multiplied; Caps.precision says what came of it.
        candidates: "all", or "named" for cuDNN's named algorithms only, on a GPU.
        layout: under which a GPU keeps what it measures of ops that have no images.
        progress: told in words what takes long.
        advice: what to do where "cuda" is not available.
    """
    described = load_profile(profile or DEFAULT_PROFILE)  # a wrong name is an error on every device
    if device == "simulated":
        return SimulatedBackend(described), "simulated was asked for"
    if device == "cpu":
        return CpuBackend(poison, order, precision), "cpu was asked for"
    driver = find_driver()
    finding = driver.finding
    if driver.gpus:
        try:
            backend = CudaBackend(
                memory_limit,
                poison=poison,
                copy_repeats=copy_repeats,
                precision=precision,
                candidates=candidates,
                layout=layout,
                progress=progress,
            )
            return backend, f"{device}: {driver.finding}"
        except BackendUnavailable as error:
            finding = f"{driver.finding}, but {error}"
    if device == "cuda":
        raise BackendUnavailable(f"device 'cuda' is not available: {finding}; {advice}")
    return CpuBackend(poison, order, precision), f"auto: {finding}"
