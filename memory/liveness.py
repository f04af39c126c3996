"""When each storage is used: the first and last op that touch it, and where forward ends and backward begins for it.

uses = storage_uses(program)
uses["conv1"].forward_last, uses["conv1"].backward_first
offloaded(uses, ["conv1"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vdnn.errors import PlanError
from vdnn.layers.op import Program
from vdnn.memory.plan import align

BEFORE_FIRST_OP = -1


@dataclass(slots=True)
class Uses:
    """Uses of one storage that is not persistent; positions are op indices.

    Args:
        nbytes: aligned, guard included.
        first, last: of all uses; a feed is used at -1, a fetch at len(ops).
        forward_last: last use by a forward op; None if there is none.
        backward_first: first use by a backward or update op; None if forward is all.
    """

    storage: str
    nbytes: int
    first: int
    last: int
    forward_last: int | None = None
    backward_first: int | None = None


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A storage that is away between two ops: its last use in forward and its first after it; nbytes as in Uses."""

    storage: str
    nbytes: int
    forward_last: int
    backward_first: int


def storage_uses(program: Program, guard_bytes: int = 0) -> dict[str, Uses]:
    """Uses by storage name, in order of first use.

    Args:
        guard_bytes: added behind every storage, see `Decisions.guard_bytes`.
    """
    persistent = set(program.persistent)
    found: dict[str, Uses] = {}

    def touch(tensor: str, position: int) -> Uses | None:
        storage = program.tensors[tensor].storage
        if storage in persistent:
            return None
        uses = found.get(storage)
        if uses is None:
            nbytes = align(program.tensors[storage].nbytes + guard_bytes)
            uses = found[storage] = Uses(storage, nbytes, position, position)
        uses.last = position
        return uses

    for tensor in program.feeds:
        touch(tensor, BEFORE_FIRST_OP)
    for i, op in enumerate(program.ops):
        for tensor in (*op.reads.values(), *op.writes.values()):
            uses = touch(tensor, i)
            if uses is None:
                continue
            if op.phase == "forward":
                uses.forward_last = i
            elif uses.backward_first is None:
                uses.backward_first = i
    for tensor in program.fetches:
        touch(tensor, len(program.ops))
    return found


def offloaded(uses: Mapping[str, Uses], names: Iterable[str]) -> list[Offloaded]:
    """The storages `names`, in this order; PlanError for one that has no time to be away."""
    found = []
    for name in names:
        use = uses.get(name)
        if use is None or use.forward_last is None or use.backward_first is None:
            raise PlanError(
                f"storage '{name}' cannot be offloaded: expected one that forward and backward use and that is not "
                "persistent; let a policy of vdnn.memory.policy choose"
            )
        found.append(Offloaded(name, use.nbytes, use.forward_last, use.backward_first))
    return found


def last_reader(program: Program, tensor: str) -> int:
    """Index of the last op that uses the storage of `tensor`; PlanError if none does."""
    storage = program.storage(tensor)
    names = {name for name, spec in program.tensors.items() if spec.storage == storage}
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        if not (names.isdisjoint(op.reads.values()) and names.isdisjoint(op.writes.values())):
            return i
    raise PlanError(f"tensor '{tensor}' is fed ahead, but no op reads it: leave it out of Program.ahead")
