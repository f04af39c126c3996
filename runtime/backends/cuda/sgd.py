"""Stochastic gradient descent on the GPU; see vdnn.layers.lower.Update for the formula, and sgd.cu.

sgd_update(op, {"dw": dw, "step": record, "w": w, "v": v, "status": record}, kernels, stream)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, Rows, rows_of


def sgd_update(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """v = momentum * v + dw + decay * w; w -= lr * (v, or Nesterov's look ahead); nothing once a dw is not finite.

    dw, w, v: any shape, float32, of one layout, without gaps, on 16 bytes; v where op.attrs["momentum"] is not 0. step
    and status are one 64-byte record: lr and not_finite are read from it, and not_finite is set before any weight is
    touched.
    """
    found = rows_of(op, arrays, "dw", "w", *(["v"] if "v" in arrays else []))
    rows = Rows.of(*found)
    if rows.count > 1 or rows.width == 1:
        raise VdnnError(f"op '{op.name}': expected dw, w and v without gaps and on 16 bytes, got {found}")
    dw, w, status = found[0].ptr, found[1].ptr, arrays["status"].ptr
    v = found[2].ptr if len(found) > 2 else 0
    size, chunks, _ = rows.args
    kernels.launch("sgd_check", rows.blocks, [dw, size, chunks, status], stream)
    attrs = op.attrs
    args = [dw, w, v, size, chunks, status, attrs["momentum"], attrs["weight_decay"], bool(attrs["nesterov"])]
    kernels.launch("sgd_update", rows.blocks, args, stream)
