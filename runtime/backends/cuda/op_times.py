"""Measured times of ops that are no convolutions, kept in the table of the algorithms.

times = OpTimes(backend.launch, stream, limit_bytes, search, copy_gbps, note=print)
times.time_ms(op, program, workspace_bytes)
times.in_step_ms(0.25)                 # of a launch that took 0.25 ms alone
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.runtime.backends.cuda.op_trial import Launch, OpTrial, op_key, trial_bytes
from vdnn.runtime.backends.cuda.source import source
from vdnn.units import format_bytes

METHOD = 1
"""Counts changes in how ops are timed; times of another number are measured anew."""
LAUNCH = "launch"
"""The key under which it is kept how much less a launch takes in a step than alone."""


class Kept(Protocol):
    """Where times are kept between runs."""

    ops: dict[str, float]

    def keep_op(self, key: str, time_ms: float) -> None:
        """Add one to `ops`, soon for later runs too."""


@dataclass(slots=True)
class OpTimes:
    """Times of ops on this GPU, each measured once.

    Args:
        launch, stream: of the backend, see OpTrial.
        limit_bytes: most device memory that a measurement may take.
        kept: what was measured before. Times are of these kernels: their source is part of the key.
        copy_gbps: 10^9 bytes per second at which kernels are expected to stream, where nothing can be measured.
        note: told in words what takes a while, and what is estimated.
    """

    launch: Launch
    stream: Any
    limit_bytes: int
    kept: Kept
    copy_gbps: float
    note: Callable[[str], None] | None = None
    _made: str = ""
    _estimated: dict[str, float] = field(default_factory=dict)
    _announced: bool = False

    def time_ms(self, op: Op, program: Program, workspace_bytes: int, variant: str = "") -> float:
        """Time of `op` within a step, whose place in memory `program` tells; an estimate if it does not fit.

        variant: which of several ways its kernel is to take, told it as the algorithm.
        """
        key = self._key(op_key(op, program, workspace_bytes))
        if variant:
            op, key = replace(op, attrs={**op.attrs, "algorithm": variant}), f"{key} by {variant}"
        if key in self.kept.ops:
            return self.kept.ops[key]
        if key in self._estimated:
            return self._estimated[key]
        expected_ms = self._by_bytes_ms(op, program)
        needed = trial_bytes(op, program, workspace_bytes)
        if needed > self.limit_bytes:
            self._say(
                f"{op.kind} of layer '{op.layer}' needs {format_bytes(needed)}, more than the memory limit leaves to "
                "measure it: its time is estimated from its bytes"
            )
            self._estimated[key] = expected_ms
            return expected_ms
        if not self._announced:
            self._announced = True
            self._say("measuring ops that are no convolutions: some seconds, once for this GPU")
        with OpTrial(op, program, workspace_bytes, self.launch, self.stream, self.limit_bytes) as trial:
            time_ms = trial.time_ms(expected_ms)
        self.kept.keep_op(key, time_ms)
        return time_ms

    def in_step_ms(self, alone_ms: float) -> float:
        """Time within a replayed step of a launch that takes `alone_ms` between two events."""
        return max(alone_ms / 2, alone_ms + self._launch_ms())

    def _launch_ms(self) -> float:
        """Time in a chain less time alone of the smallest op, measured once: below 0 if launches overlap in a step."""
        key = self._key(LAUNCH)
        if key not in self.kept.ops:
            op, program = _smallest()
            with OpTrial(op, program, 0, self.launch, self.stream, self.limit_bytes) as trial:
                alone_ms = trial.alone_ms()
                self.kept.keep_op(key, trial.time_ms(alone_ms) - alone_ms)
        return self.kept.ops[key]

    def _key(self, text: str) -> str:
        if not self._made:
            self._made = hashlib.sha256(f"{METHOD} {source()}".encode()).hexdigest()[:8]
        return f"{self._made} {text}"

    def _by_bytes_ms(self, op: Op, program: Program) -> float:
        names = (*op.reads.values(), *op.writes.values())
        return sum(program.tensors[name].nbytes for name in names) / (self.copy_gbps * 1e6) + 0.002

    def _say(self, text: str) -> None:
        if self.note is not None:
            self.note(text)


def _smallest() -> tuple[Op, Program]:
    """An update of a few weights: one small kernel, whatever the precision of activations."""
    specs = (
        TensorSpec("w", "weight", (64,)),
        TensorSpec("dw", "wgrad", (64,)),
        TensorSpec("step", "state", (64,), "uint8"),
    )
    attrs = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    writes = {"w": "w", "status": "step"}
    op = Op("update", "sgd.update", "w", "update", {"dw": "dw", "step": "step"}, writes, attrs, tuple(writes))
    return op, Program("smallest", 1, "train", {s.name: s for s in specs}, (op,), (), (), (), "", "")
