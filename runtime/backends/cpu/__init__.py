"""The NumPy backend: the embedded default, and the readable reference of every kernel.

backend = CpuBackend(poison=True)
backend.open(plan.slab_bytes, plan.host_bytes)
"""

from vdnn.runtime.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
