"""The one interface between a plan and a machine: about ten methods, no policy and no plan in it.

    backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
    y = backend.view(program.tensors["relu1"], program.tensors["conv1"], offset)
    backend.launch(op, {"x": x, "y": y}, "compute")

Everything is asynchronous on the named stream ("compute", "out", "in") until `sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from vdnn.errors import PlanError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate, CopyRates
from vdnn.runtime.held import Held


@dataclass(frozen=True, slots=True)
class Caps:
    """What a backend is: for callers that must know what to expect of it, and for people.

    Args:
        name: "cpu", "cuda" or "simulated".
        has_data: whether it computes; False if it only tells times.
        simulated: whether its times are modelled.
        description: the machine in words.
        memory_bytes: what a slab may take if the user states no limit.
        rates: of copies between the slabs.
        cost_source: where the times of `candidates` come from.
        measured_costs: whether `candidates` has run what it times; else a short run is measured before training.
        poisons: whether a debug mode fills bytes that hold nothing with NaN, and finds writes to them.
        reserve_bytes: what the process holds on the device besides the slab: context, libraries, kernels.
        precision: "fp32", "tf32", "bf16" or "fp16": what operands of products round to, which is not always what was
            asked for.
        facts: what measured times depend on: gpu, driver, cudnn.
        memory_gbps, fp32_gflops: 10^9 bytes and fp32 operations a second that it cannot exceed; 0 where nobody knows.
    """

    name: str
    has_data: bool
    simulated: bool
    description: str
    memory_bytes: int
    rates: CopyRates
    cost_source: str
    measured_costs: bool = False
    poisons: bool = False
    reserve_bytes: int = 0
    precision: str = "fp32"
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory_gbps: float = 0.0
    fp32_gflops: float = 0.0


def check_stage(offset: int, nbytes: int, stage_bytes: int) -> None:
    """PlanError unless bytes [offset, offset + nbytes) lie in a stage of `stage_bytes`."""
    if offset < 0 or offset + nbytes > stage_bytes:
        raise PlanError(f"bytes {offset} to {offset + nbytes} lie outside the stage of {stage_bytes} bytes")


class Replay(Protocol):
    """A captured run: the same steps again, with other values fed."""

    def run(self, values: Sequence[NDArray[Any]], outs: Sequence[NDArray[Any]]) -> None:
        """Feed `values` and fill `outs`, in the order of the plan's Feed and Fetch steps; complete on return."""

    def relaunch(self) -> None:
        """Queue the run on "compute" once more with what was fed last, and wait for nothing: for clocks."""


class Backend(Protocol):
    """A machine that runs steps. View is the backend's own array type.

    Attributes:
        held: what executors have fed ahead into the slab; whoever writes there by other means lets it forget.
    """

    caps: Caps
    held: Held

    def open(self, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        """Take the device slab, the host slab and the stage, at once and whole; later calls raise."""

    def view(self, spec: TensorSpec, root: TensorSpec, offset: int) -> Any:
        """The array of `spec`, whose storage `root` begins at `offset` of the slab; a channel view is strided."""

    def launch(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """Run the kernel of op.kind with its reads and writes by argument name."""

    def copy_out(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Slab bytes to host slab bytes."""

    def copy_in(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Host slab bytes to slab bytes."""

    def record(self, event: int, stream: str) -> None:
        """Mark a point of `stream`."""

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until the latest `record` of `event` is reached."""

    def mark(self, stream: str) -> Any:
        """A point of `stream` whose time `between_ms` tells after sync; within a capture that of the latest replay."""

    def between_ms(self, first: Any, second: Any) -> float:
        """ms from one mark to another, of any stream, when both have been synced; negative if `second` came before."""

    def feed(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Write `array` from host memory, by way of the stage if it needs one. `value` stays untouched until sync."""

    def feed_ahead(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """As `feed`, for a later run: no step of this one after it touches `array`, so it may be done until sync."""

    def fetch(self, array: Any, out: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Read `array` into host memory `out`, valid after sync, by way of the stage if it needs one."""

    def read(self, array: Any) -> NDArray[Any]:
        """The numbers in `array` now, after a sync: for checkpoints, and for looking at what a kernel made; bfloat16 as
        float32."""

    def write(self, array: Any, value: NDArray[Any]) -> None:
        """Make `array` hold `value`, of its shape and dtype, now: between runs, after a sync; bfloat16 from float32."""

    def guarded(self, offset: int, nbytes: int, what: str, stream: str) -> None:
        """These bytes belong to nobody: a debug mode checks that they still hold poison; sync raises, naming `what`."""

    def freed(self, offset: int, nbytes: int, stream: str) -> None:
        """These bytes hold nothing any more (a debug mode poisons them)."""

    def sync(self) -> None:
        """Wait for all streams; raises what a kernel raised."""

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """The algorithms for `op` with their workspaces; times are estimates unless measured."""

    def knows_all(self, op: Op, program: Program) -> bool:
        """Whether `candidates` has left out no algorithm of `op` because it needs more memory than there is."""

    def held_bytes(self) -> int:
        """What the process holds on the device as the system sees it, slab included; 0 where only the slab counts."""

    def capture(self, body: Callable[[], None]) -> Replay | None:
        """Record what `body` does on the streams, without running it; None where the backend cannot."""

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
