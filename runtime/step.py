"""What changes from step to step, as one 64-byte record on the device, written by Feed and read by kernels.

host = new_step(lr=0.05, gradient_scale=1 / 64, step=7, seed=0)
record = array_of_64_bytes.view(STEP_DTYPE)[0]; record["lr"]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.lower import STEP_BYTES

STEP_DTYPE = np.dtype(
    {
        "names": ["lr", "gradient_scale", "step", "seed", "sample", "not_finite", "unscale"],
        "formats": ["<f4", "<f4", "<u8", "<u8", "<u4", "<u4", "<f4"],
        "offsets": [0, 4, 8, 16, 24, 28, 32],
        "itemsize": STEP_BYTES,
    }
)
"""lr: learning rate. gradient_scale: 1 / images in the whole step, times the loss scale. step: number of the step, from
0. seed: of the run. unscale: 1 / loss scale; an update multiplies each weight gradient by it before anything else.
sample: place of this run's first image within the step (not 0 in later parts of an accumulated step).
not_finite: 0; an update that meets a weight gradient with a NaN or an infinity sets it to 1, and every update does
nothing while it is 1."""


def new_step(
    lr: float, gradient_scale: float, step: int, seed: int, sample: int = 0, unscale: float = 1.0
) -> NDArray[np.uint8]:
    """The record as 64 bytes, shape (64,), uint8."""
    record = np.zeros(1, STEP_DTYPE)
    record["lr"], record["gradient_scale"], record["step"] = lr, gradient_scale, step
    record["seed"], record["sample"], record["unscale"] = seed, sample, unscale
    return record.view(np.uint8).reshape(STEP_BYTES)
