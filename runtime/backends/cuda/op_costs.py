"""What each op can cost on this GPU: the algorithms of convolutions, the variants of other kernels, all of them timed.

costs = OpCosts(measures.of, "NHWC")
costs.candidates(op, program)         # fastest first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda.kernels import workspace_bytes
from vdnn.runtime.backends.cuda.layout import transform_candidates
from vdnn.runtime.backends.cuda.measures import Measures
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.pool import pool_candidates
from vdnn.runtime.backends.cuda.products import CONV_KINDS, LINEAR_KINDS, unplaced_problem

GEMM_WORKSPACE = 4 * 2**20
"""Bytes for a matrix product; cuBLAS recommends 32 MiB on Hopper and takes less."""

Variants = Callable[[Op, Program], Sequence[str]]
VARIANTS: Mapping[str, Variants] = {
    "layout.transform": transform_candidates,
    "pool.forward": pool_candidates,
    "pool.backward": pool_candidates,
}
"""Op kind → labels of the ways in which its kernel can compute an op, which it is told in op.attrs["algorithm"]."""


def layout_of(op: Op, program: Program, usual: str) -> str:
    """The layout of the images that `op` makes, or else reads; `usual` where it has none."""
    names = (*op.writes.values(), *op.reads.values())
    specs = (program.tensors[name] for name in names)
    return next((s.layout for s in specs if len(s.shape) == 4 and s.role in ("act", "grad")), usual)


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Candidates of ops, measured when they are asked for.

    Args:
        measures: of each layout.
        layout: under which ops without images are kept, "NCHW", "NHWC" or "CHWN".
    """

    measures: Callable[[str], Measures]
    layout: str

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Measured algorithms, fastest first; "KERNEL" or "default" where there is one way."""
        layout = layout_of(op, program, self.layout)
        found = self.measures(layout)
        times = found.times
        if op.kind in CONV_KINDS:
            found.load()
            # a kernel in CHWN adds the bias itself
            more_ms = _sum_ms(op, program, times) + (0.0 if layout == "CHWN" else _bias_ms(op, program, times))
            options = found.search.candidates(unplaced_problem(op, program))
            return tuple(replace(c, time_ms=times.in_step_ms(c.time_ms) + more_ms) for c in options)
        if op.kind in LINEAR_KINDS:
            return (Candidate("CUBLAS", times.time_ms(op, program, GEMM_WORKSPACE), GEMM_WORKSPACE),)
        shapes = {arg: program.tensors[t].shape for arg, t in (*op.reads.items(), *op.writes.items())}
        scratch = workspace_bytes(op.kind, shapes, layout)
        labels = VARIANTS[op.kind](op, program) if op.kind in VARIANTS else ()
        if len(labels) < 2:
            return (Candidate("KERNEL" if scratch else "default", times.time_ms(op, program, scratch), scratch),)
        made = (Candidate(label, times.time_ms(op, program, scratch, label), scratch) for label in labels)
        return tuple(sorted(made, key=lambda c: c.time_ms))

    def knows_all(self, op: Op, program: Program) -> bool:
        """Whether every algorithm of a convolution could be measured within the limit; True for other kinds."""
        if op.kind not in CONV_KINDS:
            return True
        return self.measures(layout_of(op, program, self.layout)).search.knows_all(unplaced_problem(op, program))


def _sum_ms(op: Op, program: Program, times: OpTimes) -> float:
    """Time of reading what a gradient is added to, as behind a fork: the search times convolutions that write alone.

    ResNet-50 (256) in bf16 on an H200: 1.0 ms of its 30.
    """
    return sum(program.tensors[op.writes[arg]].nbytes for arg in op.accumulate) / (times.copy_gbps * 1e6)


def _bias_ms(op: Op, program: Program, times: OpTimes) -> float:
    """Time of the kernel that adds a bias alone; where an activation follows, the search has counted it."""
    if "b" not in op.reads or "activation" in op.attrs:
        return 0.0
    alone = replace(op, reads={"b": op.reads["b"]}, writes={"y": op.writes["y"]}, attrs={})
    return times.time_ms(alone, program, 0)
