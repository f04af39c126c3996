"""Measures the memory-efficiency study's layers on this GPU; `vdnn tables study --out DIR` then shows them.

    python -m vdnn.bench.study layouts pooling softmax transforms networks --out runs/study
    python -m vdnn.bench.study networks --out runs/study --seconds 300       # goes on where it was

Rows go to DIR/study_PART.json, with the machine's facts, as they come; what is there already is not measured again.
Each part ends after --seconds and says what is left. Times are medians by CUDA events, operands random and in memory
rather than the cache, and a result is compared with a reference before it is timed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vdnn.bench.command import command, not_negative, reason
from vdnn.bench.harness import check_device
from vdnn.bench.study_cases import PARTS
from vdnn.bench.study_files import Recorder, file_name, read_file
from vdnn.errors import VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.pool import pool_candidates
from vdnn.runtime.backends.cuda.search import Search

SECONDS = 80.0
"""For each part by itself; one problem more may be under way at the end."""
DTYPES = ("float32", "bfloat16")
"""Of pools."""
SWEEPS = {"softmax": "gpu_softmax", "transforms": "gpu_transforms"}
"""Parts that are programs of their own."""

Note = Callable[[str], None]
Result = tuple[int, int]
"""Cases left for want of time, and those that failed."""


def layouts(recorder: Recorder, deadline: float, note: Note) -> Result:
    """Convolutions, see study_conv_gpu; and the rule that 'vdnn layouts calibrate' has found here in fp32."""
    from vdnn.bench.study_conv_gpu import FAILED, measure
    from vdnn.bench.study_layouts import RULE
    from vdnn.runtime.backends.cuda.backend import CudaBackend
    from vdnn.runtime.layout_sweep import known_rule

    backends: dict[str, CudaBackend] = {}

    def open_search(precision: str, layout: str) -> Search:
        if precision not in backends:
            backends[precision] = CudaBackend(precision=precision, progress=note)
        return backends[precision].measures.of(layout).search

    left = measure(recorder, open_search, deadline, note)
    rule = known_rule(backends["fp32"].caps) if "fp32" in backends else None
    if rule is not None and not recorder.has(case=RULE):
        recorder.add({"case": RULE, "channels": rule.channels, "images": rule.images})
    return left, sum(str(row.get("method", "")).startswith(FAILED) for row in recorder.rows)


def pooling(recorder: Recorder, deadline: float, note: Note) -> Result:
    """Pools, see study_pool_gpu."""
    from vdnn.bench.study_clock import Clock
    from vdnn.bench.study_kernels import ReferenceKernels
    from vdnn.bench.study_pool_gpu import Bench, measure
    from vdnn.bench.study_pool_methods import Method, cudnn_of, ours_of, references_of
    from vdnn.runtime.backends.cuda.cudnn import Handle
    from vdnn.runtime.backends.cuda.probe import Probe

    left = failed = 0
    for dtype in DTYPES:
        probe = Probe(dtype)
        bench, handle = Bench(probe, Clock(probe)), Handle()
        handle.set_stream(probe.stream.ptr)
        references = ReferenceKernels("study_pool.cu") if dtype == "float32" else None

        def methods(
            case: Any, probe: Probe = probe, references: Any = references, handle: Handle = handle, dtype: str = dtype
        ) -> list[Method]:
            theirs = references_of(case, references, probe.stream) if references is not None else ()
            ours = ours_of(case, probe.kernels, probe.stream, tiles_of)
            return [*theirs, *cudnn_of(case, handle, dtype), *ours]

        more, wrong = measure(recorder, bench, methods, deadline, note)
        handle.close()
        left, failed = left + more, failed + wrong
    return left, failed


def tiles_of(op: Op, arrays: Mapping[str, DeviceArray]) -> list[str]:
    """Labels of the tiles that a pool op on `arrays` can take."""
    tensors = {n: TensorSpec(n, "act", a.shape, a.dtype, a.layout) for n, a in arrays.items()}
    program = Program("pool", next(iter(arrays.values())).shape[0], "train", tensors, (op,), (), (), (), "", "")
    return list(pool_candidates(op, program))


def sweep(recorder: Recorder, deadline: float, note: Note) -> Result:
    """A part that is a program of its own: its rows are taken over."""
    if recorder.rows:
        return 0, 0
    program = importlib.import_module(f"vdnn.bench.{SWEEPS[recorder.part]}")
    before = os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OUT"] = folder
        try:
            code = program.main([])
        finally:
            os.environ.pop("OUT")
            if before is not None:
                os.environ["OUT"] = before
        rows = [row for path in sorted(Path(folder).glob("*.json")) for row in read_file(path).rows]
    recorder.add(*rows)
    return 0, int(bool(code))


def networks(recorder: Recorder, deadline: float, note: Note) -> Result:
    """Training steps, see study_networks."""
    from vdnn.bench.study_networks import measure

    left = measure(recorder, deadline, note)
    return left, sum("failed" in row for row in recorder.rows)


MEASURE: Mapping[str, Callable[[Recorder, float, Note], Result]] = {
    "layouts": layouts,
    "pooling": pooling,
    "softmax": sweep,
    "transforms": sweep,
    "networks": networks,
}


def run(parts: Sequence[str], out: Path, seconds: float, note: Note, command: str = "vdnn.bench.study") -> int:
    """Measure the parts one after another; 0 if all of them could, whether or not time was left for everything."""
    out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in parts:
        begin = time.monotonic()
        try:
            recorder = Recorder(out, name, command)
            left, failed = MEASURE[name](recorder, begin + seconds, note)
        except (VdnnError, ImportError, RuntimeError, MemoryError, OSError) as error:  # the other parts still count
            note(f"{name}: {reason(error)}")
            wrong += 1
            continue
        rest = f", {left} cases left for want of time: run it again" if left else ""
        bad = f", {failed} failed" if failed else ""
        took = f"{time.monotonic() - begin:.0f} s"
        note(f"{name}: {len(recorder.rows)} rows in {file_name(name)}{bad}{rest}; {took}")
        wrong += bool(failed)
    return int(bool(wrong))


def part(text: str) -> str:
    """A part of the study, if there is one of that name."""
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"expected {', '.join(PARTS)}, got '{text}'")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.study", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", type=part, metavar="PART", help=", ".join(PARTS))
    text = "of the rows (default: $OUT, or the present folder)"
    parser.add_argument("--out", default=os.environ.get("OUT", "."), metavar="DIR", help=text)
    text = f"for each part (default: {SECONDS:.0f})"
    parser.add_argument("--seconds", type=not_negative, default=SECONDS, help=text)
    given = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python -m vdnn.bench.study", *words])
    check_device("cuda", "run this on a GPU", loads=False)
    return run(given.parts or PARTS, Path(given.out), given.seconds, lambda text: print(text, flush=True), command)


if __name__ == "__main__":
    sys.exit(command(main))
