"""Program and Decisions to the Program that is planned: each op gets its algorithm and the workspace it needs.

    planned = apply_decisions(program, decisions)
    planned.tensors["conv1.forward.workspace"].nbytes

A workspace is a tensor like any other: it lives for one op, is placed, verified and reported.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.layers.op import Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.decisions import Decisions

WORKSPACE = "workspace"
"""The argument name under which a kernel gets its scratch bytes."""


def is_workspace(program: Program, storage: str) -> bool:
    """Whether `storage` is the workspace of an op, as `apply_decisions` adds it."""
    return program.tensors[storage].role == "aux" and storage.endswith(f".{WORKSPACE}")


def apply_decisions(program: Program, decisions: Decisions) -> Program:
    """`program` with `algorithm` in the attributes and `workspace` among the writes of the ops decided on."""
    tensors, ops = dict(program.tensors), []
    for op in program.ops:
        chosen = decisions.algorithms.get(op.name)
        if chosen is None:
            ops.append(op)
            continue
        writes = dict(op.writes)
        if chosen.workspace_bytes:
            name = f"{op.name}.{WORKSPACE}"
            tensors[name] = TensorSpec(name, "aux", (chosen.workspace_bytes,), "uint8")
            writes[WORKSPACE] = name
        ops.append(replace(op, writes=writes, attrs={**op.attrs, "algorithm": chosen.name}))
    return replace(program, tensors=tensors, ops=tuple(ops))
