"""IntervalMap against a dictionary with one entry for every number."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from vdnn.memory.intervals import IntervalMap

RANGES = st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 15)), max_size=25)


@given(RANGES)
def test_put_gives_every_number_to_the_latest_range_over_it(ranges: list[tuple[int, int]]) -> None:
    intervals: IntervalMap[int] = IntervalMap()
    numbers: dict[int, int] = {}
    for value, (start, size) in enumerate(ranges):
        held = [numbers[n] for n in range(start, start + size) if n in numbers]
        taken = intervals.put(start, start + size, value)
        # one entry for each stretch; two stretches of one value with a gap between are two entries
        assert [v for v, _ in groupby(taken)] == [v for v, _ in groupby(held)]
        numbers.update(dict.fromkeys(range(start, start + size), value))
        assert {n: v for low, high, v in intervals for n in range(low, high)} == numbers
        rows = list(intervals)
        assert all(a[1] <= b[0] for a, b in pairwise(rows))


def test_a_range_inside_another_splits_it() -> None:
    intervals: IntervalMap[str] = IntervalMap()
    assert intervals.put(0, 100, "a") == []
    assert intervals.put(40, 60, "b") == ["a"]
    assert list(intervals) == [(0, 40, "a"), (40, 60, "b"), (60, 100, "a")]
    assert intervals.put(30, 70, "c") == ["a", "b", "a"]
    assert intervals.put(70, 80, "d") == ["a"]
    assert list(intervals) == [(0, 30, "a"), (30, 70, "c"), (70, 80, "d"), (80, 100, "a")]
