"""What a checkpoint holds, on the device: weights, momentum and statistics, read and written between runs of plans.

kept = Kept(prepared.plans, backend)
kept.write(init_parameters(graph, seed=0))
kept.read()["conv1.weight"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.lower import STEP
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.pool import Pool
from vdnn.runtime.backend import Backend
from vdnn.runtime.planset import PlanSet

KEPT_ROLES = ("weight", "state")


class Kept:
    """The tensors of `plans` that outlive a step, on `backend` once it is open.

    Attributes:
        specs: by name.
    """

    def __init__(self, plans: PlanSet, backend: Backend):
        program, self._backend = plans.persistent, backend
        self.specs: dict[str, TensorSpec] = {
            name: program.tensors[name]
            for name in program.persistent
            if name != STEP and program.tensors[name].role in KEPT_ROLES
        }
        places = next(iter(plans.plans.values())).plan.persistent  # equal in all of them
        self._pool = Pool(program.tensors, places, backend.view)

    def read(self) -> dict[str, NDArray[Any]]:
        """All of them as they are now: float32 on the host, in their specs' shapes."""
        self._backend.sync()
        return {name: self._backend.read(self._pool.view(name)) for name in self.specs}

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write all of them; what `tensors` has not, such as momentum before the first step, becomes 0."""
        self._backend.sync()
        for name, spec in self.specs.items():
            value = tensors.get(name)
            fresh = np.zeros(spec.shape, np.float32) if value is None else value
            self._backend.write(self._pool.view(name), fresh)
