"""One convolution on the GPU in memory of its own: plans are run, timed and compared, one after another.

    with Trial(problem, handle, stream, workspace_bytes, limit_bytes) as trial:
        result = trial.run(plan, best_ms)
        result.time_ms, result.error, result.repeats, relative_difference(result.sample, reference)

Operands are random. Before every timed run a scratch larger than the L2 cache is written, if the limit has room for it:
the operands then come from memory as in a training step, and the GPU is busy until the host has issued the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.exact import Piece, exact_pieces
from vdnn.runtime.backends.cuda.libraries import load_cupy

ROUNDS = 5
"""Timed runs, of which the median counts."""
GIVE_UP = 1.5
"""A plan whose first timed run takes this many times the best is not run again."""
ALIGN = 512
ImageOf = Callable[[str, int], NDArray[np.float32]]
SAMPLE = 2**18
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
        sample: some of its results, for a comparison with other plans.
        repeats: whether two runs gave the same bits there.
        stays_within: whether what lies between its images or pixels, such as other channels, was left alone there.
    """

    time_ms: float
    error: float
    sample: NDArray[np.float64]
    repeats: bool
    stays_within: bool = True


def operand_bytes(problem: ConvProblem) -> dict[str, int]:
    """Bytes of "x", "w" and "y" with the gaps between their images."""
    shapes, strides = {"x": problem.x, "w": problem.w, "y": problem.y}, problem.strides()
    return {role: 4 * shape[0] * strides[role][0] for role, shape in shapes.items()}


def room_for(problem: ConvProblem) -> int:
    """Bytes that the operands take."""
    return sum(map(_aligned, operand_bytes(problem).values())) + ALIGN


class Trial:
    """The memory of one problem, taken on entry and given back on exit.

    Args:
        workspace_bytes: the most that a plan to be run needs.
        limit_bytes: most device memory to take; operands and workspace must fit.
    """

    def __init__(self, problem: ConvProblem, handle: Handle, stream: Any, workspace_bytes: int, limit_bytes: int):
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

    def __enter__(self) -> Trial:
        self._memory = offset = int(self._runtime.malloc(self.nbytes))
        self._places = {}
        for seed, (role, nbytes) in enumerate(self._sizes.items()):
            self._places[role] = offset
            self._fill_random(offset, nbytes // 4, seed)
            offset += _aligned(nbytes)
        self._workspace, self._scratch = offset, offset + self._workspace_bytes
        self.stream.synchronize()
        images = lru_cache(maxsize=2)(self._image)  # of both operands: in NHWC channels come with their image
        self._exact = exact_pieces(self.problem, partial(self._read, image_of=images))
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
        # what an earlier plan left must not pass for the result of one that writes nothing
        self._runtime.memsetAsync(out, NAN_BYTE, self._sizes[names[2]], self.stream.ptr)

        def launch() -> None:
            plan.run(self.handle, a, b, out, self._workspace, False)

        launch()
        self.stream.synchronize()
        sample, between = self._sample(names[2])
        error = self._error(names[2], sample)
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

    def _error(self, role: str, sample: NDArray[np.float32]) -> float:
        """Of what lies in `role` now; infinite if anything of it is not finite."""
        differences = np.concatenate(
            [(self._read(role, *piece.place, 1)[0] - piece.values).ravel() for piece in self._exact]
        )
        scale = float(np.sqrt(np.mean(sample.astype(np.float64) ** 2)))
        error = float(np.sqrt(np.mean(differences**2)))
        return error / scale if np.isfinite(error) and np.isfinite(scale) and scale else float("inf")

    def _shape(self, role: str) -> tuple[int, int, int, int]:
        return {"x": self.problem.x, "w": self.problem.w, "y": self.problem.y}[role]

    def _read(
        self, role: str, i: int, first: int, count: int, *, image_of: ImageOf | None = None
    ) -> NDArray[np.float32]:
        """Elements [i, first:first + count] of an operand; in NHWC from its image as `image_of` or `_image` has it."""
        if self.problem.layout == "NHWC":
            return (image_of or self._image)(role, i)[..., first : first + count].transpose(2, 0, 1)
        rows, columns = self._shape(role)[2:]
        found = np.empty((count, rows, columns), np.float32)
        start = i * self.problem.strides()[role][0] + first * rows * columns
        kind = self._runtime.memcpyDeviceToHost
        self._runtime.memcpy(found.ctypes.data, self._places[role] + 4 * start, found.nbytes, kind)
        return found

    def _image(self, role: str, i: int) -> NDArray[np.float32]:
        """Image or filter i of an operand in NHWC, (rows, columns, channels), channels of others behind its own."""
        strides = self.problem.strides()[role]
        found = np.empty((*self._shape(role)[2:], strides[3]), np.float32)
        source = self._places[role] + 4 * i * strides[0]
        self._runtime.memcpy(found.ctypes.data, source, found.nbytes, self._runtime.memcpyDeviceToHost)
        return found

    def _sample(self, role: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Some of the elements of an operand, and of those between its images or pixels."""
        address, count = self._places[role], self._sizes[role] // 4
        by_pixels = self.problem.layout == "NHWC"
        step = self.problem.strides()[role][3 if by_pixels else 0]
        own = self._shape(role)[1] if by_pixels else prod(self._shape(role)[1:])
        block = min(count, SAMPLE)
        pieces, between = [], []
        for start in sorted({0, (count - block) // 2, count - block}):
            piece = np.empty(block, np.float32)
            self._runtime.memcpy(piece.ctypes.data, address + 4 * start, piece.nbytes, self._runtime.memcpyDeviceToHost)
            inside = np.arange(start, start + block) % step < own
            pieces.append(piece[inside])
            between.append(piece[~inside])
        return np.concatenate(pieces), np.concatenate(between)

    def _fill_random(self, address: int, count: int, seed: int) -> None:
        """Normal numbers from a small host block, copied over and over: random enough for timing, at copy speed."""
        block = np.random.default_rng(seed).standard_normal(1 << 20).astype(np.float32)
        filled = min(count, block.size)
        self._runtime.memcpy(address, block.ctypes.data, 4 * filled, self._runtime.memcpyHostToDevice)
        while filled < count:
            size = min(filled, count - filled)
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(address + 4 * filled, address, 4 * size, kind, self.stream.ptr)
            filled += size


def relative_difference(result: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Norm of the difference over that of the reference; infinite if anything is not finite."""
    difference, scale = float(np.linalg.norm(result - reference)), float(np.linalg.norm(reference))
    if not np.isfinite(difference):
        return float("inf")
    return difference / scale if scale else float(difference > 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
