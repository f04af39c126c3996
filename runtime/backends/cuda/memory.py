"""Who holds what on the card: the context reserve, the allocator that refuses, and NVML's view of this process.

ledger = Ledger()
ledger.forbid_allocations(); ledger.used_bytes()
"""

from __future__ import annotations

import os
from typing import Any

from vdnn.errors import VdnnError
from vdnn.units import format_bytes


class StrayAllocation(VdnnError):
    """Something asked CuPy for device memory while the slab is all there may be."""


class Ledger:
    """Device memory of this process, as the driver and NVML tell it."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        runtime.free(0)  # makes the context
        self._nvml = _open_nvml()
        self.strays = 0

    def measure_reserve(self) -> int:
        """Bytes held now, before any slab: context, libraries, loaded kernels."""
        self._runtime.deviceSynchronize()
        return self.used_bytes()

    def used_bytes(self) -> int:
        """Bytes that this process holds on the card; the whole card's if NVML cannot tell processes apart."""
        if self._nvml is not None:
            nvml, handle = self._nvml
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        free, total = self._runtime.memGetInfo()
        return int(total - free)

    def forbid_allocations(self) -> None:
        """From now on every allocation through CuPy is counted and refused."""
        import cupy

        cupy.cuda.set_allocator(self._refuse)

    def allow_allocations(self) -> None:
        """CuPy's own allocator again."""
        import cupy

        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)

    def _refuse(self, nbytes: int) -> Any:
        self.strays += 1
        raise StrayAllocation(f"an allocation of {format_bytes(nbytes)} behind the pool's back was refused")


def _open_nvml() -> tuple[Any, Any] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        from cupy.cuda import Device, runtime

        bus = runtime.deviceGetPCIBusId(Device().id)
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode() if isinstance(bus, str) else bus)
    except pynvml.NVMLError:
        return None  # a machine without NVML: the driver's own numbers serve
