"""Every backend passes the same contract; and without a wait, some order of streams reads the wrong bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from backend_contract import CHECKS, ORDERS, ROUND_TRIP, ROWS, opened, play, values

from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cpu import CpuBackend


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", ROWS)
def test_contract(make: Callable[[], Backend], check: Callable[[Backend], None]) -> None:
    with opened(make) as backend:
        check(backend)


@pytest.mark.parametrize("dropped", [i for i, call in enumerate(ROUND_TRIP) if call[0] == "wait"])
def test_a_missing_wait_shows_under_some_order(dropped: int) -> None:
    calls = [call for i, call in enumerate(ROUND_TRIP) if i != dropped]
    wrong = 0
    for order in ORDERS:
        with opened(lambda order=order: CpuBackend(order=order)) as backend:  # type: ignore[misc]
            wrong += values(play(backend, calls)) != {"kept": [7.0] * 8, "overwritten": [9.0] * 8}
    assert wrong
