"""What a policy decided: which storages are offloaded, which algorithm each convolution uses, how bytes are shared.

    decisions = Decisions(policy="all", offload=("data", "conv1"), algorithms={"conv1.forward": Algorithm("GEMM", 0)})

No offsets here: places are the planner's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The chosen candidate of one op."""

    name: str
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """So many images of an op's batch by one algorithm."""

    images: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of a layer's images and filters, a key of vdnn.layers.tensor.MEMORY_ORDERS, and why it is that."""

    layout: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """The outcome of a policy.

    Args:
        policy: its name, for people.
        offload: storages that leave for the host after their last reader in forward. All others stay while they are
            needed, and go as soon as no later op reads them.
        algorithms: chosen candidate by op name, for the ops that have more than one.
        slices: of ops that run in slices of the batch, one after another: their images and algorithms, in order. Such
            an op is not among `algorithms`.
        layouts: by layer, or "data" for the normalised images, where each layer got its own; the program that a policy
            is given has them already (see vdnn.memory.layout). Empty for one layout everywhere.
        allocation: "layer": bytes are held from first to last use; "network": as a framework without liveness,
            every feature map for the whole step, gradients in the fewest buffers of the largest size, one workspace.
        join: "reuse": a stream waits for another when it needs its data or its bytes; "layer": as in the vDNN paper,
            both streams also meet at the end of every layer that has a copy.
        prefetch_bytes: how many bytes may lie fetched and unused while another prefetch starts; None for the largest
            offloaded storage. 0 fetches each storage just before its first reader.
        hold, fetch: by offloaded storage, the op after which its bytes are given back at the latest, and the one before
            which it is fetched at the earliest (see `pace`). Without them, or with `prefetch_bytes`: as the paper does.
        pace_bytes: most bytes live at once, persistent ones aside, up to which `hold` and `fetch` may go.
        guard_bytes: kept free behind every storage; a debug mode looks whether anything has written there.
        notes: sentences for the report: why this, what was given up.
    """

    policy: str
    offload: tuple[str, ...] = ()
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    slices: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    layouts: Mapping[str, LayoutChoice] = field(default_factory=dict)
    allocation: str = "layer"
    join: str = "reuse"
    prefetch_bytes: int | None = None
    hold: Mapping[str, str] = field(default_factory=dict)
    fetch: Mapping[str, str] = field(default_factory=dict)
    pace_bytes: int | None = None
    guard_bytes: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes equal decisions."""
        return asdict(self) | {"offload": list(self.offload), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decisions:
        """The decisions that `to_json` described."""
        algorithms = {op: Algorithm(**a) for op, a in data["algorithms"].items()}
        slices = {
            op: tuple(Slice(row["images"], Algorithm(**row["algorithm"])) for row in rows)
            for op, rows in data["slices"].items()
        }
        layouts = {layer: LayoutChoice(**row) for layer, row in data.get("layouts", {}).items()}
        lists = {"offload": tuple(data["offload"]), "notes": tuple(data["notes"])}
        return cls(**{**data, **lists, "algorithms": algorithms, "slices": slices, "layouts": layouts})

    def digest(self) -> str:
        """SHA-256 of the JSON form, hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
