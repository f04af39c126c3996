"""Every convolution plan and matrix product of the CUDA binding, run on a GPU against float64 references.

    python -m vdnn.bench.gpu_binding        # a table; JSON in $OUT/gpu_binding.json if OUT is set

Of each plan: largest error over the largest value, with and without accumulation; two runs and a captured run bit for
bit; bytes beside the output and behind the workspace untouched; milliseconds. A failing plan is listed, the next tried.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.command import command
from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda import cudnn_conv, cudnn_graph
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.cudnn_backend import DeviceProperties
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.units import GIB, KIB, MIB, format_bytes

Array = NDArray[Any]

TIME_LIMIT_S = 50.0
LARGEST_WORKSPACE_BYTES = 6 * GIB
CANARY_BYTES, CANARY = 256, 0xA5
FP32_ERROR, WRONG_ERROR = 3e-5, 1e-2
"""Errors above the first are not fp32 (TF32 gives about 1e-4); above the second the result is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """A convolution; x is the channels from `x_at` of an array with `x_of` channels (0: all of it), y likewise."""

    name: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    x_of: int = 0
    x_at: int = 0
    y_of: int = 0
    y_at: int = 0

    def problem(self, direction: str) -> ConvProblem:
        """The ConvProblem of one direction."""
        n, _, h, w = self.x
        sides = zip((h, w), self.w[2:], self.stride, self.padding, self.dilation, strict=True)
        p, q = ((size + 2 * pad - dilation * (r - 1) - 1) // step + 1 for size, r, step, pad, dilation in sides)
        y = (n, self.w[0], p, q)
        return ConvProblem(
            direction,
            self.x,
            self.w,
            y,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            x_strides=slice_strides(self.x, self.x_of),
            y_strides=slice_strides(y, self.y_of),
            alignment=4 if self.x_of or self.y_of else 16,
        )


def slice_strides(shape: tuple[int, int, int, int], channels: int) -> tuple[int, int, int, int]:
    """Strides in elements of a channel slice of an array with `channels` channels (0: as many as the slice)."""
    whole = cudnn_conv.contiguous(shape)
    return ((channels or shape[1]) * whole[1], *whole[1:])


CASES = (
    Case("ragged", (3, 5, 17, 19), (7, 5, 3, 3), padding=(1, 1)),
    Case("uneven", (2, 4, 15, 22), (6, 4, 5, 2), (2, 1), (2, 0), (1, 2)),
    Case("grouped", (4, 16, 27, 27), (32, 8, 5, 5), padding=(2, 2), groups=2),
    Case("strided", (8, 3, 59, 59), (24, 3, 11, 11), (4, 4)),
    Case("dilated", (3, 6, 21, 23), (10, 6, 3, 3), padding=(2, 2), dilation=(2, 2)),
    Case("1x1", (8, 32, 14, 14), (48, 32, 1, 1)),
    Case("sliced", (3, 5, 17, 19), (7, 5, 3, 3), padding=(1, 1), x_of=12, x_at=3, y_of=11, y_at=2),
    Case("sliced7x7", (8, 32, 7, 7), (32, 32, 3, 3), padding=(1, 1), x_of=49, x_at=1, y_of=64, y_at=31),
    Case("vgg", (16, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1)),
)


def reference(problem: ConvProblem, x: Array, w: Array, y: Array) -> Array:
    """The convolution of float64 arrays by its definition, one filter tap at a time: y, dx or dw by direction."""
    (n, _, height, width), (k, c, r_size, s_size), (_, _, p, q) = problem.x, problem.w, problem.y
    (v, h), (pad_v, pad_h), (dil_v, dil_h) = problem.stride, problem.padding, problem.dilation
    padded = np.zeros((n, problem.x[1], height + 2 * pad_v, width + 2 * pad_h))
    inside = padded[:, :, pad_v : pad_v + height, pad_h : pad_h + width]
    if problem.direction != "dgrad":
        inside[...] = x
    out = {"forward": np.zeros(problem.y), "dgrad": inside, "wgrad": np.zeros(problem.w)}[problem.direction]
    per_group = k // problem.groups
    for group, r, s in product(range(problem.groups), range(r_size), range(s_size)):
        ks = slice(group * per_group, (group + 1) * per_group)
        rows, columns = (
            slice(r * dil_v, r * dil_v + v * (p - 1) + 1, v),
            slice(s * dil_h, s * dil_h + h * (q - 1) + 1, h),
        )
        taps = padded[:, group * c : (group + 1) * c, rows, columns]
        if problem.direction == "forward":
            out[:, ks] += np.tensordot(w[ks, :, r, s], taps, (1, 1)).swapaxes(0, 1)
        elif problem.direction == "dgrad":
            taps += np.tensordot(w[ks, :, r, s], y[:, ks], (0, 1)).swapaxes(0, 1)
        else:
            out[ks, :, r, s] = np.tensordot(y[:, ks], taps, ((0, 2, 3), (0, 2, 3)))
    return out


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan or product on arrays of its own.

    Args:
        row: its labels, workspace_bytes and deterministic; what is found is added.
        run: starts it, given the address of the workspace and whether to accumulate.
        out: device array that it writes in `inside` only; `initial` is its first content.
        expected: float64, what is written to out[inside], or added to it.
    """

    row: dict[str, Any]
    run: Callable[[int, bool], None]
    out: Any
    initial: Array
    expected: Array
    inside: tuple[slice, ...]


class Lab:
    """The GPU with one stream, the library handles, and what was found."""

    def __init__(self) -> None:
        self.cupy = load_cupy()
        self.started = time.monotonic()
        self.rng = np.random.default_rng(1)
        self.memory: dict[str, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.lost = False
        self.cupy.zeros(1)
        self.note_memory("context")
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.handle = Handle()
        self.handle.set_stream(self.stream.ptr)
        self.note_memory("cudnnCreate")
        self.cublas = Cublas()
        self.note_memory("cublasCreate")

    def note_memory(self, what: str) -> None:
        """Remember the bytes that are taken on the GPU after `what`."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        self.memory[what] = total - free

    def expired(self) -> bool:
        """Whether to start nothing more."""
        return self.lost or time.monotonic() - self.started > TIME_LIMIT_S

    def try_out(self, trial: Trial) -> None:
        """Run it in every way; what fails is named in row["failures"]."""
        failures: list[str] = []
        trial.row["failures"] = failures
        self.rows.append(trial.row)
        try:
            size = trial.row["workspace_bytes"]
            workspace = self.cupy.full(size + CANARY_BYTES, CANARY, dtype="uint8")
            for accumulate, name in enumerate(("plain", "accumulate")):
                start = partial(trial.run, workspace.data.ptr, bool(accumulate))
                failures += [f"{name}: {text}" for text in self.compare(trial, start, bool(accumulate), name)]
            if int((workspace[size:] != CANARY).sum()):
                failures.append("wrote behind its workspace")
            trial.row["ms"] = self.milliseconds(partial(trial.run, workspace.data.ptr, False))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            try:
                self.cupy.cuda.runtime.deviceSynchronize()
            except Exception as fatal:
                failures.append(f"the GPU context is lost, nothing more can run: {fatal}")
                self.lost = True
        show(trial.row)

    def compare(self, trial: Trial, start: Callable[[], None], accumulate: bool, name: str) -> Iterator[str]:
        """What is wrong with the results of `start`: twice, and once captured."""
        got = self.result(trial, start)
        goal = trial.expected + (trial.initial[trial.inside] if accumulate else 0)
        scale = np.abs(trial.expected).max()
        error = float(np.abs(got[trial.inside] - goal).max() / scale)
        trial.row[f"error_{name}"] = error
        if not error < FP32_ERROR:  # also where it is not a number
            yield f"{'not fp32' if error < WRONG_ERROR else 'wrong'}, error {error:.1e}"
        outside = got.copy()
        outside[trial.inside] = trial.initial[trial.inside]
        if not np.array_equal(outside, trial.initial):
            yield "wrote outside its output"
        again = self.result(trial, start)
        graph = self.capture(start)
        replayed = self.result(trial, partial(graph.launch, self.stream))
        for what, other in {"a second run": again, "the captured run": replayed}.items():
            if trial.row["deterministic"] and not np.array_equal(other, got):
                yield f"{what} differs"
            elif not np.allclose(other, got, rtol=1e-4, atol=1e-3 * scale):
                yield f"{what} is wrong"

    def result(self, trial: Trial, start: Callable[[], None]) -> Array:
        """The whole output array after `start` on its first content."""
        trial.out.set(trial.initial)
        self.cupy.cuda.runtime.deviceSynchronize()
        start()
        self.stream.synchronize()
        found: Array = trial.out.get()
        return found

    def capture(self, start: Callable[[], None]) -> Any:
        """A CUDA graph of what `start` launches."""
        with self.stream:
            self.stream.begin_capture()
            try:
                start()
            finally:
                graph = self.stream.end_capture()
        return graph

    def milliseconds(self, start: Callable[[], None], runs: int = 5) -> float:
        """The median time of a run between two events."""
        times = []
        for _ in range(runs):
            events = [self.cupy.cuda.Event() for _ in range(2)]
            events[0].record(self.stream)
            start()
            events[1].record(self.stream)
            self.stream.synchronize()
            times.append(float(self.cupy.cuda.get_elapsed_time(*events)))
        return sorted(times)[runs // 2]


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    errors = " ".join(f"{row.get(key, float('nan')):.1e}" for key in ("error_plain", "error_accumulate"))
    marks = " ".join((*row["notes"], *(() if row["deterministic"] else ("nondeterministic",)), *row["failures"]))
    print(
        f"{row['case']:10} {row['direction']:8} {row['algorithm']:28} {format_bytes(row['workspace_bytes']):>10} "
        f"{errors} {row.get('ms', float('nan')):8.4f} ms {marks}",
        flush=True,
    )


def try_convolutions(lab: Lab, case: Case) -> None:
    """Every plan of the three directions of `case`."""
    at = {"x": (case.x_of, case.x_at), "w": (0, 0), "y": (case.y_of, case.y_at)}
    for direction, names in OPERANDS.items():
        problem = case.problem(direction)
        host, views, device, addresses = {}, {}, {}, {}
        for name, shape in {"x": problem.x, "w": problem.w, "y": problem.y}.items():
            of, first = at[name]
            host[name] = lab.rng.standard_normal((shape[0], of or shape[1], *shape[2:]), dtype=np.float32)
            views[name] = (slice(None), slice(first, first + shape[1]))
            device[name] = lab.cupy.asarray(host[name])
            addresses[name] = device[name].data.ptr + 4 * first * shape[2] * shape[3]
        expected = reference(problem, *(host[name][views[name]].astype(float) for name in ("x", "w", "y")))
        out = names[2]
        for plan in convolution_plans(lab, case.name, problem):
            if lab.expired():
                return
            if plan.workspace_bytes <= LARGEST_WORKSPACE_BYTES:
                run = partial(run_plan, lab.handle, plan, [addresses[name] for name in names])
                row = describe(
                    case.name, direction, plan.algorithm, plan.workspace_bytes, plan.deterministic, plan.notes
                )
                lab.try_out(Trial(row, run, device[out], host[out], expected, views[out]))


def run_plan(handle: Handle, plan: ConvPlan, addresses: list[int], workspace: int, accumulate: bool) -> None:
    """Start a plan on its three operands."""
    plan.run(handle, addresses[0], addresses[1], addresses[2], workspace, accumulate)


def convolution_plans(lab: Lab, case: str, problem: ConvProblem) -> list[ConvPlan]:
    """The legacy and graph plans, each made again from its label; a listing that fails is a row of its own."""
    found: list[ConvPlan] = []
    modules: dict[str, Any] = {"legacy": cudnn_conv, "graph": cudnn_graph}
    for name, module in modules.items():
        try:
            for plan in module.plans(lab.handle, problem):
                found.append(module.plan(lab.handle, problem, plan.algorithm))
                if found[-1].workspace_bytes != plan.workspace_bytes:
                    raise ValueError(
                        f"{plan.algorithm} has {found[-1].workspace_bytes} B, {plan.workspace_bytes} B listed"
                    )
        except (VdnnError, ValueError) as error:
            row = describe(case, problem.direction, f"{name} listing", 0, True, ())
            lab.rows.append(row | {"failures": [str(error)]})
            show(lab.rows[-1])
    return found


def describe(
    case: str, direction: str, algorithm: str, workspace_bytes: int, deterministic: bool, notes: tuple[str, ...]
) -> dict[str, Any]:
    """The labels of a row."""
    labels = {"case": case, "direction": direction, "algorithm": algorithm, "workspace_bytes": workspace_bytes}
    return {**labels, "deterministic": deterministic, "notes": list(notes)}


def try_products(lab: Lab) -> None:
    """Matrix products in all four orders, ragged; then the three of AlexNet's fc7 at batch 128."""
    orders = [(a, b) for a in (False, True) for b in (False, True)]
    fc7 = [(128, 4096, 4096, False, True), (128, 4096, 4096, False, False), (4096, 4096, 128, True, False)]
    for *sizes, transpose_a, transpose_b in [*((37, 53, 71, *order) for order in orders), *fc7]:
        m, n, k = sizes
        a, b, c = (lab.rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n), (m, n)))
        stored = [np.ascontiguousarray(x.T if t else x) for x, t in ((a, transpose_a), (b, transpose_b))]
        arrays = [lab.cupy.asarray(array) for array in (*stored, c)]
        expected = a.astype(float) @ b
        words = f"{m}x{n}x{k}{' aT' * transpose_a}{' bT' * transpose_b}"
        for nbytes in (16 * KIB, 4 * MIB, 32 * MIB):
            if not lab.expired():
                run = partial(run_product, lab, (m, n, k, *arrays), (transpose_a, transpose_b), nbytes)
                row = describe("gemm", "", words, nbytes, True, ())
                lab.try_out(Trial(row, run, arrays[2], c, expected, (slice(None), slice(None))))


def run_product(
    lab: Lab, operands: tuple[Any, ...], transposed: tuple[bool, bool], nbytes: int, workspace: int, accumulate: bool
) -> None:
    """Start a matrix product on (m, n, k, a, b, c) with a workspace of `nbytes`."""
    m, n, k, *arrays = operands
    lab.cublas.bind(lab.stream.ptr, workspace, nbytes)
    lab.cublas.gemm(
        *(m, n, k, *(array.data.ptr for array in arrays)),
        transpose_a=transposed[0],
        transpose_b=transposed[1],
        accumulate=accumulate,
    )


def main() -> int:
    """Try everything; 1 if anything failed."""
    lab = Lab()
    cupy, library = lab.cupy, lab.handle.api.shared_library
    facts = {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "cudnn": library.version_text,
        "cublas": library.cublas.version_text,
    }
    print(facts)
    print(library.path, library.cublas.path, library.nvrtc_path)
    try_products(lab)
    lab.note_memory("products")
    for case in CASES:
        try_convolutions(lab, case)
    failed = [row for row in lab.rows if row["failures"]]
    seconds = time.monotonic() - lab.started
    print(f"{len(lab.rows)} plans, {len(failed)} with failures, {seconds:.1f} s{', cut short' * lab.expired()}")
    print({what: format_bytes(taken) for what, taken in lab.memory.items()})
    for row in failed:
        print("FAILED", row["case"], row["direction"], row["algorithm"], "; ".join(row["failures"]))
    if folder := os.environ.get("OUT"):
        try:  # what a machine without this GPU needs to list its plans
            facts["device_properties"] = json.loads(DeviceProperties(lab.handle.api).to_json())
        except VdnnError as error:
            print(error)
        result = {"facts": facts, "taken_bytes": lab.memory, "seconds": seconds, "rows": lab.rows}
        Path(folder, "gpu_binding.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if failed or lab.lost else 0


if __name__ == "__main__":
    sys.exit(command(main))
