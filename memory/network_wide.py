"""The baseline of the vDNN paper: network-wide allocation, as a framework without liveness would do it.

    offsets, height = network_wide_offsets(program, schedule)

Every feature map has bytes of its own for the whole step. Gradient maps share the fewest buffers that their lifetimes
allow, each as large as the largest gradient (two in a chain, three in GoogLeNet); workspaces share one of the largest
size. What the paper's totals leave out (weight gradients, losses) is placed by lifetime. Figure 4 is reproduced by
sum(W) + input + one Y per CONV and POOL + FC outputs + 2 * max(Y) + max(WS).
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from vdnn.layers.op import Program
from vdnn.memory.offsets import Block, place
from vdnn.memory.passes import is_workspace
from vdnn.memory.schedule import Residency, Schedule


def network_wide_offsets(program: Program, schedule: Schedule) -> tuple[list[int], int]:
    """Offsets of the schedule's residencies, and the bytes of everything together."""
    stays = schedule.residencies
    offsets = [0] * len(stays)
    height = 0
    groups: dict[str, list[int]] = {}
    for i, stay in enumerate(stays):
        groups.setdefault(_group(program, stay.storage), []).append(i)
    for i in groups.get("act", ()):
        offsets[i] = height
        height += stays[i].nbytes
    for group in ("grad", "workspace"):
        members = groups.get(group, ())
        if members:
            size = max(stays[i].nbytes for i in members)
            buffers = _fewest_buffers([stays[i] for i in members])
            for i, buffer in zip(members, buffers, strict=True):
                offsets[i] = height + buffer * size
            height += size * (max(buffers) + 1)
    rest = groups.get("rest", [])
    placed, top = place([Block(stays[i].start, stays[i].end, stays[i].nbytes) for i in rest])
    for i, offset in zip(rest, placed, strict=True):
        offsets[i] = height + offset
    return offsets, height + top


def _group(program: Program, storage: str) -> str:
    if is_workspace(program, storage):
        return "workspace"
    role = program.tensors[storage].role
    return role if role in ("act", "grad") else "rest"


def _fewest_buffers(stays: Iterable[Residency]) -> list[int]:
    """A buffer number for each stay, in order of start, such that no two live ones share one: interval colouring."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end, buffer
    numbers: list[int] = []
    made = 0
    for stay in stays:
        while busy and busy[0][0] <= stay.start:
            heappush(free, heappop(busy)[1])
        if free:
            number = heappop(free)
        else:
            number, made = made, made + 1
        numbers.append(number)
        heappush(busy, (stay.end, number))
    return numbers
