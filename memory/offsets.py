"""Offline placement: an offset for every residency, knowing all lifetimes.

    offsets, height = place([Block(start=0, end=4, nbytes=1024), Block(start=2, end=6, nbytes=512)])

Largest first: every block, from the largest down, goes to the lowest place free for its whole life. If that ends above
the most live bytes at any moment, which no placement can beat, a beam search follows the step in time under a fixed
ceiling: each block may go to either end of any gap, and the states that keep the largest gap survive. It finds the
alternating patterns (left, right of a workspace, layer by layer) that largest first does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from vdnn.memory.plan import align

WIDTHS = (4, 16, 64, 256)
"""States kept by the beam search, tried in turn."""
CEILINGS = (1.0, 1.001, 1.0025, 1.005, 1.01, 1.02, 1.04)
"""Heights tried, as multiples of the bound; the first only where there are few blocks."""
FEW = 200
TINY = 2048
"""Blocks of less than a 2048th of the bound are left out of the search and fill gaps afterwards."""
WORK = 40_000_000
"""Live blocks looked at by the searches of one placement at most: a few seconds of pure Python."""


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` (a multiple of ALIGNMENT) needed from position `start` up to, not including, `end`."""

    start: int
    end: int
    nbytes: int


def most_live(blocks: Sequence[Block]) -> int:
    """Most bytes live at any position: the bound below every placement."""
    changes = sorted([(b.start, b.nbytes) for b in blocks] + [(b.end, -b.nbytes) for b in blocks])
    live = peak = 0
    for _, delta in changes:
        live += delta
        peak = max(peak, live)
    return peak


def place(blocks: Sequence[Block], work: int = WORK) -> tuple[tuple[int, ...], int]:
    """Offsets of `blocks` and the bytes they span in all; the search ends after `work`, see WORK.

    Results are kept: a policy's trials, its plan and the smallest budget often ask for the same blocks.
    """
    return _place(tuple(blocks), work)


@lru_cache(maxsize=16)
def _place(blocks: tuple[Block, ...], work: int) -> tuple[tuple[int, ...], int]:
    bound = most_live(blocks)
    order = sorted(range(len(blocks)), key=lambda i: (-blocks[i].nbytes, blocks[i].start))
    offsets, height = _first_fit(blocks, {}, order)
    large = [i for i in order if blocks[i].nbytes * TINY >= bound]
    for factor in CEILINGS if len(blocks) < FEW else CEILINGS[1:]:
        ceiling = align(int(bound * factor))  # a block may hang from it, so it must be a place to begin
        if height <= ceiling:
            break
        for width in WIDTHS:
            found, used = _beam([blocks[i] for i in large], ceiling, width, work)
            work -= used
            if found is not None:
                fixed = dict(zip(large, found, strict=True))
                tried, top = _first_fit(blocks, fixed, order[len(large) :])
                if top < height:
                    offsets, height = tried, top
                break
    return tuple(offsets), height


def _first_fit(blocks: Sequence[Block], fixed: Mapping[int, int], order: Sequence[int]) -> tuple[list[int], int]:
    """Each block of `order` at the lowest place free for its whole life, beside those of `fixed` (index → offset)."""
    offsets = [fixed.get(i, 0) for i in range(len(blocks))]
    placed = [(o, o + blocks[i].nbytes, blocks[i].start, blocks[i].end) for i, o in fixed.items()]
    height = max((top for _, top, _, _ in placed), default=0)
    for i in order:
        start, end, nbytes = blocks[i].start, blocks[i].end, blocks[i].nbytes
        beside = [(low, top) for low, top, a, b in placed if a < end and start < b]
        beside.sort(key=itemgetter(0))
        offset = 0
        for low, top in beside:
            if low - offset >= nbytes:
                break
            offset = max(offset, top)
        offsets[i] = offset
        placed.append((offset, offset + nbytes, start, end))
        height = max(height, offset + nbytes)
    return offsets, height


Live = tuple[tuple[int, int, int], ...]
"""(offset, top, end) of the blocks alive, by offset."""
Trail = tuple[int, int, object] | None
"""(block, its offset, the trail before)."""


def _beam(blocks: Sequence[Block], ceiling: int, width: int, work: int) -> tuple[list[int] | None, int]:
    """Offsets with every top at most `ceiling`, or None; and the work spent."""
    states: dict[Live, Trail] = {(): None}
    spent = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i].start, -blocks[i].nbytes)):
        start, end, nbytes = blocks[i].start, blocks[i].end, blocks[i].nbytes
        after: dict[Live, Trail] = {}
        for state, trail in states.items():
            live = [entry for entry in state if entry[2] > start]
            spent += len(state) + 1
            for rank, offset in _ends_of_gaps(live, nbytes, ceiling):
                grown = (*live[:rank], (offset, offset + nbytes, end), *live[rank:])
                after.setdefault(grown, (i, offset, trail))
        if not after or spent > work:
            return None, spent
        if len(after) > width:
            best = sorted(after, key=lambda state: _tidiness(state, ceiling))[:width]
            after = {state: after[state] for state in best}
        states = after
    offsets = [0] * len(blocks)
    step: object = next(iter(states.values()))
    while isinstance(step, tuple):
        i, offset, step = step
        offsets[i] = offset
    return offsets, spent


def _ends_of_gaps(live: Sequence[tuple[int, int, int]], nbytes: int, ceiling: int) -> list[tuple[int, int]]:
    """(rank among the live blocks, offset) of both ends of every gap that `nbytes` fit in."""
    ends = []
    low = 0
    for rank, (offset, top, _) in enumerate((*live, (ceiling, ceiling, 0))):
        if offset - low >= nbytes:
            ends.append((rank, low))
            if offset - low > nbytes:
                ends.append((rank, offset - nbytes))
        low = top
    return ends


def _tidiness(state: Live, ceiling: int) -> tuple[int, int]:
    """Smaller is better: the largest gap negated, then the number of gaps."""
    low = largest = gaps = 0
    for offset, top, _ in (*state, (ceiling, ceiling, 0)):
        if offset > low:
            gaps += 1
            largest = max(largest, offset - low)
        low = top
    return -largest, gaps
