"""Measured candidates: every algorithm of a convolution timed on this GPU, kept on disk.

    search = Search(products, device_key, limit_bytes)
    search.candidates(op, arrays)      # shapes and strides only; addresses are the search's own

Times are medians of CUDA events over random data. An algorithm is given up once it is clearly slower than the best, and
left out if its operands and workspace do not fit in the limit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from vdnn.layers.op import Op
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.cudnn import CudnnError
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.products import Products, conv_problem

ROUNDS = 5
GIVE_UP = 1.5
"""An algorithm whose first timed run takes this many times the best is not run again."""
ALIGN = 512
SAMPLE = 2**18
TOLERANCE = 2e-5
"""Relative difference between two fp32 algorithms that differ only in the order of their sums; cuDNN's Winograd with
5x5 filters shows 3e-3 (measured, H200, cuDNN 9.19)."""


def cache_folder() -> Path:
    """Where measured tables are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vdnn" / "algorithms"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of one problem: its candidates, and the limit some were left out under; None if none was."""

    candidates: tuple[Candidate, ...]
    limit_bytes: int | None

    def serves(self, limit_bytes: int) -> bool:
        """Whether nothing would be added by measuring again under `limit_bytes`."""
        return self.limit_bytes is None or self.limit_bytes >= limit_bytes


class Search:
    """Times convolutions on the stream that the products' handle is bound to.

    Args:
        key: what measured times depend on besides the problem: GPU, driver, cuDNN.
        limit_bytes: most device memory that a measurement may take.
        stream: the cupy stream of the handle.
    """

    def __init__(self, products: Products, key: Mapping[str, Any], limit_bytes: int, stream: Any):
        self.products, self.limit_bytes, self.stream = products, limit_bytes, stream
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{digest}.json"
        self.key = dict(key)
        self.known: dict[str, Measured] = {}
        self._load()

    def candidates(self, op: Op, arrays: Mapping[str, DeviceArray]) -> tuple[Candidate, ...]:
        """Candidates of a conv op, fastest first, measured now or before."""
        problem = replace(conv_problem(op, arrays), alignment=16)
        key = str(problem)
        if key not in self.known or not self.known[key].serves(self.limit_bytes):
            self.known[key] = self._measure(problem)
            self._save()
        return self.known[key].candidates

    def _measure(self, problem: ConvProblem) -> Measured:
        from cupy.cuda import runtime

        shapes, strides = {"x": problem.x, "w": problem.w, "y": problem.y}, problem.strides()
        sizes = {role: 4 * shape[0] * strides[role][0] for role, shape in shapes.items()}
        operands = sum(-(-n // ALIGN) * ALIGN for n in sizes.values())
        plans = self.products.plans(problem)
        fits = [p for p in plans if operands + p.workspace_bytes <= self.limit_bytes]
        workspace = max((p.workspace_bytes for p in fits), default=0)
        memory = runtime.malloc(operands + workspace + ALIGN)
        try:
            places, offset = {}, memory
            for role, nbytes in sizes.items():
                places[role] = offset
                _fill_random(offset, nbytes // 4, self.stream)
                offset += -(-nbytes // ALIGN) * ALIGN
            pointers = [places[role] for role in OPERANDS[problem.direction]]
            out = OPERANDS[problem.direction][2]
            found = self._time_all(fits, pointers, offset, sizes[out] // 4)
            return Measured(found, None if len(fits) == len(plans) else self.limit_bytes)
        finally:
            self.stream.synchronize()
            runtime.free(memory)

    def _time_all(
        self, plans: list[ConvPlan], pointers: list[int], workspace: int, out_count: int
    ) -> tuple[Candidate, ...]:
        best = float("inf")
        reference: Any = None
        found = []
        for plan in sorted(plans, key=lambda p: p.workspace_bytes):  # direct products first: the reference
            try:
                time_ms = self._time(plan, pointers, workspace, best)
            except CudnnError:
                continue  # one candidate that fails is one candidate less; the next is tried
            self.stream.synchronize()
            result = _as_host(pointers[2], out_count)
            if reference is None:
                reference = result
            elif not _is_fp32(result, reference):
                continue  # Winograd with large tiles, say: fast, but not fp32
            best = min(best, time_ms)
            found.append(Candidate(plan.algorithm, time_ms, plan.workspace_bytes, plan.deterministic))
        return tuple(sorted(found, key=lambda c: (c.time_ms, c.workspace_bytes)))

    def _time(self, plan: ConvPlan, pointers: list[int], workspace: int, best: float) -> float:
        from cupy.cuda import Event, get_elapsed_time

        a, b, out = pointers

        def once() -> float:
            start, end = Event(), Event()
            start.record(self.stream)
            plan.run(self.products.handle, a, b, out, workspace, False)
            end.record(self.stream)
            end.synchronize()
            return float(get_elapsed_time(start, end))

        once()
        first = once()
        if first > GIVE_UP * best:
            return first
        return median([first, *(once() for _ in range(ROUNDS - 1))])

    def _load(self) -> None:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            self.known = {
                problem: Measured(tuple(Candidate(**c) for c in row["candidates"]), row["limit_bytes"])
                for problem, row in data["problems"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.known = {}  # nothing kept yet, or a damaged file: measure again

    def _save(self) -> None:
        rows = {problem: asdict(found) for problem, found in self.known.items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({"key": self.key, "problems": rows}), encoding="utf-8")
            os.replace(part, self.path)
        except OSError:
            return  # a cache that cannot be written costs time at the next start, nothing else


def _as_host(address: int, count: int) -> Any:
    """Some of the results, spread over the array, as float64 on the host."""
    import numpy as np
    from cupy.cuda import runtime

    block = min(count, SAMPLE)
    pieces = []
    for start in {0, (count - block) // 2, count - block}:
        piece = np.empty(block, np.float32)
        runtime.memcpy(piece.ctypes.data, address + 4 * start, 4 * block, runtime.memcpyDeviceToHost)
        pieces.append(piece.astype(np.float64))
    return np.concatenate(pieces)


def _is_fp32(result: Any, reference: Any) -> bool:
    import numpy as np

    scale = np.linalg.norm(reference)
    return bool(np.linalg.norm(result - reference) <= TOLERANCE * scale)


def _fill_random(address: int, count: int, stream: Any) -> None:
    """Normal numbers from a small host block, copied over and over: random enough for timing, at copy speed."""
    import numpy as np
    from cupy.cuda import runtime

    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    first = min(count, block.size)
    runtime.memcpy(address, block.ctypes.data, 4 * first, runtime.memcpyHostToDevice)
    filled = first
    while filled < count:
        size = min(filled, count - filled)
        runtime.memcpyAsync(address + 4 * filled, address, 4 * size, runtime.memcpyDeviceToDevice, stream.ptr)
        filled += size
