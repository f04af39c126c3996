"""Measured candidates: the algorithms of a convolution timed and checked on this GPU, kept on disk.

    search = Search(products, device_key, limit_bytes, stream, precision="tf32", note=print)
    search.candidates(conv_problem(op, arrays))      # fastest first; addresses are the search's own

Candidates are cuDNN's named algorithms and, of the graph API, the first eight that its heuristic names, those without
workspace, and those that need far less of it; of filter gradients in TF32 those of taps.py too. One that fails, or
whose results differ from float64 by more than its precision allows, or from those of another candidate, is left out and
named.

A time is that of the whole op: where vdnn's own kernels have to finish what cuDNN leaves undone (bias and activation, a
filter gradient to be widened), the time their bytes take is added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from vdnn.errors import VdnnError
from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.memory.costs import Candidate
from vdnn.runtime.algorithm_table import AlgorithmTable, Measured, read_table
from vdnn.runtime.backends.cuda.cublas import CublasError
from vdnn.runtime.backends.cuda.cudnn import CudnnError, Handle
from vdnn.runtime.backends.cuda.cudnn_conv import ConvPlan, ConvProblem
from vdnn.runtime.backends.cuda.cudnn_graph import FUSED, INEXACT
from vdnn.runtime.backends.cuda.products import GRAPH_LABEL, applies_epilogue, tail_bytes, workspace_bytes
from vdnn.runtime.backends.cuda.trial import Trial, relative_difference, room_for
from vdnn.runtime.files import user_cache
from vdnn.units import MIB

FIRST = 8
"""Plans of the graph API tried in any case, in the order of cuDNN's heuristic."""
FEW_BYTES = MIB
"""A workspace up to this many bytes counts as none: descriptors of a few hundred bytes, small filters transposed."""
METHOD = 2
"""Counts changes in what is tried and how it is timed; tables of another number are measured anew."""
BRIEF_METHOD: Mapping[str, int] = {"fp32": 3, "tf32": 4, "bf16": 3, "fp16": 3}
"""The same for tensor cores and NHWC, where the short list is brief, by precision."""
BRIEF_FIRST = 3
"""In place of FIRST in a brief short list, of plans that leave the epilogue undone where others apply it."""
BRIEF_BUILT = 16
"""Plans of the graph API that are built for it, with and without the epilogue each."""
TOLERANCE: Mapping[str, float] = {"fp32": 5e-5, "tf32": 4e-3, "bf16": 4e-3, "fp16": 5e-4}
"""Error of a result relative to the size of results. fp32: what sums of up to 10^7 products in any order make; cuDNN's
Winograd with 5x5 filters shows 3e-3 (measured, H200, cuDNN 9.19). TF32 keeps 10 bits of each operand: 3e-4 where the
others are rounded off, 7e-4 where they are cut off; adders of tensor cores cut off too, so that cuDNN's fastest filter
gradients show 1.1e-3 to 2.7e-3, the most in sums of 10^7 (same GPU).
bf16, fp16: operands are exact and sums are fp32, so that it is the rounding of what is stored, of 8 and 11 bits: with
results spread evenly over a binade 2^-7 and 2^-10 times sqrt(3/7/12), 1.5e-3 and 1.9e-4; the rest is a margin."""
SAVE_S = 1.0
"""Times of ops come by the hundred, a few ms each; a table takes longer to write."""
LAUNCH_MS = 0.002
"""What a further kernel takes at least."""


def cache_folder() -> Path:
    """Where measured tables are kept between runs."""
    return user_cache() / "algorithms"


def shortlist(plans: Sequence[ConvPlan], brief: bool = False) -> list[ConvPlan]:
    """The plans worth timing, in their order: all named algorithms, and those of the graph API that the module says.

    brief: for having no workspace no more than make FIRST of those; in NHWC almost every plan has none.
    """
    fused = any(plan.algorithm.startswith(FUSED) for plan in plans)
    first = {GRAPH_LABEL: BRIEF_FIRST if brief and fused else FIRST, FUSED: FIRST}
    rank, empty = dict.fromkeys(first, 0), dict.fromkeys(first, 0)
    least = dict.fromkeys(first, float("inf"))
    chosen = []
    for plan in plans:
        kind = next((label for label in first if plan.algorithm.startswith(label)), None)
        if kind is not None:
            rank[kind] += 1
            needs_none = plan.workspace_bytes <= FEW_BYTES
            wanted = not brief or empty[kind] < first[kind] if needs_none else plan.workspace_bytes <= least[kind] / 2
            if rank[kind] > first[kind] and not wanted:
                continue
            empty[kind] += needs_none
            least[kind] = min(least[kind], plan.workspace_bytes)
        chosen.append(plan)
    return chosen


def trial_order(plans: Sequence[ConvPlan]) -> list[ConvPlan]:
    """First the reference, a product in fp32 of least workspace; then the likely fastest first: those that apply the
    epilogue, the graph API's, the named ones."""
    if not plans:
        return []
    bare = [plan for plan in plans if not plan.algorithm.startswith(FUSED)]
    reference = min(bare or plans, key=lambda p: (not INEXACT.isdisjoint(p.notes), p.workspace_bytes))
    rest = [p for p in plans if p is not reference]
    labels = (FUSED, GRAPH_LABEL, "")
    order = {id(p): next(n for n, label in enumerate(labels) if p.algorithm.startswith(label)) for p in rest}
    return [reference, *sorted(rest, key=lambda p: order[id(p)])]


class PlanMaker(Protocol):
    """What makes plans: vdnn.runtime.backends.cuda.products.Products, or ChwnPlans for CHWN."""

    @property
    def handle(self) -> Handle | None:
        """What its plans run with."""

    def plans(
        self, problem: ConvProblem, *, tensor_cores: bool = False, named_only: bool = False, most: int | None = None
    ) -> Sequence[ConvPlan]:
        """See Products.plans."""


class Search:
    """Times convolutions on the stream that the products' handle is bound to.

    Args:
        products: makes the plans that are tried.
        key: what measured times depend on besides the problem: gpu, driver, cudnn, layout.
        limit_bytes: most device memory that a measurement may take.
        stream: the cupy stream of the handle.
        precision: "fp32", "tf32" for candidates on tensor cores too, "bf16" or "fp16".
        candidates: "all", or "named" for cuDNN's named algorithms only.
        stream_gbps: 10^9 bytes a second that kernels read and write which finish what cuDNN leaves undone.
        note: told in words what was measured and what was left out.
    """

    def __init__(
        self,
        products: PlanMaker,
        key: Mapping[str, Any],
        limit_bytes: int,
        stream: Any,
        *,
        precision: str = "fp32",
        candidates: str = "all",
        stream_gbps: float = float("inf"),
        note: Callable[[str], None] | None = None,
    ):
        self.products, self.limit_bytes, self.stream, self.note = products, limit_bytes, stream, note
        self.stream_gbps = stream_gbps
        self.brief = (precision, key.get("layout")) != ("fp32", "NCHW")
        self.key = {**key, "precision": precision, "method": BRIEF_METHOD[precision] if self.brief else METHOD}
        if candidates != "all":
            self.key["candidates"] = candidates
        self.precision, self.named_only = precision, candidates == "named"
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{digest}.json"
        self.known: dict[str, Measured] = {}
        self._planning_s = 0.0
        self.ops: dict[str, float] = {}
        self._unsaved_since: float | None = None
        self._load()

    def candidates(self, problem: ConvProblem) -> tuple[Candidate, ...]:
        """Candidates of `problem`, fastest first, measured now or before."""
        key = str(problem)
        if key not in self.known or not self.known[key].serves(self.limit_bytes):
            started = perf_counter()
            self.known[key] = self._measure(problem)
            seconds = perf_counter() - started
            self._save()
            if self.note is not None:
                self.note(_words(problem, self.known[key], seconds, self._planning_s))
        return self.known[key].candidates

    def knows_all(self, problem: ConvProblem) -> bool:
        """Whether none of its algorithms needed more than the limit, and so was left out of `candidates`."""
        self.candidates(problem)
        return self.known[str(problem)].limit_bytes is None

    def _measure(self, problem: ConvProblem) -> Measured:
        started = perf_counter()
        plans = self.products.plans(
            problem,
            tensor_cores=self.precision != "fp32",
            named_only=self.named_only,
            most=BRIEF_BUILT if self.brief else None,
        )
        self._planning_s = perf_counter() - started
        plans = shortlist(plans, self.brief)
        room = self.limit_bytes - room_for(problem)
        fits = [plan for plan in plans if plan.workspace_bytes <= room]
        if not fits:
            return Measured((), self.limit_bytes)
        workspace = max(plan.workspace_bytes for plan in fits)
        with Trial(problem, self.products.handle, self.stream, workspace, self.limit_bytes) as trial:
            found, left_out = self._time_all(fits, trial)
        return Measured(found, None if len(fits) == len(plans) else self.limit_bytes, left_out)

    def _time_all(self, plans: Sequence[ConvPlan], trial: Trial) -> tuple[tuple[Candidate, ...], dict[str, str]]:
        best = float("inf")
        references: dict[bool, Any] = {}
        found: list[Candidate] = []
        left_out: dict[str, str] = {}
        for plan in trial_order(plans):
            rest_ms = self.rest_ms(trial.problem, plan.algorithm)
            try:
                result = trial.run(plan, best - rest_ms)
            except (CudnnError, CublasError) as error:  # one that fails is one candidate less; the next is tried
                left_out[plan.algorithm] = error.status_name
                continue
            if result.error > TOLERANCE[self.precision]:  # Winograd with large tiles, say: fast, but not fp32
                left_out[plan.algorithm] = f"error {result.error:.1e} against float64"
                continue
            if not result.stays_within:  # as if the tensor were whole: other channels of it would be lost
                left_out[plan.algorithm] = "writes between the channels it is given"
                continue
            fused = applies_epilogue(trial.problem, plan.algorithm)
            if fused and True not in references and False in references:
                references[True] = trial.finished(references[False])
            # float64 is compared with in few places, other candidates in many
            difference = relative_difference(result.sample, references.setdefault(fused, result.sample))
            if difference > 2 * TOLERANCE[self.precision]:
                left_out[plan.algorithm] = f"differs from others by {difference:.1e}"
                continue
            time_ms = result.time_ms + rest_ms
            best = min(best, time_ms)
            math = "fp32" if result.error <= TOLERANCE["fp32"] else self.precision
            deterministic = plan.deterministic and result.repeats
            nbytes = workspace_bytes(plan, trial.problem)
            found.append(Candidate(plan.algorithm, time_ms, nbytes, deterministic, math))
        return tuple(sorted(found, key=lambda c: (c.time_ms, c.workspace_bytes))), left_out

    def keep_op(self, key: str, time_ms: float) -> None:
        """Keep the time of an op that is no convolution beside them; on disk after SAVE_S, or by `flush`."""
        self.ops[key] = time_ms
        self._unsaved_since = self._unsaved_since or perf_counter()
        if perf_counter() - self._unsaved_since > SAVE_S:
            self._save()

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if self._unsaved_since is not None:
            self._save()

    def rest_ms(self, problem: ConvProblem, algorithm: str) -> float:
        """Time of what is left to be done when the algorithm has run."""
        if problem.epilogue and not applies_epilogue(problem, algorithm):  # y is read and written once more
            nbytes = 2 * prod(problem.y) * DTYPE_BYTES[problem.dtype]
        elif problem.scratch_bytes:
            nbytes = problem.scratch_bytes + prod(problem.w) * DTYPE_BYTES["float32"]
        else:
            nbytes = 2 * tail_bytes(problem, algorithm)
        return nbytes / (1e6 * self.stream_gbps) + LAUNCH_MS if nbytes else 0.0

    def _load(self) -> None:
        try:
            table = read_table(self.path.read_text(encoding="utf-8"), self.path.name)
        except (OSError, ValueError, VdnnError):
            table = AlgorithmTable(self.key)  # nothing kept yet, or a damaged file: measure again
        self.known, self.ops = table.problems, table.ops

    def _save(self) -> None:
        self._unsaved_since = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            AlgorithmTable(self.key, self.known, self.ops).save(self.path)
        except (OSError, VdnnError):
            return  # a cache that cannot be written costs time at the next start, nothing else


def _words(problem: ConvProblem, found: Measured, seconds: float, planning_s: float) -> str:
    """One line on what was measured: how many, the fastest, what was left out and why."""
    shapes = f"{problem.direction} x {problem.x} w {problem.w} stride {problem.stride}"
    shapes += f", {problem.epilogue}" if problem.epilogue else ""
    times = f"{seconds:.1f} s, {planning_s:.1f} s of it for plans"
    text = f"measured {shapes} in {times}: {len(found.candidates)} algorithms"
    if found.candidates:
        fastest = found.candidates[0]
        text += f", fastest {fastest.algorithm} {fastest.time_ms:.3g} ms"
    if found.left_out:
        text += "; left out: " + ", ".join(f"{label} ({reason})" for label, reason in found.left_out.items())
    return text
