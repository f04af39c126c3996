"""Copies within host memory by several threads: equal to numpy's own, of every shape, and complete on return."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda import host_copy

SHAPES = [(), (0,), (0, 3), (1,), (64,), (1, 3, 50, 50), (2, 3, 5, 7), (3, 1000), (7, 3, 11, 13), (128, 3, 40, 40)]


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(host_copy, "THREADS", request.param)
    monkeypatch.setattr(host_copy, "PART_BYTES", 100)
    host_copy._threads.cache_clear()
    return request.param


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everything_arrives(threads: int, shape: tuple[int, ...], dtype: Any) -> None:
    value = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    target = np.full(shape, 7, dtype)
    host_copy.copy(target, value)
    np.testing.assert_array_equal(target, value)


def test_values_that_do_not_lie_one_after_the_other(threads: int) -> None:
    value = np.arange(2 * 60 * 40).reshape(60, 80)[:, ::2].astype(np.int32)
    target = np.zeros((60, 40), np.int32)
    host_copy.copy(target, value)
    np.testing.assert_array_equal(target, value)


@pytest.mark.parametrize(
    "value", [np.zeros((50, 40), np.float32), np.zeros((50, 41), np.uint8)], ids=["dtype", "shape"]
)
def test_another_dtype_or_shape_is_refused_as_by_numpy(threads: int, value: NDArray[Any]) -> None:
    target = np.zeros((50, 40), np.uint8)
    with pytest.raises((TypeError, ValueError)) as refused:
        host_copy.copy(target, value)
    with pytest.raises(refused.type):
        np.copyto(target, value, casting="no")


def test_large_copies_are_shared_and_small_ones_are_not(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[int, ...]] = []
    copyto = np.copyto

    def counted(target: NDArray[Any], value: NDArray[Any], **how: Any) -> None:
        parts.append(value.shape)
        copyto(target, value, **how)

    monkeypatch.setattr(np, "copyto", counted)
    host_copy.copy(np.zeros(99, np.uint8), np.ones(99, np.uint8))
    assert parts == [(99,)]
    parts.clear()
    host_copy.copy(np.zeros((64, 100), np.uint8), np.ones((64, 100), np.uint8))
    assert len(parts) == threads
    assert sum(rows for rows, _ in parts) == 64


def test_callers_do_not_disturb_each_other(threads: int) -> None:
    start, wrong = Barrier(4), []

    def caller(number: int) -> None:
        value, target = np.full((40, 500), number, np.int32), np.zeros((40, 500), np.int32)
        start.wait()
        for _ in range(20):
            host_copy.copy(target, value)
            wrong.extend(target[target != number])
            target[:] = 0

    callers = [Thread(target=caller, args=(number,)) for number in range(1, 5)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong
