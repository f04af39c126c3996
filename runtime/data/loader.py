"""The order of an epoch, and batches in that order, read ahead by threads.

order = epoch_order(seed=0, epoch=3, n=len(split))
for images, labels in batches(split, order, start=640, batch=64, drop_last=False): ...   # goes on after image 640
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import DataError
from vdnn.runtime.data.hashing import words
from vdnn.runtime.data.source import Split

_ORDER_STREAM = 2**32
READERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that read, each a batch at a time: a GPU takes less for a small network's step than one of them for a batch;
the other cores are for computing."""
READ_AHEAD, AHEAD_BYTES = 2, 2**28
"""Batches that are ready or being read while one is used: so many, or as many as busy threads make ready, if their
images take no more than so many bytes."""

Batch = tuple[NDArray[np.uint8], NDArray[np.int32]]
T = TypeVar("T")
Scalar = TypeVar("Scalar", bound=np.generic)


def epoch_order(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """A permutation of 0..n-1, a function of its arguments alone: a resumed run goes on in the same order."""
    return np.argsort(words(seed, _ORDER_STREAM + epoch, np.arange(n)), kind="stable")


def steps_per_epoch(images: int, batch: int, drop_last: bool) -> int:
    """Steps that cover `images` images, the last with fewer than `batch` unless dropped; DataError if there is none."""
    steps = images // batch if drop_last else -(-images // batch)
    if steps == 0:
        raise DataError(
            f"expected at least one batch of {batch} images in an epoch, got {images}: lower train.batch_size"
        )
    return steps


def batches(split: Split, order: NDArray[np.int64], start: int, batch: int, drop_last: bool = False) -> Iterator[Batch]:
    """Images (n, C, H, W) uint8 and labels (n,) int32, contiguous, in the order of `order[start:]`; not to be written.

    The split is read by several threads at the same time.

    Args:
        start: images of the epoch already used.
        batch: images per batch; the last may have fewer, or is left out with `drop_last`.
    """
    end = len(order) - (len(order) - start) % batch if drop_last else len(order)

    def read(position: int) -> Batch:
        indices = order[position : position + batch]
        return _frozen(split.images(indices)), _frozen(split.labels(indices))

    with ThreadPoolExecutor(READERS, thread_name_prefix="data") as threads:
        ahead: deque[Future[Batch]] = deque()
        most = READ_AHEAD
        try:
            for position in range(start, end, batch):
                ahead.append(threads.submit(read, position))
                if len(ahead) > most:
                    found = ahead.popleft().result()
                    most = max(READ_AHEAD, min(READERS + 1, AHEAD_BYTES // found[0].nbytes))
                    yield found
            while ahead:
                yield ahead.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def with_next(items: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Every item with the one after it, and the last with None."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following


def _frozen(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """`array`, contiguous, in memory that cannot be written: an upload may still read it in the step after its own."""
    own = np.ascontiguousarray(array)
    if own.base is not None:  # another array might write its memory
        own = own.copy()
    own.setflags(write=False)
    return own
