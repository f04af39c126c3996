"""Op and Program: kernel calls over named tensors in a fixed order, the only thing the memory planner reads.

for op in program.ops:
    print(op.phase, op.kind, op.reads, "->", op.writes)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vdnn.errors import ProgramError
from vdnn.layers.tensor import TensorSpec, extent

PHASES = ("forward", "backward", "update")
_SPEC = tuple(field.name for field in fields(TensorSpec))


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    Args:
        name: unique in its Program, "conv1.wgrad".
        kind: the kernel, "conv.wgrad"; a backend has one function per kind.
        layer: the graph node it came from.
        phase: "forward", "backward" or "update".
        reads, writes: argument name of the kernel → tensor name. A tensor in both is updated in place.
        attrs: constants of the call, JSON values only.
        accumulate: argument names among `writes` whose old content is added to (and so is read too).
        slice_of: the name of the op of whose batch this one computes some images; None if it computes all.
    """

    name: str
    kind: str
    layer: str
    phase: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    accumulate: tuple[str, ...] = ()
    slice_of: str | None = None

    def inputs(self) -> tuple[str, ...]:
        """Tensors whose present value the kernel uses, accumulated ones included, without repeats."""
        return tuple(dict.fromkeys((*self.reads.values(), *(self.writes[a] for a in self.accumulate))))


@dataclass(frozen=True, slots=True)
class Program:
    """Ops in execution order over tensors.

    Args:
        batch: images per run (N).
        mode: "train", "eval", or one part of an accumulated step: "first", "middle", "last".
        tensors: every tensor by name; views name their storage in `view_of`.
        ops: in the order in which they are to be computed. A read means the latest write before it in this order.
        persistent: storages that keep their bytes from run to run (weights, momentum, statistics, the step state).
        feeds: tensors that the host writes before the first op; fetches: tensors that the host reads after the last.
        loss: the fetched per-image loss of the main head, shape (N,).
        correct: the fetched per-image flag "the main head's first choice is the label", shape (N,).
        ahead: feeds that come a run early. They are persistent: the ops read what the run before was given for them,
            and what this run is given, once their last reader is done, is for the next one.
    """

    name: str
    batch: int
    mode: str
    tensors: Mapping[str, TensorSpec]
    ops: tuple[Op, ...]
    persistent: tuple[str, ...]
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    loss: str
    correct: str
    ahead: tuple[str, ...] = ()

    def storage(self, tensor: str) -> str:
        """The storage that holds `tensor`'s bytes."""
        return self.tensors[tensor].storage

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal Program."""
        return {
            "name": self.name,
            "batch": self.batch,
            "mode": self.mode,
            "tensors": [{name: getattr(spec, name) for name in _SPEC} for spec in self.tensors.values()],
            "ops": [
                {
                    "name": op.name,
                    "kind": op.kind,
                    "layer": op.layer,
                    "phase": op.phase,
                    "reads": dict(op.reads),
                    "writes": dict(op.writes),
                    "attrs": dict(op.attrs),
                    "accumulate": list(op.accumulate),
                    "slice_of": op.slice_of,
                }
                for op in self.ops
            ],
            "persistent": list(self.persistent),
            "feeds": list(self.feeds),
            "fetches": list(self.fetches),
            "loss": self.loss,
            "correct": self.correct,
            "ahead": list(self.ahead),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """The program that `to_json` described."""
        tensors = {row["name"]: TensorSpec(**{**row, "shape": tuple(row["shape"])}) for row in data["tensors"]}
        ops = tuple(Op(**{**row, "accumulate": tuple(row["accumulate"])}) for row in data["ops"])
        lists = {key: tuple(data[key]) for key in ("persistent", "feeds", "fetches", "ahead")}
        return cls(**{**data, **lists, "tensors": tensors, "ops": ops})

    def digest(self) -> str:
        """SHA-256 of the JSON form, hexadecimal: equal for equal programs, on every machine."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def validate(self) -> None:
        """Raise ProgramError if an op reads a tensor never written, or one whose bytes another tensor has taken.

        Images and channels are tracked one range of each at a time, so that the branches of a concatenation, or slices
        of a batch, may fill one storage.
        """
        holder: dict[str, list[tuple[range, range, str]]] = {}  # storage → images, channels, the tensor they hold
        written: set[str] = set()  # the others, wholes and parts, are read through the tensors that fill them

        def value(name: str) -> str:
            return self.tensors[name].slice_of or name

        def box(name: str) -> tuple[range, range]:
            spec = self.tensors[name]
            return extent(spec, self.tensors[spec.storage])

        def write(name: str) -> None:
            written.add(value(name))
            images, channels = box(name)
            left: list[tuple[range, range, str]] = []
            for n, c, tensor in holder.get(self.storage(name), []):
                both = _common(n, images)
                if not both or not _common(c, channels):
                    left.append((n, c, tensor))
                    continue
                others = (range(n.start, both.start), range(both.stop, n.stop))
                sides = (range(c.start, channels.start), range(channels.stop, c.stop))
                left += [(rest, c, tensor) for rest in others if rest]
                left += [(both, rest, tensor) for rest in sides if rest]
            holder[self.storage(name)] = [*left, (images, channels, value(name))]

        def held(name: str) -> bool:
            images, channels = box(name)
            meant, covered = value(name), 0
            for n, c, tensor in holder.get(self.storage(name), []):
                area = len(_common(n, images)) * len(_common(c, channels))
                # another tensor has replaced the value, or one of the same extent that of the parts
                other = area and tensor != meant
                if other and (meant in written or self.tensors[tensor].nbytes == self.tensors[meant].nbytes):
                    return False
                covered += area
            return covered == len(images) * len(channels)

        for name in (*self.persistent, *self.feeds):
            write(name)
        for op in self.ops:
            for name in op.inputs():
                if name not in self.tensors:
                    raise ProgramError(f"op '{op.name}' reads unknown tensor '{name}'")
                if not held(name):
                    raise ProgramError(f"op '{op.name}' reads '{name}', whose bytes hold another value by then")
            for name in op.writes.values():
                write(name)


def _common(a: range, b: range) -> range:
    """The numbers in both."""
    return range(max(a.start, b.start), min(a.stop, b.stop))
