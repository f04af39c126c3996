"""What a Program means, one range of channels at a time: which write every read must find.

    versions = Versions(program)
    for region, wanted in versions.ops["relu1.forward"].reads:
        print(region.tensor, [versions.describe(v) for v in wanted])    # conv1 ["what op 'conv1.forward' wrote"]

A storage is cut along axis 1 wherever one of its tensors begins or ends; the pieces are its parts. Every write of a
part makes a new version of it, a whole number: 0 for bytes that nobody wrote, 1 for what the last run left in a
persistent storage, then one for every feed and one for every op. What is fed ahead counts as fed after the last op:
the ops mean what the last run left there.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.errors import ProgramError
from vdnn.layers.op import Program
from vdnn.layers.tensor import TensorSpec

NOTHING, LAST_RUN, FIRST_FEED = 0, 1, 2


class Region(NamedTuple):
    """The parts [first, end) of `storage` that `tensor` covers."""

    tensor: str
    storage: str
    first: int
    end: int


Read = tuple[Region, tuple[int, ...]]
"""A region, and the version that each of its parts must hold."""


class OpMeaning(NamedTuple):
    """What one op must find, what it writes, and the version that its writes make."""

    reads: tuple[Read, ...]
    writes: tuple[Region, ...]
    version: int


class Versions:
    """The meaning of every access of `program`, from its order alone.

    Attributes:
        parts: number of parts of every storage.
        ops: meaning of every op by name.
        feeds: what every feed writes: its region and version.
        fetches: what every fetch must find.
        final: versions of the parts of every persistent storage after the last op.

    Raises:
        ProgramError: an unknown tensor, a view that is not a range of channels of its storage, two ops of one name, or
            a read of bytes that nothing has written.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._cuts = _cuts(program)
        self.parts = {storage: len(cuts) - 1 for storage, cuts in self._cuts.items()}
        self._regions = {spec.name: self._cover(spec) for spec in program.tensors.values()}
        held = {storage: [NOTHING] * count for storage, count in self.parts.items()}
        for storage in program.persistent:
            if storage not in held:
                raise ProgramError(f"program '{program.name}' keeps '{storage}', which is no storage")
            held[storage] = [LAST_RUN] * self.parts[storage]
        for tensor in program.ahead:
            if tensor not in program.feeds or tensor not in program.persistent:
                raise ProgramError(f"program '{program.name}': '{tensor}' is fed ahead, but is no persistent feed")
        self.feeds: dict[str, tuple[Region, int]] = {}
        for version, tensor in enumerate(program.feeds, start=FIRST_FEED):
            region = self._region(tensor)
            self.feeds[tensor] = region, version
            if tensor not in program.ahead:
                held[region.storage][region.first : region.end] = [version] * (region.end - region.first)

        def read(tensor: str, reader: str) -> Read:
            region = self._region(tensor)
            wanted = tuple(held[region.storage][region.first : region.end])
            if NOTHING in wanted:
                part = self.place(region.storage, region.first + wanted.index(NOTHING))
                raise ProgramError(f"{reader} reads '{tensor}' before anything has written {part}")
            return region, wanted

        self.ops: dict[str, OpMeaning] = {}
        for version, op in enumerate(program.ops, start=FIRST_FEED + len(program.feeds)):
            if op.name in self.ops:
                raise ProgramError(f"program '{program.name}' has two ops named '{op.name}'")
            reads = tuple(read(tensor, f"op '{op.name}'") for tensor in op.inputs())
            writes = tuple(self._region(tensor) for tensor in dict.fromkeys(op.writes.values()))
            for region in writes:
                held[region.storage][region.first : region.end] = [version] * (region.end - region.first)
            self.ops[op.name] = OpMeaning(reads, writes, version)
        self.fetches = {tensor: read(tensor, "the host") for tensor in program.fetches}
        for tensor in program.ahead:
            region, version = self.feeds[tensor]
            held[region.storage][region.first : region.end] = [version] * (region.end - region.first)
        self.final = {storage: tuple(held[storage]) for storage in program.persistent}

    def whole(self, storage: str) -> Region:
        """All parts of `storage`."""
        return Region(storage, storage, 0, self.parts[storage])

    def describe(self, version: int) -> str:
        """`version` in words: whose write made it."""
        program = self._program
        if version == NOTHING:
            return "nothing that was written"
        if version == LAST_RUN:
            return "what the last run left"
        if version < FIRST_FEED + len(program.feeds):
            return f"the feed of '{program.feeds[version - FIRST_FEED]}'"
        return f"what op '{program.ops[version - FIRST_FEED - len(program.feeds)].name}' wrote"

    def place(self, storage: str, part: int) -> str:
        """Part `part` of `storage` in words."""
        cuts = self._cuts[storage]
        if len(cuts) == 2:
            return f"'{storage}'"
        return f"channels {cuts[part]} to {cuts[part + 1] - 1} of '{storage}'"

    def _region(self, tensor: str) -> Region:
        if tensor not in self._regions:
            raise ProgramError(f"program '{self._program.name}' names the unknown tensor '{tensor}'")
        return self._regions[tensor]

    def _cover(self, spec: TensorSpec) -> Region:
        cuts = self._cuts[spec.storage]
        low, high = _channels(spec, self._program.tensors[spec.storage])
        return Region(spec.name, spec.storage, cuts.index(low), cuts.index(high))


def _cuts(program: Program) -> dict[str, list[int]]:
    """By storage: the channels at which a tensor of it begins or ends, in order, without repeats."""
    ends: dict[str, set[int]] = {}
    for spec in program.tensors.values():
        root = program.tensors.get(spec.storage)
        if root is None or root.view_of is not None:
            raise ProgramError(f"tensor '{spec.name}' is a view of '{spec.storage}', which is no storage")
        ends.setdefault(root.name, set()).update(_channels(spec, root))
    return {storage: sorted(channels) for storage, channels in ends.items()}


def _channels(spec: TensorSpec, root: TensorSpec) -> tuple[int, int]:
    """First channel and end channel of `root` that `spec` covers; a storage without axis 1 is one channel."""
    channels = root.shape[1] if len(root.shape) > 1 else 1
    if spec.nbytes == root.nbytes and spec.channel == 0:
        return 0, channels
    same = (spec.dtype, spec.layout, spec.shape[:1], spec.shape[2:]) == (
        root.dtype,
        root.layout,
        root.shape[:1],
        root.shape[2:],
    )
    if not same or len(spec.shape) < 2 or spec.channel < 0 or spec.channel + spec.shape[1] > channels:
        raise ProgramError(
            f"tensor '{spec.name}', {spec.dtype} {spec.layout} {spec.shape} from channel {spec.channel} on, is no range"
            f" of channels of '{root.name}', {root.dtype} {root.layout} {root.shape}"
        )
    return spec.channel, spec.channel + spec.shape[1]
