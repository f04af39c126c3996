"""Layout transforms on this GPU: every ordered pair of layouts, every way, against a device copy of the same size.

    python -m vdnn.bench.gpu_transforms                         # gpu_transforms.json goes to $OUT
    python -m vdnn.bench.gpu_transforms float32 13x13           # such activations, cases with this in their name
    python -m vdnn.bench.gpu_transforms --large --only NHWC:CHWN CHWN:NHWC --ways VECTOR BRICKS

--only: these pairs of layouts; --ways: labels that begin so, not only those that a run tries; --large: none of the
study's convolutions. With any of them the best ways of each pair are listed.

Each call is checked first: windows of y, the first and the last among them, hold the numbers that NumPy finds for their
places. Bytes are those of x and y; `share` is the time of a copy of as many over the time of the transform, both from
the same operands, in memory and not in the cache. Exit 1 if a call was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.command import command
from vdnn.bench.harness import write_results
from vdnn.bench.study_cases import convolutions
from vdnn.bench.study_clock import Clock
from vdnn.layers import Op
from vdnn.layers.tensor import DTYPE_BYTES, MEMORY_ORDERS, Shape
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.launch import Kernels
from vdnn.runtime.backends.cuda.layout import ALGORITHMS, different_ways, layout_transform
from vdnn.runtime.backends.cuda.matrices import Matrix
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.source import STORAGE

ALIGN_BYTES = 512
PATTERN = 4_000_037
"""Numbers of x before they begin anew; no size or stride is a multiple of it."""
PAIRS = tuple(permutations(MEMORY_ORDERS, 2))
BEST = 6
"""Ways that are listed of each pair."""
TILED = ("BRICKS", "ROWS")
"""Labels whose tiles are told: pieces, numbers and pieces; or pieces, numbers and words."""
WINDOWS, WINDOW = 12, 2048
"""Parts of y that are checked, and the numbers of each."""
LARGE: tuple[tuple[str, Shape], ...] = (
    ("by 32", (128, 64, 64, 64)),
    ("by 32", (256, 256, 28, 28)),
    ("by 32", (32, 96, 112, 112)),
    ("55x55", (128, 96, 55, 55)),
    ("13x13", (1024, 256, 13, 13)),
    ("C = 3", (256, 3, 224, 224)),
    ("C = 3, 13x13", (70016, 3, 13, 13)),
)
"""Kinds of sizes, and images of 64 MiB or more in 16 bits, of each."""
NAIVE_SHAPES = ((128, 64, 64, 64), (256, 3, 224, 224))
"""Of the large ones those that are also moved number by number, which takes long."""
TARGETS = {"by 32": (0.95, 0.88), "": (0.75, 0.75)}
"""Kind of sizes → the share wanted on an H200, in 32 and in 16 bits; "" for all other large ones."""


class Machine(Protocol):
    """What a Probe has that is needed here."""

    stream: Any

    @property
    def kernels(self) -> Kernels: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def upload(self, address: int, content: NDArray[np.uint8]) -> None: ...
    def download(self, address: int, nbytes: int) -> NDArray[np.uint8]: ...


class Timer(Protocol):
    """What a Clock has."""

    def count(self, nbytes: int) -> int: ...
    def time_us(self, calls: Sequence[Callable[[], None]]) -> float: ...
    def copy_us(self, places: Sequence[int], nbytes: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Operands:
    """Pairs of x and y for one shape: addresses of each x, y half of `nbytes` behind it, and the numbers of every x."""

    places: tuple[int, ...]
    nbytes: int
    pattern: NDArray[Any]


def cases() -> Iterator[tuple[str, Shape]]:
    """The large images, then the inputs of the study's convolutions."""
    yield from LARGE
    for name, case in convolutions().items():
        yield name, case.x


def study(
    machine: Machine,
    clock: Timer,
    chosen: Sequence[tuple[str, Shape]],
    note: Callable[[str], None],
    pairs: Sequence[tuple[str, str]] = PAIRS,
    ways: tuple[str, ...] = (),
) -> Rows:
    """(rows, failures) of every case in the dtype of the machine's kernels, for labels that begin as one of `ways`; or,
    without, for all."""
    dtype = machine.kernels.dtype
    pattern = np.random.default_rng(0).integers(0, 2**16, PATTERN * DTYPE_BYTES[dtype] // 2).astype(np.uint16)
    numbers = pattern.view(f"u{DTYPE_BYTES[dtype]}")
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for case, shape in chosen:
        nbytes = 2 * -(-prod(shape) * DTYPE_BYTES[dtype] // ALIGN_BYTES) * ALIGN_BYTES
        count = clock.count(nbytes)
        slab = machine.allocate(nbytes * count + pattern.nbytes)
        try:
            operands = Operands(tuple(slab + i * nbytes for i in range(count)), nbytes, numbers)
            _fill(machine, operands, slab + nbytes * count)
            copy_us = clock.copy_us(operands.places, nbytes)
            for one, two in pairs:
                for label in labels(case, shape, one, two, dtype):
                    if ways and not label.startswith(ways):
                        continue
                    key = {"case": case, "shape": list(shape), "dtype": dtype, "from": one, "to": two, "method": label}
                    calls = [_call(machine, at, key, nbytes) for at in operands.places]
                    wrong = _wrong(machine, operands, key, calls[0])
                    if wrong:
                        failures.append(f"{dtype} {shape} {one} to {two}, {label}: {wrong}")
                        note(f"FAILED {failures[-1]}")
                        continue
                    time_us = clock.time_us(calls)
                    gbps = 2e-3 * prod(shape) * DTYPE_BYTES[dtype] / time_us
                    measured = {"time_us": time_us, "gbps": gbps, "share": copy_us / time_us, "nbytes": nbytes}
                    rows.append({**key, **measured, "copy_us": copy_us})
        finally:
            machine.free(slab)
    return rows, failures


Rows = tuple[list[dict[str, Any]], list[str]]


def labels(case: str, shape: Shape, one: str, two: str, dtype: str) -> list[str]:
    """The ways that apply and differ, but for that of one thread a number where it takes long."""
    x, y = (contiguous(0, shape, dtype, layout) for layout in (one, two))
    matrix = Matrix.of(x, y)
    if matrix is None:
        return []
    naive = shape in NAIVE_SHAPES or (case, shape) not in LARGE
    return [label for label in different_ways(matrix) if label != "NAIVE" or naive]


def _fill(machine: Machine, operands: Operands, spare: int) -> None:
    """The pattern to `spare`, and from there into every x, over and over."""
    size = operands.pattern.nbytes
    machine.upload(spare, operands.pattern.view(np.uint8))
    for at in operands.places:
        for start in range(0, operands.nbytes // 2, size):
            machine.copy(at + start, spare, min(size, operands.nbytes // 2 - start))


def _call(machine: Machine, at: int, key: dict[str, Any], nbytes: int) -> Callable[[], None]:
    shape, dtype = tuple(key["shape"]), key["dtype"]
    x = contiguous(at, shape, dtype, key["from"])
    y = contiguous(at + nbytes // 2, shape, dtype, key["to"])
    attrs = {"algorithm": key["method"]}
    op = Op("move", "layout.transform", "layer", "forward", {"x": "x"}, {"y": "y"}, attrs)
    return partial(layout_transform, op, {"x": x, "y": y}, machine.kernels, machine.stream)


def _wrong(machine: Machine, operands: Operands, key: dict[str, Any], call: Callable[[], None]) -> str:
    """Calls it on a y that holds x as it is, and says what is wrong with the result; "" if nothing is."""
    x, half = operands.places[0], operands.nbytes // 2
    machine.copy(x + half, x, half)
    call()
    machine.stream.synchronize()
    shape, itemsize = tuple(key["shape"]), operands.pattern.itemsize
    size = prod(shape)
    starts = np.linspace(0, max(0, size - WINDOW), WINDOWS).astype(int)
    for start in dict.fromkeys(starts.tolist()):
        end = min(start + WINDOW, size)
        raw = machine.download(x + half + start * itemsize, (end - start) * itemsize)
        want = operands.pattern[places_in_x(np.arange(start, end), shape, key["from"], key["to"]) % PATTERN]
        differ = np.flatnonzero(raw.view(want.dtype) != want)
        if len(differ):
            return f"{len(differ)} of numbers {start} to {end} of y, the first is number {start + differ[0]}"
    return ""


def places_in_x(numbers: NDArray[Any], shape: Shape, one: str, two: str) -> NDArray[Any]:
    """Where in memory of layout `one` those numbers of a batch lie that are `numbers` in memory of layout `two`."""
    found = np.unravel_index(numbers, [shape[axis] for axis in MEMORY_ORDERS[two]])
    logical = dict(zip(MEMORY_ORDERS[two], found, strict=True))
    order = MEMORY_ORDERS[one]
    return np.ravel_multi_index([logical[axis] for axis in order], [shape[axis] for axis in order])


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for every case and dtype: the best way of each pair of layouts, and its share of a copy."""
    yield f"{'':32}" + "".join(f"{one + '>' + two:>22}" for one, two in PAIRS)
    for case, shape, dtype in dict.fromkeys((r["case"], tuple(r["shape"]), r["dtype"]) for r in rows):
        of = [r for r in rows if (r["case"], tuple(r["shape"]), r["dtype"]) == (case, shape, dtype)]
        cells, least = [], 1e9
        for one, two in PAIRS:
            found = [r for r in of if (r["from"], r["to"]) == (one, two)]
            if not found:
                cells.append("-")
                continue
            best = max(found, key=lambda row: float(row["share"]))
            least = min(least, best["share"])
            cells.append(f"{best['method']} {best['share']:.0%}")
        wanted = TARGETS.get(case, TARGETS[""])[dtype != "float32"] if (case, shape) in LARGE else 0.0
        short = f"  below {wanted:.0%}" if least < wanted else ""
        yield f"{'x'.join(map(str, shape)):21}{dtype:11}" + "".join(f"{cell:>22}" for cell in cells) + short


def ranking(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for every case, dtype and pair of layouts: the best ways, their tiles, and their shares of a copy."""
    for key in dict.fromkeys((tuple(r["shape"]), r["dtype"], r["from"], r["to"]) for r in rows):
        shape, dtype, one, two = key
        matrix = Matrix.of(*(contiguous(0, shape, dtype, layout) for layout in (one, two)))
        found = [row for row in rows if (tuple(row["shape"]), row["dtype"], row["from"], row["to"]) == key]
        best = [f"{row['method']}{_tile(row, matrix)} {row['share']:.1%}" for row in sorted(found, key=_time)[:BEST]]
        yield f"{'x'.join(map(str, shape))} {dtype} {one}:{two}  " + ", ".join(best)


def _time(row: dict[str, Any]) -> float:
    return float(row["time_us"])


def _tile(row: dict[str, Any], matrix: Matrix | None) -> str:
    """The last arguments of ways that fit their tiles to the shape."""
    launch = ALGORITHMS[row["method"]](matrix, False) if matrix and row["method"] in TILED else None
    return f"({'x'.join(map(str, launch.args[-3:]))})" if launch else ""


def main(words: Sequence[str] = ()) -> int:
    """Measure all dtypes and cases, or those that `words` name; 1 if a call was wrong."""
    started = time.monotonic()
    given = _parser().parse_args(words)
    dtypes = [given.dtype] if given.dtype else list(STORAGE)
    chosen = [(case, shape) for case, shape in cases() if given.case in case]
    if given.large:
        chosen = [case for case in chosen if case in LARGE]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    facts: dict[str, Any] = {}
    for dtype in dtypes:
        probe = Probe(dtype)
        facts[dtype] = probe.facts()
        found, wrong = study(probe, Clock(probe), chosen, print, given.only or PAIRS, tuple(given.ways))
        rows, failures = rows + found, failures + wrong
    for line in summary(rows):
        print(line)
    if given.only or given.large or given.ways:
        for line in ranking(rows):
            print(line)
    command = " ".join(["python -m vdnn.bench.gpu_transforms", *words])
    results = {"rows": rows, "failures": failures, "machine": facts, "seconds": time.monotonic() - started}
    write_results("gpu_transforms.json", command, results)
    return int(bool(failures) or not rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vdnn.bench.gpu_transforms", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("dtype", nargs="?", choices=list(STORAGE), help="of the activations; all if none is named")
    parser.add_argument("case", nargs="?", default="", help="in the name of the cases, such as 13x13 (default: all)")
    parser.add_argument("--only", nargs="+", type=_pair, metavar="FROM:TO", help="pairs of layouts, as NHWC:CHWN")
    parser.add_argument("--ways", nargs="+", default=[], metavar="LABEL", help="how labels of the ways begin")
    parser.add_argument("--large", action="store_true", help="no case of the study's convolutions")
    return parser


def _pair(text: str) -> tuple[str, str]:
    one, _, two = text.partition(":")
    if (one, two) not in PAIRS:
        raise argparse.ArgumentTypeError(
            f"expected two of {', '.join(MEMORY_ORDERS)} with a colon between, got '{text}'"
        )
    return one, two


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
