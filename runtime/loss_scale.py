"""The dynamic loss scale of fp16, whose small gradients would otherwise be 0.

    scaling = LossScale()
    record = new_step(lr, scaling.scale / images, step, seed, unscale=1 / scaling.scale)
    scaling.count(finite=not record_is_not_finite)

Micikevicius et al., "Mixed Precision Training" (2018): the loss is multiplied by a scale, and so is every gradient; the
update divides by it. A step with a gradient that is not finite changes no weight and halves the scale; after so many
good steps in a row it is doubled. Scales are powers of two, so that they change nothing but the exponents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST_SCALE = 65536.0
LEAST_SCALE, MOST_SCALE = 1.0, 2.0**32
"""Below the least a gradient is not finite for another reason than the scale; what is above the most gains nothing, and
gradient_scale and unscale stay normal float32 numbers."""
GOOD_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """What the next step uses, good steps since it last changed, and steps that were skipped in the whole run."""

    scale: float = FIRST_SCALE
    good_steps: int = 0
    skipped: int = 0

    def count(self, finite: bool) -> None:
        """One more step, whose gradients were all `finite` or which was skipped."""
        if not finite:
            self.scale, self.good_steps, self.skipped = self.scale / 2, 0, self.skipped + 1
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS:
            self.scale, self.good_steps = min(2 * self.scale, MOST_SCALE), 0

    @property
    def exhausted(self) -> bool:
        """Whether the scale has fallen so far that it cannot be the cause of what is not finite."""
        return self.scale < LEAST_SCALE

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal one."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LossScale:
        """The one that `to_json` described."""
        return cls(float(data["scale"]), data["good_steps"], data["skipped"])

    @staticmethod
    def is_json(value: Any) -> bool:
        """Whether `value` is what `to_json` makes, with a scale that can be."""
        if not isinstance(value, dict) or value.keys() != {"scale", "good_steps", "skipped"}:
            return False
        counts = (value["good_steps"], value["skipped"])
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
        scale = value["scale"]
        return whole and isinstance(scale, float) and LEAST_SCALE <= scale <= MOST_SCALE
