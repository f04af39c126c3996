"""Program and Decisions to the Program that is planned: each op gets its algorithm and the workspace it needs.

    planned = apply_decisions(program, decisions)
    planned.tensors["conv1.forward.workspace"].nbytes
    planned.tensors["conv2.forward[64:128].workspace"].nbytes     # of the second slice of an op in slices of 64 images

A workspace is a tensor like any other: it lives for one op, is placed, verified and reported. An op in slices of its
batch becomes one op a slice over views of its images; a filter gradient is written by the first and added to by the
others, in the order of the images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vdnn.errors import PlanError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.decisions import Algorithm, Decisions, Slice

WORKSPACE = "workspace"
"""The argument name under which a kernel gets its scratch bytes."""
BY_IMAGE: Mapping[str, tuple[str, ...]] = {
    "conv.forward": ("x", "y"),
    "conv.dgrad": ("dy", "dx"),
    "conv.wgrad": ("x", "dy"),
}
"""Kinds that can run in slices of the batch, with the arguments that have a row for every image. What else they write
is a sum over images."""


def is_workspace(program: Program, storage: str) -> bool:
    """Whether `storage` is the workspace of an op, as `apply_decisions` adds it."""
    return program.tensors[storage].role == "aux" and storage.endswith(f".{WORKSPACE}")


def apply_decisions(program: Program, decisions: Decisions) -> Program:
    """`program` with `algorithm` in the attributes and `workspace` among the writes of the ops decided on."""
    tensors, ops = dict(program.tensors), []
    for op in program.ops:
        rows = decisions.slices.get(op.name)
        if rows is not None:
            check_slices(op, program, rows)
            first = 0
            for row in rows:
                part = slice_op(op, tensors, first, row.images)
                ops.append(_with_algorithm(part, row.algorithm, tensors))
                first += row.images
            continue
        chosen = decisions.algorithms.get(op.name)
        ops.append(op if chosen is None else _with_algorithm(op, chosen, tensors))
    return replace(program, tensors=tensors, ops=tuple(ops))


def slice_op(op: Op, tensors: dict[str, TensorSpec], first: int, images: int) -> Op:
    """The op that computes `images` images of `op` from image `first` on; its views are added to `tensors`.

    Sums over images are added to, unless `first` is 0.
    """
    label = f"[{first}:{first + images}]"

    def part(arguments: Mapping[str, str]) -> dict[str, str]:
        names = dict(arguments)
        for argument in BY_IMAGE[op.kind]:
            if argument in names:
                whole = tensors[names[argument]]
                names[argument] = f"{whole.name}{label}"
                tensors[names[argument]] = replace(
                    whole,
                    name=names[argument],
                    shape=(images, *whole.shape[1:]),
                    view_of=whole.storage,
                    image=whole.image + first,
                    slice_of=whole.name,
                )
        return names

    sums = tuple(a for a in op.writes if a not in BY_IMAGE[op.kind]) if first else ()
    return replace(
        op,
        name=f"{op.name}{label}",
        reads=part(op.reads),
        writes=part(op.writes),
        accumulate=tuple(dict.fromkeys((*op.accumulate, *sums))),
        slice_of=op.name,
    )


def batch_of(op: Op, program: Program) -> int:
    """Images of an op of a kind in BY_IMAGE."""
    return program.tensors[{**op.reads, **op.writes}[BY_IMAGE[op.kind][0]]].shape[0]


def check_slices(op: Op, program: Program, rows: Sequence[Slice]) -> None:
    """PlanError unless `rows` are slices of the whole batch of an op that can be sliced."""
    sizes = [row.images for row in rows]
    batch = batch_of(op, program) if op.kind in BY_IMAGE else 0
    if not sizes or min(sizes) < 1 or sum(sizes) != batch:
        kinds = ", ".join(BY_IMAGE)
        raise PlanError(
            f"op '{op.name}' (layer '{op.layer}', kind '{op.kind}'): expected slices of 1 image or more that add up to "
            f"its batch of {batch}, of an op of kind {kinds}; got {sizes}; let a policy of vdnn.memory.policy choose"
        )


def _with_algorithm(op: Op, chosen: Algorithm, tensors: dict[str, TensorSpec]) -> Op:
    writes = dict(op.writes)
    if chosen.workspace_bytes:
        name = f"{op.name}.{WORKSPACE}"
        tensors[name] = TensorSpec(name, "aux", (chosen.workspace_bytes,), "uint8")
        writes[WORKSPACE] = name
    return replace(op, writes=writes, attrs={**op.attrs, "algorithm": chosen.name})
