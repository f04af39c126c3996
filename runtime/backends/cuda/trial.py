"""One convolution on the GPU in memory of its own: plans are run, timed and compared, one after another.

    with Trial(problem, handle, stream, workspace_bytes, limit_bytes) as trial:
        result = trial.run(plan, best_ms)
        result.time_ms, result.error, result.repeats, relative_difference(result.sample, reference)

Operands are random numbers as they are stored, see operands.py. Before every timed run a scratch larger than the L2
cache is written, if the limit has room for it: the operands then come from memory as in a training step, and the GPU is
busy until the host has issued the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.exact import Piece, exact_pieces
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, Operands, load
from vdnn.runtime.backends.cuda.products import applies_epilogue

ROUNDS = 5
"""Timed runs, of which the median counts."""
GIVE_UP = 1.5
"""A plan whose first timed run takes this many times the best is not run again."""
ALIGN = 512
SAMPLE = 2**16
"""Results compared at the start, in the middle and at the end of the output."""
BUSY_BYTES = 5 * 2**28
"""Written before a timed run, in rounds over the scratch: about 0.3 ms on an H200, as long as a launch from Python."""
NAN_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Result:
    """Of one plan.

    Args:
        time_ms: the median.
        error: root of the mean square of its differences from float64, over that of its results.
        sample: some of its results, for a comparison with other plans that do or do not apply the epilogue as it does.
        repeats: whether two runs gave the same bits there.
        stays_within: whether what lies between its images or pixels, such as other channels, was left alone there.
    """

    time_ms: float
    error: float
    sample: NDArray[np.float64]
    repeats: bool
    stays_within: bool = True


def operand_bytes(problem: ConvProblem) -> dict[str, int]:
    """Bytes of "x", "w" and "y" with the gaps between their images, and of a bias "b"."""
    shapes, strides = {"x": problem.x, "w": problem.w, "y": problem.y}, problem.strides()
    counts = {role: shape[0] * strides[role][0] for role, shape in shapes.items()}
    if problem.layout == "CHWN":  # where gaps lie between pixels, or (c, r, s) of filters
        counts = {role: shape[1] * strides[role][1] for role, shape in shapes.items()}
    counts |= {"b": problem.w[0]} if problem.epilogue else {}
    return {role: count * _size(problem, role) for role, count in counts.items()}


def room_for(problem: ConvProblem) -> int:
    """Bytes that the operands take."""
    return sum(map(_aligned, operand_bytes(problem).values())) + ALIGN


class Trial:
    """The memory of one problem, taken on entry and given back on exit.

    Args:
        workspace_bytes: the most that a plan to be run needs.
        limit_bytes: most device memory to take; operands and workspace must fit.
    """

    def __init__(
        self, problem: ConvProblem, handle: Handle | None, stream: Any, workspace_bytes: int, limit_bytes: int
    ):
        self.problem, self.handle, self.stream = problem, handle, stream
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._sizes = operand_bytes(problem)
        self._workspace_bytes = _aligned(workspace_bytes)
        needed = room_for(problem) + self._workspace_bytes
        device = self._cupy.cuda.Device().id
        cache = int(self._runtime.getDeviceProperties(device)["l2CacheSize"])
        scratch = _aligned(cache + cache // 2)
        self.scratch_bytes = scratch if needed + scratch <= limit_bytes else 0
        self.nbytes = needed + self.scratch_bytes
        self._memory = 0
        self._exact: list[Piece] = []
        self._operands = Operands(problem)
        self._samples: dict[str, list[tuple[NDArray[np.int64], NDArray[np.bool_]]]] = {}

    def __enter__(self) -> Trial:
        self._memory = offset = int(self._runtime.malloc(self.nbytes))
        self._places = {}
        for role, nbytes in self._sizes.items():
            self._places[role] = offset
            self._operands.fill(role, offset, nbytes // _size(self.problem, role), self._runtime, self.stream)
            offset += _aligned(nbytes)
        self._workspace, self._scratch = offset, offset + self._workspace_bytes
        self.stream.synchronize()
        self._exact = exact_pieces(self.problem, self._operands.read, self._operands.repeat)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        memory, self._memory = self._memory, 0
        try:
            self.stream.synchronize()
        finally:
            self._runtime.free(memory)

    def run(self, plan: ConvPlan, best_ms: float) -> Result:
        """Run `plan` a few times; CudnnError if it refuses."""
        names = OPERANDS[self.problem.direction]
        a, b, out = (self._places[role] for role in names)
        fused = applies_epilogue(self.problem, plan.algorithm)
        extra = (self._places["b"],) if fused else ()
        # what an earlier plan left must not pass for the result of one that writes nothing
        self._runtime.memsetAsync(out, NAN_BYTE, self._sizes[names[2]], self.stream.ptr)

        def launch() -> None:
            plan.run(self.handle, a, b, out, self._workspace, False, *extra)

        launch()
        self.stream.synchronize()
        sample, between = self._sample(names[2])
        error = self._error(names[2], sample, fused)
        times = [self._timed(launch)]
        if times[0] <= GIVE_UP * best_ms:
            times += [self._timed(launch) for _ in range(ROUNDS - 1)]
        again, _ = self._sample(names[2])
        repeats = bool(np.array_equal(sample, again, equal_nan=True))
        stays_within = bool((between.view(np.uint8) == NAN_BYTE).all())
        return Result(median(times), error, sample.astype(np.float64), repeats, stays_within)

    def _timed(self, launch: Any) -> float:
        if self.scratch_bytes:
            for _ in range(max(1, BUSY_BYTES // self.scratch_bytes)):
                self._runtime.memsetAsync(self._scratch, 0, self.scratch_bytes, self.stream.ptr)
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self.stream)
        launch()
        end.record(self.stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end))

    def finished(self, sample: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the epilogue makes of a sample of the convolution alone."""
        shape, by_pixels = self.problem.y, self.problem.layout == "NHWC"
        step = self.problem.strides()["y"][3 if by_pixels else 0]
        places = np.concatenate([piece[inside] for piece, inside in self._sampled("y")])
        return self._epilogue(sample, places % step // (1 if by_pixels else prod(shape[2:])))

    def _epilogue(self, values: NDArray[np.float64], filters: Any) -> NDArray[np.float64]:
        """Of the sums of some filters."""
        if self.problem.epilogue == "bias+relu":
            values = values + self._operands.bias[filters]
        return np.maximum(values, 0)

    def _error(self, role: str, sample: NDArray[np.float32], fused: bool) -> float:
        """Of what lies in `role` now; infinite if anything of it is not finite."""
        differences = np.concatenate(
            [
                (
                    self._read(role, *piece.place)
                    - (self._epilogue(piece.values, piece.place[1]) if fused else piece.values)
                ).ravel()
                for piece in self._exact
            ]
        )
        scale = float(np.sqrt(np.mean(sample.astype(np.float64) ** 2)))
        error = float(np.sqrt(np.mean(differences**2)))
        return error / scale if np.isfinite(error) and np.isfinite(scale) and scale else float("inf")

    def _shape(self, role: str) -> tuple[int, int, int, int]:
        return {"x": self.problem.x, "w": self.problem.w, "y": self.problem.y}[role]

    def _read(self, role: str, i: int, channel: int) -> NDArray[np.float32]:
        """Elements [i, channel] of an operand, shape (rows, columns); in NHWC its image is copied for it, in CHWN the
        channel of all images."""
        (rows, columns), strides = self._shape(role)[2:], self.problem.strides()[role]
        if self.problem.layout == "CHWN":
            found = self._copy(role, channel * strides[1], strides[1])
            return found.reshape(rows, columns, strides[3])[..., i]
        if self.problem.layout == "NHWC":
            image = self._copy(role, i * strides[0], rows * columns * strides[3])
            return image.reshape(rows, columns, strides[3])[..., channel]
        return self._copy(role, i * strides[0] + channel * rows * columns, rows * columns).reshape(rows, columns)

    def _sample(self, role: str) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Some of the elements of an operand, and the bits of those between its images or pixels."""
        elements, between = [], []
        for places, inside in self._sampled(role):
            bits = self._copy_bits(role, int(places[0]), places.size)
            elements.append(load(bits[inside], self.problem.dtypes()[role]))
            between.append(bits[~inside])
        return np.concatenate(elements), np.concatenate(between)

    def _sampled(self, role: str) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Where a sample of an operand is taken: places, and which of them are the operand's own."""
        if role in self._samples:
            return self._samples[role]
        count = self._sizes[role] // _size(self.problem, role)
        layout, shape = self.problem.layout, self._shape(role)
        step = self.problem.strides()[role][0 if layout == "NCHW" else 3]
        own = {"NCHW": prod(shape[1:]), "NHWC": shape[1], "CHWN": shape[0]}[layout]
        block = min(count, SAMPLE)
        starts = sorted({0, (count - block) // 2, count - block})
        blocks = [np.arange(start, start + block) for start in starts]
        self._samples[role] = [(places, places % step < own) for places in blocks]
        return self._samples[role]

    def _copy(self, role: str, start: int, count: int) -> NDArray[np.float32]:
        """Elements of an operand as they lie in memory."""
        return load(self._copy_bits(role, start, count), self.problem.dtypes()[role])

    def _copy_bits(self, role: str, start: int, count: int) -> NDArray[Any]:
        bits = np.empty(count, NUMPY_DTYPES[self.problem.dtypes()[role]])
        source = self._places[role] + bits.itemsize * start
        self._runtime.memcpy(bits.ctypes.data, source, bits.nbytes, self._runtime.memcpyDeviceToHost)
        return bits


def relative_difference(result: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Norm of the difference over that of the reference; infinite if anything is not finite."""
    difference, scale = float(np.linalg.norm(result - reference)), float(np.linalg.norm(reference))
    if not np.isfinite(difference):
        return float("inf")
    return difference / scale if scale else float(difference > 0)


def _size(problem: ConvProblem, role: str) -> int:
    return DTYPE_BYTES[problem.dtypes()[role]]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
