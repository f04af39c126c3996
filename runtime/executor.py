"""The executor: a loop over the steps of a plan, the same for every backend.

    executor = Executor(backend, plan, program)
    outputs = executor.run({"images": images, "labels": labels, "step": record})

It knows no policy, no layer kind and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import PlanError
from vdnn.layers.op import Op, Program
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Step, Wait
from vdnn.memory.pool import Pool
from vdnn.runtime.backend import Backend, Replay

Inspect = Callable[[Op, Mapping[str, Any]], None]


class Observer(Protocol):
    """Who follows a run step by step."""

    def started(self, plan: Plan, program: Program) -> None:
        """A run of `plan` begins; the streams are idle."""

    def before(self, step: Step) -> None:
        """`step` is about to be queued."""

    def after(self, step: Step) -> None:
        """`step` has been queued."""


_NUMPY = {"float32": np.float32, "float64": np.float64, "uint8": np.uint8, "int32": np.int32}


class Executor:
    """Runs `plan` of `program` (with algorithms) on an open backend, as often as asked.

    Args:
        inspect: called after every launch, when it is complete, with the op and its arrays: for debugging.
        capture: from the second run on, let the backend replay the whole step if it can.

    Attributes:
        observer: if set, the next runs are not replayed and it follows them.
    """

    def __init__(
        self, backend: Backend, plan: Plan, program: Program, inspect: Inspect | None = None, *, capture: bool = False
    ):
        self.backend, self.plan, self.program, self.inspect = backend, plan, program, inspect
        self._capture = capture and inspect is None
        self.observer: Observer | None = None
        self._replay: Replay | None = None
        self._runs = 0
        # what another plan of the slab keeps, such as the gradients of a step in parts, this one may allocate
        own = {name: plan.persistent[name] for name in program.persistent}
        self.pool = Pool(program.tensors, own, backend.view)
        self._ops = {op.name: op for op in program.ops}
        self._host: dict[str, int] = {}
        self._feeds: Mapping[str, NDArray[Any]] = {}
        self._fetched: dict[str, NDArray[Any]] = {}
        self._run: dict[type[Step], Callable[[Any], None]] = {
            Alloc: self._alloc,
            Free: self._free,
            Launch: self._launch,
            CopyOut: self._copy_out,
            CopyIn: self._copy_in,
            Record: self._record,
            Wait: self._wait,
            Feed: self._feed,
            Fetch: self._fetch,
        }

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run all steps and join the streams.

        Args:
            feeds: an array for every tensor of `program.feeds`, of its shape and dtype.

        Returns: an array for every tensor of `program.fetches`.
        """
        for name in self.program.feeds:
            spec = self.program.tensors[name]
            got = feeds.get(name)
            if got is None or got.shape != spec.shape or got.dtype != _NUMPY[spec.dtype]:
                found = "nothing" if got is None else f"{got.shape} {got.dtype}"
                raise PlanError(f"feed '{name}': expected {spec.shape} {spec.dtype}, got {found}")
        self._feeds, self._fetched = feeds, {}
        self._runs += 1
        if self._capture and self._runs > 1:  # the first run has made what a capture cannot: plans, events, modules
            self._capture = False
            self._replay = self.backend.capture(self._steps)
        if self._replay is None or self.observer is not None:
            self._steps(self.observer)
            self.backend.sync()
            if self.backend.caps.poisons:
                free = self.plan.slab_bytes - self.plan.persistent_bytes
                self.backend.guarded(self.plan.persistent_bytes, free, "free bytes after the step", "compute")
                self.backend.sync()
            return self._fetched
        values = [feeds[step.tensor] for step in self.plan.steps if isinstance(step, Feed)]
        self._fetched = {step.tensor: self._empty(step.tensor) for step in self.plan.steps if isinstance(step, Fetch)}
        self._replay.run(values, list(self._fetched.values()))
        return self._fetched

    def _steps(self, observer: Observer | None = None) -> None:
        if observer is None:
            for step in self.plan.steps:
                self._run[type(step)](step)
            return
        observer.started(self.plan, self.program)
        for step in self.plan.steps:
            observer.before(step)
            self._run[type(step)](step)
            observer.after(step)

    def _empty(self, tensor: str) -> NDArray[Any]:
        spec = self.program.tensors[tensor]
        return np.zeros(spec.shape, _NUMPY[spec.dtype])

    def _alloc(self, step: Alloc) -> None:
        self.pool.alloc(step.storage, step.offset, step.nbytes)

    def _free(self, step: Free) -> None:
        offset, nbytes = self.pool.free(step.storage)
        own = self.program.tensors[step.storage].nbytes
        self.backend.guarded(offset + own, nbytes - own, f"behind '{step.storage}'", step.stream)
        self.backend.freed(offset, nbytes, step.stream)

    def _launch(self, step: Launch) -> None:
        op = self._ops[step.op]
        arrays = {arg: self.pool.view(tensor) for arg, tensor in (*op.reads.items(), *op.writes.items())}
        self.backend.launch(op, arrays, step.stream)
        if self.inspect is not None:
            self.backend.sync()
            self.inspect(op, arrays)

    def _copy_out(self, step: CopyOut) -> None:
        # the storage's own bytes: its place may be longer, and on the host that padding may be another's
        offset, nbytes = self.pool.place(step.storage)[0], self.program.tensors[step.storage].nbytes
        self._host[step.storage] = step.host_offset
        self.backend.copy_out(offset, step.host_offset, nbytes, step.stream)

    def _copy_in(self, step: CopyIn) -> None:
        offset, nbytes = self.pool.place(step.storage)[0], self.program.tensors[step.storage].nbytes
        self.backend.copy_in(offset, self._host[step.storage], nbytes, step.stream)

    def _record(self, step: Record) -> None:
        self.backend.record(step.event, step.stream)

    def _wait(self, step: Wait) -> None:
        self.backend.wait(step.event, step.stream)

    def _feed(self, step: Feed) -> None:
        self.backend.feed(self.pool.view(step.tensor), self._feeds[step.tensor], step.stream)

    def _fetch(self, step: Fetch) -> None:
        out = self._fetched[step.tensor] = self._empty(step.tensor)
        self.backend.fetch(self.pool.view(step.tensor), out, step.stream)
