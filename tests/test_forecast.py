"""How long a run will take: evaluations counted as the trainer makes them, times added by hand."""

from __future__ import annotations

import sys

import pytest

from vdnn.cli.display import Display
from vdnn.memory.clock import simulate
from vdnn.runtime import rehearsal, trainer
from vdnn.runtime.config import load_config
from vdnn.runtime.forecast import evaluation_count, evaluation_ms, run_ms
from vdnn.runtime.prepare import Steps, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

SECTIONS = ("device=cpu", "data={source: synthetic, train_images: 20, test_images: 11}", "evaluate.batch_size=4")


@pytest.mark.parametrize(
    ("per_epoch", "total", "every", "count"),
    [(5, 10, 1, 2), (5, 7, 1, 2), (5, 3, 1, 1), (5, 25, 2, 3), (5, 20, 2, 2), (5, 20, 0, 1), (5, 20, 9, 1)],
)
def test_evaluations_are_those_of_epochs_and_of_the_end(per_epoch, total, every, count):
    assert evaluation_count(Steps(per_epoch, total, [], [], []), every) == count


def test_a_run_is_its_steps_and_its_evaluations():
    prepared = prepare(load_config("lenet", [*SECTIONS, "train={epochs: 3, batch_size: 10}"]))
    parts = {key[1]: simulate(p.plan, p.program, p.costs).total_ms for key, p in prepared.plans.plans.items()}
    evaluation = 2 * parts[4] + parts[3]
    assert evaluation_ms(prepared) == pytest.approx(evaluation)
    assert run_ms(prepared, parts[10]) == pytest.approx(6 * parts[10] + 3 * evaluation)
    assert run_ms(prepared, 2 * parts[10]) == pytest.approx(2 * (6 * parts[10] + 3 * evaluation))


@pytest.mark.parametrize("silent_ms", [0.0, 60_000.0])
def test_what_takes_long_in_silence_is_announced(tmp_path, monkeypatch, capsys, silent_ms):
    for module in (rehearsal, trainer):
        monkeypatch.setattr(module, "SILENT_MS", silent_ms)
    prepared = prepare(load_config("lenet", [*SECTIONS, "train={iterations: 1, batch_size: 10}"]))
    folder = RunFolder.create(str(tmp_path / "run"))
    made = Trainer(prepared, folder, Display(sys.stdout, folder.metrics, prepared.steps.per_epoch))
    made.start()
    made.run()
    made.backend.close()
    lines = capsys.readouterr().out.splitlines()
    expected = ["measuring 9 steps on blank data: about ", "evaluating 11 images: about "] if silent_ms == 0 else []
    assert [line[: line.index("about") + 6] for line in lines if "about" in line] == expected
