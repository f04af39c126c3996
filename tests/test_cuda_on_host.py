"""The stand-in for a GPU sees what a GPU would not forgive: overruns of shared memory, addresses of nothing, barriers
that some threads miss."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import HostKernels, fenced

KERNELS = """
using u32 = unsigned int;
using i64 = long long;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) mirrored(const float* x, float* y, int more) {
    __shared__ float held[4][8], other[8];
    if (threadIdx.x < 8) other[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < u32(8 + more)) (&held[3][0])[int(threadIdx.x)] = other[7 - threadIdx.x % 8];
    __syncthreads();
    if (threadIdx.x < 8) y[threadIdx.x] = held[3][threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(THREADS) before(const float* x, float* y, int less) {
    __shared__ float held[8];
    if (threadIdx.x == 0) held[-less] = x[0];
    __syncthreads();
    if (threadIdx.x == 0) y[0] = held[0];
}
extern "C" __global__ void __launch_bounds__(THREADS) read_at(const float* x, float* y, i64 at) {
    if (threadIdx.x == 0) y[0] = x[at];
}
extern "C" __global__ void __launch_bounds__(THREADS) written_at(const float* x, float* y, i64 at) {
    if (threadIdx.x == 0) y[at] = x[0];
}
extern "C" __global__ void __launch_bounds__(THREADS) parted(const float* x, float* y, int threads) {
    if (threadIdx.x >= u32(threads)) return;
    __syncthreads();
    if (threadIdx.x == 0) y[0] = x[0];
}
"""
PAGE_NUMBERS = 1024


@pytest.fixture
def kernels() -> HostKernels:
    return HostKernels(text=KERNELS)


def places() -> tuple[np.ndarray, np.ndarray]:
    """x, a page that others that are not there surround, and y."""
    x = fenced(4 * PAGE_NUMBERS).view(np.float32)
    x[...] = np.arange(PAGE_NUMBERS)
    return x, fenced(4 * 8).view(np.float32)


def test_what_keeps_to_its_place_runs(kernels: HostKernels) -> None:
    x, y = places()
    kernels.launch("mirrored", 3, [x.ctypes.data, y.ctypes.data, 0], None)
    assert y.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    kernels.launch("before", 1, [x.ctypes.data, y.ctypes.data, 0], None)
    assert y[0] == 0
    for at in (0, PAGE_NUMBERS - 1):
        kernels.launch("read_at", 1, [x.ctypes.data, y.ctypes.data, at], None)
        assert y[0] == at


@pytest.mark.parametrize(("name", "more"), [("mirrored", 1), ("mirrored", 200), ("before", 1), ("before", 9)])
def test_writing_beside_a_shared_array_is_seen(kernels: HostKernels, name: str, more: int) -> None:
    x, y = places()
    with pytest.raises(AssertionError, match=f"'{name}' wrote beside a __shared__ array"):
        kernels.launch(name, 1, [x.ctypes.data, y.ctypes.data, more], None)
    kernels.launch(name, 1, [x.ctypes.data, y.ctypes.data, 0], None)  # and said once


@pytest.mark.parametrize("at", [-1, PAGE_NUMBERS, PAGE_NUMBERS + 700, -500])
def test_an_address_of_nothing_is_seen(kernels: HostKernels, at: int) -> None:
    x, y = places()
    with pytest.raises(AssertionError, match="'read_at' touched memory that is not there"):
        kernels.launch("read_at", 1, [x.ctypes.data, y.ctypes.data, at], None)
    with pytest.raises(AssertionError, match="'written_at' touched memory that is not there"):
        kernels.launch("written_at", 1, [y.ctypes.data, x.ctypes.data, at], None)
    kernels.launch("read_at", 1, [x.ctypes.data, y.ctypes.data, 5], None)
    assert y[0] == 5


def test_a_barrier_that_some_threads_miss_is_seen(kernels: HostKernels) -> None:
    x, y = places()
    kernels.launch("parted", 1, [x.ctypes.data, y.ctypes.data, 256], None)
    with pytest.raises(AssertionError, match="'parted' missed a barrier"):
        kernels.launch("parted", 1, [x.ctypes.data, y.ctypes.data, 64], None)
