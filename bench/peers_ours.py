"""One case of vdnn.bench.peers by vdnn: a whole training step, replayed in a chain and timed, with its memory.

    found = measure(Case("resnet50", 256, "tf32", "ours"))
    found["step_ms"], found["held_bytes"]

A chain of replays feeds the step with the images that lie on the device already, as PyTorch's has them; "wall_ms" is of
steps as training takes them, with the upload of the next images beside them and the loss read after each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.harness import Silent, replayed_ms
from vdnn.bench.peers_cases import Case
from vdnn.bench.peers_timing import RATE, WALL_STEPS, WARM_UP, spread, steps_for
from vdnn.errors import ConfigError
from vdnn.runtime.config import Config, load_config
from vdnn.runtime.executor import Executor
from vdnn.runtime.planset import Key
from vdnn.runtime.prepare import prepare
from vdnn.runtime.rehearsal import LimitExceeded
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

LAYOUT: Mapping[str, str] = {"fp32": "nchw", "tf32": "nhwc", "bf16": "nhwc"}
"""Where tensor cores multiply, channels last; a case's options may say otherwise."""


@dataclass(slots=True)
class Running:
    """A trainer on a batch of synthetic images, its steps captured where the backend can.

    Args:
        executors: that the trainer's steps go through, by key.
        prepare_s, open_s: to plan, measured costs included, and to take the memory and capture.
    """

    trainer: Trainer
    executors: Mapping[Key, Executor]
    images: NDArray[np.uint8]
    labels: NDArray[np.int32]
    prepare_s: float
    open_s: float

    def step(self) -> float:
        """One step, the next one's images uploaded beside it; its loss."""
        loss = self.trainer.train_step(self.images, self.labels, RATE, self.images)[0]
        self.trainer.step += 1
        return loss

    def chain_ms(self, count: int) -> list[float] | None:
        """See `replayed_ms`."""
        return replayed_ms(self.trainer, count)


def settings(case: Case) -> list[str]:
    """Overrides of the network's packaged configuration."""
    limit = case.parsed.limit_bytes
    memory = ("null", "none") if limit is None else (limit, "dyn")
    return [
        "data.source=synthetic",
        f"train.batch_size={case.batch}",
        f"data.train_images={case.batch}",
        "data.test_images=1",
        f"train.accumulate={case.parsed.slices}",
        f"device={case.device}",
        f"precision={case.precision}",
        f"memory.layout={LAYOUT[case.precision]}",
        f"memory.limit={memory[0]}",
        f"memory.policy={memory[1]}",
        *case.options,
        *case.ours,
    ]


def configuration(case: Case, *more: str) -> Config:
    """The case's; ConfigError if its options make another case of it.

    Args:
        more: overrides besides.
    """
    config = load_config(case.network, [*settings(case), *more])
    if config.data.source != "synthetic":  # only that one makes a step's images and no more
        raise ConfigError(f"data.source: images of a benchmark are synthetic, got '{config.data.source}'; leave it out")
    for key, got, named in (
        ("device", config.device, case.device),
        ("precision", config.precision, case.precision),
        ("train.batch_size", config.train.batch_size, case.batch),
    ):
        if got != named:  # else results would bear the name of a case that was not measured
            raise ConfigError(f"{key}: the case says {named}, an option {got}; leave the option out")
    return config


@contextmanager
def running(case: Case, *, capture: bool = True) -> Iterator[Running]:
    """The case's trainer, started; closed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(case, f"output={folder}/run")
        try:
            started = _start(config, Path(folder), capture)
        except LimitExceeded as error:  # as training does: plan once more for what lies outside the slab
            started = _start(config, Path(folder), capture, error.reserve_bytes)
        try:
            yield started
        finally:
            started.trainer.backend.close()


def _start(config: Config, folder: Path, capture: bool, reserve_bytes: int | None = None) -> Running:
    begin = perf_counter()
    prepared = prepare(config, reserve_bytes=reserve_bytes, evaluates=False)
    planned_at = perf_counter()
    trainer = Trainer(prepared, RunFolder(folder), Silent())
    executors = {
        key: Executor(prepared.backend, planned.plan, planned.program, capture=capture)
        for key, planned in prepared.plans.plans.items()
    }
    for key, executor in executors.items():
        trainer.use(key, executor)
    try:
        trainer.start()
    except BaseException:
        prepared.backend.close()
        raise
    split = prepared.source.train
    whole = np.arange(len(split))
    images, labels = np.ascontiguousarray(split.images(whole)), np.ascontiguousarray(split.labels(whole))
    images.setflags(write=False)
    return Running(trainer, executors, images, labels, planned_at - begin, perf_counter() - planned_at)


def measure(case: Case) -> dict[str, Any]:
    """Times and bytes of the case; BudgetError where it does not fit."""
    with running(case) as run:
        first_loss = run.step()
        for _ in range(WARM_UP):
            run.step()
        walls = [_wall_ms(run) for _ in range(WALL_STEPS)]
        count = steps_for(spread(walls)["step_ms"], case.seconds)
        times = run.chain_ms(count)
        last_loss = run.step()  # NotFiniteError if the chain has met a NaN
        trainer = run.trainer
        prepared, backend = trainer.prepared, trainer.backend
        return {
            **spread(times or walls),
            "wall_ms": spread(walls)["step_ms"],
            "steps": len(times or walls),
            "timed": "CUDA events in a chain of replays" if times else "the host's clock",
            "losses": [first_loss, last_loss],
            "prepare_s": run.prepare_s + run.open_s,
            "planning_s": run.prepare_s,
            "predicted_ms": trainer.predicted_step_ms,
            "parts_ms": prepared.predicted_step_ms(),
            "planned_bytes": prepared.plans.slab_bytes,
            "peak_bytes": trainer.peak_bytes(),
            "host_bytes": prepared.plans.host_bytes,
            "held_bytes": backend.held_bytes(),
            "computed_precision": backend.caps.precision,
            "layout": prepared.config.memory.layout,
            "policy": prepared.config.memory.policy,
            "algorithms": {
                op: algorithm for plan in prepared.plans.algorithms().values() for op, algorithm in plan.items()
            },
            "library": backend.caps.description,
            "device": backend.caps.description.split(",")[0],
        }


def _wall_ms(run: Running) -> float:
    begin = perf_counter()
    run.step()
    return (perf_counter() - begin) * 1000
