"""What an op must at least do: bytes that it moves, operations of its products, and the time that these take.

    work = work_of(op, program)
    work.floor_ms(Rates(copy_gbps=4160.0, tflops=790.0)), work.bound

Each tensor is read once and written once; products are counted as direct ones, which a Winograd or FFT algorithm may
undercut. Elementwise arithmetic takes no time. A batch-norm that does not fit in the cache must read what it
normalises twice: its sums come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from vdnn.bench.op_rates import Rates
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import Shape

CACHE_BYTES = 50 * 2**20
"""What a second reading may find in the cache, all of such tensors of an op together: an H200's L2."""
READ_AGAIN: Mapping[str, tuple[str, ...]] = {"batchnorm.forward": ("x",), "batchnorm.backward": ("x", "dy")}
"""Arguments that an op needs once for its sums and once more for its result."""
OPERANDS: Mapping[str, tuple[str, str]] = {
    "conv.forward": ("w", "y"),
    "conv.dgrad": ("w", "dy"),
    "conv.wgrad": ("dw", "dy"),
    "linear.forward": ("w", "y"),
    "linear.dgrad": ("w", "dy"),
    "linear.wgrad": ("dw", "dy"),
}
"""Filter and output of the kinds that multiply matrices: 2 * |filter| / K operations for each output."""


@dataclass(frozen=True, slots=True)
class Work:
    """Least bytes moved and operations."""

    nbytes: int
    operations: int

    def bytes_ms(self, rates: Rates) -> float:
        """Time of the bytes alone."""
        return self.nbytes / rates.copy_gbps / 1e6

    def products_ms(self, rates: Rates) -> float:
        """Time of the products alone."""
        return self.operations / rates.tflops / 1e9

    def floor_ms(self, rates: Rates) -> float:
        """No faster than this: the longer of both."""
        return max(self.bytes_ms(rates), self.products_ms(rates))

    def bound(self, rates: Rates) -> str:
        """Which of both it is: "bytes" or "products"."""
        return "products" if self.products_ms(rates) > self.bytes_ms(rates) else "bytes"


def work_of(op: Op, program: Program) -> Work:
    """Counted from the tensors of the program; a padded filter counts as the filter it was made from."""
    sizes = {name: program.tensors[name].nbytes for name in (*op.inputs(), *op.writes.values())}
    nbytes = sum(sizes[name] for name in op.inputs()) + sum(sizes[name] for name in dict.fromkeys(op.writes.values()))
    again = sum(sizes[op.reads[arg]] for arg in READ_AGAIN.get(op.kind, ()) if arg in op.reads)
    if again > CACHE_BYTES:
        nbytes += again
    if op.kind not in OPERANDS:
        return Work(nbytes, 0)
    prepared = {o.writes["y"]: o.reads["w"] for o in program.ops if o.kind == "filter.prepare"}
    names = {**op.reads, **op.writes}
    filters, outputs = OPERANDS[op.kind]
    shape: Shape = program.tensors[prepared.get(names[filters], names[filters])].shape
    return Work(nbytes, 2 * prod(shape[1:]) * prod(program.tensors[names[outputs]].shape))
