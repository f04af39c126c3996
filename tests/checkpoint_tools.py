"""A small checkpoint to save and to compare.

path = save(folder, tensors(), state(123), keep=2)
same(load(path)[0], tensors())
"""

from __future__ import annotations

import numpy as np


def state(step: int) -> dict:
    return {
        "network": "lenet",
        "step": step,
        "epoch": 1,
        "position": 64 * step,
        "seed": 2**63 - 1,
        "schedule": {"name": "cosine", "milestones": [1.5]},
        "algorithms": {"train/64": {"conv1.forward": "IM2COL"}},
        "config": {"network": {"name": "lenet"}, "output": "runs/é"},
    }


def tensors(step: int = 1, size: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "conv1.weight": rng.standard_normal((size, 3, 2), np.float32),
        "conv1.weight.momentum": rng.standard_normal((size, 3, 2), np.float32),
        "bn1.running_mean": rng.standard_normal(5),
    }


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
