"""Filter gradients in TF32 and NHWC on this GPU: products of rows, checked, beside cuDNN's best.

    python -m vdnn.bench.gpu_wgrad                           # gpu_wgrad.json goes to $OUT
    python -m vdnn.bench.gpu_wgrad 256:512:28:512:3 --shares 8 16 3x4 --cudnn named

A case is images, channels, size, filters, window. Both are measured as the search does: against float64 in a few
places, twice, and timed with operands that come from memory. Of products of rows the time within a replayed CUDA graph
is told too, and what of it bringing operands to rows, products, and adding partial sums take, each replayed alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from time import monotonic
from typing import Any

from vdnn.bench.command import command
from vdnn.bench.harness import write_results
from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.layout import Launch
from vdnn.runtime.backends.cuda.search import TOLERANCE, Search
from vdnn.runtime.backends.cuda.tap_steps import Step, steps
from vdnn.runtime.backends.cuda.taps import TAPS, TapPlan, TapPlans
from vdnn.runtime.backends.cuda.trial import Trial

CASES = (
    "128:1024:15:1024:3",
    "256:512:28:512:3",
    "256:256:56:256:3",
    "256:256:14:256:3",
    "256:128:28:128:3",
    "256:512:7:512:3",
    "128:192:13:384:3",
)
PRECISION, LAYOUT = "tf32", "NHWC"
LIMIT_BYTES = 32 * 2**30
"""Most memory of one measurement."""
PARTS = ("rows", "products", "sums")


@dataclass(frozen=True)
class Row:
    """One way to compute one filter gradient.

    Args:
        case: as in the command line. error: relative to float64; 0 of cuDNN's, which the search has judged.
        replayed_ms: within a CUDA graph; parts: of what, by PARTS.
        problem: what is wrong with its results; empty if nothing is.
    """

    case: str
    algorithm: str
    time_ms: float
    tflops: float
    workspace_bytes: int
    error: float = 0.0
    replayed_ms: float | None = None
    parts: dict[str, float] | None = None
    problem: str = ""


def problem_of(case: str) -> ConvProblem:
    """The filter gradient of "images:channels:size:filters:window", with as many outputs as pixels."""
    n, c, size, k, window = map(int, case.split(":"))
    around = ((window - 1) // 2,) * 2
    shapes = (n, c, size, size), (k, c, window, window), (n, k, size, size)
    return ConvProblem("wgrad", *shapes, padding=around, layout=LAYOUT)


def tflops(problem: ConvProblem, time_ms: float) -> float:
    """10^12 operations a second, counted by the definition."""
    return 2e-9 * prod(problem.y) * prod(problem.w[1:]) / time_ms


class Lab:
    """The GPU.

    Args:
        probe: memory, stream, kernels and clock, see vdnn.runtime.backends.cuda.probe.
        taps: what is measured. search: of cuDNN's; None for none.
    """

    def __init__(self, probe: Any, taps: TapPlans, search: Search | None):
        self.probe, self.taps, self.search = probe, taps, search

    def cudnn(self, case: str) -> Iterator[Row]:
        """cuDNN's fastest."""
        problem = problem_of(case)
        for best in self.search.candidates(problem)[:1] if self.search is not None else ():
            speed = tflops(problem, best.time_ms)
            yield Row(case, best.algorithm, best.time_ms, speed, best.workspace_bytes)

    def own(self, case: str, shares: Sequence[str]) -> Iterator[Row]:
        """Products of rows in the shares that the search would try, or in these."""
        problem = problem_of(case)
        plans = [self.taps.plan(problem, f"{TAPS}{count}") for count in shares] or self.taps.plans(problem)
        needed = max((plan.workspace_bytes for plan in plans), default=0)
        found: list[Row] = []
        with Trial(problem, None, self.probe.stream, needed, LIMIT_BYTES) as trial:
            for plan in plans:
                result = trial.run(plan, float("inf"))
                wrong = [
                    *([f"error {result.error:.1e}"] if not result.error <= TOLERANCE[PRECISION] else []),
                    *(["two runs differ"] if not result.repeats else []),
                ]
                row = Row(case, plan.algorithm, result.time_ms, tflops(problem, result.time_ms), plan.workspace_bytes)
                found.append(replace(row, error=result.error, problem=", ".join(wrong)))
        sizes = [DTYPE_BYTES[problem.dtype] * prod(shape) for shape in (problem.x, problem.y, problem.w)]
        places = [self.probe.allocate(nbytes) for nbytes in (*sizes, needed)] if plans else []
        try:
            for place, nbytes in zip(places[:2], sizes, strict=False):
                self.probe.fill(place, nbytes)
            for plan, row in zip(plans, found, strict=True):
                replayed_ms, parts = self.replayed(plan, places)
                yield replace(row, replayed_ms=replayed_ms, parts=parts)
        finally:
            for place in places:
                self.probe.free(place)

    def replayed(self, plan: TapPlan, places: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Time of a plan within a CUDA graph, and of its parts; places of x, dy, dw and a workspace."""
        x, dy, dw, workspace = places
        whole = self.probe.replayed_ms(lambda: plan.run(None, x, dy, dw, workspace, False))
        of: dict[str, list[Step]] = {part: [] for part in PARTS}
        for step in steps(plan.form, x, dy, dw, workspace, False):
            part = "products"
            if isinstance(step, Launch):
                part = "sums" if step.kernel == "tap_sums" else "rows"
            of[part].append(step)
        return whole, {part: self.probe.replayed_ms(lambda own=own: plan.start(own)) for part, own in of.items()}


def on_gpu(candidates: str) -> Lab:
    """The current GPU; candidates: cuDNN's, "none", "named" or "all"."""
    from vdnn.runtime.backends.cuda.cublas import Cublas
    from vdnn.runtime.backends.cuda.cudnn import Handle
    from vdnn.runtime.backends.cuda.probe import Probe
    from vdnn.runtime.backends.cuda.products import Products
    from vdnn.runtime.backends.cuda.tap_lanes import Lanes

    probe, cublas, search = Probe(), Cublas(precision=PRECISION), None
    if candidates != "none":
        handle = Handle()
        handle.set_stream(probe.stream.ptr)
        facts, version = probe.facts(), handle.api.shared_library.version
        key = {"gpu": facts["gpu"], "driver": facts["driver"], "cudnn": version, "layout": LAYOUT}
        products = Products(handle, cublas)
        search = Search(products, key, LIMIT_BYTES, probe.stream, precision=PRECISION, candidates=candidates)
    return Lab(probe, TapPlans(cublas, probe.kernels, probe.stream, Lanes(probe.stream)), search)


def words(row: Row, beside: float | None) -> str:
    """A line; `beside`: ms of cuDNN's."""
    text = f"{row.case:20} {row.algorithm[-28:]:28} {row.time_ms:8.3f} ms {row.tflops:6.1f} TFLOP/s"
    text += f" {row.workspace_bytes / 2**20:7.0f} MiB"
    if row.parts is not None and row.replayed_ms is not None:
        text += f" {row.error:.1e}, replayed {row.replayed_ms:.3f}: "
        text += ", ".join(f"{part} {time_ms:.3f}" for part, time_ms in row.parts.items())
        speed = row.tflops * row.time_ms / row.parts["products"]
        text += f" ({speed:.0f} TFLOP/s)"
    if beside is not None:
        text += f"; cuDNN takes {beside / row.time_ms:.2f} times as long"
    return f"{text} {row.problem}".rstrip()


def _case(text: str) -> str:
    """Five whole numbers above 0 and colons."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){4}", text):
        raise argparse.ArgumentTypeError(
            f"expected images, channels, size, filters and window as {CASES[0]}, got '{text}'"
        )
    return text


def _shares(text: str) -> str:
    """As in the label of a plan."""
    if not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of shares as 8, or 3x11 with taps beside, got '{text}'")
    return text


def main(argv: Sequence[str] | None = None, lab: Lab | None = None) -> int:
    """Print a line a measurement; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.gpu_wgrad", description=__doc__.partition("\n")[0])
    text = f"default: {' '.join(CASES)}"
    parser.add_argument("cases", nargs="*", type=_case, metavar="N:C:SIZE:K:WINDOW", default=list(CASES), help=text)
    parser.add_argument(
        "--shares",
        nargs="+",
        type=_shares,
        default=[],
        metavar="COUNT",
        help="in how many each sum is cut, such as 8 16 3x11",
    )
    parser.add_argument("--cudnn", choices=("none", "named", "all"), default="all", help="candidates (default: all)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of it (default: 240)")
    options = parser.parse_args(argv)
    end = monotonic() + options.seconds
    lab = lab or on_gpu(options.cudnn)
    facts = lab.probe.facts()
    print({name: value for name, value in facts.items() if name != "registers"})
    print({name: count for name, count in facts["registers"].items() if name.startswith("tap_")}, flush=True)
    rows: list[Row] = []
    for number, case in enumerate(options.cases):
        if monotonic() > end:
            print(f"out of time for {', '.join(options.cases[number:])}")
            break
        beside: float | None = None
        for row in lab.cudnn(case):
            beside = row.time_ms
            rows.append(row)
            print(words(row, None), flush=True)
        for row in lab.own(case, options.shares):
            rows.append(row)
            print(words(row, beside), flush=True)
    started = " ".join(["python -m vdnn.bench.gpu_wgrad", *(sys.argv[1:] if argv is None else argv)])
    write_results("gpu_wgrad.json", started, {"rows": [asdict(row) for row in rows], "machine": facts})
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    sys.exit(command(main))
