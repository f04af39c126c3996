"""A backend without data: plans run on the Clock of a hardware profile."""

from vdnn.runtime.backends.simulated.backend import SimulatedBackend

__all__ = ["SimulatedBackend"]
