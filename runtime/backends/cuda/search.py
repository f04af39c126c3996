"""Measured candidates: the algorithms of a convolution timed and checked on this GPU, kept on disk.

    search = Search(products, device_key, limit_bytes, stream, precision="tf32", note=print)
    search.candidates(conv_problem(op, arrays))      # fastest first; addresses are the search's own

Candidates are cuDNN's named algorithms and, of the graph API, the first eight that its heuristic names, those without
workspace, and those that need far less of it. One that fails, or whose results differ from float64 by more than its
precision allows, or from those of another candidate, is left out and named.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from vdnn.errors import VdnnError
from vdnn.memory.costs import Candidate
from vdnn.runtime.algorithm_table import AlgorithmTable, Measured, read_table
from vdnn.runtime.backends.cuda.cudnn import CudnnError
from vdnn.runtime.backends.cuda.cudnn_conv import ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.cudnn_graph import INEXACT
from vdnn.runtime.backends.cuda.products import GRAPH_LABEL, Products
from vdnn.runtime.backends.cuda.trial import Trial, relative_difference, room_for
from vdnn.units import MIB

FIRST = 8
"""Plans of the graph API tried in any case, in the order of cuDNN's heuristic."""
FEW_BYTES = MIB
"""A workspace up to this many bytes counts as none: descriptors of a few hundred bytes, small filters transposed."""
METHOD = 2
"""Counts changes in what is tried and how it is timed; tables of another number are measured anew."""
TOLERANCE: Mapping[str, float] = {"fp32": 5e-5, "tf32": 1e-3}
"""Error of a result relative to the size of results. fp32: what sums of up to 10^7 products in any order make; cuDNN's
Winograd with 5x5 filters shows 3e-3 (measured, H200, cuDNN 9.19). TF32 keeps 10 bits of each operand: about 3e-4."""


def cache_folder() -> Path:
    """Where measured tables are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vdnn" / "algorithms"


def shortlist(plans: Sequence[ConvPlan]) -> list[ConvPlan]:
    """The plans worth timing, in their order: all named algorithms, and those of the graph API that the module says."""
    chosen, rank, least = [], 0, float("inf")
    for plan in plans:
        if plan.algorithm.startswith(GRAPH_LABEL):
            rank += 1
            if rank > FIRST and plan.workspace_bytes > FEW_BYTES and plan.workspace_bytes > least / 2:
                continue
            least = min(least, plan.workspace_bytes)
        chosen.append(plan)
    return chosen


def trial_order(plans: Sequence[ConvPlan]) -> list[ConvPlan]:
    """First the reference, a product in fp32 of least workspace; then the graph API's, the likely fastest first."""
    if not plans:
        return []
    reference = min(plans, key=lambda p: (not INEXACT.isdisjoint(p.notes), p.workspace_bytes))
    rest = [p for p in plans if p is not reference]
    return [reference, *sorted(rest, key=lambda p: not p.algorithm.startswith(GRAPH_LABEL))]


class Search:
    """Times convolutions on the stream that the products' handle is bound to.

    Args:
        key: what measured times depend on besides the problem: gpu, driver, cudnn, layout.
        limit_bytes: most device memory that a measurement may take.
        stream: the cupy stream of the handle.
        precision: "fp32", or "tf32" for candidates on tensor cores too.
        candidates: "all", or "named" for cuDNN's named algorithms only.
        note: told in words what was measured and what was left out.
    """

    def __init__(
        self,
        products: Products,
        key: Mapping[str, Any],
        limit_bytes: int,
        stream: Any,
        *,
        precision: str = "fp32",
        candidates: str = "all",
        note: Callable[[str], None] | None = None,
    ):
        self.products, self.limit_bytes, self.stream, self.note = products, limit_bytes, stream, note
        self.key = {**key, "precision": precision, "method": METHOD}
        if candidates != "all":
            self.key["candidates"] = candidates
        self.precision, self.named_only = precision, candidates == "named"
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{digest}.json"
        self.known: dict[str, Measured] = {}
        self._load()

    def candidates(self, problem: ConvProblem) -> tuple[Candidate, ...]:
        """Candidates of `problem`, fastest first, measured now or before."""
        key = str(problem)
        if key not in self.known or not self.known[key].serves(self.limit_bytes):
            started = perf_counter()
            self.known[key] = self._measure(problem)
            self._save()
            if self.note is not None:
                self.note(_words(problem, self.known[key], perf_counter() - started))
        return self.known[key].candidates

    def knows_all(self, problem: ConvProblem) -> bool:
        """Whether none of its algorithms needed more than the limit, and so was left out of `candidates`."""
        self.candidates(problem)
        return self.known[str(problem)].limit_bytes is None

    def _measure(self, problem: ConvProblem) -> Measured:
        plans = self.products.plans(problem, tensor_cores=self.precision != "fp32", named_only=self.named_only)
        plans = shortlist(plans)
        room = self.limit_bytes - room_for(problem)
        fits = [plan for plan in plans if plan.workspace_bytes <= room]
        if not fits:
            return Measured((), self.limit_bytes)
        workspace = max(plan.workspace_bytes for plan in fits)
        with Trial(problem, self.products.handle, self.stream, workspace, self.limit_bytes) as trial:
            found, left_out = self._time_all(fits, trial)
        return Measured(found, None if len(fits) == len(plans) else self.limit_bytes, left_out)

    def _time_all(self, plans: Sequence[ConvPlan], trial: Trial) -> tuple[tuple[Candidate, ...], dict[str, str]]:
        best, reference = float("inf"), None
        found: list[Candidate] = []
        left_out: dict[str, str] = {}
        for plan in trial_order(plans):
            try:
                result = trial.run(plan, best)
            except CudnnError as error:  # one candidate that fails is one candidate less; the next is tried
                left_out[plan.algorithm] = error.status_name
                continue
            if result.error > TOLERANCE[self.precision]:  # Winograd with large tiles, say: fast, but not fp32
                left_out[plan.algorithm] = f"error {result.error:.1e} against float64"
                continue
            if not result.stays_within:  # as if the tensor were whole: other channels of it would be lost
                left_out[plan.algorithm] = "writes between the channels it is given"
                continue
            if reference is None:
                reference = result.sample
            # float64 is compared with in few places, other candidates in many
            difference = relative_difference(result.sample, reference)
            if difference > 2 * TOLERANCE[self.precision]:
                left_out[plan.algorithm] = f"differs from others by {difference:.1e}"
                continue
            best = min(best, result.time_ms)
            math = "fp32" if result.error <= TOLERANCE["fp32"] else "tf32"
            deterministic = plan.deterministic and result.repeats
            found.append(Candidate(plan.algorithm, result.time_ms, plan.workspace_bytes, deterministic, math))
        return tuple(sorted(found, key=lambda c: (c.time_ms, c.workspace_bytes))), left_out

    def _load(self) -> None:
        try:
            self.known = read_table(self.path.read_text(encoding="utf-8"), self.path.name).problems
        except (OSError, ValueError, VdnnError):
            self.known = {}  # nothing kept yet, or a damaged file: measure again

    def _save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            AlgorithmTable(self.key, self.known).save(self.path)
        except (OSError, VdnnError):
            return  # a cache that cannot be written costs time at the next start, nothing else


def _words(problem: ConvProblem, found: Measured, seconds: float) -> str:
    """One line on what was measured: how many, the fastest, what was left out and why."""
    shapes = f"{problem.direction} x {problem.x} w {problem.w} stride {problem.stride}"
    text = f"measured {shapes} in {seconds:.1f} s: {len(found.candidates)} algorithms"
    if found.candidates:
        fastest = found.candidates[0]
        text += f", fastest {fastest.algorithm} {fastest.time_ms:.3g} ms"
    if found.left_out:
        text += "; left out: " + ", ".join(f"{label} ({reason})" for label, reason in found.left_out.items())
    return text
