"""Offline placement: an offset for every residency, knowing all lifetimes.

    offsets, height = place([Block(start=0, end=4, nbytes=1024), Block(start=2, end=6, nbytes=512)])

Largest first: every block, from the largest down, goes to the lowest place free for its whole life. If that ends above
the most live bytes at any moment, which no placement can beat, two searches follow. The first changes the order: a
block that stands highest is placed earlier, and what is not worse is kept. The second follows the step in time under a
fixed ceiling: each block may go to either end of any gap, and the states that keep the largest gap survive. It finds
the alternating patterns (left, right of a workspace, layer by layer) that an order does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from vdnn.memory.plan import ALIGNMENT, align

WIDTHS = (4, 16, 64, 256)
"""States kept by the beam search, tried in turn."""
CEILINGS = (1.0, 1.001, 1.0025, 1.005, 1.01, 1.02, 1.04)
"""Heights tried, as multiples of the bound; the first only where there are few blocks."""
LOOSE = 0.999
"""Of a given room, what large blocks are placed under, so that the small ones fit in as well."""
ENOUGH = 1.001
"""A height that ends the search of orders, as a multiple of the bound."""
ORDERS_WORK = 4_000_000
"""Pairs of blocks looked at by the search of orders at most."""
CLOSE = 1.01
"""A height that is tidy enough where the room allows more, as a multiple of the bound."""
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


def place(blocks: Sequence[Block], room: int | None = None, work: int = WORK) -> tuple[tuple[int, ...], int]:
    """Offsets of `blocks` and the bytes they span in all.

    Args:
        room: what will do; the search for less begins there. None for as few bytes as can be.
        work: after which the search ends, see WORK.

    Results are kept: a policy's trials, its plan and the smallest budget often ask for the same blocks.
    """
    return _place(tuple(blocks), room, work)


@lru_cache(maxsize=64)
def _place(blocks: tuple[Block, ...], room: int | None, work: int) -> tuple[tuple[int, ...], int]:
    bound = most_live(blocks)
    order = sorted(range(len(blocks)), key=lambda i: (-blocks[i].nbytes, blocks[i].start))
    beside = _neighbours(blocks)
    offsets, height = _first_fit(blocks, {}, order, beside)
    large = [i for i in order if blocks[i].nbytes * TINY >= bound]
    goal = int(bound * ENOUGH) if room is None else min(room, int(bound * CLOSE))
    if height > goal:
        better = _reordered(blocks, large, goal, min(work // 2, ORDERS_WORK), beside)
        tried, top = _first_fit(blocks, dict(zip(large, better, strict=True)), order[len(large) :], beside)
        if top < height:
            offsets, height = tried, top
    ceilings = [align(int(bound * factor)) for factor in (CEILINGS if len(blocks) < FEW else CEILINGS[1:])]
    if room is not None:  # what fits first, then what is tidy
        fits = int(room * LOOSE) // ALIGNMENT * ALIGNMENT
        ceilings = [fits, *(ceiling for ceiling in reversed(ceilings) if ceiling < fits)]
    for ceiling in ceilings:  # a block may hang from it, so it must be a place to begin
        if height <= ceiling:
            if room is None:
                break
            continue
        for width in WIDTHS:
            found, used = _beam([blocks[i] for i in large], ceiling, width, work)
            work -= used
            if found is not None:
                fixed = dict(zip(large, found, strict=True))
                tried, top = _first_fit(blocks, fixed, order[len(large) :], beside)
                if top < height:
                    offsets, height = tried, top
                break
        if work <= 0 or (room is not None and (height > ceiling or height <= CLOSE * bound)):
            break
    return tuple(offsets), height


def _reordered(
    blocks: Sequence[Block], order: Sequence[int], goal: int, work: int, beside: Sequence[Sequence[int]]
) -> list[int]:
    """Offsets of the blocks of `order`, in that order, first fit in the best order found, until they end at `goal`."""
    chance, given = Random(0), order
    best, order = _first_fit(blocks, {}, order, beside)[0], list(order)
    tops = [best[i] + blocks[i].nbytes for i in order]
    cost = max(1, sum(len(beside[i]) for i in order))
    while max(tops) > goal and work > 0:
        work -= cost
        tried = list(order)
        highest = max(tops)
        for where in (chance.choice([k for k, top in enumerate(tops) if top == highest]), chance.randrange(len(order))):
            tried.insert(chance.randrange(where + 1), tried.pop(where))
        offsets, height = _first_fit(blocks, {}, tried, beside)
        if height <= highest:
            best, order = offsets, tried
            tops = [best[i] + blocks[i].nbytes for i in order]
    return [best[i] for i in given]


def _neighbours(blocks: Sequence[Block]) -> list[list[int]]:
    """For every block, those that live at some moment of its life."""
    beside: list[list[int]] = [[] for _ in blocks]
    alive: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].start):
        alive = [j for j in alive if blocks[j].end > blocks[i].start]
        beside[i].extend(alive)
        for j in alive:
            beside[j].append(i)
        alive.append(i)
    return beside


def _first_fit(
    blocks: Sequence[Block], fixed: Mapping[int, int], order: Sequence[int], beside: Sequence[Sequence[int]]
) -> tuple[list[int], int]:
    """Each block of `order` at the lowest place free for its whole life, beside those of `fixed` (index → offset).

    Args:
        beside: see `_neighbours`.

    Returns: offsets, 0 for blocks neither fixed nor ordered; and the highest top.
    """
    tops = [0] * len(blocks)  # none where a block has no place yet
    offsets = [0] * len(blocks)
    for i, offset in fixed.items():
        offsets[i], tops[i] = offset, offset + blocks[i].nbytes
    for i in order:
        nbytes, offset = blocks[i].nbytes, 0
        for low, top in sorted([(offsets[j], tops[j]) for j in beside[i] if tops[j]]):
            if low - offset >= nbytes:
                break
            if top > offset:
                offset = top
        offsets[i], tops[i] = offset, offset + nbytes
    return offsets, max(tops, default=0)


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
