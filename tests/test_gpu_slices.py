"""Convolutions in slices of the batch on a GPU: a VGG step is the same in slices, and stays in its limit.

    python -m pytest -m gpu tests/test_gpu_slices.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_gpu import AGREEMENT, SMALL, Silent, train
from test_gpu_algorithms import trained

from vdnn.memory.passes import BY_IMAGE
from vdnn.memory.policy import MEMORY_OPTIMAL
from vdnn.runtime.config import load_config
from vdnn.runtime.init import init_parameters
from vdnn.runtime.planset import Algorithms
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCH = 32
KEY = ("train", BATCH)
VGG = (*SMALL, f"train.batch_size={BATCH}", "network.dropout=0", "network.image_size=96", "optimizer.lr=0.00003")
"""A rate at which a step moves the loss by half a percent: one of 5% makes 2e-5 of the rounding of two algorithms."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured algorithms of these tests are theirs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def prepared(*overrides: str, recorded: Algorithms | None = None) -> Prepared:
    return prepare(load_config("vgg16", [*VGG, *overrides, f"device={DEVICE}"]), recorded)


def in_slices(found: Prepared, images: int) -> dict[str, str]:
    """A record in which every convolution of the step runs in equal slices, by the algorithm of the whole batch."""
    planned = found.plans[KEY]
    assert planned.costs.slices is not None
    record = {op: algorithm.name for op, algorithm in planned.decisions.algorithms.items()}
    for op in planned.program.ops:
        if op.kind in BY_IMAGE:
            options = [c.algorithm for c in planned.costs.slices(op.name, images).candidates]
            if record[op.name] not in options:  # cuDNN may have it for the whole batch alone
                record[op.name] = options[0]
            record[op.name] = f"{BATCH // images} x {images} images with {record[op.name]}"
    return record


def test_a_step_in_slices_is_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    found = prepared("memory.slices=false")
    records = {images: in_slices(found, images) for images in (16, 8)}
    start = init_parameters(found.graph, found.config.train.seed)
    losses, tensors = trained(tmp_path / "whole", found, 2)
    assert len(set(losses)) == 2
    for images, record in records.items():
        made = prepared(recorded={"train/32": record})
        assert made.plans.algorithms()["train/32"] == record
        sliced = made.plans[KEY]
        parts = [op for op in sliced.program.ops if op.slice_of is not None]
        assert len(parts) == BATCH // images * sum(" images with " in words for words in record.values())
        others, found_tensors = trained(tmp_path / str(images), made, 2)
        assert others == pytest.approx(losses, rel=AGREEMENT)
        for name in start:
            change = np.linalg.norm(tensors[name] - start[name])
            difference = np.linalg.norm(found_tensors[name] - tensors[name])
            assert difference <= 1e-3 * change + 1e-6 * np.sqrt(tensors[name].size), name


def test_slices_stay_in_the_limit_that_they_were_chosen_for(tmp_path: Path) -> None:
    smallest = prepared("memory.policy=all", f"memory.algorithms={MEMORY_OPTIMAL}")
    reserve, least = smallest.backend.caps.reserve_bytes, smallest.plans.slab_bytes
    smallest.backend.close()
    divided, reference = 0, None
    for share in (1.15, 1.4, 2.0):
        limit = reserve + int(share * least)
        made = prepared(f"memory.limit={limit}", "memory.slices=true")
        divided += len(made.plans[KEY].decisions.slices)
        folder = tmp_path / str(share)
        folder.mkdir()
        trainer = Trainer(made, RunFolder(folder), Silent())
        try:
            trainer.start()
            losses = train(trainer, 2)
            assert trainer.backend.held_bytes() <= limit
        finally:
            made.backend.close()
        reference = reference or losses
        assert losses == pytest.approx(reference, rel=AGREEMENT)
    assert divided, "no limit made any convolution run in slices, so that nothing was tested"
