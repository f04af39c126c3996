"""Settings of the whole suite, the first read before NumPy is; and tests marked `gpu`, skipped where there is none."""

import os
from collections.abc import Sequence

import pytest

# on two busy cores two BLAS threads spend most of their time waiting for each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip what needs a GPU unless the driver reports one; a GPU whose libraries are missing is a failure."""
    from vdnn.runtime.driver import find_driver

    marked = [item for item in items if item.get_closest_marker("gpu")]
    driver = find_driver()
    if not driver.gpus:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {driver.finding}"))
