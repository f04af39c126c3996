"""vdnn's CUDA kernels on this GPU: every kind against the CPU backend, then the bandwidth of each on a large tensor.

    python -m vdnn.bench.gpu_kernels                     # exit 1 if a call is wrong
    python -m vdnn.bench.gpu_kernels bfloat16 NHWC       # those with such activations whose name has this in it

gpu_kernels.json goes to the folder $OUT. Bandwidth counts every operand once, so that a kernel that reads one twice
shows less; `share` is of a device copy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vdnn.bench.command import command
from vdnn.bench.kernel_cases import all_cases
from vdnn.bench.kernel_check import CALLS, LAYOUTS, STORE, Case, Machine, difference, is_activation
from vdnn.layers import Op
from vdnn.layers.tensor import DTYPE_BYTES, Shape
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import workspace_bytes
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.source import STORAGE
from vdnn.runtime.step import new_step

ALIGN_BYTES, WORKSPACE_BYTES = 256, 2**23
IMAGE, SMALL, DEEP = (64, 64, 224, 224), (256, 64, 56, 56), (256, 2048, 7, 7)
COPIED = IMAGE
POOLED, THIRD = (64, 64, 112, 112), (512, 64, 27, 27)


@dataclass(frozen=True)
class Load:
    """A large call: shapes of arguments by name; `before` is a kind that makes what it reads, also from `source`.

    `layout` is that of images and filters, but for pixels that are uploaded.
    """

    name: str
    kind: str
    reads: Mapping[str, Shape]
    writes: Mapping[str, Shape]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    accumulate: tuple[str, ...] = ()
    before: str | None = None
    source: Mapping[str, Shape] = field(default_factory=dict)
    layout: str = "NCHW"

    def nbytes(self, dtype: str = "float32") -> int:
        """Bytes of every operand, once; accumulated ones twice. dtype: of activations."""
        sizes = {a: prod(s) * DTYPE_BYTES[self.dtype(a, dtype)] for a, s in self.shapes.items()}
        return sum(sizes.values()) + sum(sizes[a] for a in self.accumulate)

    def layout_of(self, argument: str) -> str:
        """Of an argument."""
        return "NCHW" if (self.kind, argument) == ("input.normalize", "x") else self.layout

    def dtype(self, argument: str, dtype: str) -> str:
        """Of an argument where activations have `dtype`."""
        if argument == "indices" or (self.kind, argument) == ("input.normalize", "x"):
            return "uint8"
        return dtype if is_activation(self.kind, argument) else "float32"

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of all arguments."""
        return {**self.reads, **self.writes}


def window(mode: str, size: int, stride: int, padding: int = 0) -> dict[str, Any]:
    """Attributes of a pool op with square windows."""
    pairs = {"kernel": [size] * 2, "stride": [stride] * 2, "padding": [padding] * 2}
    return {"mode": mode, "count_include_pad": True, **pairs}


POOLS: tuple[tuple[str, Shape, int, dict[str, Any]], ...] = (
    ("max VGG-19 pool1", (256, 64, 224, 224), 112, window("max", 2, 2)),
    ("max GoogLeNet pool1", (128, 64, 112, 112), 56, window("max", 3, 2)),  # the last windows lie half outside
    ("max ResNet pool1", (128, 64, 112, 112), 56, window("max", 3, 2, 1)),
    ("max inception 3a", (128, 192, 28, 28), 28, window("max", 3, 1, 1)),
    ("max AlexNet pool1", (256, 64, 55, 55), 27, window("max", 3, 2)),  # rows that cannot be loaded by fours
    ("max VGG-19 pool4", (256, 512, 28, 28), 14, window("max", 2, 2)),
)
"""Name, images, outputs a side, attributes."""


def pool_loads() -> Iterable[Load]:
    """Forward with and without indices, backward by x and y, by indices, and by indices with the mask of a ReLU."""
    for name, x, side, attrs in POOLS:
        y = (*x[:2], side, side)
        yield Load(f"{name}", "pool.forward", {"x": x}, {"y": y}, attrs)
        yield Load(f"{name} indexed", "pool.forward", {"x": x}, {"y": y, "indices": y}, attrs)
        yield Load(f"{name} gradient", "pool.backward", {"x": x, "y": y, "dy": y}, {"dx": x}, attrs, (), "pool.forward")
        for what, reads in (("by indices", {"indices": y}), ("masked", {"indices": y, "y": y})):
            made = {"x": x, "y": y}
            yield Load(
                f"{name} gradient {what}",
                "pool.backward",
                {**reads, "dy": y},
                {"dx": x},
                attrs,
                before="pool.forward",
                source={argument: shape for argument, shape in made.items() if argument not in reads},
            )
    small, deep, apart = (256, 2048, 1, 1), window("average", 7, 7), window("average", 2, 2)
    yield Load("average 7x7", "pool.forward", {"x": DEEP}, {"y": small}, deep)
    yield Load("average 7x7 gradient", "pool.backward", {"dy": small}, {"dx": DEEP}, deep)
    yield Load("average 2x2", "pool.forward", {"x": IMAGE}, {"y": POOLED}, apart)
    yield Load("average 2x2 gradient", "pool.backward", {"dy": POOLED}, {"dx": IMAGE}, apart)


def loads() -> Iterable[Load]:
    """One or a few of every kind that moves much, those of images in every layout."""
    plain = list(_loads())
    yield from plain
    for load in plain:
        if any(len(shape) == 4 for shape in load.shapes.values()):
            for layout in ("NHWC", "CHWN"):
                yield replace(load, name=f"{layout} {load.name}", layout=layout)
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3}
    for channels in (4, 8):
        reads, writes = {"x": (256, 3, 224, 224)}, {"y": (256, channels, 224, 224)}
        yield Load(f"pixels to {channels} channels", "input.normalize", reads, writes, pixels, layout="NHWC")
    for name, n, made, fold, padding in (("ResNet", 256, (16, 115, 115), 2, 3), ("AlexNet", 128, (48, 57, 57), 4, 2)):
        reads, writes = {"x": (n, 3, 224, 224)}, {"y": (n, *made)}
        attrs = {**pixels, "fold": fold, "padding": [padding] * 2}
        yield Load(f"pixels of {name}, folded", "input.normalize", reads, writes, attrs, layout="NHWC")
    vectors = (DEEP[0], prod(DEEP[1:]))
    yield Load("to vectors", "layout.transform", {"x": DEEP}, {"y": vectors}, layout="NHWC")
    yield Load("to images", "layout.transform", {"x": vectors}, {"y": DEEP}, layout="NHWC")


def _loads() -> Iterable[Load]:
    c, channels = (64,), {"weight": (64,), "bias": (64,)}
    saved = {"mean": c, "invstd": c}
    running = {"running_mean": c, "running_var": c}
    lrn = {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 2.0}
    drop = {"p": 0.5, "key": 7}
    sgd = {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-4}
    weight = (4096, 25088)
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3}
    yield Load("pixels", "input.normalize", {"x": (256, 3, 224, 224)}, {"y": (256, 3, 224, 224)}, pixels)
    yield Load("copy", "copy.forward", {"x": IMAGE}, {"y": IMAGE})
    yield Load("copy added", "copy.forward", {"x": IMAGE}, {"y": IMAGE}, {}, ("y",))
    yield Load("sum", "add.forward", {"a": IMAGE, "b": IMAGE}, {"y": IMAGE})
    yield Load("relu", "relu.forward", {"x": IMAGE}, {"y": IMAGE})
    yield Load("relu gradient", "relu.backward", {"y": IMAGE, "dy": IMAGE}, {"dx": IMAGE})
    yield Load("bias", "conv.forward", {"b": c}, {"y": IMAGE}, {}, ("y",))
    yield Load("bias and relu", "conv.forward", {"b": c}, {"y": IMAGE}, {"activation": "relu"}, ("y",))
    for shape in (IMAGE, DEEP):
        name, k = f"relu and bias gradient {shape[-1]}x{shape[-1]}", shape[1]
        yield Load(name, "relu.bias_backward", {"y": shape, "dy": shape}, {"dx": shape, "db": (k,)})
    yield Load("filter", "filter.prepare", {"w": (4096, 25088)}, {"y": (4096, 25088)})
    yield Load("filter 3x3", "filter.prepare", {"w": (4096, 2048, 3, 3)}, {"y": (4096, 2048, 3, 3)})
    yield Load("filter gradient", STORE, {"scratch": (4096, 25088)}, {"dw": (4096, 25088)})
    yield Load("bias gradient", "conv.bgrad", {"dy": IMAGE}, {"db": c})
    yield Load("bias gradient 7x7", "conv.bgrad", {"dy": DEEP}, {"db": (2048,)})
    yield Load("bias gradient of linear", "linear.bgrad", {"dy": (16384, 4096)}, {"db": (4096,)})
    yield from pool_loads()
    yield Load("lrn", "lrn.forward", {"x": THIRD}, {"y": THIRD}, lrn)
    yield Load("lrn gradient", "lrn.backward", {"x": THIRD, "y": THIRD, "dy": THIRD}, {"dx": THIRD}, lrn, ())
    yield Load("norm", "batchnorm.forward", {"x": SMALL, **channels}, {"y": SMALL, **saved}, {"eps": 1e-5})
    yield Load(
        "norm inference", "batchnorm.inference", {"x": SMALL, **channels, **running}, {"y": SMALL}, {"eps": 1e-5}
    )
    reads: dict[str, Shape] = {"x": SMALL, "dy": SMALL, "weight": c, **saved}
    writes: dict[str, Shape] = {"dweight": c, "dbias": c, "dx": SMALL}
    yield Load("norm gradient", "batchnorm.backward", reads, writes, {"eps": 1e-5})
    yield Load("dropout", "dropout.forward", {"x": (8192, 4096)}, {"y": (8192, 4096)}, drop)
    yield Load("dropout gradient", "dropout.backward", {"dy": (8192, 4096)}, {"dx": (8192, 4096)}, drop)
    yield Load("update", "sgd.update", {"dw": weight}, {"w": weight, "v": weight}, sgd, ("w", "v"))
    yield updates()
    yield filters()


def updates(count: int = 160) -> Load:
    """The update of many parameters together, of 64 to 2.4 million numbers as those of ResNet-50."""
    shapes = {i: ((64, 2048, 36864, 2359296)[i % 4],) for i in range(count)}
    writes = {f"{name}{i}": shape for i, shape in shapes.items() for name in ("w", "v")}
    rule = {"momentum": 0.9, "nesterov": False, "weight_decay": [1e-4] * count}
    reads = {f"dw{i}": shape for i, shape in shapes.items()}
    return Load("updates together", "sgd.update_all", reads, writes, rule, tuple(writes))


def filters(count: int = 53) -> Load:
    """All filters in 16 bits, of sizes as in ResNet-50."""
    shapes: tuple[Shape, ...] = ((64, 64, 1, 1), (512, 512, 3, 3), (256, 1024, 1, 1), (2048, 512, 1, 1))
    reads, writes = ({f"{name}{i}": shapes[i % 4] for i in range(count)} for name in "wy")
    return Load("filters together", "filter.prepare_all", reads, writes)


def measure(probe: Probe, load: Load, slab: int) -> dict[str, Any]:
    """Time of `load` with its operands one after another from `slab` on; the step record lies before it."""
    arrays: dict[str, DeviceArray] = {}
    place = slab
    probe.fill(slab, _slab_bytes(load))  # an earlier call may have left numbers that are not finite
    dtype = probe.kernels.dtype
    for argument, shape in {**load.shapes, **load.source}.items():
        arrays[argument] = contiguous(place, shape, load.dtype(argument, dtype), load.layout_of(argument))
        place += -(-arrays[argument].nbytes // ALIGN_BYTES) * ALIGN_BYTES
    arrays["workspace"] = contiguous(place, (max(1, workspace_bytes(load.kind, load.shapes, load.layout)),), "uint8")
    arrays["step"] = arrays["status"] = contiguous(slab - ALIGN_BYTES, (64,), "uint8")
    op = Op(load.name, load.kind, "layer", "forward", {}, {}, load.attrs, load.accumulate)
    if load.before:
        CALLS[load.before](op, arrays, probe.kernels, probe.stream)
        arrays = {argument: array for argument, array in arrays.items() if argument not in load.source}
    time_ms = probe.time_ms(lambda: CALLS[load.kind](op, arrays, probe.kernels, probe.stream))
    return {"name": load.name, "dtype": dtype, "kind": load.kind, "nbytes": load.nbytes(dtype), "time_ms": time_ms}


def _slab_bytes(load: Load) -> int:
    """Bytes of all operands, more or less."""
    return sum(4 * prod(shape) + ALIGN_BYTES for shape in (*load.shapes.values(), *load.source.values()))


def check(machine: Machine, cases: Iterable[Case], note: Callable[[str], None] = print) -> tuple[int, list[str]]:
    """Calls made, and what is wrong with those that failed."""
    calls, failures = 0, []
    for case in cases:
        for layout in LAYOUTS:
            calls += 1
            try:
                wrong = difference(case, layout, machine)
            except Exception as error:  # one call that raises must not hide the others
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                failures.append(f"{case.kind}, {case.name}, {layout}: {wrong}")
                note(f"FAILED {failures[-1]}")
    return calls, failures


def study(dtype: str, wanted: str) -> dict[str, Any]:
    """Checks, and bandwidths of the loads with `wanted` in their name, for one dtype of activations."""
    probe = Probe(dtype)
    facts = probe.facts()
    print(dtype, {key: value for key, value in facts.items() if key != "registers"})
    calls, failures = check(probe, all_cases())
    print(f"{calls} calls, {len(failures)} failures, {probe.unequal} unequal repeats")
    half = 4 * prod(COPIED)
    chosen = [load for load in loads() if wanted in load.name]
    slab = probe.allocate(max(2 * half, *map(_slab_bytes, chosen)) + WORKSPACE_BYTES) + ALIGN_BYTES
    record = np.zeros(ALIGN_BYTES, np.uint8)
    record[:64] = new_step(1e-6, 1.0, 0, 0)
    probe.upload(slab - ALIGN_BYTES, record)
    probe.fill(slab, 2 * half)
    copy_gbps = 2 * half / probe.time_ms(lambda: probe.copy(slab + half, slab, half)) / 1e6
    print(f"device copy {copy_gbps:.0f} GB/s, read and write counted")
    rows: list[dict[str, Any]] = []
    for load in chosen:
        try:
            row = measure(probe, load, slab)
        except Exception as error:  # the others still count
            failures.append(f"{load.kind}, {load.name}: {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}")
            continue
        row["gbps"] = row["nbytes"] / row["time_ms"] / 1e6
        row["share"] = row["gbps"] / copy_gbps
        rows.append(row)
        print(f"{row['name']:42} {row['time_ms']:8.3f} ms {row['gbps']:7.0f} GB/s {row['share']:6.1%} of a copy")
    probe.free(slab - ALIGN_BYTES)
    result = {"facts": facts, "calls": calls, "failures": failures, "unequal": probe.unequal}
    return result | {"copy_gbps": copy_gbps, "bandwidth": rows}


def main(words: Sequence[str] = ()) -> int:
    """Check and measure everything, or one dtype and the loads whose name has a word in it; 1 if a call was wrong."""
    started = time.monotonic()
    dtypes, wanted = list(words[:1]) or list(STORAGE), "".join(words[1:2])
    studies = {dtype: study(dtype, wanted) for dtype in dtypes}
    if folder := os.environ.get("OUT"):
        result = {"dtypes": studies, "seconds": time.monotonic() - started}
        Path(folder, "gpu_kernels.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if any(found["failures"] or found["unequal"] for found in studies.values()) else 0


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
