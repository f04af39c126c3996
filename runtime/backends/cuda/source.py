"""The CUDA source of vdnn's own kernels as one text, how it is compiled, and what its kernels take as arguments.

    text = source()
    signatures(text)["relu_forward"]      # (("x", "float*"), ("x_stride", "i64"), ...)
    constants(text)["THREADS"]            # 256

It lies in the `.cu` and `.cuh` files beside this one. Kernels are `extern "C"`; their arguments are named by the short
types of common.cuh, so that the host converts every argument to the width that the kernel declares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from vdnn.errors import VdnnError

FILES = (
    "common.cuh",
    "channels.cuh",
    "copy.cu",
    "layout.cu",
    "relu.cu",
    "bias.cu",
    "pool.cu",
    "pool_fixed.cu",
    "pool_pixels.cu",
    "lrn.cu",
    "lrn_pixels.cu",
    "batchnorm.cu",
    "dropout.cu",
    "softmax_loss.cu",
    "sgd.cu",
    "debug.cu",
)
"""In the order in which they are joined."""

OPTIONS = ("-std=c++17", "-fmad=false")
"""Of the compiler. Without fused multiply-adds results round as on the CPU; memory is the limit, not arithmetic."""

SCALARS: Mapping[str, Callable[[float], Any]] = {
    "int": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
"""The type of an argument → that of its value; every other type is a pointer, np.uint64."""

Signature = tuple[tuple[str, str], ...]

_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(THREADS\) (\w+)\(([^)]*)\)')
_CONSTANT = re.compile(r"^constexpr int (\w+) = (\d+);", re.MULTILINE)


@cache
def source() -> str:
    """All files, each after a #line directive, so that a compiler's message names the file."""
    folder = files(__package__)
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}\n' for name in FILES)


def signatures(text: str) -> dict[str, Signature]:
    """The arguments, (name, type), of every kernel in `text`."""
    found: dict[str, Signature] = {}
    for name, arguments in _KERNEL.findall(text):
        words = [argument.replace("const ", "").rsplit(None, 1) for argument in arguments.split(",")]
        found[name] = tuple((word, kind.strip()) for kind, word in words)
    return found


def constants(text: str) -> dict[str, int]:
    """The integer constants at file level of `text`."""
    return {name: int(value) for name, value in _CONSTANT.findall(text)}


def convert(name: str, signature: Signature, args: Sequence[float]) -> tuple[Any, ...]:
    """`args` of kernel `name` as NumPy scalars of the types it declares, pointers as uint64.

    VdnnError if there are too many or too few, or if one does not fit its type.
    """
    if len(args) != len(signature):
        raise VdnnError(f"kernel '{name}': expected {len(signature)} arguments, got {len(args)}")
    values = []
    for (argument, kind), arg in zip(signature, args, strict=True):
        try:
            values.append(SCALARS.get(kind, np.uint64)(arg))
        except OverflowError as error:
            raise VdnnError(f"kernel '{name}', argument '{argument}': {arg} does not fit {kind}") from error
    return tuple(values)
