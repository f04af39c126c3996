"""Softmax on this GPU: ours, as libraries have it, and with loss and gradient, at the study's sizes and a sweep.

    python -m vdnn.bench.gpu_softmax                    # exit 1 if a result of ours is wrong
    python -m vdnn.bench.gpu_softmax CLASS 4096         # cases with one of these in their words

gpu_softmax.json goes to the folder $OUT. Every result is compared with NumPy before it is timed; a library's that is
not exact enough, such as a sum of millions one after another or of 16 bits, is noted as inaccurate and has no time.
Calls are captured in a graph, and take turns on copies of their operands that are several times the cache. Bytes are
those of scores and result; `share` is of a device copy that moves as many. What takes milliseconds is timed by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.command import command
from vdnn.bench.harness import write_results
from vdnn.bench.softmax_methods import (
    COLUMNS,
    OURS,
    ROWS,
    Method,
    Places,
    SoftmaxCase,
    cudnn_of,
    ours_of,
    references_of,
)
from vdnn.bench.study_cases import classifiers
from vdnn.bench.study_clock import Clock, aligned
from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, load
from vdnn.runtime.step import new_step

SECONDS = 32.0
"""For all cases, without the compilation of kernels; cases that are left out are named."""
ROOM = 0.8
"""Of the memory that is free, which operands may take."""
CATEGORIES, IMAGES = (10, 100, 1000, 10_000, 100_000, 1_000_000), (32, 64, 128, 512)
LARGE = ((4096, 8192), (4096, 16_384), (4096, 32_768), (1024, 65_536), (256, 262_144), (32, 2_097_152))
"""Images and categories of more than 256 MiB, scores and result, in float32 or both."""
MOST_COLUMNS = 2**27
"""Bytes of scores by columns, all of which are compared on the host."""
MOST_WHOLE = 10_000
"""Categories with which loss and gradient are measured."""
SAMPLED, MOST_SAMPLED = 6, 2**21
"""Images that are compared, and scores of them, but for one image at least."""
SLOW_US, SLOW_ROUNDS = 3000.0, 3
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Relative, beside a hundredth of it absolute relative to the largest."""
TARGET_BYTES, TARGET_SHARE, TARGET_RATIO = 256 * 2**20, 0.85, 2.0

MethodsOf = Callable[[SoftmaxCase], Iterable[Method]]


def cases() -> Iterator[SoftmaxCase]:
    """The study's classifiers in every precision, large ones, then the sweep."""
    dtypes = ("float32", "bfloat16")
    for name, of in classifiers().items():
        for dtype in (*dtypes, "float16"):
            yield SoftmaxCase(name, of.n, of.k, ROWS, dtype)
        yield SoftmaxCase(name, of.n, of.k, COLUMNS)
    for (n, k), dtype in product(LARGE, dtypes):
        yield SoftmaxCase("large", n, k, ROWS, dtype)
    for order, k, n, dtype in product((ROWS, COLUMNS), CATEGORIES, IMAGES, dtypes):
        case = SoftmaxCase("sweep", n, k, order, dtype)
        if order == ROWS or case.nbytes <= MOST_COLUMNS:
            yield case


class Bench:
    """The GPU, or what stands for it, with operands in memory.

    Args:
        probe: memory, a stream, and vdnn's kernels for one dtype.
        cases: all that are to be measured, of that dtype.
    """

    def __init__(self, probe: Any, clock: Clock, cases: Sequence[SoftmaxCase]) -> None:
        self.probe, self.clock = probe, clock
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._copies: dict[int, float] = {}
        # scores are made once and never written
        nbytes = max(self.sets(case) * aligned(case.nbytes) for case in cases)
        self._scores = probe.allocate(nbytes)
        probe.fill(self._scores, nbytes)
        self._rest = probe.allocate(max(self.sets(case) * self._step(case) for case in cases))

    def close(self) -> None:
        """Give the memory back."""
        self.probe.stream.synchronize()
        self.probe.free(self._scores)
        self.probe.free(self._rest)

    def sets(self, case: SoftmaxCase) -> int:
        """Copies of the operands."""
        return self.clock.count(2 * case.nbytes)

    @staticmethod
    def _step(case: SoftmaxCase) -> int:
        return sum(aligned(nbytes) for nbytes in case.operands.values())

    def places(self, case: SoftmaxCase) -> list[dict[str, int]]:
        """Addresses of the operands of every copy; labels and records are there."""
        found = []
        for i in range(self.sets(case)):
            at, end = {"x": self._scores + i * aligned(case.nbytes)}, self._rest + i * self._step(case)
            for name, nbytes in case.operands.items():
                at[name] = end
                end += aligned(nbytes)
            self.probe.upload(at["labels"], labels_of(case).view(np.uint8))
            self.probe.upload(at["step"], new_step(0.1, 1 / case.n, 0, 0))
            found.append(at)
        return found

    def read(self, address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """What lies there, in float32."""
        bits = np.empty(shape, NUMPY_DTYPES[dtype])
        self.probe.stream.synchronize()
        self._runtime.memcpy(bits.ctypes.data, address, bits.nbytes, self._runtime.memcpyDeviceToHost)
        return load(bits, dtype)

    def sampled(self, case: SoftmaxCase, address: int, images: Sequence[int]) -> NDArray[Any]:
        """Scores or results of some images, shape (images, K), float64."""
        if case.order == COLUMNS:
            return self.read(address, (case.k, case.n), case.dtype)[:, images].T.astype(np.float64)
        row = case.nbytes // case.n
        rows = [self.read(address + image * row, (case.k,), case.dtype) for image in images]
        return np.stack(rows).astype(np.float64)

    def poison(self, address: int, nbytes: int) -> None:
        """Fill with NaN, so that what is not written is seen."""
        self._runtime.memsetAsync(address, 0xFF, nbytes, self.probe.stream.ptr)

    def time_us(self, calls: Sequence[Callable[[], None]]) -> float:
        """Time of one of `calls`, captured; not where it is so slow that launching it does not count."""
        calls[0]()
        alone = self._once_us(calls[0])
        if alone < SLOW_US:
            return self.clock.time_us(calls)
        return median([alone, *(self._once_us(call) for call in ([*calls] * SLOW_ROUNDS)[1:SLOW_ROUNDS])])

    def _once_us(self, call: Callable[[], None]) -> float:
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self.probe.stream)
        call()
        end.record(self.probe.stream)
        end.synchronize()
        return 1000 * float(self._cupy.cuda.get_elapsed_time(start, end))

    def copy_us(self, case: SoftmaxCase, sets: Sequence[Places]) -> float:
        """Time of a device copy of the scores."""
        if case.nbytes not in self._copies:
            copy = self.probe.copy
            calls = [lambda at=at: copy(at["y"], at["x"], case.nbytes) for at in sets]
            self._copies[case.nbytes] = self.clock.time_us(calls)
        return self._copies[case.nbytes]


def labels_of(case: SoftmaxCase) -> NDArray[np.int32]:
    """Labels of the images."""
    return np.random.default_rng(2).integers(0, case.k, case.n).astype(np.int32)


@dataclass(frozen=True)
class Expected:
    """What is right for some images of a case, in float64."""

    case: SoftmaxCase
    images: Sequence[int]
    probs: NDArray[Any]

    @classmethod
    def of(cls, case: SoftmaxCase, bench: Bench, at: Places) -> Expected:
        """Of the scores at these places."""
        few = max(1, min(SAMPLED, MOST_SAMPLED // case.k))
        images = sorted({case.n - 1, *np.random.default_rng(1).integers(0, case.n, few).tolist()})
        x = bench.sampled(case, at["x"], images)
        probs = np.exp(x - x.max(axis=1, keepdims=True))
        return cls(case, images, probs / probs.sum(axis=1, keepdims=True))

    def difference(self, method: Method, bench: Bench, at: Places) -> str:
        """What is wrong with a result; "" if nothing is."""
        case, wanted, most = self.case, self.probs, TOLERANCE[self.case.dtype]
        if method.whole:
            labels, rows = labels_of(case)[self.images], np.arange(len(self.images))
            losses = -np.log(wanted[rows, labels])
            wanted = wanted.copy()
            wanted[rows, labels] -= 1
            wanted /= case.n
            loss = bench.read(at["loss"], (case.n,), "float32")[self.images]
            if not np.allclose(loss, losses, rtol=1e-4, atol=1e-4):
                return f"losses {loss.tolist()}, expected {losses.tolist()}"
        got = bench.sampled(case, at["dx" if method.whole else "y"], self.images)
        right = np.abs(got - wanted) <= most * np.abs(wanted) + most / 100 * np.abs(wanted).max()
        return "" if right.all() else f"{int((~right).sum())} of {right.size} sampled numbers are wrong"


def measure_case(
    case: SoftmaxCase, methods: Sequence[Method], bench: Bench, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for every method; one whose result is wrong has no time: ours has failed, another's is inaccurate."""
    sets, rows = bench.places(case), []
    nbytes, copy_us, expected = 2 * case.nbytes, bench.copy_us(case, sets), Expected.of(case, bench, sets[0])
    known = {"case": case.name, "n": case.n, "k": case.k, "dtype": case.dtype, "order": case.order}
    for method in methods:
        row = {**known, "method": method.name, "nbytes": nbytes}
        try:
            bench.poison(sets[0]["dx" if method.whole else "y"], case.nbytes)
            method.launch(sets[0])
            if wrong := expected.difference(method, bench, sets[0]):
                if method.name not in OURS:
                    rows.append({**row, "time_us": None, "inaccurate": wrong})
                    note(f"{case.words:34} {method.name:30} inaccurate: {wrong}")
                    continue
                raise VdnnError(wrong)
            time_us = bench.time_us([lambda at=at, run=method.launch: run(at) for at in sets])  # type: ignore[misc]
        except Exception as error:  # the other methods still count
            rows.append({**row, "time_us": None, "failed": f"{type(error).__name__}: {error}"})
            note(f"FAILED {case.words} {method.name}: {error}")
            continue
        rate = {"time_us": time_us, "gbps": nbytes / time_us / 1e3, "share": copy_us / time_us, "copy_us": copy_us}
        rows.append({**row, **rate})
        note(f"{case.words:34} {method.name:30} {time_us:10.2f} us {rate['gbps']:6.0f} GB/s {rate['share']:6.1%}")
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Against what is asked for: shares of large rows, and how much faster a fused head is than cuDNN's sequence."""
    timed = [row for row in rows if row["time_us"]]
    lines = []
    for dtype, order in product(("float32", "bfloat16"), (ROWS, COLUMNS)):
        kind = {"method": "ours", "dtype": dtype, "order": order}
        large = [r for r in timed if kind.items() <= r.items() and r["nbytes"] >= TARGET_BYTES]
        if large:
            least = min(large, key=lambda row: float(row["share"]))
            lines.append(
                f"{dtype} {order} of 256 MiB and more: {least['share']:.1%} of a copy or more "
                f"({least['n']}x{least['k']}), wanted {TARGET_SHARE:.0%}"
            )
    for name in ("CLASS3", "CLASS4", "CLASS5"):
        of = {r["method"]: r["time_us"] for r in timed if r["case"] == name and r["dtype"] == "float32"}
        if {"fused train", "cudnn sequence"} <= of.keys():
            ratio = min(time for method, time in of.items() if "sequence" in method) / of["fused train"]
            lines.append(
                f"{name}: fused {of['fused train']:.2f} us, {ratio:.2f}x as fast as cuDNN's best sequence, "
                f"wanted {TARGET_RATIO:.0f}x"
            )
    return lines


def methods_with(probe: Any, handle: Any, references: Any) -> MethodsOf:
    """All ways to compute a case on a probe; `references` compute float32."""

    def of(case: SoftmaxCase) -> list[Method]:
        theirs = references if case.dtype == "float32" else None
        found = [*references_of(case, theirs, probe.copy, probe.stream)] if theirs is not None else []
        found += [*cudnn_of(case, handle, theirs, probe.stream), *ours_of(case, probe.kernels, probe.stream)]
        return [method for method in found if not method.whole or case.k <= MOST_WHOLE]

    return of


def _operand_bytes(case: SoftmaxCase, clock: Clock) -> int:
    """Of scores, probabilities and gradients of all copies."""
    return 3 * clock.count(2 * case.nbytes) * case.nbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if a result of ours was wrong, or one of our methods failed."""
    from vdnn.bench.study_kernels import ReferenceKernels
    from vdnn.runtime.backends.cuda.cudnn import Handle
    from vdnn.runtime.backends.cuda.probe import Probe

    words = sys.argv[1:] if argv is None else argv
    chosen = [case for case in cases() if not words or any(word in case.words for word in words)]
    references, handle = ReferenceKernels("study_softmax.cu"), Handle()
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    seconds = 0.0
    for dtype in dict.fromkeys(case.dtype for case in chosen):
        probe = Probe(dtype)
        handle.set_stream(probe.stream.ptr)
        clock, free_bytes = Clock(probe), load_cupy().cuda.runtime.memGetInfo()[0]
        wanted = [case for case in chosen if case.dtype == dtype]
        own = [case for case in wanted if _operand_bytes(case, clock) <= ROOM * free_bytes]
        left += [case.words for case in wanted if case not in own]
        bench, methods_of = Bench(probe, clock, own), methods_with(probe, handle, references)
        for case in own:
            if seconds > SECONDS:
                left.append(case.words)
                continue
            begin = time.monotonic()
            rows += measure_case(case, list(methods_of(case)), bench, lambda text: print(text, flush=True))
            seconds += time.monotonic() - begin
        bench.close()
    handle.close()
    command = " ".join(["python -m vdnn.bench.gpu_softmax", *words])
    write_results("gpu_softmax.json", command, {"rows": rows, "left": left, "seconds": seconds})
    for line in (*summary(rows), *(f"left for want of time or memory: {name}" for name in left)):
        print(line)
    return int(any("failed" in row and row["method"] in OURS for row in rows))


if __name__ == "__main__":
    sys.exit(command(main))
