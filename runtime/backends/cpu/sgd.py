"""Stochastic gradient descent on the CPU; see vdnn.layers.update for the formula.

sgd_update(op, dw=dw, step=step, w=w, v=v, status=step)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import TEMPORARY_BYTES, Array, in_memory_order
from vdnn.runtime.step import STEP_DTYPE


def sgd_update(op: Op, *, dw: Array, step: Array, w: Array, status: Array, v: Array | None = None) -> None:
    """v = momentum * v + dw * unscale + decay * w; w -= lr * (v, or Nesterov's look ahead); nothing once a dw is not
    finite.

    Args:
        dw: gradient, any shape, without gaps, only read.
        step: the 64-byte record with lr, unscale and not_finite, uint8; `status` is the same record, to be written.
        w, v: weight and momentum in the shape and layout of dw; v where op.attrs["momentum"] is not 0.
    """
    record = step.view(STEP_DTYPE)[0]
    if record["not_finite"]:
        return
    if not _finite(dw):
        status.view(STEP_DTYPE)["not_finite"] = 1
        return
    _apply(op, op.attrs["weight_decay"], record, dw, w, v)


def sgd_update_all(op: Op, *, step: Array, status: Array, **arrays: Array) -> None:
    """`sgd_update` of all weights, or of none if any dw is not finite.

    Args:
        arrays: dw0, w0, and v0 where there is momentum, then dw1 and so on; op.attrs["weight_decay"] has a number for
            each.
    """
    record = step.view(STEP_DTYPE)[0]
    if record["not_finite"]:
        return
    decays = op.attrs["weight_decay"]
    if not all(_finite(arrays[f"dw{i}"]) for i in range(len(decays))):
        status.view(STEP_DTYPE)["not_finite"] = 1
        return
    for i, decay in enumerate(decays):
        _apply(op, decay, record, arrays[f"dw{i}"], arrays[f"w{i}"], arrays.get(f"v{i}"))


def _finite(dw: Array) -> bool:
    gradient = in_memory_order(dw)
    return all(np.isfinite(gradient[part]).all() for part in _parts(dw))


def _apply(op: Op, decay: float, record: Any, dw: Array, w: Array, v: Array | None) -> None:
    gradient, weight = in_memory_order(dw), in_memory_order(w)
    velocities = in_memory_order(v) if v is not None else None
    momentum, rate, unscale = op.attrs["momentum"], w.dtype.type(record["lr"]), w.dtype.type(record["unscale"])
    for part in _parts(dw):
        change = gradient[part] * unscale + decay * weight[part]
        if velocities is not None:
            velocity = velocities[part]
            velocity *= momentum
            velocity += change
            change = change + momentum * velocity if op.attrs["nesterov"] else velocity.copy()
        change *= rate
        weight[part] -= change


def _parts(array: Array) -> list[slice]:
    size = TEMPORARY_BYTES // array.itemsize
    return [slice(start, start + size) for start in range(0, array.size, size)]
