"""bfloat16 and float16 on the CPU: an op's kernel runs in float32 between widening its reads and rounding its writes.

    run_rounded(relu_forward, op, {"x": x, "y": y})     # x, y in float32, float16, or uint16 with bfloat16 in it

So every sum and product is in float32 and each result is rounded once, to nearest even, when it is stored: what kernels
for tensor cores do too. The float32 copies of an op's 16-bit tensors lie outside of the slab while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16

BFLOAT16, FLOAT16 = np.dtype(np.uint16), np.dtype(np.float16)
"""The dtypes of arrays that hold 16-bit numbers; uint16 is bfloat16."""


def run_rounded(kernel: Callable[..., None], op: Op, arrays: Mapping[str, Array]) -> None:
    """Call `kernel` with float32 in place of 16-bit arrays, then round what it wrote to them."""
    halves = {argument: array for argument, array in arrays.items() if array.dtype in (BFLOAT16, FLOAT16)}
    if not halves:
        kernel(op, **arrays)
        return
    wide = {
        argument: widen(array)
        if argument in op.reads or argument in op.accumulate
        else np.empty_like(array, np.float32)  # in the same order of dimensions
        for argument, array in halves.items()
    }
    with np.errstate(over="ignore", invalid="ignore"):  # float16 overflows as a matter of course: its step is skipped
        kernel(op, **{**arrays, **wide})
    for argument in op.writes:
        if argument in halves:
            narrow(wide[argument], halves[argument])


def widen(array: Array) -> Array:
    """The numbers of a 16-bit array as float32, without gaps, in the same order of dimensions in memory."""
    return from_bfloat16(array) if array.dtype == BFLOAT16 else array.astype(np.float32)


def narrow(values: Array, out: Array) -> None:
    """out = `values` (float32) rounded to nearest even; beyond the largest number it is an infinity."""
    with np.errstate(over="ignore"):
        np.copyto(out, to_bfloat16(values) if out.dtype == BFLOAT16 else values, casting="same_kind")
