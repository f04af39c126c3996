"""Runs for studies: a few training steps of a configuration, with everything worth comparing.

outcome = train("vgg16", ["device=cuda", "memory.policy=all"], steps=20)
outcome.losses, outcome.digest, outcome.step_ms
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import BackendUnavailable
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.config import Config, load_config
from vdnn.runtime.data import batches, epoch_order, with_next
from vdnn.runtime.driver import find_driver
from vdnn.runtime.executor import Executor
from vdnn.runtime.files import write_output
from vdnn.runtime.listener import StepInfo
from vdnn.runtime.planset import PlanSet
from vdnn.runtime.prepare import prepare
from vdnn.runtime.rehearsal import LimitExceeded
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trace import Marks
from vdnn.runtime.trainer import Trainer

CHAIN_MS = 400.0
"""Of a chain of replayed steps."""
NO_GPU = "use --device cpu to try this without a GPU"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a few steps gave: losses as they were computed, SHA-256 of all persistent tensors, times, bytes.

    Args:
        held_bytes: what the process holds on the device after every step, as the system sees it; 0 where only the slab
            counts.
        layouts: of the layers, in words: "NHWC", or "12 in NHWC, 3 in CHWN".
        step_ms, predicted_ms: by the host's clock, the loss read after each step; and what training says beforehand.
        parts_ms: of a step by the clock of plans, from ops that were measured one by one.
        replayed_ms: of a step in a chain of replays, by the GPU's clock; None where none was captured whole.
        compute_ms, out_ms, in_ms: sums over one more step, measured op by op; None if none was traced.
    """

    losses: tuple[float, ...]
    digest: str
    step_ms: float
    predicted_ms: float
    slab_bytes: int
    host_bytes: int
    peak_bytes: int
    policy_notes: tuple[str, ...]
    prepare_s: float
    open_s: float
    device: str
    used_bytes: int | None
    strays: int | None
    held_bytes: tuple[int, ...] = ()
    compute_ms: float | None = None
    out_ms: float | None = None
    in_ms: float | None = None
    layouts: str = ""
    parts_ms: float = 0.0
    replayed_ms: float | None = None

    @property
    def bound_ms(self) -> float | None:
        """No step of this plan can be shorter: max(kernels, copies one way, copies the other way)."""
        if self.compute_ms is None or self.out_ms is None or self.in_ms is None:
            return None
        return max(self.compute_ms, self.out_ms, self.in_ms)


class Silent:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.steps: list[StepInfo] = []

    def note(self, text: str) -> None:
        """Keep nothing."""

    def step(self, info: StepInfo) -> None:
        """Keep the step."""
        self.steps.append(info)

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """Keep nothing."""


def train(
    config_name: str, overrides: Sequence[str], steps: int, *, capture: bool = True, trace: Path | None = None
) -> Outcome:
    """Train `steps` steps of a packaged configuration without evaluation or checkpoints.

    Args:
        trace: a file for the trace of one step more, which runs uncaptured.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(config_name, [*overrides, f"train.iterations={steps}", f"output={folder}/run"])
        try:
            return _train(config, steps, Path(folder), capture, trace)
        except LimitExceeded as error:  # as the trainer does: plan once more for what lies outside the slab
            return _train(config, steps, Path(folder), capture, trace, error.reserve_bytes)


def _train(
    config: Config, steps: int, folder: Path, capture: bool, trace: Path | None, reserve_bytes: int | None = None
) -> Outcome:
    started = perf_counter()
    prepared = prepare(config, reserve_bytes=reserve_bytes)
    planned_at = perf_counter()
    trainer = Trainer(prepared, RunFolder(folder), Silent())
    try:
        trainer.start()
        opened_at = perf_counter()
        if not capture:
            for key, planned in prepared.plans.plans.items():
                trainer.use(key, Executor(prepared.backend, planned.plan, planned.program))
        losses, times, held = [], [], []
        split = prepared.source.train
        order = np.concatenate([epoch_order(config.train.seed, e, len(split)) for e in range(steps)])
        feed = batches(split, order[: steps * config.train.batch_size], 0, config.train.batch_size)
        for (images, labels), later in with_next(feed):
            begin = perf_counter()
            losses.append(trainer.train_step(images, labels, config.optimizer.lr, later and later[0])[0])
            times.append((perf_counter() - begin) * 1000)
            held.append(prepared.backend.held_bytes())
            trainer.step += 1
        digest = hashlib.sha256()
        for name, array in sorted(trainer.tensors().items()):
            digest.update(name.encode())
            digest.update(array.tobytes())
        none: tuple[None, None, None] = (None, None, None)
        compute_ms, out_ms, in_ms = _traced(trainer, images, labels, config.optimizer.lr, trace) if trace else none
        step_ms = median(times[2:] or times)
        chain = replayed_ms(trainer, chain_steps(step_ms)) if trace is None else None
        chained = median(chain) if chain else None
        ledger = getattr(prepared.backend, "ledger", None)
        notes = prepared.plans[prepared.steps.full[0]].decisions.notes
        return Outcome(
            tuple(losses),
            digest.hexdigest(),
            step_ms,
            trainer.predicted_step_ms,
            prepared.plans.slab_bytes,
            prepared.plans.host_bytes,
            trainer.peak_bytes(),
            notes,
            planned_at - started,
            opened_at - planned_at,
            prepared.backend.caps.description,
            ledger.used_bytes() if ledger is not None else None,
            ledger.strays if ledger is not None else None,
            tuple(held),
            *(compute_ms, out_ms, in_ms),
            _layouts(prepared.plans),
            prepared.predicted_step_ms(),
            chained,
        )
    finally:
        prepared.backend.close()


def chain_steps(step_ms: float) -> int:
    """How many steps take about CHAIN_MS, within bounds."""
    return max(5, min(200, int(CHAIN_MS / max(step_ms, 1e-3))))


def replayed_ms(trainer: Trainer, count: int) -> list[float] | None:
    """Times of `count` steps queued one after the other, with what was fed last; None where nothing is captured, or a
    step has parts, which need other values fed in between."""
    replays = [trainer.executor(key).replay for key in trainer.prepared.steps.full]
    if len(replays) > 1 or replays[0] is None:
        return None
    backend = trainer.backend
    marks = [backend.mark("compute")]
    for _ in range(count):
        replays[0].relaunch()
        marks.append(backend.mark("compute"))
    backend.sync()
    return [backend.between_ms(before, after) for before, after in pairwise(marks)]


def _layouts(plans: PlanSet) -> str:
    found = Counter(choice.layout for choice in plans.layouts.values())
    return ", ".join(f"{count} in {layout}" for layout, count in found.most_common()) or plans.layout


def _traced(
    trainer: Trainer, images: NDArray[np.uint8], labels: NDArray[np.int32], lr: float, path: Path
) -> tuple[float, float, float]:
    """Kernel, copy-out and copy-in ms of one more step, whose trace goes to `path`."""
    trainer.observer = marks = Marks(trainer.backend)
    trainer.train_step(images, labels, lr)
    trainer.observer = None
    marks.trace(f"measured uncaptured on {trainer.backend.caps.description}").write(str(path))
    timings = [timing for _, _, timing in marks.timings()]
    return sum(t.compute_ms for t in timings), sum(t.out_ms for t in timings), sum(t.in_ms for t in timings)


def check_device(device: str, advice: str = NO_GPU, *, loads: bool = True) -> None:
    """BackendUnavailable if "cuda" is asked for and not there: the driver speaks first, then the libraries.

    Args:
        loads: whether this process is to use the GPU, and so needs its libraries.
    """
    if device != "cuda":
        return
    driver = find_driver()
    if not driver.gpus:
        raise BackendUnavailable(f"device 'cuda' is not available: {driver.finding}; {advice}")
    if loads:
        load_cupy()


def facts(command: str) -> dict[str, Any]:
    """Machine, versions, commit and command, for a results file."""
    found: dict[str, Any] = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu_cores": os.cpu_count(),
        "commit": _output(["git", "rev-parse", "HEAD"]),
    }
    gpu = _output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if gpu:
        found["gpu"] = gpu
    return found


def write_results(name: str, command: str, results: Mapping[str, Any]) -> Path:
    """Write {facts, results} as JSON to `results_path(name)`, whole or not at all, and say so."""
    path = save_results(name, {"facts": facts(command), "results": results})
    print(f"wrote {path.name}", file=sys.stderr)
    return path


def save_results(name: str, content: Mapping[str, Any]) -> Path:
    """Write `content` as JSON to `results_path(name)`, whole or not at all."""
    path = results_path(name)
    write_output(path, json.dumps(content, indent=1).encode())
    return path


def results_path(name: str) -> Path:
    """Where results of this name go: the folder $OUT, or the present one."""
    return Path(os.environ.get("OUT", ".")) / name


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
