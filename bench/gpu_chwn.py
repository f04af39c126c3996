"""Convolutions in CHWN on this GPU: every tile at the study's shapes, beside cuDNN in NCHW and NHWC.

    python -m vdnn.bench.gpu_chwn                                  # gpu_chwn.json goes to $OUT
    python -m vdnn.bench.gpu_chwn CONV4 CONV9 --directions forward --precisions fp32 tf32 bf16 --cudnn none

Each convolution is checked against float64 in a few places, run twice and timed as the search does: operands come from
memory, the median of five counts. cuDNN's are the best of its named algorithms ("--cudnn all": of its plans too), in
NCHW in fp32 without tensor cores, in NHWC in TF32 and bf16 on them. What the time is not enough for is left out and
named; forward comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from vdnn.bench.command import above_zero, command
from vdnn.bench.study_cases import CHWN, NCHW, NHWC, ConvCase, convolutions
from vdnn.bench.study_conv_gpu import problem_of
from vdnn.runtime.backends.cuda.chwn_plans import MODULE, ChwnPlan
from vdnn.runtime.backends.cuda.chwn_tiles import GRADIENT_TILES, TILES, chwn_candidates
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.search import TOLERANCE, Search
from vdnn.runtime.config import PRECISIONS

DIRECTIONS = ("forward", "wgrad", "dgrad")
LIBRARY = (("fp32", NCHW), ("tf32", NHWC), ("bf16", NHWC))
"""Precisions and layouts of cuDNN's convolutions."""
EVERY = len(TILES) + len(GRADIENT_TILES)
LIMIT_BYTES = 32 * 2**30
"""Most memory of one measurement."""


@dataclass(frozen=True)
class Row:
    """One way to compute one convolution.

    Args:
        error: relative to float64, of vdnn's own; those of cuDNN that are named are within the search's tolerance.
        problem: what is wrong with its results; empty if nothing is.
    """

    case: str
    direction: str
    precision: str
    layout: str
    algorithm: str
    time_ms: float
    tflops: float
    workspace_bytes: int
    error: float = 0.0
    problem: str = ""


def own(case: ConvCase, direction: str, precision: str, probe: Probe) -> Iterator[Row]:
    """Every tile for one convolution, each checked."""
    from vdnn.runtime.backends.cuda.trial import Trial

    problem = problem_of(case, direction, precision, CHWN)
    variants = chwn_candidates(problem, EVERY, tensor_cores=precision == "tf32")
    with Trial(problem, None, probe.stream, max(nbytes for _, nbytes in variants), LIMIT_BYTES) as trial:
        for label, nbytes in variants:
            result = trial.run(ChwnPlan(label, nbytes, problem, probe.kernels, probe.stream), float("inf"))
            wrong = [
                *([f"error {result.error:.1e}"] if not result.error <= TOLERANCE[precision] else []),
                *(["two runs differ"] if not result.repeats else []),
            ]
            speed = case.operations / result.time_ms / 1e9
            yield Row(
                *(case.name, direction, precision, CHWN, label, result.time_ms, speed, nbytes, result.error),
                problem=", ".join(wrong),
            )


def library(case: ConvCase, direction: str, precision: str, layout: str, search: Search) -> Iterator[Row]:
    """cuDNN's fastest algorithm for one convolution."""
    problem: ConvProblem = problem_of(case, direction, precision, layout)
    for best in search.candidates(problem)[:1]:
        speed = case.operations / best.time_ms / 1e9
        yield Row(*(case.name, direction, precision, layout, best.algorithm, best.time_ms, speed, best.workspace_bytes))


class Searches:
    """cuDNN's, opened when they are needed."""

    def __init__(self, probe: Probe, candidates: str):
        from vdnn.runtime.backends.cuda.cublas import Cublas
        from vdnn.runtime.backends.cuda.products import Products

        self.probe, self.candidates = probe, candidates
        self.handle = Handle()
        self.handle.set_stream(probe.stream.ptr)
        self.products = Products(self.handle, Cublas())
        self.opened: dict[tuple[str, str], Search] = {}

    def of(self, precision: str, layout: str) -> Search:
        """The search of a precision and layout, whose times are kept where training finds them, but for TF32 in NHWC,
        where training has filter gradients beside cuDNN's."""
        if (precision, layout) not in self.opened:
            facts, version = self.probe.facts(), self.handle.api.shared_library.version
            key = {"gpu": facts["gpu"], "driver": facts["driver"], "cudnn": version, "layout": layout}
            self.opened[precision, layout] = Search(
                *(self.products, key, LIMIT_BYTES, self.probe.stream), precision=precision, candidates=self.candidates
            )
        return self.opened[precision, layout]


def fastest(rows: Sequence[Row], **wanted: str) -> Row | None:
    """The fastest right row of these values; None if there is none."""
    found = [
        row for row in rows if not row.problem and all(getattr(row, key) == value for key, value in wanted.items())
    ]
    return min(found, key=lambda row: row.time_ms) if found else None


def table(rows: Sequence[Row], precision: str) -> Iterator[str]:
    """A line a convolution: vdnn's fastest tile in a precision, and how many times as long cuDNN takes."""
    yield f"{'':18} {f'CHWN {precision}':>24} {'TFLOP/s':>8}" + "".join(f" {f'{a} {b}':>30} ratio" for a, b in LIBRARY)
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        mine = fastest(rows, case=case, direction=direction, layout=CHWN, precision=precision)
        if mine is None:
            yield f"{case:7} {direction:10} no right result"
            continue
        line = f"{case:7} {direction:7} {mine.algorithm[7:]:>16} {1000 * mine.time_ms:7.1f} us {mine.tflops:8.2f}"
        for other_precision, layout in LIBRARY:
            other = fastest(rows, case=case, direction=direction, layout=layout, precision=other_precision)
            line += (
                f" {'-':>30}      "
                if other is None
                else (
                    f" {other.algorithm[-18:]:>19} {1000 * other.time_ms:7.1f} us {other.time_ms / mine.time_ms:5.2f}"
                )
            )
        yield line


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a measurement and the table last; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.gpu_chwn", description=__doc__.partition("\n")[0])
    text = f"default: {' '.join(convolutions())}"
    parser.add_argument("cases", nargs="*", metavar="CONV", default=list(convolutions()), help=text)
    text = f"default: {' '.join(DIRECTIONS)}"
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help=text)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32"], help="default: fp32")
    words = "algorithms of cuDNN's to try (default: named)"
    parser.add_argument("--cudnn", choices=("none", "named", "all"), default="named", help=words)
    parser.add_argument("--seconds", type=above_zero, default=50.0, help="for all of it (default: 50)")
    options = parser.parse_args(argv)
    end = monotonic() + options.seconds
    probes = {dtype: Probe(dtype) for dtype in dict.fromkeys(PRECISIONS[name][0] for name in options.precisions)}
    for probe in probes.values():
        started = monotonic()
        probe.kernels.load(MODULE)
        print(f"{probe.kernels.dtype}: compiled in {monotonic() - started:.1f} s", flush=True)
    first = next(iter(probes.values()))
    print({name: value for name, value in first.facts().items() if name != "registers"})
    print({name: count for name, count in first.kernels.registers.items() if name.startswith("chwn")})
    searches = Searches(first, options.cudnn) if options.cudnn != "none" else None
    rows: list[Row] = []
    left: list[str] = []
    for direction in options.directions:
        for name in options.cases:
            case = convolutions()[name]
            if direction not in case.directions:
                continue
            works = [own(case, direction, kind, probes[PRECISIONS[kind][0]]) for kind in options.precisions]
            if searches is not None:
                works += [library(case, direction, *kind, searches.of(*kind)) for kind in LIBRARY]
            for work in works:
                if monotonic() > end:
                    left.append(f"{name} {direction}")
                    break
                for row in work:
                    rows.append(row)
                    print(
                        f"{row.case:7} {row.direction:8} {row.precision} {row.layout} {row.algorithm:24} "
                        f"{1000 * row.time_ms:9.1f} us {row.tflops:7.2f} TFLOP/s {row.error:.0e} {row.problem}",
                        flush=True,
                    )
    if folder := os.environ.get("OUT"):
        content: dict[str, Any] = {"facts": first.facts(), "results": {"rows": [asdict(row) for row in rows]}}
        Path(folder, "gpu_chwn.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for precision in options.precisions:
        print(*table(rows, precision), sep="\n")
    if left:
        print(f"out of time for all or a part of {', '.join(left)}")
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    sys.exit(command(main))
