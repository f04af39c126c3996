"""One kernel on plain arrays, through an Op and a Program of its own, with exactly the workspace it asks for.

y = call("conv.forward", {"x": x, "w": w}, {"y": (2, 4, 5, 5)}, stride=[1, 1], ...)["y"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from interpreter import Array, garbage

from vdnn.layers import Op, Program, TensorSpec
from vdnn.runtime.backends.cpu.geometry import workspace_bytes
from vdnn.runtime.backends.cpu.kernels import KERNELS


def call(
    kind: str,
    reads: Mapping[str, Array],
    writes: Mapping[str, tuple[int, ...] | Array],
    accumulate: tuple[str, ...] = (),
    **attrs: Any,
) -> dict[str, Array]:
    """Run the kernel of `kind`; returns its outputs by argument name.

    Args:
        writes: shape of each output, made of NaN bytes in the dtype of the first read; or the array to write into.
    """
    dtype = next(iter(reads.values())).dtype
    outputs = {a: w if isinstance(w, np.ndarray) else garbage(w, str(dtype)) for a, w in writes.items()}
    arrays = {**reads, **outputs}
    tensors = {name: TensorSpec(name, "aux", array.shape, str(array.dtype)) for name, array in arrays.items()}
    op = Op("op", kind, "layer", "forward", {a: a for a in reads}, {a: a for a in outputs}, attrs, accumulate)
    program = Program("test", 1, "train", tensors, (op,), (), (), (), "", "")
    if "algorithm" in attrs:
        arrays["workspace"] = garbage((workspace_bytes(op, program, attrs["algorithm"]),), "uint8")
    KERNELS[kind](op, **arrays)
    return outputs


def channel_slice(array: Array, before: int = 2, after: int = 1) -> Array:
    """The same values as a strided view: channels in the middle of a larger tensor of NaN."""
    n, c, *rest = array.shape
    whole = garbage((n, before + c + after, *rest), str(array.dtype))
    part = whole[:, before : before + c]
    part[...] = array
    return part
