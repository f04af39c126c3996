"""The simulated backend: it holds no data and computes nothing; its streams are the Clock's.

backend = SimulatedBackend(load_profile("titan-x-maxwell"))
Executor(backend, plan, program).run(feeds)
backend.elapsed_ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import PlanError, VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.clock import StreamClock
from vdnn.memory.costs import Candidate
from vdnn.memory.plan import STREAMS
from vdnn.runtime.backend import Caps, check_stage
from vdnn.runtime.held import Held
from vdnn.runtime.plain_images import PlainImages
from vdnn.runtime.profile import Profile, model_candidates, operands


class SimulatedBackend:
    """A machine described by `profile`. A view is the TensorSpec itself; fetched arrays stay as they are."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.caps = Caps(
            name="simulated",
            has_data=False,
            simulated=True,
            description=f"simulated {profile.description}",
            memory_bytes=profile.memory_bytes,
            rates=profile.copies,
            cost_source=f"modelled by profile {profile.name}",
        )
        self.elapsed_ms = 0.0
        self.held = Held()
        self._stage_bytes = 0
        self._clock = StreamClock(profile.copies)
        self._sizes: tuple[int, int] | None = None
        self._times: dict[tuple[Any, ...], float] = {}
        self._images = PlainImages()

    def open(self, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        """Note the sizes, against which every place is checked."""
        if self._sizes is not None:
            raise VdnnError("the simulated backend is already open")
        self._sizes, self._stage_bytes = (slab_bytes, host_bytes), stage_bytes

    def view(self, spec: TensorSpec, root: TensorSpec, offset: int) -> TensorSpec:
        """The spec, after a check that it lies in the slab."""
        self._check(offset, root.nbytes, 0, "slab")
        return spec

    def launch(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """Let the modelled time of the op pass on `stream`."""
        self._images.note(op, arrays)
        key = (op.name, op.attrs.get("algorithm"), tuple(spec.shape for spec in arrays.values()))
        if key not in self._times:
            options = model_candidates(op, arrays, self.profile, self._images)
            chosen = op.attrs.get("algorithm")
            self._times[key] = next(c.time_ms for c in options if chosen is None or c.algorithm == chosen)
        self._clock.run(stream, self._times[key], self.profile.copies.slowdown(op.kind))

    def copy_out(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Let the copy pass on `stream`."""
        self._check(offset, nbytes, 0, "slab")
        self._check(host_offset, nbytes, 1, "host slab")
        self._clock.copy("out", nbytes, stream)

    def copy_in(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Let the copy pass on `stream`."""
        self._check(offset, nbytes, 0, "slab")
        self._check(host_offset, nbytes, 1, "host slab")
        self._clock.copy("in", nbytes, stream)

    def record(self, event: int, stream: str) -> None:
        """Note the time of `event`."""
        self._clock.record(event, stream)

    def wait(self, event: int, stream: str) -> None:
        """Move `stream` on to the time of `event`."""
        if event not in self._clock.events:
            raise PlanError(f"stream '{stream}' waits for event {event}, which nothing records")
        self._clock.wait(event, stream)

    def mark(self, stream: str) -> float:
        """The time of `stream` in ms since the backend was made."""
        return self.elapsed_ms + self._clock.now[stream]

    def between_ms(self, first: float, second: float) -> float:
        """Their difference."""
        return second - first

    def feed(self, array: TensorSpec, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Let the upload pass on `stream`."""
        check_stage(stage_offset, array.nbytes, self._stage_bytes)
        self._clock.copy("in", array.nbytes, stream)

    def feed_ahead(self, array: TensorSpec, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """As feed."""
        self.feed(array, value, stage_offset, stream)

    def fetch(self, array: TensorSpec, out: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Let the download pass on `stream`; `out` keeps its content."""
        check_stage(stage_offset, array.nbytes, self._stage_bytes)
        self._clock.copy("out", array.nbytes, stream)

    def read(self, array: TensorSpec) -> NDArray[Any]:
        """Nothing but zeros: there is no data."""
        return np.zeros(array.shape)

    def write(self, array: TensorSpec, value: NDArray[Any]) -> None:
        """Nothing: there is no data."""

    def guarded(self, offset: int, nbytes: int, what: str, stream: str) -> None:
        """Nothing: there are no bytes to look at."""

    def freed(self, offset: int, nbytes: int, stream: str) -> None:
        """Nothing: there are no bytes to poison."""

    def sync(self) -> None:
        """All streams meet; the time since the last sync is added to `elapsed_ms`."""
        if self._sizes is None:
            raise VdnnError("the simulated backend is not open")
        self.elapsed_ms += self._clock.join()
        self._clock.now = dict.fromkeys(STREAMS, 0.0)
        self._clock.events = dict.fromkeys(self._clock.events, 0.0)

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """The profile's candidates."""
        return model_candidates(op, operands(op, program), self.profile, PlainImages.of(program))

    def knows_all(self, op: Op, program: Program) -> bool:
        """Yes: nothing is run."""
        return True

    def held_bytes(self) -> int:
        """0: the limit is for the slab alone."""
        return 0

    def capture(self, body: Callable[[], None]) -> None:
        """Nothing to capture: every run goes step by step."""

    def close(self) -> None:
        """Forget the sizes."""
        self._sizes, self.held = None, Held()

    def _check(self, offset: int, nbytes: int, which: int, name: str) -> None:
        if self._sizes is None:
            raise VdnnError("the simulated backend is not open")
        if offset < 0 or offset + nbytes > self._sizes[which]:
            raise PlanError(f"bytes {offset} to {offset + nbytes} lie outside the {name} of {self._sizes[which]} bytes")
