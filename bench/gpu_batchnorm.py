"""Time and bandwidth of vdnn's batch normalisation on this GPU, at the shapes of ResNet-50 and GoogLeNet.

    python -m vdnn.bench.gpu_batchnorm --dtypes bfloat16 float32 --layouts NHWC       # gpu_batchnorm.json goes to $OUT

Bytes are those that the passes move: a tensor that two passes read counts twice. What stays in the cache between them
makes small tensors faster than a device copy, of which `share` is measured in the same run. Calls are launched as
graphs, as in training. `--cuts 256:1024:14 264:528:15` measures NHWC with other numbers of blocks, to choose those of
vdnn.runtime.backends.cuda.launch.Channels: few and many blocks, and the digits of what a block of many has to add up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from vdnn.bench.command import command
from vdnn.layers import Op
from vdnn.layers.tensor import DTYPE_BYTES, Shape
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.launch import Channels
from vdnn.runtime.backends.cuda.probe import Probe

ALIGN_BYTES = 256
COPY_BYTES = 2**29
GRAPH_BYTES, GRAPH_CALLS = 2**30, 20
"""A graph has so many calls at most, and one at least, as move so many bytes."""
SHAPES: tuple[tuple[str, Shape], ...] = (
    *(
        ("resnet50", (256, c, side, side))
        for c, side in (
            *((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)),
        )
    ),
    *(
        ("googlenet", (128, c, side, side))
        for c, side in ((64, 112), (192, 56), (96, 28), (16, 28), (208, 14), (48, 14), (384, 7), (128, 7))
    ),
)


@dataclass(frozen=True)
class Call:
    """A kind, the batches that it takes, and how many of them its passes read or write."""

    name: str
    kind: str
    batches: tuple[str, ...]
    passes: int
    relu: bool = False


CALLS = (
    Call("norm", "batchnorm.forward", ("x", "y"), 3),
    Call("norm, relu", "batchnorm.forward", ("x", "y"), 3, True),
    Call("norm, sum, relu", "batchnorm.forward", ("x", "z", "y"), 4, True),
    Call("inference, relu", "batchnorm.inference", ("x", "y"), 2, True),
    Call("gradient", "batchnorm.backward", ("x", "dy", "dx"), 5),
    Call("gradient of relu", "batchnorm.backward", ("x", "dy", "dx"), 5, True),
    Call("gradient of sum, relu", "batchnorm.backward", ("x", "dy", "y", "dz", "dx"), 7, True),
)
PRESENT = (*Channels.COLUMN_BLOCKS, Channels.BLOCK_NUMBERS[1].bit_length() - 1)
"""How sums are cut."""
CHANNELS = ("weight", "bias", "mean", "invstd", "running_mean", "running_var", "dweight", "dbias")


def measure(probe: Probe, call: Call, shape: Shape, layout: str, slab: int) -> dict[str, Any]:
    """Time of `call`, its tensors one after another from `slab` on; dz lies over dy."""
    arrays: dict[str, DeviceArray] = {}
    place = slab
    wanted = [(b, shape, probe.kernels.dtype) for b in call.batches if b != "dz"]
    wanted += [(name, shape[1:2], "float32") for name in CHANNELS]
    for name, size, dtype in wanted:
        arrays[name] = contiguous(place, size, dtype, layout)
        place += -(-arrays[name].nbytes // ALIGN_BYTES) * ALIGN_BYTES
    if "dz" in call.batches:
        arrays["dz"] = arrays["dy"]
    scratch = workspace_bytes(call.kind, {"x": shape}, layout)
    arrays["workspace"] = contiguous(place, (max(1, scratch),), "uint8")
    op = Op(
        call.name, call.kind, "layer", "forward", {}, {}, {"eps": 1e-5} | ({"activation": "relu"} if call.relu else {})
    )
    nbytes = call.passes * prod(shape) * DTYPE_BYTES[probe.kernels.dtype]
    calls = max(1, min(GRAPH_CALLS, GRAPH_BYTES // nbytes))
    CUDA_KERNELS[call.kind](op, arrays, probe.kernels, probe.stream)
    probe.stream.synchronize()
    probe.stream.begin_capture()
    for _ in range(calls):
        CUDA_KERNELS[call.kind](op, arrays, probe.kernels, probe.stream)
    graph = probe.stream.end_capture()
    time_ms = probe.time_ms(lambda: graph.launch(probe.stream)) / calls
    return {"call": call.name, "shape": shape, "nbytes": nbytes, "time_ms": time_ms, "workspace_bytes": scratch}


def slab_bytes(shape: Shape, dtype: str) -> int:
    """Bytes for the tensors of any call on `shape`."""
    return 4 * (prod(shape) * DTYPE_BYTES[dtype] + ALIGN_BYTES) + len(CHANNELS) * 4 * (shape[1] + ALIGN_BYTES) + 2**24


def cut_of(text: str) -> tuple[int, int, int]:
    """FEW:MANY:DIGITS as numbers; ValueError if it is no such text."""
    few, many, digits = (int(word) for word in text.split(":"))
    return few, many, digits


def cut(few: int, many: int, digits: int) -> None:
    """Let all sums of this process that follow be cut so, where channels are columns."""
    least, _, most = Channels.BLOCK_NUMBERS
    Channels.COLUMN_BLOCKS, Channels.BLOCK_NUMBERS = (few, many), (least, 2**digits, most)


def rows(dtype: str, layouts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every call on every shape, and the copy first."""
    probe = Probe(dtype)
    room = max(2 * COPY_BYTES, *(slab_bytes(shape, dtype) for _, shape in SHAPES))
    slab = probe.allocate(room)
    probe.fill(slab, room)
    copy_gbps = 2 * COPY_BYTES / probe.time_ms(lambda: probe.copy(slab + COPY_BYTES, slab, COPY_BYTES)) / 1e6
    registers = {k: v for k, v in probe.kernels.registers.items() if k.startswith("batchnorm")}
    yield {**probe.facts(), "dtype": dtype, "copy_gbps": copy_gbps, "registers": registers}
    for layout in layouts:
        for network, shape in SHAPES:
            for call in CALLS:
                row = measure(probe, call, shape, layout, slab)
                gbps = row["nbytes"] / row["time_ms"] / 1e6
                yield {
                    "network": network,
                    "dtype": dtype,
                    "layout": layout,
                    **row,
                    "gbps": gbps,
                    "share": gbps / copy_gbps,
                }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a call."""
    parser = argparse.ArgumentParser(description="bandwidth of batch normalisation on this GPU")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="default: bfloat16 float32")
    parser.add_argument("--layouts", nargs="+", default=["NHWC", "NCHW"], help="default: NHWC NCHW")
    text = f"default: {':'.join(map(str, PRESENT))}"
    parser.add_argument("--cuts", nargs="+", type=cut_of, metavar="FEW:MANY:DIGITS", default=[PRESENT], help=text)
    options = parser.parse_args(arguments)
    found = []
    for numbers, dtype in product(options.cuts, options.dtypes):
        cut(*numbers)
        print(f"cut {':'.join(map(str, numbers))}")
        for row in rows(dtype, options.layouts):
            found.append({"cut": numbers, **row})
            if "call" not in row:
                print({key: value for key, value in row.items() if key != "registers"})
                print(f"registers: {row['registers']}")
                continue
            words = f"{row['network']:10} {row['dtype']:9} {row['layout']} {row['call']:21}  {row['shape']!s:22}"
            print(f"{words} {row['time_ms']:8.4f} ms {row['gbps']:6.0f} GB/s {row['share']:6.1%} of a copy")
    if folder := os.environ.get("OUT"):
        Path(folder, "gpu_batchnorm.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(command(main))
