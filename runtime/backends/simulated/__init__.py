"""A backend without data: plans run on the Clock of a hardware profile."""

if __name__ != "vdnn.runtime.backends.simulated":
    raise ImportError(
        "this folder is the package vdnn.runtime.backends.simulated: install vdnn (pip install -e .) and import that"
    )

from vdnn.runtime.backends.simulated.backend import SimulatedBackend

__all__ = ["SimulatedBackend"]
