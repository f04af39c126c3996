"""Valid plans made at random, by means that share nothing with the planner or the verifier.

    plan = random_plan(program, random.Random(7))

Ops in a random order that their storages allow, storages allocated early and freed late, copied out and back in the
gaps between their uses, bytes and host bytes used again; then the waits that this needs, and no others or too many.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Linear,
    Lrn,
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    TensorSpec,
    Update,
    lower,
)
from vdnn.memory.decisions import Algorithm, Decisions, Slice
from vdnn.memory.passes import BY_IMAGE, apply_decisions
from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Step, Wait, align


def random_program(random: Random, layers: int = 6) -> Program:
    """A small network of two images of 4x4, with forks, sums, concatenations, workspaces and convolutions in slices."""
    graph = Graph("random", (2, 4, 4), classes=3)
    ends = [graph.add("first", Conv(4, 3, padding=1), graph.input)]
    for i in range(layers):
        x = random.choice(ends)
        name = f"layer{i}"
        kind = random.choice(("conv", "conv", "relu", "relu", "lrn", "norm", "drop", "pool", "add", "concat", "concat"))
        others = [t for t in ends if graph.shape(t)[1:] == graph.shape(x)[1:] and t != x]
        if kind == "add":
            others = [t for t in others if graph.shape(t) == graph.shape(x)]
        match kind:
            case "conv":
                graph.add(name, Conv(random.choice((2, 4)), 3, padding=1, bias=random.random() < 0.5), x)
            case "add" | "concat" if others:
                graph.add(name, Add() if kind == "add" else Concat(), [x, random.choice(others)])
            case "norm":
                graph.add(name, BatchNorm(), x)
            case "drop":
                graph.add(name, Dropout(0.5), x)
            case "lrn":
                graph.add(name, Lrn(), x)
            case "pool":
                graph.add(name, Pool(random.choice(("max", "average")), 3, stride=1, padding=1), x)
            case _:
                graph.add(name, Relu(), x)
        ends.append(name)
        if random.random() < 0.5 and graph.consumers[x]:
            ends.remove(x)
    # every branch must reach the loss
    loose = [name for name in graph.nodes if not graph.consumers[name]]
    x = graph.add("all", Concat(), loose) if len(loose) > 1 else loose[0]
    x = graph.add("flat", Flatten(), x)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), x))
    mode = random.choice(("train", "train", "train", "eval", "first", "last"))
    update = Update(momentum=random.choice((0.0, 0.9)))
    program = lower(graph, 2, mode, update=update, ahead=random.random() < 0.5)
    return with_workspaces(sliced(program, random), random)


def sliced(program: Program, random: Random) -> Program:
    """`program` with some of its convolutions image by image."""
    images = (Slice(1, Algorithm("ANY")),) * program.batch
    chosen = {op.name: images for op in program.ops if op.kind in BY_IMAGE and random.random() < 0.25}
    return apply_decisions(program, Decisions("random", slices=chosen))


def with_workspaces(program: Program, random: Random) -> Program:
    """`program` with a workspace for some of its convolutions."""
    tensors, ops = dict(program.tensors), []
    for op in program.ops:
        if op.kind.startswith("conv.") and random.random() < 0.4:
            name = f"{op.name}.workspace"
            tensors[name] = TensorSpec(name, "aux", (random.randint(1, 700),), "uint8")
            op = replace(op, writes={**op.writes, "workspace": name})
        ops.append(op)
    return replace(program, tensors=tensors, ops=tuple(ops))


def shrunk(program: Program, random: Random) -> Program:
    """`program` with the same ops on tensors of a few bytes: two images, one channel for each part of a storage."""
    cuts: dict[str, set[int]] = {}
    for spec in program.tensors.values():
        root = program.tensors[spec.storage]
        whole = spec.nbytes == root.nbytes
        cuts.setdefault(root.name, set()).update((0, -1) if whole else (spec.channel, spec.channel + spec.shape[1]))
    tensors = {}
    for name, spec in program.tensors.items():
        root = program.tensors[spec.storage]
        channels = root.shape[1] if len(root.shape) > 1 else 1
        ends = sorted({channels if c == -1 else c for c in cuts[root.name]})
        low, high = 0, len(ends) - 1
        if spec.nbytes != root.nbytes:
            low, high = ends.index(spec.channel), ends.index(spec.channel + spec.shape[1])
        size = tensors[root.name].shape[2] if root.name in tensors else random.randint(1, 300)
        images = 2 if spec.slice_of is None else 1
        tensors[name] = replace(spec, shape=(images, high - low, size), dtype="uint8", channel=low)
    return replace(program, tensors=tensors, batch=2)


@dataclass
class _Entry:
    """A step, the streamed steps (by index) that are over before it, and the events recorded right after it."""

    step: Step
    before: int = 0  # a set of indices, as bits
    records: list[Record] = field(default_factory=list)


class Writer:
    """Steps in list order; every step names those it must come after, and gets the waits for it."""

    def __init__(self, random: Random, late: float = 0.0, extra: float = 0.0):
        self.random, self.late, self.extra = random, late, extra
        self.entries: list[_Entry] = []
        self.known = dict.fromkeys(STREAMS, 0)
        self.events = 0

    def add(self, step: Any, after: set[int]) -> int:
        """Append `step`, with waits for what of `after` its stream does not know; returns its index."""
        if isinstance(step, Alloc):
            self.entries.append(_Entry(step))
            return len(self.entries) - 1
        for other in sorted(after, reverse=True):
            if not self.known[step.stream] >> other & 1:
                self._wait(step.stream, other)
        if self.random.random() < self.extra:
            streamed = [i for i, entry in enumerate(self.entries) if not isinstance(entry.step, Alloc)]
            if streamed:
                self._wait(step.stream, self.random.choice(streamed))
        index = len(self.entries)
        self.entries.append(_Entry(step, self.known[step.stream]))
        self.known[step.stream] |= 1 << index
        return index

    def steps(self) -> tuple[Step, ...]:
        """All steps, each Record behind the step it marks."""
        return tuple(step for entry in self.entries for step in (entry.step, *entry.records))

    def _wait(self, stream: str, other: int) -> None:
        entry = self.entries[other]
        source = entry.step.stream  # type: ignore[union-attr]
        if self.random.random() < self.late:
            # record where the other stream is by now: later than needed
            other = max(i for i, e in enumerate(self.entries) if getattr(e.step, "stream", None) == source)
            entry = self.entries[other]
        entry.records.append(Record(self.events, source))
        self.entries.append(_Entry(Wait(self.events, stream), self.known[stream]))
        self.known[stream] |= entry.before | 1 << other | 1 << (len(self.entries) - 1)
        self.events += 1


@dataclass
class _Stay:
    low: int
    high: int
    frees: set[int]
    written: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)


class _Places:
    """First fit among ranges that are not in use, with gaps at random; remembers who was where."""

    def __init__(self, base: int, unit: int, random: Random):
        self.base, self.unit, self.random, self.top = base, unit, random, base
        self.live: dict[object, tuple[int, int]] = {}
        self.past: list[tuple[int, int, set[int]]] = []

    def take(self, key: object, nbytes: int) -> tuple[int, int, set[int]]:
        """(first byte, end byte, steps that used these bytes before) of a place for `key`."""
        low = self.base + self.unit * self.random.choice((0, 0, 0, 0, 1, 3))
        for start, end in sorted(self.live.values()):
            if low + nbytes <= start:
                break
            low = max(low, -(-end // self.unit) * self.unit)
        high = low + nbytes
        self.live[key] = low, high
        self.top = max(self.top, high)
        return low, high, {i for start, end, steps in self.past if start < high and low < end for i in steps}

    def give(self, key: object, steps: set[int]) -> None:
        """The place of `key` is free for those that wait for `steps`."""
        self.past.append((*self.live.pop(key), steps))


def op_order(program: Program, random: Random, shuffle: float) -> list[int]:
    """Indices of the ops in an order in which no two that conflict on a storage change places."""
    pending: list[set[int]] = []
    uses: list[tuple[set[str], set[str]]] = []
    for op in program.ops:
        reads = {program.storage(t) for t in op.inputs()}
        writes = {program.storage(t) for t in op.writes.values()}
        pending.append({j for j, (r, w) in enumerate(uses) if writes & (r | w) or reads & w})
        uses.append((reads, writes))
    order: list[int] = []
    left = list(range(len(program.ops)))
    while left:
        ready = [i for i in left if not pending[i] & set(left)]
        chosen = random.choice(ready) if random.random() < shuffle else ready[0]
        order.append(chosen)
        left.remove(chosen)
    return order


def random_plan(program: Program, random: Random) -> Plan:
    """A plan of `program` that is valid in every way the streams may run."""
    order = op_order(program, random, random.choice((0.0, 0.5)))
    writer = Writer(random, late=random.choice((0.0, 0.5)), extra=random.choice((0.0, 0.0, 0.2)))
    persistent, end = {}, 0
    for storage in program.persistent:
        persistent[storage] = end
        end += align(program.tensors[storage].nbytes) + 256 * random.choice((0, 0, 1))
    device, hosts, stages = _Places(end, 256, random), _Places(0, 1, random), _Places(0, 1, random)
    stays = {storage: _Stay(0, 0, set()) for storage in program.persistent}
    copies: dict[str, tuple[int, set[int]]] = {}  # storage → its CopyOut, and the steps that used its host bytes
    moves = random.choice((0.0, 0.5, 1.0))

    def stage(tensor: str) -> int:
        return stages.take((tensor, stages.top), program.tensors[tensor].nbytes)[0]

    def streams() -> str:
        return random.choice(STREAMS)

    def touch(step: Any, reads: set[str], writes: set[str]) -> int:
        after: set[int] = set()
        for storage in reads | writes:
            stay = stays[storage]
            after |= stay.frees | stay.written | (stay.used if storage in writes else set())
        index = writer.add(step, after)
        for storage in reads | writes:
            stays[storage].used.add(index)
            if storage in writes:
                stays[storage].written, stays[storage].used = {index}, {index}
        return index

    def alloc(storage: str) -> None:
        nbytes = program.tensors[storage].nbytes + random.choice((0, 0, 1, 256))
        low, high, frees = device.take(storage, nbytes)
        writer.add(Alloc(storage, low, nbytes), set())
        stays[storage] = _Stay(low, high, frees)

    def free(storage: str) -> None:
        step = touch(Free(storage, streams()), set(), {storage})
        device.give(storage, {step})
        del stays[storage]

    def copy_out(storage: str) -> None:
        if storage in copies:
            hosts.give(storage, copies.pop(storage)[1])
        low, _, before = hosts.take(storage, program.tensors[storage].nbytes)
        stays[storage].frees |= before
        step = touch(CopyOut(storage, low, streams()), {storage}, set())
        copies[storage] = step, {step}

    def copy_in(storage: str) -> None:
        out, users = copies[storage]
        stays[storage].frees |= {out}
        users.add(touch(CopyIn(storage, streams()), set(), {storage}))

    # uses of every storage in launch order; the host's feed and fetch are uses as well
    acts: list[tuple[Any, set[str], set[str]]] = []
    for tensor in program.feeds:
        if tensor not in program.ahead:
            acts.append((Feed(tensor, streams(), stage(tensor)), set(), {program.storage(tensor)}))
    for i in order:
        op = program.ops[i]
        writes = {program.storage(t) for t in op.writes.values()}
        acts.append((Launch(op.name, "compute"), {program.storage(t) for t in op.inputs()}, writes))
    for tensor in program.fetches:
        acts.append((Fetch(tensor, streams(), stage(tensor)), {program.storage(tensor)}, set()))
    for tensor in program.ahead:
        storage = program.storage(tensor)
        last = max(i for i, (_, reads, _) in enumerate(acts) if storage in reads)
        acts.insert(random.randint(last + 1, len(acts)), (Feed(tensor, streams(), stage(tensor)), set(), {storage}))
    uses: dict[str, list[int]] = {}
    for i, (_, reads, writes) in enumerate(acts):
        for storage in sorted(reads | writes):
            uses.setdefault(storage, []).append(i)
    before: dict[int, list[tuple[Any, str]]] = {}
    after: dict[int, list[tuple[Any, str]]] = {}
    for storage, at in uses.items():
        if storage in program.persistent:
            continue
        before.setdefault(random.randint(max(0, at[0] - 2), at[0]), []).append((alloc, storage))
        after.setdefault(random.randint(at[-1], min(len(acts) - 1, at[-1] + 2)), []).append((free, storage))
        for left, right in itertools.pairwise(at):
            if right - left < 2 or random.random() >= moves:
                continue
            out = random.randint(left, right - 2)
            back = random.randint(out + 1, right - 1)
            after.setdefault(out, []).append((copy_out, storage))
            if random.random() < 0.9:
                after.setdefault(out, []).append((free, storage))
                before.setdefault(back + 1, []).append((alloc, storage))
            before.setdefault(back + 1, []).append((copy_in, storage))
    for i, (step, reads, writes) in enumerate(acts):
        for act, storage in before.get(i, []):
            act(storage)
        touch(step, reads, writes)
        for act, storage in after.get(i, []):
            act(storage)
    return Plan(
        program.name,
        program.batch,
        program.mode,
        program.digest(),
        "",
        persistent,
        end,
        device.top,
        hosts.top,
        writer.steps(),
        stages.top,
    )
