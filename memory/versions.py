"""What a Program means, one range of images and channels at a time: which write every read must find.

    versions = Versions(program)
    for region, wanted in versions.ops["relu1.forward"].reads:
        print(region.tensor, [versions.describe(v) for v in wanted])    # conv1 ["what op 'conv1.forward' wrote"]

A storage is cut along axes 0 and 1 wherever one of its tensors begins or ends; the pieces are its parts. Every write of
a part makes a new version of it, a whole number: 0 for bytes that nobody wrote, 1 for what the last run left in a
persistent storage, then one for every feed and one for every op. What is fed ahead counts as fed after the last op:
the ops mean what the last run left there.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

from vdnn.errors import ProgramError
from vdnn.layers.op import Program
from vdnn.layers.tensor import TensorSpec

NOTHING, LAST_RUN, FIRST_FEED = 0, 1, 2


class Region(NamedTuple):
    """The parts of `storage` that `tensor` covers, by their numbers."""

    tensor: str
    storage: str
    parts: tuple[int, ...]


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
        ProgramError: an unknown tensor, a view that is no range of images and channels of its storage, two ops of one
            name, or a read of bytes that nothing has written.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._cuts = _cuts(program)
        self.parts = {storage: (len(n) - 1) * (len(c) - 1) for storage, (n, c) in self._cuts.items()}
        self._regions = {spec.name: self._cover(spec) for spec in program.tensors.values()}
        held = {storage: [NOTHING] * count for storage, count in self.parts.items()}
        for storage in program.persistent:
            if storage not in held:
                raise ProgramError(f"program '{program.name}' keeps '{storage}', which is no storage")
            held[storage] = [LAST_RUN] * self.parts[storage]
        for tensor in program.ahead:
            if tensor not in program.feeds or tensor not in program.persistent:
                raise ProgramError(f"program '{program.name}': '{tensor}' is fed ahead, but is no persistent feed")

        def write(region: Region, version: int) -> None:
            for part in region.parts:
                held[region.storage][part] = version

        self.feeds: dict[str, tuple[Region, int]] = {}
        for version, tensor in enumerate(program.feeds, start=FIRST_FEED):
            region = self._region(tensor)
            self.feeds[tensor] = region, version
            if tensor not in program.ahead:
                write(region, version)

        def read(tensor: str, reader: str) -> Read:
            region = self._region(tensor)
            wanted = tuple(held[region.storage][part] for part in region.parts)
            if NOTHING in wanted:
                part = self.place(region.storage, region.parts[wanted.index(NOTHING)])
                raise ProgramError(f"{reader} reads '{tensor}' before anything has written {part}")
            return region, wanted

        self.ops: dict[str, OpMeaning] = {}
        for version, op in enumerate(program.ops, start=FIRST_FEED + len(program.feeds)):
            if op.name in self.ops:
                raise ProgramError(f"program '{program.name}' has two ops named '{op.name}'")
            reads = tuple(read(tensor, f"op '{op.name}'") for tensor in op.inputs())
            writes = tuple(self._region(tensor) for tensor in dict.fromkeys(op.writes.values()))
            for region in writes:
                write(region, version)
            self.ops[op.name] = OpMeaning(reads, writes, version)
        self.fetches = {tensor: read(tensor, "the host") for tensor in program.fetches}
        for tensor in program.ahead:
            write(*self.feeds[tensor])
        self.final = {storage: tuple(held[storage]) for storage in program.persistent}

    def whole(self, storage: str) -> Region:
        """All parts of `storage`."""
        return Region(storage, storage, tuple(range(self.parts[storage])))

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
        image_cuts, channel_cuts = self._cuts[storage]
        image, channel = divmod(part, len(channel_cuts) - 1)
        words = []
        if len(image_cuts) > 2:
            words.append(f"images {image_cuts[image]} to {image_cuts[image + 1] - 1}")
        if len(channel_cuts) > 2:
            words.append(f"channels {channel_cuts[channel]} to {channel_cuts[channel + 1] - 1}")
        return f"{', '.join(words)} of '{storage}'" if words else f"'{storage}'"

    def _region(self, tensor: str) -> Region:
        if tensor not in self._regions:
            raise ProgramError(f"program '{self._program.name}' names the unknown tensor '{tensor}'")
        return self._regions[tensor]

    def _cover(self, spec: TensorSpec) -> Region:
        image_cuts, channel_cuts = self._cuts[spec.storage]
        images, channels = _box(spec, self._program.tensors[spec.storage])
        rows = range(image_cuts.index(images[0]), image_cuts.index(images[1]))
        columns = range(channel_cuts.index(channels[0]), channel_cuts.index(channels[1]))
        width = len(channel_cuts) - 1
        return Region(spec.name, spec.storage, tuple(row * width + column for row, column in product(rows, columns)))


Span = tuple[int, int]
"""First and end."""


def _cuts(program: Program) -> dict[str, tuple[list[int], list[int]]]:
    """By storage: the images and channels at which a tensor of it begins or ends, in order, without repeats."""
    ends: dict[str, tuple[set[int], set[int]]] = {}
    for spec in program.tensors.values():
        root = program.tensors.get(spec.storage)
        if root is None or root.view_of is not None:
            raise ProgramError(f"tensor '{spec.name}' is a view of '{spec.storage}', which is no storage")
        images, channels = _box(spec, root)
        found = ends.setdefault(root.name, (set(), set()))
        found[0].update(images)
        found[1].update(channels)
    return {storage: (sorted(images), sorted(channels)) for storage, (images, channels) in ends.items()}


def _box(spec: TensorSpec, root: TensorSpec) -> tuple[Span, Span]:
    """Images and channels of `root` that `spec` covers; a storage without such an axis has one."""
    count, width = (*root.shape, 1, 1)[:2]
    if spec.nbytes == root.nbytes and not spec.channel and not spec.image:
        return (0, count), (0, width)
    images, channels = (spec.image, spec.image + spec.shape[0]), (0, width)
    same = (spec.dtype, spec.layout) == (root.dtype, root.layout) and len(spec.shape) > 1
    if spec.channel or prod(spec.shape[1:]) != prod(root.shape[1:]):  # a flattened slice has all channels
        same = same and spec.shape[2:] == root.shape[2:]
        channels = (spec.channel, spec.channel + spec.shape[1]) if same else channels
    if not same or not 0 <= images[0] < images[1] <= count or not 0 <= channels[0] < channels[1] <= width:
        raise ProgramError(
            f"tensor '{spec.name}', {spec.dtype} {spec.layout} {spec.shape} from channel {spec.channel} and image"
            f" {spec.image} on, is no range of images and channels of '{root.name}', {root.dtype} {root.layout}"
            f" {root.shape}"
        )
    return images, channels
