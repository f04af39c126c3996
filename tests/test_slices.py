"""Divisions of a batch against every division there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vdnn.memory.costs import Candidate
from vdnn.memory.slices import divide, sizes_of


def partitions(batch: int, largest: int) -> Iterator[list[int]]:
    """Every way to write `batch` as a sum, the largest first."""
    if batch == 0:
        yield []
    for images in range(min(batch, largest), 0, -1):
        for rest in partitions(batch - images, images):
            yield [images, *rest]


TIMES = st.integers(1, 40).map(float)
TABLES = st.dictionaries(
    st.integers(1, 12),
    st.lists(st.builds(Candidate, st.sampled_from("ABC"), TIMES, st.integers(0, 9)), max_size=3),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), TABLES, st.none() | st.integers(0, 9))
def test_no_division_is_faster(batch, table, limit):
    def time_of(images: int) -> float:
        fits = [c.time_ms for c in table.get(images, ()) if limit is None or c.workspace_bytes <= limit]
        return min(fits, default=float("inf"))

    every = [(sum(map(time_of, sizes)), len(sizes)) for sizes in partitions(batch, batch)]
    fastest = min(every)
    found = divide(batch, table, limit)
    if fastest[0] == float("inf"):
        assert found is None
        return
    assert found is not None
    assert (found.time_ms, len(found.parts)) == fastest
    assert sum(part.images for part in found.parts) == batch
    assert all(part.candidate in table[part.images] for part in found.parts)
    assert limit is None or found.workspace_bytes <= limit
    assert found.workspace_bytes == max(part.candidate.workspace_bytes for part in found.parts)


def test_halves_let_a_faster_algorithm_fit():
    whole = (Candidate("FFT", 10.0, 1000), Candidate("GEMM", 30.0, 0))
    half = (Candidate("FFT", 6.0, 500), Candidate("GEMM", 15.0, 0))
    table = {64: whole, 32: half}

    def shown(limit):
        division = divide(64, table, limit)
        return [(part.images, part.candidate.algorithm) for part in division.parts], division.time_ms

    assert shown(None) == ([(64, "FFT")], 10.0)
    assert shown(999) == ([(32, "FFT"), (32, "FFT")], 12.0)
    assert shown(499) == ([(64, "GEMM")], 30.0)  # as fast as two halves, in one part
    assert divide(64, {32: half[:1]}, 499) is None
    assert divide(64, {}, None) is None
    assert divide(63, table, None) is None


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(256, (256, 128, 64, 32)), (100, (100, 50, 25, 13, 12)), (3, (3, 2, 1)), (1, (1,)), (7, (7, 4, 3, 2, 1))],
)
def test_sizes_are_halves_and_their_sums_reach_the_batch(batch, sizes):
    assert sizes_of(batch) == sizes
    without = {n: (Candidate("A", 1.0),) for n in sizes[1:]}
    assert not without or divide(batch, without) is not None
