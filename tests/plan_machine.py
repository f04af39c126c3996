"""A machine for plans that computes with opaque kernels on single bytes, and two judgements made with it.

    harmless(program, plan)    # all six stream priorities read what plain execution reads
    sound(program, plan)       # list order does, and no two steps race for a byte

Every byte of the slab is one number. A kernel writes numbers made from its name and from all it reads, so one wrong
byte anywhere changes everything after it. Nothing here knows versions, parts or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vdnn.layers import Op, Program, TensorSpec
from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Plan, Record, Wait

Numbers = NDArray[Any]


class Broken(Exception):
    """A plan that makes no sense as a list of steps, or that never ends."""


class Outcome(NamedTuple):
    """What every op and every fetch read, and what the persistent storages hold at the end."""

    read: dict[str, tuple[bytes, ...]]
    kept: dict[str, bytes]


class Bound(NamedTuple):
    """A step with its places: how to run it, and the ranges or views that it reads and writes."""

    step: Any
    reads: list[Callable[[Numbers, Numbers], Numbers]]
    writes: list[Callable[[Numbers, Numbers], Numbers]]


def numbers(what: object, count: int) -> Numbers:
    """`count` different numbers that stand for `what`."""
    first = int.from_bytes(blake2b(repr(what).encode(), digest_size=7).digest(), "little")
    return np.arange(first, first + count, dtype=np.uint64)


def digest(values: Numbers) -> bytes:
    """A short name for `values`."""
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).digest()


def part(spec: TensorSpec, root: TensorSpec, held: Numbers) -> Numbers:
    """The bytes of `spec` among those of its storage, (N, C, ...) in order; `held` has one number a byte."""
    if spec.nbytes == root.nbytes:
        return held
    images = held.reshape(root.shape[0], root.shape[1], -1)
    return images[spec.image : spec.image + spec.shape[0], spec.channel : spec.channel + spec.shape[1]]


def compute(op: Op, program: Program, view: Callable[[str], Numbers]) -> tuple[bytes, ...]:
    """Run `op` on the bytes that `view` gives; returns digests of what it read."""
    read = tuple(digest(view(tensor)) for tensor in op.inputs())
    for argument, tensor in op.writes.items():
        target = view(tensor)
        target[...] = numbers((op.name, argument, read), target.size).reshape(target.shape)
    return read


def reference(program: Program) -> Outcome:
    """Every op in program order, every storage in an array of its own."""
    held = {
        name: numbers(("kept" if name in program.persistent else "garbage", name), spec.nbytes)
        for name, spec in program.tensors.items()
        if spec.view_of is None
    }

    def view(tensor: str) -> Numbers:
        spec = program.tensors[tensor]
        return part(spec, program.tensors[spec.storage], held[spec.storage])

    def feed(tensor: str) -> None:
        view(tensor)[...] = numbers(("feed", tensor), view(tensor).size).reshape(view(tensor).shape)

    for tensor in program.feeds:
        if tensor not in program.ahead:
            feed(tensor)
    read = {op.name: compute(op, program, view) for op in program.ops}
    read |= {f"fetch {tensor}": (digest(view(tensor)),) for tensor in program.fetches}
    for tensor in program.ahead:
        feed(tensor)
    return Outcome(read, {name: digest(held[name]) for name in program.persistent})


def bind(program: Program, plan: Plan) -> list[Bound]:
    """Every step with its places, in list order; Broken if a storage is used without bytes or bytes are shared."""
    live: dict[str, tuple[int, int]] = {s: (plan.persistent[s], program.tensors[s].nbytes) for s in program.persistent}
    hosts: dict[str, int] = {}
    recorded: set[int] = set()
    ops = {op.name: op for op in program.ops}
    bound = []

    def on_device(tensor: str) -> Callable[[Numbers, Numbers], Numbers]:
        spec = program.tensors[tensor]
        root = program.tensors[spec.storage]
        if root.name not in live:
            raise Broken(f"{tensor} has no bytes")
        offset = live[root.name][0]
        return lambda slab, host: part(spec, root, slab[offset : offset + root.nbytes])

    def on_host(storage: str) -> Callable[[Numbers, Numbers], Numbers]:
        if storage not in hosts:
            raise Broken(f"{storage} was never copied out")
        start, size = hosts[storage], program.tensors[storage].nbytes
        return lambda slab, host: host[start : start + size]

    for step in plan.steps:
        reads, writes = [], []
        match step:
            case Alloc(storage, offset, nbytes):
                room = range(plan.persistent_bytes, plan.slab_bytes + 1)
                if storage in live or offset not in room or offset + nbytes not in room:
                    raise Broken(f"{step}: no room")
                if any(at < offset + nbytes and offset < at + size for at, size in live.values()):
                    raise Broken(f"{step}: shared bytes")
                live[storage] = offset, nbytes
            case Free(storage):
                if storage not in live:
                    raise Broken(f"{storage} is freed twice")
                start, size = live.pop(storage)
                writes.append(lambda slab, host, start=start, size=size: slab[start : start + size])
            case Launch(op):
                reads.extend(on_device(tensor) for tensor in ops[op].inputs())
                writes.extend(on_device(tensor) for tensor in ops[op].writes.values())
            case CopyOut(storage, host_offset):
                if not 0 <= host_offset <= plan.host_bytes - program.tensors[storage].nbytes:
                    raise Broken(f"{step}: outside of the host slab")
                hosts[storage] = host_offset
                reads.append(on_device(storage))
                writes.append(on_host(storage))
            case CopyIn(storage):
                reads.append(on_host(storage))
                writes.append(on_device(storage))
            case Feed(tensor):
                writes.append(on_device(tensor))
            case Fetch(tensor):
                reads.append(on_device(tensor))
            case Record(event):
                if event in recorded:
                    raise Broken(f"event {event} is recorded twice")
                recorded.add(event)
            case Wait(event):
                if event not in recorded:
                    raise Broken(f"event {event} is waited for first")
        bound.append(Bound(step, reads, writes))
    return bound


def run(program: Program, plan: Plan, order: Iterable[int], bound: list[Bound]) -> Outcome:
    """The steps in `order`, on one slab."""
    slab = numbers("slab", plan.slab_bytes)
    host = numbers("host", plan.host_bytes)
    ops = {op.name: op for op in program.ops}
    for storage in program.persistent:
        offset, size = plan.persistent[storage], program.tensors[storage].nbytes
        slab[offset : offset + size] = numbers(("kept", storage), size)
    read: dict[str, tuple[bytes, ...]] = {}
    for index in order:
        step, reads, writes = bound[index]
        match step:
            case Launch(name):
                op = ops[name]
                inputs = tuple(op.inputs())
                views = dict(zip((*inputs, *op.writes.values()), (*reads, *writes), strict=True))
                done = compute(op, program, lambda tensor, views=views: views[tensor](slab, host))
                read[name] = (*read.get(name, ()), *done)
            case CopyOut() | CopyIn():
                writes[0](slab, host)[...] = reads[0](slab, host)
            case Feed(tensor):
                target = writes[0](slab, host)
                target[...] = numbers(("feed", tensor), target.size).reshape(target.shape)
            case Fetch(tensor):
                read[f"fetch {tensor}"] = (*read.get(f"fetch {tensor}", ()), digest(reads[0](slab, host)))
            case Free():
                target = writes[0](slab, host)
                target[...] = numbers(("freed", index), target.size)
    kept = {}
    for storage in program.persistent:
        offset, size = plan.persistent[storage], program.tensors[storage].nbytes
        kept[storage] = digest(slab[offset : offset + size])
    return Outcome(read, kept)


def by_priority(plan: Plan, streams: tuple[str, ...]) -> list[int]:
    """The order of steps in which the first stream of `streams` that can go on always does."""
    queues = {
        stream: [i for i, s in enumerate(plan.steps) if getattr(s, "stream", None) == stream] for stream in streams
    }
    heads = dict.fromkeys(streams, 0)
    reached: set[int] = set()
    order: list[int] = []
    while True:
        for stream in streams:
            if heads[stream] == len(queues[stream]):
                continue
            index = queues[stream][heads[stream]]
            step = plan.steps[index]
            if isinstance(step, Wait) and step.event not in reached:
                continue
            if isinstance(step, Record):
                reached.add(step.event)
            heads[stream] += 1
            order.append(index)
            break
        else:
            break
    if any(heads[stream] < len(queues[stream]) for stream in streams):
        raise Broken("the streams wait for each other")
    return order


def harmless(program: Program, plan: Plan) -> bool:
    """Whether every stream priority reads, and leaves, what plain execution does."""
    expected = reference(program)
    try:
        bound = bind(program, plan)
        return all(run(program, plan, by_priority(plan, order), bound) == expected for order in permutations(STREAMS))
    except (Broken, KeyError, ValueError):
        return False


def sound(program: Program, plan: Plan) -> bool:
    """Whether list order computes the program and any two steps that share a byte, not both reading, are ordered.

    A storage counts as using all its bytes for what others did with them before: that is how plans are meant.
    """
    try:
        bound = bind(program, plan)
        if run(program, plan, range(len(bound)), bound) != reference(program):
            return False
    except (Broken, KeyError, ValueError):
        return False
    touched = [(_bytes(plan, reads), _bytes(plan, writes)) for _, reads, writes in bound]
    others = _other_stays(program, plan)
    before = _before(plan)
    for j, (read, written) in enumerate(touched):
        for i, (earlier_read, earlier_written) in enumerate(touched[:j]):
            shared = written & (earlier_read | earlier_written) or read & earlier_written or (i, j) in others
            if shared and not before[j] >> i & 1:
                return False
    return True


def _bytes(plan: Plan, views: list[Callable[[Numbers, Numbers], Numbers]]) -> int:
    """The set of bytes, of the slab and then of the host, in `views`: one bit each."""
    marks = np.zeros(plan.slab_bytes + plan.host_bytes, np.uint8)
    for view in views:
        view(marks[: plan.slab_bytes], marks[plan.slab_bytes :])[...] = 1
    return int.from_bytes(np.packbits(marks).tobytes())


def _before(plan: Plan) -> list[int]:
    """Of every step the set of steps, one bit each, that are over before it by streams and events."""
    before: list[int] = []
    last: dict[str, int] = {}
    recorded: dict[int, int] = {}
    for j, step in enumerate(plan.steps):
        direct = [last[step.stream]] if getattr(step, "stream", None) in last else []
        if isinstance(step, Wait):
            direct.append(recorded[step.event])
        over = 0
        for i in direct:
            over |= before[i] | 1 << i
        before.append(over)
        if hasattr(step, "stream"):
            last[step.stream] = j
        if isinstance(step, Record):
            recorded[step.event] = j
    return before


def _other_stays(program: Program, plan: Plan) -> set[tuple[int, int]]:
    """(i, j): step i frees bytes that some storage which step j touches got after it."""
    pairs: set[tuple[int, int]] = set()
    ops = {op.name: op for op in program.ops}
    live: dict[str, tuple[int, int]] = {}
    freed: list[tuple[int, int, int]] = []
    for j, step in enumerate(plan.steps):
        touched: tuple[str, ...] = ()
        match step:
            case Alloc(storage, offset, nbytes):
                live[storage] = offset, offset + nbytes
            case Launch(op):
                touched = tuple(program.storage(t) for t in (*ops[op].inputs(), *ops[op].writes.values()))
            case Feed(tensor) | Fetch(tensor):
                touched = (program.storage(tensor),)
            case Free(storage) | CopyOut(storage) | CopyIn(storage):
                touched = (storage,)
        for storage in touched:
            low, high = live.get(storage, (0, 0))
            pairs.update((i, j) for i, start, end in freed if start < high and low < end)
        if isinstance(step, Free):
            freed.append((j, *live.pop(step.storage)))
    return pairs
