"""Stochastic gradient descent on the GPU; see vdnn.layers.lower.Update for the formula, and sgd.cu.

    sgd_update(op, {"dw": dw, "step": record, "w": w, "v": v, "status": record}, kernels, stream)

dw, w, v: any shape, float32, of one layout, without gaps, on 16 bytes; v where op.attrs["momentum"] is not 0. step and
status are one 64-byte record: lr, unscale and not_finite are read from it, and not_finite is set before any weight is
touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, Rows, rows_of
from vdnn.runtime.backends.cuda.tables import tables


def sgd_update(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """With g = dw * unscale + decay * w: v = momentum * v + g; w -= lr * (v, or Nesterov's look ahead); nothing once a
    dw is not finite."""
    found, rows = _parameter(op, arrays, "")
    dw, w, *v = (array.ptr for array in found)
    size, chunks, _ = rows.args
    status = arrays["status"].ptr
    kernels.launch("sgd_check", rows.blocks, [dw, size, chunks, status], stream)
    attrs = op.attrs
    args = [dw, w, v[0] if v else 0, size, chunks, status]
    args += [attrs["momentum"], attrs["weight_decay"], bool(attrs["nesterov"])]
    kernels.launch("sgd_update", rows.blocks, args, stream)


def sgd_update_all(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """sgd_update of parameters dw0, w0, v0, dw1, ..., all of them or none, in a few launches.

    op.attrs["weight_decay"]: a number for each.
    """
    status, found = arrays["status"].ptr, list(tables("Updates", _rows(op, arrays)))
    for blocks, count, table in found:
        kernels.launch("sgd_check_all", blocks, [table, count, status], stream)
    rule = [op.attrs["momentum"], bool(op.attrs["nesterov"])]
    for blocks, count, table in found:
        kernels.launch("sgd_update_all", blocks, [table, count, status, *rule], stream)


def _rows(op: Op, arrays: Arrays) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Blocks of each parameter, and its row of struct Updates."""
    for i, decay in enumerate(op.attrs["weight_decay"]):
        found, rows = _parameter(op, arrays, str(i))
        dw, w, *v = (array.ptr for array in found)
        yield rows.blocks, (dw, w, v[0] if v else 0, rows.inner, decay)


def _parameter(op: Op, arrays: Arrays, number: str) -> tuple[list[DeviceArray], Rows]:
    """dw, w and, if there is momentum, v of one parameter, and their numbers as a row."""
    v = f"v{number}"
    found = rows_of(op, arrays, f"dw{number}", f"w{number}", *([v] if v in arrays else []))
    rows = Rows.of(*found)
    if rows.count > 1 or rows.width == 1:
        raise VdnnError(f"op '{op.name}': expected dw, w and v without gaps and on 16 bytes, got {found}")
    return found, rows
