"""Quick measurements and facts of this machine, for people and for predictions.

gemm_gflops(); copy_gbps()
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

SIZE = 768
COPY_BYTES = 64 * 2**20
ROUNDS = 5


def gemm_gflops() -> float:
    """10^9 float32 operations per second of a matrix product of SIZE^3, best of a few."""
    a = np.ones((SIZE, SIZE), np.float32)
    out = np.empty_like(a)
    return 2 * SIZE**3 / _best(lambda: np.matmul(a, a, out=out)) / 1e9


def copy_gbps() -> float:
    """10^9 bytes per second of copying COPY_BYTES, best of a few."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return COPY_BYTES / _best(lambda: np.copyto(target, source)) / 1e9


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    build = np.show_config(mode="dicts")
    library = build.get("Build Dependencies", {}).get("blas", {}) if isinstance(build, dict) else {}
    return f"{library.get('name', 'unknown')} {library.get('version', '')}".strip()


def _best(task: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = perf_counter()
        task()
        times.append(perf_counter() - start)
    return min(times)
