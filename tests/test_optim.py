"""Learning rates against numbers worked out by hand."""

from __future__ import annotations

from math import cos, pi

import pytest

from vdnn.runtime.config import ScheduleConfig, TrainConfig
from vdnn.runtime.optim import SCHEDULES, learning_rate, total_steps


def rates(steps, per_epoch=10, total=100, base=1.0, **schedule) -> list[float]:
    config = ScheduleConfig(**schedule)
    return [learning_rate(config, base, step, per_epoch, total) for step in steps]


def test_constant():
    assert rates([0, 57, 99, 1000], base=0.3, name="constant") == [0.3] * 4


def test_step_drops_every_so_many_epochs():
    got = rates([0, 19, 20, 39, 40, 99], name="step", step_epochs=2, gamma=0.5)
    assert got == [1, 1, 0.5, 0.5, 0.25, 0.0625]


def test_multistep_drops_at_its_milestones():
    got = rates([0, 29, 30, 44, 45, 99], name="multistep", milestones=[3, 4.5], gamma=0.1)
    assert got == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01], rel=1e-15)


def test_cosine_falls_from_the_base_to_the_least_rate():
    got = rates([0, 25, 50, 75, 100, 120], base=0.5, name="cosine", min_lr=0.1)
    root = 2**-0.5
    assert got == pytest.approx([0.5, 0.3 + 0.2 * root, 0.3, 0.3 - 0.2 * root, 0.1, 0.1], rel=1e-14)


def test_poly_falls_with_its_power():
    assert rates([0, 50, 75, 100, 500], name="poly", power=2) == [1, 0.25, 0.0625, 0, 0]
    assert rates([0, 50, 100], name="poly", power=1, min_lr=0.2) == pytest.approx([1, 0.6, 0.2])
    assert rates([36], name="poly", power=0.5) == pytest.approx([0.8])


def test_warm_up_rises_in_equal_parts_from_the_first_step():
    assert rates(range(5), per_epoch=4, base=0.8, warmup_epochs=1) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_decay_counts_from_the_end_of_the_warm_up_but_epochs_from_the_start():
    got = rates([9, 10, 55, 99], name="cosine", warmup_epochs=1)
    assert got == pytest.approx([1, 1, 0.5, (1 + cos(pi * 89 / 90)) / 2])
    assert rates([9, 10, 20], name="step", step_epochs=2, gamma=0.5, warmup_epochs=1) == [1, 1, 0.5]
    assert rates([10, 55, 100], name="poly", warmup_epochs=1) == [1, 0.5, 0]


def test_a_fraction_of_an_epoch_warms_up_whole_steps():
    assert rates(range(4), warmup_epochs=0.25, per_epoch=8, base=1) == [0.5, 1, 1, 1]


def test_a_warm_up_longer_than_the_run():
    assert rates([0, 99, 150, 200, 500], name="cosine", warmup_epochs=20) == pytest.approx([0.005, 0.5, 0.755, 1, 0])


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_schedule_leaves_the_range_between_zero_and_base(name):
    milestones = [1, 7] if name == "multistep" else []
    for warmup in (0, 1, 3.3):
        got = rates(range(130), name=name, warmup_epochs=warmup, milestones=milestones, min_lr=0.01, step_epochs=3)
        assert all(0 < rate <= 1 for rate in got)
        after = got[round(10 * warmup) :]
        assert after == sorted(after, reverse=True)


def test_a_whole_run_ends_at_epochs_or_iterations_whichever_is_first():
    assert total_steps(TrainConfig(epochs=12), 63) == 756
    assert total_steps(TrainConfig(epochs=12, iterations=100), 63) == 100
    assert total_steps(TrainConfig(epochs=1, iterations=100), 63) == 63
    assert total_steps(TrainConfig(epochs=None, iterations=100), 63) == 100
