"""The schedule as a value: slab sizes, persistent places, and a flat list of steps that three executors read.

    for step in plan.steps:
        print(step)          # Alloc(storage='conv1', offset=4096, nbytes=...) ...

What the steps mean:
- Three streams, "compute", "out" and "in", each run their own steps in list order. Between streams nothing is ordered
  but by events: Wait(e, s) holds s until the Record(e, t) before it in the list has been reached by t. Every event is
  recorded once, and before it is waited for.
- Alloc and Free say which bytes of the slab are whose. Alloc is in force for every later step; the first step that
  touches the bytes must come after the Free of whoever held them. Free is a point on its stream: all uses of the
  storage come before it, in that stream's order or through events. A storage that is offloaded has two residencies,
  Alloc ... CopyOut, Free and Alloc, CopyIn ... Free; offsets may differ. Offsets are stated once, at Alloc, and host
  offsets once, at CopyOut.
- Launch runs an op of the Program; its operands lie at the offset of their storage (plus that of a view's channel).
- Feed writes a tensor from the host, Fetch reads one back. The Feed of a tensor in `Program.ahead` brings the value of
  the next run, after every reader of this run's. Each passes through a place of its own in the stage: pinned host bytes
  that the host fills before the copy and reads after it. After the last step all streams are joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

STREAMS = ("compute", "out", "in")
ALIGNMENT = 256
"""Bytes; what cuDNN and vector loads want, and enough for every SIMD width."""


class Alloc(NamedTuple):
    """Bytes [offset, offset + nbytes) of the slab belong to `storage` from here on."""

    storage: str
    offset: int
    nbytes: int


class Free(NamedTuple):
    """`storage` gives its bytes back, at this point of `stream`."""

    storage: str
    stream: str


class Launch(NamedTuple):
    """Run op `op` on `stream`."""

    op: str
    stream: str


class CopyOut(NamedTuple):
    """Copy all bytes of `storage` to the host slab at `host_offset`."""

    storage: str
    host_offset: int
    stream: str


class CopyIn(NamedTuple):
    """Copy all bytes of `storage` back from where its CopyOut put them."""

    storage: str
    stream: str


class Record(NamedTuple):
    """`event` is reached when `stream` gets here."""

    event: int
    stream: str


class Wait(NamedTuple):
    """`stream` goes on only when `event` is reached."""

    event: int
    stream: str


class Feed(NamedTuple):
    """Write `tensor` from the host's input of that name, by way of the stage from `stage_offset` on."""

    tensor: str
    stream: str
    stage_offset: int = 0


class Fetch(NamedTuple):
    """Read `tensor` back for the host, by way of the stage from `stage_offset` on."""

    tensor: str
    stream: str
    stage_offset: int = 0


Step = Alloc | Free | Launch | CopyOut | CopyIn | Record | Wait | Feed | Fetch
STEP_KINDS: Mapping[str, Any] = {
    cls.__name__: cls for cls in (Alloc, Free, Launch, CopyOut, CopyIn, Record, Wait, Feed, Fetch)
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a Program in bytes and order.

    Args:
        name, batch, mode: those of the Program.
        program_digest, decisions_digest: of what this was planned from.
        persistent: offset of every persistent storage; equal in all plans that share a slab.
        persistent_bytes: end of the persistent section, from 0.
        slab_bytes: device bytes needed, persistent section included.
        host_bytes: pinned host bytes needed for what is offloaded.
        steps: see the module docstring.
        stage_bytes: pinned host bytes that feeds and fetches pass through, apart from `host_bytes`.
    """

    name: str
    batch: int
    mode: str
    program_digest: str
    decisions_digest: str
    persistent: Mapping[str, int]
    persistent_bytes: int
    slab_bytes: int
    host_bytes: int
    steps: tuple[Step, ...]
    stage_bytes: int = 0

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes needed in all."""
        return self.host_bytes + self.stage_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal plan; a step is [kind, its fields]."""
        return {
            "name": self.name,
            "batch": self.batch,
            "mode": self.mode,
            "program_digest": self.program_digest,
            "decisions_digest": self.decisions_digest,
            "persistent": dict(self.persistent),
            "persistent_bytes": self.persistent_bytes,
            "slab_bytes": self.slab_bytes,
            "host_bytes": self.host_bytes,
            "stage_bytes": self.stage_bytes,
            "steps": [[type(step).__name__, *step] for step in self.steps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` described."""
        return cls(**{**data, "steps": tuple(STEP_KINDS[row[0]](*row[1:]) for row in data["steps"])})


def align(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
