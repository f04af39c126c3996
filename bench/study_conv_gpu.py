"""Measures the study's convolutions in every layout, by the search that training takes its algorithms from.

measure(recorder, open_search, deadline, print)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from vdnn.bench.gpu_algos import OpenSearch
from vdnn.bench.study_cases import CHWN, NCHW, NHWC, ConvCase, convolutions
from vdnn.bench.study_files import Recorder
from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.search import Search
from vdnn.runtime.config import PRECISIONS

KINDS = (("fp32", NCHW), ("fp32", CHWN), ("tf32", NHWC), ("bf16", NHWC), ("bf16", CHWN), ("fp32", NHWC))
"""Precision and layout, the ones first that the study's question is about."""
DIRECTIONS = ("forward", "wgrad", "dgrad")
FAILED = "failed"
"""As the method of a row without a time: the rest of it says why."""


def problem_of(case: ConvCase, direction: str, precision: str, layout: str) -> ConvProblem:
    """The convolution as training has it: images of few channels are padded in NHWC."""
    dtype, multiple = PRECISIONS[precision]
    channels = -(-case.c // multiple) * multiple if layout == NHWC else case.c
    pair, around = (case.stride,) * 2, (case.padding,) * 2
    x, w = (case.n, channels, case.size, case.size), (case.k, channels, case.window, case.window)
    problem = ConvProblem(direction, x, w, case.y, pair, around, dtype=dtype, layout=layout)
    return replace(problem, channels=case.c) if direction == "wgrad" and channels != case.c else problem


def worklist() -> Iterator[tuple[ConvCase, str, str, str]]:
    """Case, direction, precision and layout; forward first, which the study is about."""
    for direction in DIRECTIONS:
        for precision, layout in KINDS:
            for case in convolutions().values():
                if direction in case.directions:
                    yield case, direction, precision, layout


def measure(recorder: Recorder, open_search: OpenSearch, deadline: float, note: Callable[[str], None] = print) -> int:
    """Measure what is missing until `deadline` (time.monotonic); how many problems are left."""
    searches: dict[tuple[str, str], Search] = {}
    left = 0
    for case, direction, precision, layout in worklist():
        key = {"case": case.name, "direction": direction, "precision": precision, "layout": layout}
        if recorder.has(**key):
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        kind = (precision, layout)
        if kind not in searches:
            searches[kind] = open_search(*kind)
        try:
            found = searches[kind].candidates(problem_of(case, direction, precision, layout))
        except (VdnnError, RuntimeError, MemoryError) as error:  # the others are still worth measuring
            found, why = (), f"{type(error).__name__}: {error}"
        else:
            why = "no algorithm serves it"
        if not found:
            recorder.add({**key, "method": f"{FAILED}: {why}", "time_us": None})
            note(f"{case.name} {direction} {precision} {layout} {FAILED}: {why}")
            continue
        recorder.add(
            *(
                {
                    **key,
                    "method": candidate.algorithm,
                    "time_us": 1000 * candidate.time_ms,
                    "tflops": case.operations / candidate.time_ms / 1e9,
                    "workspace_bytes": candidate.workspace_bytes,
                    "deterministic": candidate.deterministic,
                    "math": candidate.math,
                }
                for candidate in found
            )
        )
        best = min(found, key=lambda candidate: candidate.time_ms)
        note(
            f"{case.name:6} {direction:7} {precision:4} {layout} {best.algorithm:28} {1000 * best.time_ms:9.1f} us "
            f"{case.operations / best.time_ms / 1e9:7.2f} TFLOP/s of {len(found)}"
        )
    return left
