"""vdnn's pools on this GPU in every layout and in every way, beside cuDNN's and a copy of as many bytes.

    python -m vdnn.bench.gpu_pool                      # float32 and bfloat16; gpu_pool.json goes to $OUT
    python -m vdnn.bench.gpu_pool float16 AlexNet      # that type, the cases with this in their name
    python -m vdnn.bench.gpu_pool --only backward:NCHW # one direction in one layout, of every case in both types

Pools of networks, then those of the memory-efficiency study. Planes of every result are compared with the CPU backend
before it is timed; operands lie in as many copies as it takes to be rid of the cache. A row's share is of a device copy
that moves as many bytes, each operand counted once; cuDNN's gradient reads x and y, ours reads indices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from vdnn.bench.command import command
from vdnn.bench.cudnn_pool import CudnnPool
from vdnn.bench.gpu_kernels import window
from vdnn.bench.harness import write_results
from vdnn.bench.study_cases import CHWN, LAYOUTS, pools
from vdnn.bench.study_clock import Clock, aligned
from vdnn.bench.study_pool_gpu import Bench
from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, Shape, TensorSpec
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.pool import pool_backward, pool_candidates, pool_forward

SECONDS = 45.0
"""After which cases are left out, and said to be."""
DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Of averages and gradients, relative to the largest number; maxima are exact."""
Row = dict[str, Any]


@dataclass(frozen=True)
class PoolCase:
    """A pool of images x; `side` outputs in a row and in a column."""

    name: str
    x: Shape
    side: int
    attrs: Mapping[str, Any]

    @property
    def y(self) -> Shape:
        """Shape of the outputs."""
        return (*self.x[:2], self.side, self.side)

    @property
    def whole(self) -> Shape:
        """Shape of cuDNN's outputs, whose number rounds down."""
        (size, _), (step, _), (pad, _) = (self.attrs[key] for key in ("kernel", "stride", "padding"))
        side = (self.x[2] + 2 * pad - size) // step + 1
        return (*self.x[:2], side, side)


@dataclass(frozen=True)
class Call:
    """One direction of a case: `reads` and `writes` name its operands, the result last."""

    direction: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


FORWARD = Call("forward", ("x",), ("y",))
INDEXED = Call("forward indexed", ("x",), ("indices", "y"))
BACKWARD = Call("backward", ("indices", "dy"), ("dx",))
MASKED = Call("backward masked", ("indices", "y", "dy"), ("dx",))
SPREAD = Call("backward", ("dy",), ("dx",))
OF_NETWORKS: tuple[tuple[str, Shape, int, dict[str, Any]], ...] = (
    ("AlexNet pool1", (128, 96, 55, 55), 27, window("max", 3, 2)),
    ("AlexNet pool2", (128, 256, 27, 27), 13, window("max", 3, 2)),
    ("AlexNet pool5", (128, 256, 13, 13), 6, window("max", 3, 2)),
    ("ResNet pool1", (256, 64, 112, 112), 56, window("max", 3, 2, 1)),
    ("ResNet pool5", (256, 2048, 7, 7), 1, window("average", 7, 7)),
    ("GoogLeNet pool1", (128, 64, 112, 112), 56, window("max", 3, 2)),
    ("GoogLeNet 3a", (128, 192, 28, 28), 28, window("max", 3, 1, 1)),
    ("VGG pool1", (64, 64, 224, 224), 112, window("max", 2, 2)),
    ("VGG pool4", (64, 512, 28, 28), 14, window("max", 2, 2)),
)


def cases() -> Iterator[PoolCase]:
    """Pools of networks, and those of the study."""
    for name, x, side, attrs in OF_NETWORKS:
        yield PoolCase(name, x, side, attrs)
    for case in pools().values():
        yield PoolCase(case.name, case.x, case.y[2], window("max", case.window, case.stride))


def calls_of(case: PoolCase) -> tuple[Call, ...]:
    """What training and evaluation do."""
    return (FORWARD, INDEXED, BACKWARD, MASKED) if case.attrs["mode"] == "max" else (FORWARD, SPREAD)


class Operands:
    """Memory for the operands of a case, in `count` copies: what is read from outside, x and dy, and what is made.

    Args:
        given: address of random numbers that nothing writes over. made: of room for results.
    """

    def __init__(self, case: PoolCase, dtype: str, count: int, given: int, made: int) -> None:
        self.shapes = {"x": case.x, "dy": case.y, "y": case.y, "dx": case.x, "indices": case.y}
        self.dtypes = {name: "uint8" if name == "indices" else dtype for name in self.shapes}
        self.sizes = {name: prod(shape) * DTYPE_BYTES[self.dtypes[name]] for name, shape in self.shapes.items()}
        self.copies: list[dict[str, int]] = []
        for _ in range(count):
            at: dict[str, int] = {}
            for name in ("x", "dy"):
                at[name], given = given, given + aligned(self.sizes[name])
            for name in ("y", "dx", "indices"):
                at[name], made = made, made + aligned(self.sizes[name])
            self.copies.append(at)

    def nbytes(self, *names: str) -> int:
        """Of these, each once."""
        return sum(self.sizes[name] for name in names)

    def op(self, case: PoolCase, call: Call, label: str) -> Op:
        """The op of a call, in one way."""
        kind = "pool.forward" if "x" in call.reads else "pool.backward"
        attrs = {**case.attrs, **({"algorithm": label} if label else {})}
        reads, writes = ({name: name for name in given} for given in (call.reads, call.writes))
        return Op(case.name, kind, "pool", kind.removeprefix("pool."), reads, writes, attrs)

    def labels(self, case: PoolCase, call: Call, layout: str) -> tuple[str, ...]:
        """The ways that vdnn has; "" if there is one."""
        op = self.op(case, call, "")
        specs = {
            name: TensorSpec(name, "aux" if name == "indices" else "act", self.shapes[name], self.dtypes[name], layout)
            for name in (*call.reads, *call.writes)
        }
        program = Program("pool", case.x[0], "train", specs, (op,), (), (), (), "", "")
        return pool_candidates(op, program) or ("",)

    def launch(self, probe: Any, case: PoolCase, call: Call, layout: str, label: str, at: Mapping[str, int]) -> None:
        """Queue vdnn's kernel on one copy."""
        op, names = self.op(case, call, label), (*call.reads, *call.writes)
        arrays = {name: contiguous(at[name], self.shapes[name], self.dtypes[name], layout) for name in names}
        run = pool_forward if op.kind == "pool.forward" else pool_backward
        run(op, arrays, probe.kernels, probe.stream)


def wrong_planes(case: PoolCase, call: Call, layout: str, bench: Bench, at: Mapping[str, int]) -> str:
    """What is wrong with a result in some planes, in words; "" if nothing is."""
    images, channels = (sorted({0, size // 2, size - 1}) for size in case.x[:2])

    def read(name: str) -> Any:
        shape = case.x if name in ("x", "dx") else case.y
        return np.ascontiguousarray(bench.read(at[name], shape, layout, images, channels)[:, None])

    x = read("x")
    outputs = (len(x), 1, case.side, case.side)
    y, indices = np.empty(outputs, np.float32), np.empty(outputs, np.uint8)
    is_maximum = case.attrs["mode"] == "max"
    op = Op(case.name, "pool.forward", "pool", "forward", {}, {}, case.attrs)
    KERNELS["pool.forward"](op, x=x, y=y, **({"indices": indices} if is_maximum else {}))
    wanted, result = y, call.writes[-1]
    if result == "dx":
        wanted = np.empty_like(x)
        told: dict[str, Any] = {"indices": indices} if is_maximum else {}
        told |= {"y": y} if "y" in call.reads else {}
        KERNELS["pool.backward"](op, dy=read("dy"), dx=wanted, **told)
    most = 0.0 if result == "y" and is_maximum else TOLERANCE[bench.dtype] * float(np.abs(wanted).max())
    differ = ~(np.abs(read(result) - wanted) <= most)
    return f"{int(differ.sum())} of {differ.size} sampled numbers are wrong" if differ.any() else ""


def measure(
    case: PoolCase,
    bench: Bench,
    handle: Any,
    given: int,
    made: int,
    note: Callable[[str], None],
    only: tuple[str, str] = ("", ""),
) -> list[Row]:
    """Rows of a case in the dtype of `bench`; `only`: of that direction and layout, "" for all."""
    probe, clock, dtype = bench.probe, bench.clock, bench.dtype
    rows: list[Row] = []
    smallest = Operands(case, dtype, 0, 0, 0)
    operands = Operands(case, dtype, clock.count(smallest.nbytes("x", "y")), given, made)
    copies, first = operands.copies, operands.copies[0]

    def timed(call: Call, layout: str, method: str, names: Sequence[str], launch: Callable[[Any], None]) -> None:
        if not call.direction.startswith(only[0]):
            return
        row: Row = {"case": case.name, "direction": call.direction, "layout": layout, "dtype": dtype, "method": method}
        try:
            launch(first)
            probe.stream.synchronize()
            wrong = wrong_planes(case, call, layout, bench, first) if method.startswith("ours") else ""
            if wrong:
                raise ValueError(wrong)
            time_us = clock.time_us([lambda at=at: launch(at) for at in copies])  # type: ignore[misc]
        except Exception as error:  # the others still count
            rows.append({**row, "time_us": None, "failed": f"{type(error).__name__}: {error}"})
            note(f"FAILED {' '.join(map(str, row.values()))}: {error}")
            return
        nbytes = operands.nbytes(*names)
        if nbytes not in copy_us:
            copy_us[nbytes] = clock.copy_us([at["dx"] for at in copies], min(nbytes, operands.sizes["dx"]))
            copy_us[nbytes] *= nbytes / min(nbytes, operands.sizes["dx"])
        rows.append(
            {**row, "time_us": time_us, "gbps": nbytes / time_us / 1e3, "share": copy_us[nbytes] / time_us}
            | {"nbytes": nbytes}
        )

    copy_us: dict[int, float] = {}
    for layout in (layout for layout in LAYOUTS if only[1] in ("", layout)):
        for call in (call for call in calls_of(case) if call.direction.startswith(only[0])):
            if "indices" in call.reads:
                for at in copies:  # what it reads, in this layout
                    operands.launch(probe, case, INDEXED, layout, "", at)
            for label in operands.labels(case, call, layout):

                def ours(at: Any, call: Call = call, layout: str = layout, label: str = label) -> None:
                    operands.launch(probe, case, call, layout, label, at)

                timed(call, layout, f"ours {label}".strip(), (*call.reads, *call.writes), ours)
        if layout != CHWN and handle is not None:
            theirs = _cudnn(case, handle, layout, dtype)

            def there(at: Any, run: CudnnPool = theirs) -> None:
                run.forward(at["x"], at["y"])

            timed(FORWARD, layout, "cudnn", ("x", "y"), there)
            for at in copies:
                theirs.forward(at["x"], at["y"])

            def back(at: Any, run: CudnnPool = theirs) -> None:
                run.backward(at["y"], at["dy"], at["x"], at["dx"])

            timed(BACKWARD, layout, "cudnn", ("x", "y", "dy", "dx"), back)
    return rows


def _cudnn(case: PoolCase, handle: Any, layout: str, dtype: str) -> CudnnPool:
    (size, _), (step, _), (pad, _) = (case.attrs[key] for key in ("kernel", "stride", "padding"))
    options: dict[str, Any] = {"mode": case.attrs["mode"], "layout": layout, "dtype": dtype}
    return CudnnPool(handle, case.x, case.whole, window=size, stride=step, padding=pad, **options)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each case, direction, layout and dtype: the best of ours, the way taken unmeasured, cuDNN's best."""
    keys = dict.fromkeys((r["case"], r["direction"], r["layout"], r["dtype"]) for r in rows if r["method"] != "cudnn")
    timed = [row for row in rows if row["time_us"] is not None]
    for key in keys:
        case, direction, _, dtype = key
        ours = [
            r for r in timed if (r["case"], r["direction"], r["layout"], r["dtype"]) == key and r["method"] != "cudnn"
        ]
        theirs = [
            r["time_us"]
            for r in timed
            if r["method"] == "cudnn"
            and (r["case"], r["dtype"]) == (case, dtype)
            and r["direction"].split()[0] == direction.split()[0]
        ]
        if not ours:
            continue
        best = min(ours, key=lambda row: float(row["time_us"]))
        words = f"{' '.join(key):52} {best['time_us']:9.2f} us {best['gbps']:6.0f} GB/s {best['share']:6.1%} of a copy"
        words += f"  {best['method'].removeprefix('ours').strip() or '-':10}"
        words += f" first {best['time_us'] / ours[0]['time_us']:4.0%}"
        yield words + (f"  {min(theirs) / best['time_us']:5.2f} x cuDNN's best" if theirs else "")


def main(words: Sequence[str] = ()) -> int:
    """Measure everything, or one dtype and the cases with a word in their name, or one direction and layout; 1 if a
    result of ours was wrong."""
    from vdnn.runtime.backends.cuda.probe import Probe

    deadline, rows, left = time.monotonic() + SECONDS, [], 0
    words, only = _chosen(words)
    dtypes, wanted = list(words[:1]) or list(DTYPES), "".join(words[1:2])
    chosen = [case for case in cases() if wanted in case.name]
    for number, dtype in enumerate(dtypes):
        probe = Probe(dtype)
        bench, handle = Bench(probe, Clock(probe)), Handle()
        handle.set_stream(probe.stream.ptr)
        given, made = (max(_room(case, dtype, bench.clock, names) for case in chosen) for names in (GIVEN, MADE))
        arena = probe.allocate(given + made)
        probe.fill(arena, given)
        share = time.monotonic() + (deadline - time.monotonic()) / (len(dtypes) - number)
        for case in chosen:
            if time.monotonic() > share:
                left += 1
                print(f"left out for lack of time: {case.name} {dtype}")
                continue
            rows += measure(case, bench, handle, arena, arena + given, print, only)
        probe.stream.synchronize()
        probe.free(arena)
        handle.close()
    write_results("gpu_pool.json", "python -m vdnn.bench.gpu_pool", {"rows": rows, "left_out": left})
    for line in summary(rows):
        print(line)
    return int(any(row["time_us"] is None and row["method"] != "cudnn" for row in rows))


def _chosen(words: Sequence[str]) -> tuple[list[str], tuple[str, str]]:
    """The words without "--only", and the direction and the layout that it names."""
    rest, named = list(words), ""
    if "--only" in rest:
        at = rest.index("--only")
        named = "".join(rest[at + 1 : at + 2])
        del rest[at : at + 2]
    direction, _, layout = named.partition(":")
    if direction not in ("", "forward", "backward") or layout not in ("", *LAYOUTS):
        raise ConfigError(
            f"--only {named}: expected forward or backward, a colon and one of {', '.join(LAYOUTS)}, as in "
            "--only backward:NCHW"
        )
    return rest, (direction, layout)


GIVEN, MADE = ("x", "dy"), ("y", "dx", "indices")


def _room(case: PoolCase, dtype: str, clock: Clock, names: Sequence[str]) -> int:
    """Bytes of these operands in all copies of a case."""
    operands = Operands(case, dtype, 0, 0, 0)
    return clock.count(operands.nbytes("x", "y")) * sum(aligned(operands.sizes[name]) for name in names)


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
