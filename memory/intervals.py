"""A map from ranges of whole numbers to values, in which a later range takes what it covers from earlier ones.

bytes_of = IntervalMap[str]()
bytes_of.put(0, 100, "a")
bytes_of.put(40, 60, "b")      # → ["a"]; "a" keeps [0, 40) and [60, 100)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class IntervalMap(Generic[T]):
    """Disjoint ranges [start, end), each with one value; numbers in no range have none."""

    def __init__(self) -> None:
        # disjoint, so both starts and ends are sorted
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._values: list[T] = []

    def put(self, start: int, end: int, value: T) -> list[T]:
        """Give [start, end), which must not be empty, to `value`; returns who held parts of it, lowest range first."""
        starts, ends, values = self._starts, self._ends, self._values
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        taken = values[first:last]
        new = [(start, end, value)]
        if taken and starts[first] < start:
            new.insert(0, (starts[first], start, taken[0]))
        if taken and ends[last - 1] > end:
            new.append((end, ends[last - 1], taken[-1]))
        starts[first:last] = [row[0] for row in new]
        ends[first:last] = [row[1] for row in new]
        values[first:last] = [row[2] for row in new]
        return taken

    def __iter__(self) -> Iterator[tuple[int, int, T]]:
        """(start, end, value) of every range, lowest first."""
        return zip(self._starts, self._ends, self._values, strict=True)
