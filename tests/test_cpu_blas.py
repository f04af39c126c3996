"""Threads of matrix products: by the size of the op alone, and given back at the end."""

from __future__ import annotations

import threading

import pytest

from vdnn.layers import Op
from vdnn.runtime.backends.cpu import blas
from vdnn.runtime.backends.cpu.blas import SMALL, BlasThreads
from vdnn.runtime.backends.cpu.estimates import product_operations


class Library:
    """A BLAS that remembers what it was set to."""

    user_api = "blas"

    def __init__(self, num_threads: int):
        self.num_threads, self.calls = num_threads, []

    def set_num_threads(self, count: int) -> None:
        self.calls.append(count)


@pytest.fixture
def libraries(monkeypatch):
    found = [Library(4), Library(2)]
    monkeypatch.setattr(blas, "ThreadpoolController", lambda: type("Found", (), {"lib_controllers": found}))
    return found


def test_small_products_get_one_thread_and_large_ones_all(libraries):
    threads = BlasThreads()
    for operations in (SMALL, SMALL / 10, SMALL * 2, SMALL * 3, SMALL):
        threads.use(operations)
    assert [library.calls for library in libraries] == [[1, 4, 1], [1, 2, 1]]
    threads.restore()
    assert [library.calls[-1] for library in libraries] == [4, 2]


def test_every_stream_sets_the_threads_of_the_real_library(monkeypatch):
    """Streams end and begin with every open; in between the main thread gives the threads back."""
    threads = BlasThreads()
    if not threads._libraries:
        pytest.skip("NumPy has no BLAS whose threads can be set")
    monkeypatch.setattr(threads, "_most", [2] * len(threads._libraries))
    before = [library.get_num_threads() for library in threads._libraries]
    seen = []

    def stream():
        for operations in (SMALL, 2 * SMALL, SMALL):
            threads.use(operations)
            seen.append(threads._libraries[0].get_num_threads())

    try:
        for _ in range(3):
            thread = threading.Thread(target=stream)
            thread.start()
            thread.join()
            threads.restore()
    finally:
        for library, count in zip(threads._libraries, before, strict=True):
            library.set_num_threads(count)
    assert seen == [1, 2, 1] * 3


def test_operations_of_a_product():
    conv = Op("c", "conv.dgrad", "c", "backward", {}, {})
    shapes = {"w": (20, 3, 5, 5), "dy": (8, 20, 24, 24), "dx": (8, 3, 28, 28)}
    assert product_operations(conv, shapes) == 2 * (3 * 5 * 5) * (8 * 20 * 24 * 24)
    linear = Op("f", "linear.wgrad", "f", "backward", {}, {})
    assert product_operations(linear, {"x": (8, 800), "dy": (8, 500), "dw": (500, 800)}) == 2 * 800 * 8 * 500
    assert product_operations(Op("r", "relu.forward", "r", "forward", {}, {}), {"x": (1,), "y": (1,)}) == 0
