"""Stochastic gradient descent on the CPU; see vdnn.layers.lower.Update for the formula.

sgd_update(op, dw=dw, step=step, w=w, v=v, status=step)
"""

from __future__ import annotations

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import TEMPORARY_BYTES, Array, in_memory_order
from vdnn.runtime.step import STEP_DTYPE


def sgd_update(op: Op, *, dw: Array, step: Array, w: Array, status: Array, v: Array | None = None) -> None:
    """v = momentum * v + dw + decay * w; w -= lr * (v, or Nesterov's look ahead); nothing once a dw is not finite.

    Args:
        dw: gradient, any shape, without gaps, only read.
        step: the 64-byte record with lr and not_finite, uint8; `status` is the same record, to be written.
        w, v: weight and momentum in the shape and layout of dw; v where op.attrs["momentum"] is not 0.
    """
    record = step.view(STEP_DTYPE)[0]
    if record["not_finite"]:
        return
    size = TEMPORARY_BYTES // dw.itemsize
    parts = [slice(start, start + size) for start in range(0, dw.size, size)]
    gradient, weight = in_memory_order(dw), in_memory_order(w)
    velocities = in_memory_order(v) if v is not None else None
    if not all(np.isfinite(gradient[part]).all() for part in parts):
        status.view(STEP_DTYPE)["not_finite"] = 1
        return
    momentum, decay, rate = op.attrs["momentum"], op.attrs["weight_decay"], w.dtype.type(record["lr"])
    for part in parts:
        change = gradient[part] + decay * weight[part]
        if velocities is not None:
            velocity = velocities[part]
            velocity *= momentum
            velocity += change
            change = change + momentum * velocity if op.attrs["nesterov"] else velocity.copy()
        change *= rate
        weight[part] -= change
