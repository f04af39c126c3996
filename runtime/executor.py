"""The executor: a loop over the steps of a plan, the same for every backend.

    executor = Executor(backend, plan, program)
    outputs = executor.run({"images": images, "labels": labels, "step": record}, {"images": next_images})

What is fed ahead (see Program.ahead) is on the device when a run begins; where it is not, it is uploaded before.
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
from vdnn.runtime.held import is_frozen

Inspect = Callable[[Op, Mapping[str, Any]], None]


class Observer(Protocol):
    """Who follows a run step by step."""

    def started(self, plan: Plan, program: Program) -> None:
        """A run of `plan` begins; the streams are idle."""

    def before(self, step: Step) -> None:
        """`step` is about to be queued."""

    def after(self, step: Step) -> None:
        """`step` has been queued."""


_FREEZE = "as array.setflags(write=False) makes it, got an array that can be"
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
        self._stages = {step.tensor: step.stage_offset for step in plan.steps if isinstance(step, Feed)}
        # looked for once: a plan has thousands of steps, and a replayed run no time for them
        self._fed = [step.tensor for step in plan.steps if isinstance(step, Feed)]
        self._fetches = [step.tensor for step in plan.steps if isinstance(step, Fetch)]
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

    def run(
        self, feeds: Mapping[str, NDArray[Any]], ahead: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Run all steps and join the streams.

        Args:
            feeds: an array for every tensor of `program.feeds`, of its shape and dtype.
            ahead: what the next run of the slab will be given for tensors of `program.ahead`, of the same shapes, in
                memory that nobody can write; None, or left out, where that is unknown or of another shape.

        Returns: an array for every tensor of `program.fetches`.
        """
        ahead = {name: value for name, value in (ahead or {}).items() if name in self.program.ahead}
        for name in self.program.feeds:
            self._check(name, feeds.get(name))
        for name, value in ahead.items():
            self._check(name, value)
            if not is_frozen(value):
                raise PlanError(f"feed '{name}' of the next run: expected memory that cannot be written, {_FREEZE}")
        held, places = self.backend.held, self.plan.persistent
        held.keep(places)
        missing = [name for name in self.program.ahead if not held.has(name, places[name], feeds[name])]
        held.forget(self.program.ahead)  # until this run is over, as it may end in an error
        self._upload(missing, feeds)
        # without a next run in sight the plan feeds the same again
        self._feeds, self._fetched = {**feeds, **ahead}, {}
        fetched = self._go()
        for name in self.program.ahead:
            held.note(name, places[name], self._feeds[name])
        return fetched

    @property
    def replay(self) -> Replay | None:
        """The captured step, from the second run on; None before, and where nothing is captured."""
        return self._replay

    def _check(self, name: str, got: NDArray[Any] | None) -> None:
        spec = self.program.tensors[name]
        if got is None or got.shape != spec.shape or got.dtype != _NUMPY[spec.dtype]:
            found = "nothing" if got is None else f"{got.shape} {got.dtype}"
            raise PlanError(f"feed '{name}': expected {spec.shape} {spec.dtype}, got {found}")

    def _upload(self, names: list[str], feeds: Mapping[str, NDArray[Any]]) -> None:
        for name in names:
            self.backend.feed(self.pool.view(name), feeds[name], self._stages[name], "in")
        if names:
            self.backend.sync()

    def _go(self) -> dict[str, NDArray[Any]]:
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
        self._fetched = {tensor: self._empty(tensor) for tensor in self._fetches}
        self._replay.run([self._feeds[tensor] for tensor in self._fed], list(self._fetched.values()))
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
        feed = self.backend.feed_ahead if step.tensor in self.program.ahead else self.backend.feed
        feed(self.pool.view(step.tensor), self._feeds[step.tensor], step.stage_offset, step.stream)

    def _fetch(self, step: Fetch) -> None:
        out = self._fetched[step.tensor] = self._empty(step.tensor)
        self.backend.fetch(self.pool.view(step.tensor), out, step.stage_offset, step.stream)
