"""What the CPU backend can run an op with, and nominal times for it where nothing has been measured.

    estimate(op, program)   # (Candidate("GEMM_BATCH", 12.5, 8388608), Candidate("GEMM_TILE", ...))

The rates are round numbers for a small CPU, fixed so that plans are the same on every machine. A 16-bit tensor is
moved three times: itself, and its copy in float32 twice (vdnn.runtime.backends.cpu.half).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from vdnn.layers.lower import HALF_DTYPES
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import Shape, TensorSpec
from vdnn.memory.costs import Candidate, CopyRates
from vdnn.runtime.backends.cpu.geometry import algorithms, workspace_bytes

FLOPS_PER_MS = {
    "GEMM": 60e6,
    "GEMM_BATCH": 60e6,
    "GEMM_TILE": 50e6,
    "GEMM_WIDE": 60e6,
    "GEMM_WIDE_TILE": 50e6,
    "default": 60e6,
}
BYTES_PER_MS = 4e6
OVERHEAD_MS = 0.01
RATES = CopyRates(d2h_gbps=5.0, h2d_gbps=5.0, both_gbps=8.0, latency_us=20.0)
"""Of one thread's memory copies."""
MATRIX_OPERANDS = {
    "conv.forward": ("w", "y"),
    "conv.wgrad": ("dw", "dy"),
    "conv.dgrad": ("w", "dy"),
    "linear.forward": ("w", "y"),
    "linear.wgrad": ("dw", "dy"),
    "linear.dgrad": ("w", "dy"),
}
"""Filter and output of the kinds that multiply matrices: 2 * |filter| / K operations for each output."""


def product_operations(op: Op, shapes: Mapping[str, Shape]) -> int:
    """Operations of the matrix products in `op`, by the shapes of its arguments; 0 for kinds without any."""
    if op.kind not in MATRIX_OPERANDS:
        return 0
    filters, outputs = (shapes[argument] for argument in MATRIX_OPERANDS[op.kind])
    return 2 * prod(filters[1:]) * prod(outputs)


def estimate(op: Op, program: Program) -> tuple[Candidate, ...]:
    """The candidates of `op`, fastest first, with estimated times in ms and exact workspaces in bytes."""
    names = {**op.reads, **op.writes}
    nbytes = sum(_moved_bytes(program.tensors[name]) for name in names.values())
    operations = product_operations(op, {argument: program.tensors[name].shape for argument, name in names.items()})
    options = algorithms(op, program) if op.kind.startswith("conv.") else ("default",)
    return tuple(
        Candidate(
            option,
            OVERHEAD_MS + operations / FLOPS_PER_MS[option] + nbytes / BYTES_PER_MS,
            workspace_bytes(op, program, option),
        )
        for option in options
    )


def _moved_bytes(spec: TensorSpec) -> int:
    return 5 * spec.nbytes if spec.dtype in HALF_DTYPES else spec.nbytes
