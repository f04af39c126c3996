"""Training: steps, evaluation, checkpoints, interruption; everything that happens between plans.

    trainer = Trainer(prepared, folder, listener)
    trainer.start()            # or trainer.resume(checkpoint)
    result = trainer.run()

A step is a few runs of plans (one, or the parts of an accumulated step). The trainer knows plans by key, not how they
move bytes.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import CheckpointError, NotFiniteError, VdnnError
from vdnn.layers.lower import IMAGES, LABELS, STEP
from vdnn.runtime.calibration import CALIBRATION
from vdnn.runtime.checkpoint import State, check_tensors, latest, load, prune, save, set_aside
from vdnn.runtime.cut import cut_step
from vdnn.runtime.data import batches, epoch_order, with_next
from vdnn.runtime.executor import Executor, Observer
from vdnn.runtime.forecast import SILENT_MS, compare, evaluation_ms
from vdnn.runtime.init import init_parameters
from vdnn.runtime.kept import Kept
from vdnn.runtime.listener import Listener, StepInfo
from vdnn.runtime.loss_scale import LossScale
from vdnn.runtime.not_finite import RANGE, first_not_finite, owner
from vdnn.runtime.optim import learning_rate
from vdnn.runtime.planset import Key, slice_sizes
from vdnn.runtime.prepare import Prepared
from vdnn.runtime.rehearsal import predict, rehearse
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.step import STEP_DTYPE, new_step
from vdnn.units import format_ms


class Interrupted(VdnnError):
    """SIGINT or SIGTERM came; a checkpoint was written. `exit_code` is 128 + the signal's number."""

    def __init__(self, signum: int, checkpoint: Path):
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(f"interrupted by {name}; checkpoint written to '{checkpoint}': go on with --resume")


@dataclass(frozen=True, slots=True)
class Result:
    """How training ended. Accuracy and loss are of the test images; times in ms."""

    steps: int
    loss: float
    accuracy: float
    predicted_step_ms: float
    measured_step_ms: float
    used_bytes: int


class Trainer:
    """One run on an open backend.

    Args:
        prepared: see vdnn.runtime.prepare.
        folder: where metrics and checkpoints go.
        listener: told what happens.

    Attributes:
        observer: follows the plans of the next training steps, which then run uncaptured.
        kept: weights, momentum and statistics on the device.
        scaling: the loss scale in fp16; None in other precisions, whose gradients need none.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, listener: Listener):
        self.prepared, self.folder, self.listener = prepared, folder, listener
        self.config, self.backend = prepared.config, prepared.backend
        self.kept = Kept(prepared.plans, prepared.backend)
        self.observer: Observer | None = None
        self.scaling = LossScale() if self.config.precision == "fp16" else None
        self.step = 0
        self._parts_ms = prepared.predicted_step_ms()
        self.predicted_step_ms, self.predicted_from = self._parts_ms, prepared.backend.caps.cost_source
        self._executors: dict[Key, Executor] = {}
        self._signal: int | None = None
        self._times: list[float] = []

    # ---- state

    def start(self) -> None:
        """Take the memory, measure the step if it is short, draw the first weights."""
        self._open(init_parameters(self.prepared.graph, self.config.train.seed))
        self.folder.metrics.start()

    def resume(self, checkpoint: Path) -> None:
        """Take the memory and continue from `checkpoint` as if nothing had happened."""
        tensors, state = load(checkpoint)
        if state["network"] != self.prepared.graph.name:
            raise CheckpointError(
                f"checkpoint '{checkpoint}': expected state.network {self.prepared.graph.name}, got {state['network']}"
            )
        expected = {name: spec.shape for name, spec in self.kept.specs.items()}
        check_tensors(checkpoint, tensors, expected)
        self._open(tensors)
        self.step = state["step"]
        kept_scale = state.get("loss_scale")
        if self.scaling is not None and kept_scale is not None:
            self.scaling = LossScale.from_json(kept_scale)
        for path in set_aside(self.folder.checkpoints, self.step):
            self.listener.note(
                f"note: a checkpoint from after step {self.step}, where this run goes on, is now '{path}'"
            )
        self.folder.metrics.start(self.step)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Weights, momentum and statistics as they are now, by name: float32 on the host, in their specs' shapes."""
        return self.kept.read()

    def checkpoint(self, spare: int = 0) -> Path:
        """Write a checkpoint of the present state and leave `spare` more than are kept; NotFiniteError before a NaN."""
        tensors = self.tensors()
        self._check_finite(tensors)
        per_epoch = self.prepared.steps.per_epoch
        done = self.step % per_epoch
        state = State(
            network=self.prepared.graph.name,
            step=self.step,
            epoch=self.step // per_epoch,
            position=done * self.config.train.batch_size,
            seed=self.config.train.seed,
            schedule=self.config.schedule.model_dump(mode="json"),
            algorithms=dict(self.prepared.plans.algorithms()),
            config=self.config.model_dump(mode="json"),
            loss_scale=None if self.scaling is None else self.scaling.to_json(),
        )
        return save(self.folder.checkpoints, tensors, state, self.config.checkpoint.keep + spare)

    # ---- the run

    def run(self) -> Result:
        """Train to the end and evaluate; Interrupted after a signal, NotFiniteError at a NaN."""
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> Result:
        steps = self.prepared.steps
        tested: tuple[float, float] | None = None
        if self.step and self.step % steps.per_epoch == 0:
            tested = self._epoch_end(resumed=True)
        while self.step < steps.total:
            self._epoch()
            if self.step % steps.per_epoch == 0 or self.step == steps.total:
                tested = self._epoch_end()
        loss, accuracy = self._evaluate_and_tell() if tested is None else tested
        measured = float(np.median(self._times)) if self._times else float("nan")
        return Result(self.step, loss, accuracy, self.predicted_step_ms, measured, self.peak_bytes())

    def peak_bytes(self) -> int:
        """How much of the slab was used: up to the highest byte that a storage of any plan that ran has lain in."""
        return max(e.pool.top_bytes for e in self._executors.values())

    def use(self, key: Key, executor: Executor) -> None:
        """Run the plan of `key` by this executor from now on (one that does not capture, say)."""
        self._executors[key] = executor

    def _epoch(self) -> None:
        train, steps = self.config.train, self.prepared.steps
        split = self.prepared.source.train
        epoch, done = divmod(self.step, steps.per_epoch)
        full = min(train.batch_size, len(split))
        order = epoch_order(train.seed, epoch, len(split))
        waiting = perf_counter()
        epoch_batches = batches(split, order, done * train.batch_size, train.batch_size, train.drop_last)
        for (images, labels), later in with_next(epoch_batches):
            started = perf_counter()
            lr = learning_rate(self.config.schedule, self.config.optimizer.lr, self.step, steps.per_epoch, steps.total)
            loss, accuracy = self.train_step(images, labels, lr, later and later[0])
            ended = perf_counter()
            self.step += 1
            if len(images) == full:
                self._times.append((ended - started) * 1000)
                self._compare()
            waited = (started - waiting) * 1000
            self.listener.step(
                StepInfo(
                    self.step,
                    steps.total,
                    epoch,
                    loss,
                    accuracy,
                    lr,
                    len(images),
                    (ended - started) * 1000,
                    waited,
                    *((self.scaling.scale, self.scaling.skipped) if self.scaling else ()),
                )
            )
            self._stop_if_asked()
            if self.step == steps.total:
                return
            waiting = perf_counter()

    def _compare(self) -> None:
        """Tell how the first steps compare with their prediction, once that is known."""
        found = compare(self.prepared, self._parts_ms, self._times) if self.observer is None else None
        if found is not None:
            self.listener.note(found.words())
            self.folder.write_json(CALIBRATION, found.to_json())

    def _epoch_end(self, resumed: bool = False) -> tuple[float, float] | None:
        """Checkpoint first, then evaluate, if due, so that a kill during evaluation loses no training."""
        steps = self.prepared.steps
        epoch, last = self.step // steps.per_epoch, self.step == steps.total
        due = last or _due(self.config.evaluate.every_epochs, epoch)
        written: Path | None = None
        if not resumed and (last or _due(self.config.checkpoint.every_epochs, epoch)):
            written = self.checkpoint(spare=int(due))
        if not due or (resumed and self.folder.metrics.has(self.step, "test")):
            return None
        try:
            result = self._evaluate_and_tell()
        except NotFiniteError as error:  # finite weights, but what cannot be evaluated is not to go on from
            if written is None:
                raise
            aside = set_aside(self.folder.checkpoints, self.step - 1)
            names = " and ".join(f"'{path}'" for path in aside)
            raise NotFiniteError(f"{error}. That of step {self.step} was set aside as {names}") from error
        if written:
            prune(self.folder.checkpoints, self.config.checkpoint.keep, written)
        return result

    def train_step(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int32],
        lr: float,
        following: NDArray[np.uint8] | None = None,
    ) -> tuple[float, float]:
        """One step over all of its parts; mean loss and share of right first choices, NotFiniteError at a NaN.

        In fp16 a gradient that is not finite only makes this step change no weight, unless the loss scale is exhausted.

        Args:
            images: (N, C, H, W) uint8, as many as in a full step or in an epoch's last one.
            labels: (N,) int32. lr: rate of this step.
            following: images of the next step if they are known; uploaded beside this one if no array can write them.
        """
        start, losses, correct = 0, 0.0, 0
        scale = 1.0 if self.scaling is None else self.scaling.scale
        for key, part_images, ahead in cut_step(self.prepared.steps, images, following):
            end = start + key[1]
            record = new_step(lr, scale / len(images), self.step, self.config.train.seed, start, unscale=1 / scale)
            feeds: dict[str, NDArray[Any]] = {IMAGES: part_images, LABELS: labels[start:end], STEP: record}
            executor = self.executor(key)
            executor.observer = self.observer
            fetched = executor.run(feeds, {} if ahead is None else {IMAGES: ahead})
            part = float(np.sum(fetched[executor.program.loss], dtype=np.float64))
            finite = not fetched[STEP].view(STEP_DTYPE)["not_finite"][0]
            if end == len(images) and self.scaling is not None and isfinite(part):
                self.scaling.count(finite)  # the last part has updated, or skipped, all weights
                finite = finite or not self.scaling.exhausted
            if not isfinite(part) or not finite:
                raise self._diagnose(executor, feeds, f"step {self.step}", f"{lr:g}", self.step)
            losses += part
            correct += int(np.sum(fetched[executor.program.correct]))
            start = end
        return losses / len(images), correct / len(images)

    def evaluate(self) -> tuple[float, float]:
        """Mean loss per image and top-1 accuracy from 0 to 1 over all test images, the last partial batch included.

        NotFiniteError at a NaN; Interrupted after a signal, once a checkpoint is written. In fp16 maps may be beyond
        its range: then the loss is NaN or infinite, the images concerned count as wrong, and the listener is told why.
        """
        split, losses, correct, told = self.prepared.source.test, 0.0, 0, False
        sizes = slice_sizes(len(split), self.prepared.steps.evaluation[0][1])
        start = 0
        for size in sizes:
            indices = np.arange(start, start + size)
            executor = self.executor(("eval", size))
            feeds: dict[str, NDArray[Any]] = {
                IMAGES: np.ascontiguousarray(split.images(indices)),
                LABELS: np.ascontiguousarray(split.labels(indices)),
                STEP: new_step(0.0, 1.0, self.step, self.config.train.seed),
            }
            fetched = executor.run(feeds)
            each = fetched[executor.program.loss]
            part = float(np.sum(each, dtype=np.float64))
            correct += int(np.sum(fetched[executor.program.correct], where=np.isfinite(each)))
            if not isfinite(part) and not told:
                moment = f"evaluation after step {self.step}"
                if self.scaling is None:
                    raise self._diagnose(executor, feeds, moment, self._rate_words(), self.step - 1)
                place = first_not_finite(executor, feeds, self.prepared.graph)
                left = "; training goes on" if self.step < self.prepared.steps.total else "; the weights are finite"
                self.listener.note(f"note: {moment}: NaN or infinity {place}: {RANGE}{left}")
                told = True
            losses += part
            start += size
            self._stop_if_asked()
        return losses / len(split), correct / len(split)

    def _evaluate_and_tell(self) -> tuple[float, float]:
        images = len(self.prepared.source.test)
        expected_ms = evaluation_ms(self.prepared) * self.predicted_step_ms / self._parts_ms
        if expected_ms > SILENT_MS:
            self.listener.note(f"evaluating {images:,} images: about {format_ms(expected_ms)}")
        loss, accuracy = self.evaluate()
        epoch = -(-self.step // self.prepared.steps.per_epoch)  # that in which training is, from 1
        self.folder.metrics.write(
            step=self.step, epoch=epoch, split="test", loss=f"{loss:.6f}", accuracy=f"{accuracy:.6f}", images=images
        )
        self.listener.evaluated(self.step, epoch, loss, accuracy)
        return loss, accuracy

    # ---- signals and NaN

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self._signal = number
        with suppress(RuntimeError):  # in the middle of a line that is being printed no other can be
            self.listener.note(
                f"{signal.Signals(number).name} received: finishing this step, then writing a checkpoint"
            )

    def _stop_if_asked(self) -> None:
        if self._signal is not None:
            raise Interrupted(self._signal, self.checkpoint())

    def _diagnose(
        self, executor: Executor, feeds: Mapping[str, NDArray[Any]], moment: str, rate: str, newest: int
    ) -> NotFiniteError:
        place = first_not_finite(executor, feeds, self.prepared.graph)
        return self._not_finite(f"{moment}: NaN or infinity {place}", rate, newest)

    def _check_finite(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """NotFiniteError if an update has overflowed: such weights are never written."""
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                layer = owner(self.prepared.graph, name)
                what = f"update of step {self.step - 1}: NaN or infinity in tensor '{name}' (layer '{layer}')"
                raise self._not_finite(what, self._rate_words(), self.step - 1)

    def _rate_words(self) -> str:
        steps, last = self.prepared.steps, max(0, self.step - 1)
        base = self.config.optimizer.lr
        return f"{learning_rate(self.config.schedule, base, last, steps.per_epoch, steps.total):g}"

    def _not_finite(self, what: str, rate: str, newest: int) -> NotFiniteError:
        """The error; a checkpoint up to step `newest` is from before the fault."""
        kept = latest(self.folder.checkpoints, newest)
        saved = f"The last checkpoint, '{kept}', is from before it" if kept else "No checkpoint was written before it"
        small = f"; or maps are {RANGE}" if self.scaling is not None else ""
        return NotFiniteError(f"{what}; learning rate {rate}: lower it (--lr) or add a warm-up{small}. {saved}")

    # ---- memory

    def _open(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take the memory, see what runs need of it and of time, and leave `tensors` in it."""
        plans, backend = self.prepared.plans, self.backend
        backend.open(plans.slab_bytes, plans.host_bytes, plans.stage_bytes)
        self.kept.write(tensors)  # what is tried now must not read what nobody wrote
        if backend.caps.reserve_bytes:
            rehearse(self.prepared, self.executor)
        self.predicted_step_ms, self.predicted_from = predict(self.prepared, self.listener.note, self.train_step)
        self.kept.write(tensors)  # which measurements have changed
        if self.scaling is not None:
            self.scaling = LossScale()

    def executor(self, key: Key) -> Executor:
        """What runs the plan of `key`, captured after its first run where the backend can."""
        if key not in self._executors:
            planned = self.prepared.plans[key]
            self._executors[key] = Executor(self.backend, planned.plan, planned.program, capture=True)
        return self._executors[key]


def _due(every: int, epoch: int) -> bool:
    return bool(every) and epoch % every == 0
