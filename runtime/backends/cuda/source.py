"""The CUDA source of vdnn's own kernels as one text, how it is compiled, and what its kernels take as arguments.

    text = source("bfloat16")
    signatures(text)["relu_forward"]      # (("x", "float*"), ("x_stride", "i64"), ...)
    constants(text)["THREADS"]            # 256

It lies in the `.cu` and `.cuh` files beside this one. Kernels are `extern "C"`; their arguments are named by the short
types of real.cuh, so that the host converts every argument to the width that the kernel declares. Activations and
their gradients have one type a run, there called Real; the source is compiled for that one.
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
    "real.cuh",
    "common.cuh",
    "channels.cuh",
    "columns.cuh",
    "copy.cu",
    "images.cu",
    "layout.cu",
    "layout_strips.cu",
    "layout_bricks.cu",
    "layout_rows.cu",
    "relu.cu",
    "bias.cu",
    "prepare.cu",
    "taps.cu",
    "pool.cu",
    "pool_fixed.cu",
    "pool_pixels.cu",
    "pool_pixels_fixed.cu",
    "pool_tiles.cu",
    "pool_planes.cu",
    "pool_global.cu",
    "lrn.cu",
    "lrn_pixels.cu",
    "batchnorm.cu",
    "batchnorm_gradient.cu",
    "dropout.cu",
    "softmax.cu",
    "softmax_parts.cu",
    "softmax_columns.cu",
    "softmax_loss.cu",
    "sgd.cu",
    "debug.cu",
)
"""Of the kernels that every program takes, in the order in which they are joined."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "main": FILES,
    "chwn": ("real.cuh", "common.cuh", "chwn.cuh", "chwn_conv.cu", "chwn_wgrad.cu"),
}
"""What is compiled by itself → its files. All but "main" take long, and are compiled where they are needed."""

OPTIONS = ("-std=c++17", "-fmad=false")
"""Of the compiler. Without fused multiply-adds results round as on the CPU; memory is the limit, not arithmetic."""

STORAGE: Mapping[str, str] = {"float32": "float", "bfloat16": "bfloat16", "float16": "float16"}
"""dtype of activations and their gradients → its type in real.cuh."""

SCALARS: Mapping[str, Callable[[float], Any]] = {
    "int": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
"""The type of an argument → that of its value; every other type is a pointer, np.uint64."""

STRUCTS: Mapping[str, tuple[str, str]] = {
    "Updates": ("UPDATES", "dw:u8 w:u8 v:u8 size:i8 decay:f4 first:u4"),
    "Filters": ("FILTERS", "w:u8 y:u8 size:i8 first:u4"),
    "Norms": (
        "NORMS",
        "mean:u8 invstd:u8 running_mean:u8 running_var:u8 momentum:f8 eps:f8 unbias:f8 size:u4 first:u4",
    ),
    "ChwnConvs": (
        "SINGLE",
        "x:u8 w:u8 b:u8 y:u8 w_group:i8 images:i4 x_pixel:i4 y_pixel:i4 channels:i4 x_rows:i4 x_columns:i4 filters:i4 "
        "y_rows:i4 y_columns:i4 w_row:i4 taps_down:i4 taps_across:i4 stride_down:i4 stride_across:i4 pad_down:i4 "
        "pad_across:i4 dilation_down:i4 dilation_across:i4 filter_tiles:i4 pixel_tiles:i4 wide_filters:i4 "
        "transposed:i4 relu:i4 accumulate:i4",
    ),
    "ChwnGradients": (
        "SINGLE",
        "x:u8 dy:u8 dw:u8 images:i4 x_pixel:i4 y_pixel:i4 channels:i4 x_rows:i4 x_columns:i4 filters:i4 y_rows:i4 "
        "y_columns:i4 groups:i4 taps_down:i4 taps_across:i4 stride_down:i4 stride_across:i4 pad_down:i4 pad_across:i4 "
        "dilation_down:i4 dilation_across:i4 filter_tiles:i4 row_tiles:i4 shares:i4 share:i4 accumulate:i4",
    ),
}
"""The type of an argument that is a table, passed whole → the constant that says how many rows it has, and the fields
of a row with their NumPy types, which lie as in C."""

Signature = tuple[tuple[str, str], ...]

_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(THREADS(?:, \d)?\) (\w+)\(([^)]*)\)')
_QUALIFIERS = re.compile(r"\b(?:const|__grid_constant__) ")
_CONSTANT = re.compile(r"^constexpr int (\w+) = (\d+);", re.MULTILINE)


@cache
def source(dtype: str = "float32", module: str = "main") -> str:
    """All files of a module, each after a #line directive, so that a compiler's message names the file.

    dtype: of activations and their gradients, a key of STORAGE; VdnnError if it is another. module: a key of MODULES.
    """
    if dtype not in STORAGE:
        raise VdnnError(f"CUDA kernels: expected activations of {', '.join(STORAGE)}, got {dtype}; choose a precision")
    folder = files(__package__)
    names = MODULES[module]
    text = "".join(f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}\n' for name in names)
    return f"#define STORAGE {STORAGE[dtype]}\n{text}"


def signatures(text: str) -> dict[str, Signature]:
    """The arguments, (name, type), of every kernel in `text`."""
    found: dict[str, Signature] = {}
    for name, arguments in _KERNEL.findall(text):
        words = [_QUALIFIERS.sub("", argument).rsplit(None, 1) for argument in arguments.split(",")]
        found[name] = tuple((word, kind.strip()) for kind, word in words)
    return found


def constants(text: str) -> dict[str, int]:
    """The integer constants at file level of `text`."""
    return {name: int(value) for name, value in _CONSTANT.findall(text)}


def convert(name: str, signature: Signature, args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` of kernel `name` as NumPy scalars of the types it declares, pointers as uint64, tables as they are.

    VdnnError if there are too many or too few, or if one does not fit its type.
    """
    if len(args) != len(signature):
        raise VdnnError(f"kernel '{name}': expected {len(signature)} arguments, got {len(args)}")
    values = []
    for (argument, kind), arg in zip(signature, args, strict=True):
        if kind in STRUCTS:
            values.append(arg)
            continue
        try:
            values.append(SCALARS.get(kind, np.uint64)(arg))
        except OverflowError as error:
            raise VdnnError(f"kernel '{name}', argument '{argument}': {arg} does not fit {kind}") from error
    return tuple(values)
