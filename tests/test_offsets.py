"""Placement: nothing live overlaps, whatever the lifetimes, and where the least height is known it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vdnn.memory.offsets import Block, most_live, place

UNIT = 256
"""Bytes to which every place is aligned (design: what cuDNN wants)."""


def live_at_most(blocks: Sequence[Block]) -> int:
    """Most bytes live at a position, counted position by position."""
    positions = {block.start for block in blocks}
    return max((sum(b.nbytes for b in blocks if b.start <= p < b.end) for p in positions), default=0)


def check(blocks: Sequence[Block]) -> int:
    """Place `blocks`, check the places pair by pair, and return the height."""
    offsets, height = place(blocks)
    assert len(offsets) == len(blocks)
    for i, (a, low) in enumerate(zip(blocks, offsets, strict=True)):
        assert low >= 0
        assert low % UNIT == 0
        for b, other in zip(blocks[i + 1 :], offsets[i + 1 :], strict=True):
            together = a.start < b.end and b.start < a.end
            assert not together or low + a.nbytes <= other or other + b.nbytes <= low, (a, low, b, other)
    assert height == max((low + b.nbytes for b, low in zip(blocks, offsets, strict=True)), default=0)
    assert height >= live_at_most(blocks)
    return height


def least_height(blocks: Sequence[Block]) -> int:
    """The least height there is, for a few blocks: the best placement is the first fit in the order of its offsets."""
    return min(first_fit(order) for order in permutations(blocks))


def first_fit(order: Sequence[Block]) -> int:
    placed: list[tuple[int, Block]] = []
    for block in order:
        beside = [(low, b) for low, b in placed if b.start < block.end and block.start < b.end]
        tries = [0, *(low + b.nbytes for low, b in beside)]
        fits = (t for t in tries if all(t + block.nbytes <= low or low + b.nbytes <= t for low, b in beside))
        placed.append((min(fits), block))
    return max(low + b.nbytes for low, b in placed)


@st.composite
def lifetimes(draw: st.DrawFn, most: int) -> list[Block]:
    rows = draw(
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=most)
    )
    return [Block(start, start + length, UNIT * size) for start, length, size in rows]


@settings(max_examples=150, deadline=None)
@given(lifetimes(40))
@example([Block(10, 11, 2560), Block(10, 12, 2560), Block(11, 13, 2560), Block(12, 13, 2816)])  # two begin alike
def test_live_blocks_never_overlap(blocks: list[Block]) -> None:
    assert most_live(blocks) == live_at_most(blocks)
    check(blocks)


@settings(max_examples=60, deadline=None)
@given(lifetimes(6))
def test_no_height_below_the_least_there_is(blocks: list[Block]) -> None:
    least = least_height(blocks)
    assert live_at_most(blocks) <= least <= check(blocks)


def test_few_blocks_are_nearly_always_placed_as_well_as_possible() -> None:
    random = Random(5)
    reached = 0
    for _ in range(150):
        blocks = [
            Block(s := random.randint(0, 8), s + random.randint(1, 6), UNIT * random.randint(1, 9)) for _ in range(6)
        ]
        reached += check(blocks) == least_height(blocks)
    assert reached >= 145


def test_nothing_needs_nothing() -> None:
    assert place([]) == ((), 0)


def test_one_after_the_other_share_their_bytes() -> None:
    assert check([Block(i, i + 1, UNIT * (1 + i % 5)) for i in range(50)]) == 5 * UNIT


def test_all_at_once_lie_side_by_side() -> None:
    assert check([Block(0, 9, UNIT * size) for size in (3, 1, 4, 1, 5)]) == 14 * UNIT


def tight_chain(sizes: Sequence[int], height: int) -> list[Block]:
    """Maps of a chain, each live in its own layer and the next, and workspaces that fill every layer up to `height`."""
    maps = [Block(2 * i, 2 * i + 4, UNIT * size) for i, size in enumerate(sizes)]
    scratch = [Block(2 * i, 2 * i + 1, UNIT * (height - sum(sizes[i - 1 : i + 1]))) for i in range(1, len(sizes))]
    return maps + scratch


@pytest.mark.parametrize("layers", [5, 30, 90])
def test_maps_alternate_left_and_right_of_the_workspaces(layers: int) -> None:
    # a map must lie at the end that its predecessor does not have, or the workspace between finds no room in one piece
    random = Random(layers)
    blocks = tight_chain([random.randint(5, 20) for _ in range(layers)], 60)
    assert live_at_most(blocks) == 60 * UNIT
    assert first_fit(sorted(blocks, key=lambda b: (-b.nbytes, b.start))) > 60 * UNIT
    assert check(blocks) == 60 * UNIT


def test_a_map_that_stays_lies_at_an_end() -> None:
    # 4 stays throughout; beside it come 3, then 3 and 3, then 6: only with 4 at an end is there a place for the 6
    blocks = [Block(0, 9, 4 * UNIT), Block(0, 3, 3 * UNIT), Block(2, 5, 3 * UNIT), Block(5, 9, 6 * UNIT)]
    assert check(blocks) == least_height(blocks) == 10 * UNIT
