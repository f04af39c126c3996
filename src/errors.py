"""Every error vdnn raises on purpose, each with the exit code its command ends with.

raise ShapeError("conv1", "x", expected="at least 11x11 after padding", got="(3, 8, 8)")
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class VdnnError(Exception):
    """Base of all errors a user can cause or meet; `exit_code` is what the command returns."""

    exit_code = 1


class ConfigError(VdnnError):
    """A configuration or argument that cannot be used: file, line, key, what is wrong, the nearest key."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
        known: Iterable[str] = (),
    ):
        self.file, self.line, self.key = file, line, key
        self.nearest = next(iter(get_close_matches(key.split(".")[-1], list(known), n=1)), None) if key else None
        place = ":".join(str(part) for part in (file, line) if part is not None)
        text = f"{place}: {message}" if place else message
        if self.nearest:
            text += f" (did you mean '{self.nearest}'?)"
        super().__init__(text)


class ShapeError(VdnnError):
    """A layer got a tensor of a shape it cannot take."""

    exit_code = 2

    def __init__(self, layer: str, tensor: str, *, expected: str, got: str):
        self.layer, self.tensor, self.expected, self.got = layer, tensor, expected, got
        super().__init__(f"layer '{layer}', tensor '{tensor}': expected {expected}, got {got}")


class DataError(VdnnError):
    """A data file that is missing, truncated or not what its name says."""

    exit_code = 2


class CheckpointError(VdnnError):
    """A checkpoint that cannot be read, or that belongs to another network or run."""

    exit_code = 2


class BackendUnavailable(VdnnError):
    """A device that was asked for is not there: what was tried, and the next step."""

    exit_code = 2


class BudgetError(VdnnError):
    """A plan that does not fit: which layer, needed, budget, and what would work. All bytes.

    `smallest_bytes` is the smallest budget that works under any policy, `own_bytes` under the one asked for if it
    can; `evaluated_images` is the batch size of a plan that evaluates, None of one that trains.
    """

    exit_code = 3

    def __init__(self, message: str, *, layer: str, needed_bytes: int, budget_bytes: int, smallest_bytes: int | None):
        self.layer, self.needed_bytes, self.budget_bytes = layer, needed_bytes, budget_bytes
        self.smallest_bytes = self.own_bytes = smallest_bytes
        self.evaluated_images: int | None = None
        super().__init__(message)


class NotFiniteError(VdnnError):
    """Training met a NaN or an infinity: at which step and in which layer."""

    exit_code = 4


class PlanError(VdnnError):
    """A plan the verifier refuses: a fault in vdnn, never in the user's input. `step` is the index in the plan."""

    def __init__(self, message: str, *, step: int | None = None):
        self.step = step
        super().__init__(message if step is None else f"plan step {step}: {message}")


class ProgramError(VdnnError):
    """A program that reads a value which another op has overwritten, or that names an unknown tensor."""
