"""Divisions of a batch against every division there is, where slices are asked for, and divisions in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vdnn.memory.costs import Candidate, CopyRates, CostTable, Division, Options
from vdnn.memory.slices import LEAST_BYTES, describe, divide, parse, quickest, sizes_of, step_of
from vdnn.units import MIB


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


class Machine:
    """FAST takes `need` bytes an image and 1 ms, SLOW nothing and 3 ms, every call 0.1 ms besides; asked is noted.

    Args:
        memory_bytes: what it can measure: FAST is left out of slices that need more.
    """

    def __init__(self, batch: int, need: int, memory_bytes: int = 2**60):
        self.batch, self.need, self.memory_bytes = batch, need, memory_bytes
        self.asked: list[int] = []

    def options(self, op: str, images: int) -> Options:
        assert op == "conv"
        self.asked.append(images)
        fast, slow = Candidate("FAST", images + 0.1, images * self.need), Candidate("SLOW", 3 * images + 0.1)
        return Options((fast, slow), True) if fast.workspace_bytes <= self.memory_bytes else Options((slow,), False)

    def quickest(self, limit: int | None) -> tuple[list[tuple[int, str]], float]:
        whole = self.options("conv", self.batch).candidates
        self.asked = []
        table = CostTable({"conv": whole}, CopyRates(1, 1, 1), "made up", self.options)
        found = quickest(table, "conv", self.batch, limit)
        if isinstance(found, Division):
            return [(part.images, part.candidate.algorithm) for part in found.parts], found.time_ms
        return [(self.batch, found.algorithm)], found.time_ms


@pytest.mark.parametrize(
    ("limit", "parts", "time_ms", "asked"),
    [
        (None, [(64, "FAST")], 64.1, set()),
        (64 * MIB, [(64, "FAST")], 64.1, {64}),
        (63 * MIB, [(32, "FAST")] * 2, 64.2, {64, 32}),
        (20 * MIB, [(16, "FAST")] * 4, 64.4, {64, 32, 16}),
        (2 * MIB, [(2, "FAST")] * 32, 67.2, {64, 32, 16, 8, 4, 2}),
        (LEAST_BYTES - 1, [(64, "SLOW")], 192.1, set()),
    ],
)
def test_slices_are_asked_for_until_the_fastest_fits(limit, parts, time_ms, asked):
    machine = Machine(64, MIB)
    found, time = machine.quickest(limit)
    assert (found, pytest.approx(time)) == (parts, time_ms)
    assert set(machine.asked) == asked


def test_what_was_left_out_for_its_memory_is_found_in_smaller_slices():
    machine = Machine(64, MIB, memory_bytes=17 * MIB)
    assert machine.quickest(30 * MIB) == ([(16, "FAST")] * 4, pytest.approx(64.4))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4 * MIB), st.integers(MIB, 64 * MIB))
def test_the_quickest_is_the_best_of_all_sums_of_the_sizes_asked_for(batch, need, limit):
    machine = Machine(batch, need)
    _, time_ms = machine.quickest(limit)

    def cost(images: int) -> float:
        return min(
            c.time_ms for c in Machine(batch, need).options("conv", images).candidates if c.workspace_bytes <= limit
        )

    sums: dict[int, float] = {0: 0.0}  # every number of images that slices of these sizes make
    for done in range(1, batch + 1):
        ways = [sums[done - n] + cost(n) for n in {*machine.asked, batch} if done - n in sums]
        if ways:
            sums[done] = min(ways)
    assert time_ms == pytest.approx(sums[batch])


@given(st.integers(1, 600))
def test_every_slice_begins_at_a_multiple_of_the_step(batch):
    assert all(size % step_of(batch) == 0 for size in sizes_of(batch, 5))


ROWS = st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["FFT", "GEMM", "graph:eng8{k2=3,k5=1}"])), min_size=1)


@given(ROWS)
def test_words_say_the_slices(rows):
    assert parse(describe(rows), sum(images for images, _ in rows)) == rows
    assert parse(describe(rows), sum(images for images, _ in rows) + 1) is None


def test_slices_in_words():
    assert describe([(64, "FFT"), (64, "FFT"), (32, "GEMM")]) == "2 x 64 images with FFT, 1 x 32 images with GEMM"
    for words in ("FFT", "", "2 x 64 images with FFT, GEMM", "2 x 64 images with", "-2 x 64 images with FFT"):
        assert parse(words, 128) is None
    assert parse("99999999999 x 64 images with FFT", 128) is None
