"""The NumPy backend: the embedded default, and the readable reference of every kernel.

backend = CpuBackend(poison=True)
backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
"""

if __name__ != "vdnn.runtime.backends.cpu":
    raise ImportError(
        "this folder is the package vdnn.runtime.backends.cpu: install vdnn (pip install -e .) and import that"
    )

from vdnn.runtime.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
