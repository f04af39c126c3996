"""What each op can cost on this GPU: the algorithms of convolutions, and for other ops the one way there is, all timed.

costs = OpCosts(search, times, "NHWC")
costs.candidates(op, program)         # fastest first
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda.kernels import workspace_bytes
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.products import CONV_KINDS, LINEAR_KINDS, unplaced_problem
from vdnn.runtime.backends.cuda.search import Search

GEMM_WORKSPACE = 4 * 2**20
"""Bytes for a matrix product; cuBLAS recommends 32 MiB on Hopper and takes less."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Candidates of ops, measured when they are asked for.

    Args:
        search: of convolutions. times: of all other ops, and of what follows a convolution.
        layout: of batches of images, "NCHW" or "NHWC".
    """

    search: Search
    times: OpTimes
    layout: str

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Measured algorithms of a convolution, fastest first; of another op the only one."""
        if op.kind in CONV_KINDS:
            found, bias_ms = self.search.candidates(unplaced_problem(op, program)), self._bias_ms(op, program)
            return tuple(replace(c, time_ms=self.times.in_step_ms(c.time_ms) + bias_ms) for c in found)
        if op.kind in LINEAR_KINDS:
            return (Candidate("CUBLAS", self.times.time_ms(op, program, GEMM_WORKSPACE), GEMM_WORKSPACE),)
        shapes = {arg: program.tensors[t].shape for arg, t in (*op.reads.items(), *op.writes.items())}
        scratch = workspace_bytes(op.kind, shapes, self.layout)
        return (Candidate("KERNEL" if scratch else "default", self.times.time_ms(op, program, scratch), scratch),)

    def knows_all(self, op: Op, program: Program) -> bool:
        """Whether every algorithm of a convolution could be measured within the limit; True for other kinds."""
        return op.kind not in CONV_KINDS or self.search.knows_all(unplaced_problem(op, program))

    def _bias_ms(self, op: Op, program: Program) -> float:
        """Time of the kernel that adds a bias alone; where an activation follows, the search has counted it."""
        if "b" not in op.reads or "activation" in op.attrs:
            return 0.0
        alone = replace(op, reads={"b": op.reads["b"]}, writes={"y": op.writes["y"]}, attrs={})
        return self.times.time_ms(alone, program, 0)
