"""vdnn's own kernels on this GPU against the CPU backend, in every storage of activations; twice, to equal bits."""

from __future__ import annotations

import pytest

from vdnn.bench.gpu_kernels import check
from vdnn.bench.kernel_cases import all_cases
from vdnn.runtime.backends.cuda.probe import Probe
from vdnn.runtime.backends.cuda.source import STORAGE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", STORAGE)
def test_kernels_agree_with_the_cpu(dtype: str) -> None:
    probe = Probe(dtype)
    calls, failures = check(probe, all_cases())
    assert calls > 1000
    assert failures == []
    assert probe.unequal == 0
