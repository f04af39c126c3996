"""The learning rate of a step: a pure function of the step's number, so that a resumed run needs no state for it.

    learning_rate(config.schedule, base_lr=0.05, step=750, steps_per_epoch=63, total_steps=756)

The update itself is an op of the Program (see vdnn.layers.update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi

from vdnn.runtime.config import ScheduleConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a step lies: the share (0..1) of the way from the end of the warm-up to the end, and the epoch begun."""

    share: float
    epoch: float


def total_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Steps of a whole run: `train.epochs` or `train.iterations`, whichever ends first."""
    ends = (train.epochs * steps_per_epoch if train.epochs is not None else None, train.iterations)
    return min(end for end in ends if end is not None)


def learning_rate(schedule: ScheduleConfig, base_lr: float, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 0.

    While the warm-up lasts (warmup_epochs * steps_per_epoch steps, rounded) the rate rises in equal parts:
    base_lr * (step + 1) / warm-up steps. After it the schedule holds, with t = the share of the remaining steps done:
        constant    base_lr
        step        base_lr * gamma ^ (epoch // step_epochs)
        multistep   base_lr * gamma ^ (milestones reached)
        cosine      min_lr + (base_lr - min_lr) * (1 + cos(pi * t)) / 2      (Loshchilov and Hutter 2017)
        poly        min_lr + (base_lr - min_lr) * (1 - t) ^ power
    Epochs count from the start of the run, warm-up included.
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return base_lr * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return SCHEDULES[schedule.name](schedule, base_lr, Moment(share, step / steps_per_epoch))


def _constant(schedule: ScheduleConfig, base_lr: float, at: Moment) -> float:
    return base_lr


def _step(schedule: ScheduleConfig, base_lr: float, at: Moment) -> float:
    return float(base_lr * schedule.gamma ** int(at.epoch // schedule.step_epochs))


def _multistep(schedule: ScheduleConfig, base_lr: float, at: Moment) -> float:
    return float(base_lr * schedule.gamma ** sum(at.epoch >= milestone for milestone in schedule.milestones))


def _cosine(schedule: ScheduleConfig, base_lr: float, at: Moment) -> float:
    return schedule.min_lr + (base_lr - schedule.min_lr) * (1 + cos(pi * at.share)) / 2


def _poly(schedule: ScheduleConfig, base_lr: float, at: Moment) -> float:
    return float(schedule.min_lr + (base_lr - schedule.min_lr) * (1 - at.share) ** schedule.power)


SCHEDULES: Mapping[str, Callable[[ScheduleConfig, float, Moment], float]] = {
    "constant": _constant,
    "step": _step,
    "multistep": _multistep,
    "cosine": _cosine,
    "poly": _poly,
}
