"""Convolutions in CHWN by vdnn's own kernels, and their gradients; see chwn_conv.cu and chwn_wgrad.cu.

    chwn_convolve(op, {"x": x, "w": w, "b": b, "y": y}, kernels, stream)

x, dx (N, C, H, W), y, dy (N, K, P, Q), w (K, C/groups, R, S), as activations are stored; b (K,) and dw, shaped as w,
float32. Four dimensions lie in CHWN: filters as (C/groups, R, S, K). Sums are float32, and so are products, but for
those of "TENSOR", on tensor cores: they round float32 operands to TF32, while those of 16 bits are exact in it.
Algorithms are those of chwn_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from vdnn.errors import PlanError, VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.chwn_tiles import (
    GRADIENT_TILES,
    GROUP,
    LABEL,
    SMALL,
    SMALL_BYTES,
    TILES,
    Tile,
    chwn_candidates,
    filter_bytes,
    loads_groups,
    rounded,
    share_bytes,
    shares_of,
)
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.launch import THREADS, Arrays, Kernels, check_index, workspace
from vdnn.runtime.backends.cuda.tables import table_type

FILTER_TILE = 32
"""Filters, and channels, of a block that transposes filters."""


def chwn_convolve(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """Start the convolution of `op`, conv.forward, conv.dgrad or conv.wgrad, on `stream`.

    forward adds a bias "b" and applies the activation of op.attrs; the gradients add to what is there if op accumulates
    them. op.attrs: stride, padding, dilation, groups, algorithm (a label; the first candidate if it is not given).
    """
    _RUN[op.kind](op, arrays, kernels, stream)


def _forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    x, w, y = (_checked(op, arrays, name, kernels.dtype) for name in ("x", "w", "y"))
    tile, problem, _ = _chosen(op, "forward", x, w, y, TILES)
    filters = w.shape[0] // problem.groups
    wide = filters % GROUP == 0 and w.shape[0] % GROUP == 0 and w.ptr % (GROUP * w.itemsize) == 0
    given = {
        "w": w.ptr,
        "b": arrays["b"].ptr if "b" in arrays else 0,
        "w_group": filters,
        "w_row": w.shape[0],
        "channels": w.shape[1],
        "filters": filters,
        "wide_filters": wide,
        "relu": op.attrs.get("activation") == "relu",
    }
    outputs = y.shape[0] * prod(y.shape[2:])
    _convolve(problem, tile, x, y, outputs, given, kernels, stream)


def _dgrad(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """The sum over filters of dy, whose operand are filters with channels and filters exchanged."""
    dx, w, dy = (_checked(op, arrays, name, kernels.dtype) for name in ("dx", "w", "dy"))
    tile, problem, _ = _chosen(op, "dgrad", dx, w, dy, TILES)
    k, own, taps = w.shape[0], w.shape[1], prod(w.shape[2:])
    channels, filters = rounded(own), k // problem.groups
    turned = workspace(op, arrays, filter_bytes(problem))
    across, down = -(-k // FILTER_TILE), -(-channels // FILTER_TILE)
    kernels.launch("chwn_filters", across * down * taps, [w.ptr, turned, own, channels, taps, k, across, down], stream)
    given = {
        "w": turned,
        "b": 0,
        "w_group": filters * taps * channels,
        "w_row": channels,
        "channels": filters,
        "filters": own,
        "wide_filters": True,
        "transposed": True,
        "accumulate": bool(op.accumulate),
    }
    (vertical, horizontal), (h, q) = problem.stride, dx.shape[2:]
    outputs = dx.shape[0] * -(-h // vertical) * -(-q // horizontal)  # of the most that meet the same taps
    _convolve(problem, tile, dy, dx, outputs, given, kernels, stream)


def _convolve(
    problem: ConvProblem,
    tile: Tile,
    x: DeviceArray,
    y: DeviceArray,
    outputs: int,
    given: Mapping[str, int],
    kernels: Kernels,
    stream: Any,
) -> None:
    """Launch chwn_conv from x to y; `given` are the fields of its table in which the directions differ."""
    check_index(y.shape[0] * prod(y.shape[2:]), "numbers of one channel of a batch")
    filter_tiles, pixel_tiles = -(-given["filters"] // tile.columns), -(-outputs // tile.rows)
    fields = {
        **{"transposed": False, "relu": False, "accumulate": False},
        **{"x": x.ptr, "y": y.ptr, "images": x.shape[0], "x_pixel": _pixel(x), "y_pixel": _pixel(y)},
        **_sizes(x, y),
        **_window(problem),
        **{"filter_tiles": filter_tiles, "pixel_tiles": pixel_tiles},
        **given,
    }
    classes = prod(problem.stride) if given.get("transposed") else 1
    blocks = filter_tiles * pixel_tiles * classes * problem.groups
    kernels.launch(_kernel("chwn_conv", problem, tile, x, y), blocks, [_table("ChwnConvs", fields)], stream)


def _wgrad(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    x, dy = (_checked(op, arrays, name, kernels.dtype) for name in ("x", "dy"))
    dw = _checked(op, arrays, "dw", "float32")
    tile, problem, label = _chosen(op, "wgrad", x, dw, dy, GRADIENT_TILES)
    check_index(x.shape[0] * prod(dy.shape[2:]), "numbers of one channel of a batch")
    limit = SMALL_BYTES if label.endswith(SMALL) else None
    shares, share = shares_of(problem, tile, limit)
    nbytes = share_bytes(problem, tile, limit)
    target, adds = workspace(op, arrays, nbytes) if nbytes else dw.ptr, bool(op.accumulate)
    filters = dw.shape[0] // problem.groups
    row_tiles, filter_tiles = -(-prod(dw.shape[1:]) // tile.rows), -(-filters // tile.columns)
    fields = {
        **{"x": x.ptr, "dy": dy.ptr, "dw": target, "images": x.shape[0], "x_pixel": _pixel(x), "y_pixel": _pixel(dy)},
        **{"channels": dw.shape[1], "filters": filters, "groups": problem.groups},
        **_sizes(x, dy),
        **_window(problem),
        **{"filter_tiles": filter_tiles, "row_tiles": row_tiles, "shares": shares, "share": share},
        "accumulate": adds and not nbytes,
    }
    blocks = row_tiles * filter_tiles * shares * problem.groups
    kernels.launch(_kernel("chwn_wgrad", problem, tile, x, dy), blocks, [_table("ChwnGradients", fields)], stream)
    if nbytes:
        lanes = 1 if shares <= 8 else 16
        blocks = -(-dw.size // (THREADS // lanes))
        kernels.launch("chwn_wgrad_sum", blocks, [target, dw.ptr, dw.size, shares, lanes, adds], stream)


_RUN = {"conv.forward": _forward, "conv.dgrad": _dgrad, "conv.wgrad": _wgrad}


def _window(problem: ConvProblem) -> dict[str, int]:
    """Taps, stride, padding and dilation, as the tables have them."""
    pairs = {
        "taps": problem.w[2:],
        "stride": problem.stride,
        "pad": problem.padding,
        "dilation": problem.dilation,
    }
    return {f"{name}_{way}": pair[i] for name, pair in pairs.items() for i, way in enumerate(("down", "across"))}


def _sizes(x: DeviceArray, y: DeviceArray) -> dict[str, int]:
    (h, w), (p, q) = x.shape[2:], y.shape[2:]
    return {"x_rows": h, "x_columns": w, "y_rows": p, "y_columns": q}


def _table(kind: str, fields: Mapping[str, int]) -> Any:
    table = np.zeros((), table_type(kind))
    row = table["of"][0]
    for name in row.dtype.names:
        row[name] = fields[name]
    return table


def _reads_groups(*batches: DeviceArray) -> bool:
    alignment = min(GROUP if batch.ptr % (GROUP * batch.itemsize) == 0 else 1 for batch in batches)
    strides = dict(zip("xy", (batch.strides for batch in batches), strict=True))
    return loads_groups(batches[0].shape[0], alignment, strides)


def _pixel(batch: DeviceArray) -> int:
    """Elements from a pixel to the next."""
    return batch.strides[3]


def _kernel(family: str, problem: ConvProblem, tile: Tile, *batches: DeviceArray) -> str:
    """The kernel of a tile for these batches; PlanError if there is none."""
    grouped = _reads_groups(*batches)
    if not grouped and not tile.any_images:
        raise PlanError(
            f"{problem}: algorithm {LABEL}{tile.name} expects images by {GROUP}, each group at a multiple of its "
            "bytes; plan again, as the algorithm was chosen for another number of images"
        )
    return tile.kernel(family, grouped)


def _chosen(
    op: Op, direction: str, x: DeviceArray, w: DeviceArray, y: DeviceArray, tiles: Mapping[str, Tile]
) -> tuple[Tile, ConvProblem, str]:
    """The tile of op's algorithm, its convolution, and the label."""
    attrs = op.attrs
    alignment = min(GROUP * t.itemsize if t.ptr % (GROUP * t.itemsize) == 0 else t.itemsize for t in (x, y))
    problem = ConvProblem(
        direction,
        _four(x.shape),
        _four(w.shape),
        _four(y.shape),
        _two(attrs["stride"]),
        _two(attrs["padding"]),
        _two(attrs["dilation"]),
        attrs["groups"],
        x_strides=_four(x.strides),
        y_strides=_four(y.strides),
        alignment=alignment,
        dtype=x.dtype,
        layout="CHWN",
    )
    label = attrs.get("algorithm") or chwn_candidates(problem)[0][0]
    name = label.removeprefix(LABEL).removesuffix(SMALL)
    if not label.startswith(LABEL) or name not in tiles:
        raise PlanError(
            f"op '{op.name}' (layer '{op.layer}'): expected one of {', '.join(LABEL + known for known in tiles)} for a "
            f"convolution in CHWN, got algorithm {label}; plan again"
        )
    for array in (x, y):
        check_index(prod(array.shape[1:]), "numbers of one image")
    return tiles[name], problem, label


def _checked(op: Op, arrays: Arrays, name: str, dtype: str) -> DeviceArray:
    """An array in CHWN; VdnnError if it is another, or has gaps other than between its pixels."""
    array = arrays[name]
    if len(array.shape) == 4:
        n, _, h, w = array.shape
        step = array.strides[3]
        pairs = list(zip(array.shape, array.strides, (1, h * w * step, w * step, step), strict=True))
        if array.dtype == dtype and step >= n and all(size == 1 or stride == want for size, stride, want in pairs):
            return array
    raise VdnnError(
        f"op '{op.name}' (layer '{op.layer}'), tensor '{name}': expected {dtype} in CHWN, got {array.dtype} "
        f"{array.layout} with strides {array.strides} for shape {array.shape}; transform it first"
    )


def _four(values: Any) -> tuple[int, int, int, int]:
    a, b, c, d = values
    return int(a), int(b), int(c), int(d)


def _two(values: Any) -> tuple[int, int]:
    a, b = values
    return int(a), int(b)
