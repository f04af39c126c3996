"""The order of an epoch, and batches in that order."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from vdnn.errors import DataError
from vdnn.runtime.config import DataConfig
from vdnn.runtime.data import batches, epoch_order, loader, open_source, steps_per_epoch
from vdnn.runtime.data.hashing import words

MNIST = (1, 28, 28)
CODES = {"uint8": 0x08, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D}


def test_hash_words_are_splitmix64():
    """The reference: Vigna's splitmix64, whose first outputs from state 0 are published."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    key = _published_key(seed=5, stream=3)
    state, expected = key, []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        expected.append(_finish(state))
    assert [_finish((i + 1) * 0x9E3779B97F4A7C15 % 2**64) for i in range(3)] == published
    assert words(5, 3, np.arange(4)).tolist() == expected


def _finish(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _published_key(seed: int, stream: int) -> int:
    return _finish((_finish((seed + 0x9E3779B97F4A7C15) % 2**64) ^ stream) + 0x9E3779B97F4A7C15 & 2**64 - 1)


def test_an_epoch_visits_every_image_once_in_an_order_of_its_own():
    orders = [epoch_order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1, 2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.02
    assert np.array_equal(orders[1], epoch_order(0, 1, 1000))
    assert epoch_order(0, 0, 1).tolist() == [0]
    assert len(epoch_order(2**63 - 1, 10**6, 10)) == 10


def test_orders_are_uniform():
    """Every place is equally likely to hold every image: chi-square over 4,000 epochs of 8 images."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), epoch_order(3, epoch, 8)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 90  # 49 degrees of freedom: 90 is beyond 0.03%


def test_steps_per_epoch():
    assert [steps_per_epoch(n, 4, False) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert [steps_per_epoch(n, 4, True) for n in (4, 5, 8)] == [1, 1, 2]
    with pytest.raises(DataError, match="at least one batch of 4 images in an epoch, got 3"):
        steps_per_epoch(3, 4, True)


class Slow:
    """A split that notes the threads it is read from, and fails at one image."""

    def __init__(self, count: int, fails_at: int | None = None):
        self.count, self.fails_at, self.read = count, fails_at, []

    def __len__(self) -> int:
        return self.count

    def images(self, indices):
        self.read.append((threading.current_thread().name, indices.tolist()))
        if self.fails_at in indices:
            raise DataError("image 7 is damaged")
        return np.broadcast_to(indices.astype(np.uint8)[:, None, None, None], (len(indices), 1, 2, 2))

    def labels(self, indices):
        return (indices * 2).astype(np.int32)[::-1][::-1]


@pytest.mark.parametrize(
    ("start", "drop_last", "sizes"),
    [
        (0, False, [4, 4, 2]),
        (0, True, [4, 4]),
        (4, False, [4, 2]),
        (8, False, [2]),
        (3, True, [4]),
        (3, False, [4, 3]),
        (8, True, []),
        (10, False, []),
    ],
)
def test_batches_follow_the_order_from_where_it_was_left(start, drop_last, sizes):
    order = epoch_order(0, 0, 10)
    got = list(batches(Slow(10), order, start, 4, drop_last))
    assert [len(labels) for _, labels in got] == sizes
    for x, y in got:
        assert x.flags.c_contiguous
        assert y.flags.c_contiguous
        assert x.shape == (len(y), 1, 2, 2)
    seen = [int(image[0, 0, 0]) for x, _ in got for image in x]
    assert seen == order[start : start + sum(sizes)].tolist()
    assert [int(label) for _, y in got for label in y] == [2 * i for i in seen]


def test_batches_are_read_ahead_but_not_far_by_another_thread(monkeypatch):
    monkeypatch.setattr(loader, "READERS", 1)
    split = Slow(100)
    stream = batches(split, np.arange(100), 0, 10)
    next(stream)
    deadline = time.monotonic() + 10
    while len(split.read) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(split.read) == 3  # one in use, two ahead
    assert {name for name, _ in split.read} != {threading.current_thread().name}
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


class Together(Slow):
    """A split that gives nothing before so many threads ask for images at the same time."""

    def __init__(self, count, threads):
        super().__init__(count)
        self.barrier = threading.Barrier(threads)

    def images(self, indices):
        self.barrier.wait(timeout=30)
        return super().images(indices)


def test_several_threads_read_and_the_order_stays(monkeypatch):
    monkeypatch.setattr(loader, "READERS", 3)
    split = Together(60, threads=3)
    order = epoch_order(0, 0, 60)
    got = list(batches(split, order, 0, 5))
    assert [int(label) for _, y in got for label in y] == (2 * order).tolist()
    assert len({name for name, _ in split.read}) == 3


@pytest.mark.parametrize(("nbytes", "ahead"), [(10**6, 5), (120, 3), (1, 2)])
def test_batches_ahead_are_limited_by_bytes(nbytes, ahead, monkeypatch):
    """A batch of 10 images has 40 bytes."""
    monkeypatch.setattr(loader, "READERS", 4)
    monkeypatch.setattr(loader, "AHEAD_BYTES", nbytes)
    split = Slow(200)
    stream = batches(split, np.arange(200), 0, 10)
    for _ in range(3):
        next(stream)
    deadline = time.monotonic() + 10
    while len(split.read) < 3 + ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(split.read) == 3 + ahead
    stream.close()


def test_an_error_while_reading_arrives_where_the_batch_is_used():
    stream = batches(Slow(20, fails_at=7), np.arange(20), 0, 5)
    assert next(stream)[1].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(DataError, match="image 7"):
        next(stream)


def test_an_epoch_in_two_parts_is_the_epoch_in_one():
    source = open_source(DataConfig(source="synthetic", train_images=50, test_images=8), (1, 4, 4), 10, 0)
    order = epoch_order(0, 2, 50)
    whole = [y.tolist() for _, y in batches(source.train, order, 0, 8)]
    first = [y.tolist() for _, y in batches(source.train, order, 0, 8)][:3]
    assert first + [y.tolist() for _, y in batches(source.train, order, 24, 8)] == whole
    assert all(a != b for a, b in pairwise(whole))
