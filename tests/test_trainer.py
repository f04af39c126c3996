"""Training in this process, against LeNet in plain NumPy: steps, accumulation, evaluation, order, rates, signals."""

from __future__ import annotations

import os
import signal
from math import cos, pi

import numpy as np
import pytest
from lenet_reference import Reference

from vdnn.errors import NotFiniteError
from vdnn.layers.lower import lower
from vdnn.runtime import cut, planset, rehearsal
from vdnn.runtime import trainer as trainer_module
from vdnn.runtime.checkpoint import latest, load
from vdnn.runtime.config import load_config
from vdnn.runtime.executor import Executor
from vdnn.runtime.init import init_parameters
from vdnn.runtime.prepare import prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.step import STEP_DTYPE
from vdnn.runtime.trainer import Interrupted, Trainer

IMAGES, TESTS = 31, 11
SECTIONS = (
    "network={name: lenet, dropout: 0.0}",
    f"data={{source: synthetic, train_images: {IMAGES}, test_images: {TESTS}}}",
    "train={epochs: 2, batch_size: 7}",
    "optimizer={lr: 0.02, weight_decay: 0.01}",
    "schedule={name: cosine, warmup_epochs: 0.4}",
    "memory={limit: 64MiB}",
    "evaluate={batch_size: 4}",
    "device=cpu",
)
"""Steps of 7, 7, 7, 7 and 3 images, ten in all; evaluation in 4, 4 and 3."""


class Silent:
    """A listener that keeps what it hears; `on_step` is called at every step."""

    def __init__(self, on_step=lambda info: None):
        self.on_step, self.steps, self.tests = on_step, [], []

    def note(self, text):
        pass

    def step(self, info):
        self.steps.append(info)
        self.on_step(info)

    def evaluated(self, step, epoch, loss, accuracy):
        self.tests.append((step, epoch, loss, accuracy))


@pytest.fixture
def watch(monkeypatch):
    """Every run of every plan: mode, copies of its feeds, and masks of what dropout let through."""
    runs = []

    class Watched(Executor):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **{**options, "inspect": self.look})

        def look(self, op, arrays):
            if op.kind == "dropout.forward":
                runs[-1]["kept"] = arrays["y"] != 0

        def run(self, feeds, ahead=None):
            runs.append({"mode": self.program.mode, **{name: np.copy(value) for name, value in feeds.items()}})
            runs[-1]["step"] = runs[-1]["step"].view(STEP_DTYPE)[0]
            return super().run(feeds, ahead)

    monkeypatch.setattr(trainer_module, "Executor", Watched)
    return runs


def make(folder, *overrides, listener=None, checkpoint=None):
    """A trainer that has started, or goes on from `checkpoint`."""
    prepared = prepare(load_config("lenet", [*SECTIONS, *overrides]))
    made = Trainer(prepared, RunFolder(folder), listener or Silent())
    folder.mkdir(exist_ok=True)
    if checkpoint is None:
        made.start()
    else:
        made.resume(checkpoint)
    return made


def trained(folder, *overrides, **options):
    """Trainer, result and tensors after a whole run."""
    made = make(folder, *overrides, **options)
    result = made.run()
    tensors = made.tensors()
    made.backend.close()
    return made, result, tensors


def normalised(source, images):
    mean, std = (np.reshape(value, (-1, 1, 1)) for value in (source.mean, source.std))
    return (images / 255 - mean) / std


def rate(step, warmup=2, total=10, base=0.02):
    """Warm-up of 0.4 * 5 steps, then half a cosine."""
    if step < warmup:
        return base * (step + 1) / warmup
    return base * (1 + cos(pi * (step - warmup) / (total - warmup))) / 2


# ---- steps


@pytest.mark.parametrize("policy", ["none", "all"])
def test_ten_steps_are_those_of_plain_numpy(tmp_path, watch, policy):
    listener = Silent()
    made, result, tensors = trained(tmp_path, f"memory.policy={policy}", listener=listener)
    reference = Reference(init_parameters(made.prepared.graph, 0))
    steps = [run for run in watch if run["mode"] == "train"]
    assert result.steps == len(steps) == 10
    for number, run in enumerate(steps):
        x = normalised(made.prepared.source, run["images"])
        loss = reference.step(x, run["labels"], rate(number), momentum=0.9, decay=0.01)
        assert listener.steps[number].loss == pytest.approx(loss, rel=2e-5), number
    for name, value in reference.w.items():
        assert np.abs(tensors[name] - value).max() < 2e-5 * np.abs(value).max() + 1e-7, name
        velocity = reference.v[name]
        assert np.abs(tensors[f"{name}.momentum"] - velocity).max() < 2e-4 * np.abs(velocity).max() + 1e-7, name


def test_evaluation_is_exact_over_the_whole_set(tmp_path, watch):
    listener = Silent()
    made, result, tensors = trained(tmp_path, listener=listener)
    test = made.prepared.source.test
    x = normalised(made.prepared.source, test.images(np.arange(TESTS)))
    reference = Reference({name: value for name, value in tensors.items() if not name.endswith("momentum")})
    losses, right = reference.evaluate(x, test.labels(np.arange(TESTS)))
    assert result.loss == pytest.approx(losses / TESTS, rel=1e-5)
    assert result.accuracy == right / TESTS
    assert [(step, epoch) for step, epoch, _, _ in listener.tests] == [(5, 1), (10, 2)]
    assert listener.tests[-1][2:] == (result.loss, result.accuracy)
    sizes = [len(run["images"]) for run in watch if run["mode"] == "eval"]
    assert sizes == [4, 4, 3, 4, 4, 3]
    seen = np.concatenate([run["images"] for run in watch if run["mode"] == "eval"][:3])
    assert np.array_equal(seen, test.images(np.arange(TESTS)))


def test_evaluation_changes_nothing_that_training_needs(tmp_path):
    often = trained(tmp_path / "a", "evaluate.every_epochs=1")[2]
    never = trained(tmp_path / "b", "evaluate.every_epochs=0")[2]
    assert all(np.array_equal(often[name], never[name]) for name in often)


# ---- accumulation


def test_slices_add_up_to_the_whole_batch(tmp_path, watch):
    whole = trained(tmp_path / "a", "network.dropout=0.5", "train.iterations=5")[2]
    once = list(watch)
    watch.clear()
    listener = Silent()
    sliced = trained(
        tmp_path / "b", "network.dropout=0.5", "train.iterations=5", "train.accumulate=3", listener=listener
    )
    assert [info.images for info in listener.steps] == [7, 7, 7, 7, 3]
    for name, value in whole.items():
        scale = np.abs(value).max()
        assert np.abs(sliced[2][name] - value).max() <= 1e-5 * scale, name
    parts = [run for run in watch if run["mode"] in ("first", "middle", "last", "train")]
    # 7 images in slices of 3; the last 3 of the epoch are one slice
    assert [len(run["images"]) for run in parts] == [3, 3, 1] * 4 + [3]
    assert [run["mode"] for run in parts] == ["first", "middle", "last"] * 4 + ["train"]
    assert [int(run["step"]["sample"]) for run in parts] == [0, 3, 6] * 4 + [0]
    assert [int(run["step"]["step"]) for run in parts] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4]
    assert [float(run["step"]["gradient_scale"]) for run in parts] == pytest.approx([1 / 7] * 12 + [1 / 3])
    for number, run in enumerate(run for run in once if run["mode"] == "train"):
        same = [part for part in parts if part["step"]["step"] == number]
        for key in ("images", "labels", "kept"):
            assert np.array_equal(np.concatenate([part[key] for part in same]), run[key]), (number, key)
        assert 0.1 < run["kept"].mean() < 0.45  # half of what ReLU lets through


def test_dropout_differs_from_step_to_step_and_from_image_to_image(tmp_path, watch):
    trained(tmp_path, "network.dropout=0.5", "train.iterations=2", "optimizer.lr=1e-12", "schedule={name: constant}")
    first, second = (run["kept"] for run in watch if run["mode"] == "train")
    assert (first != second).mean() > 0.1
    assert len({row.tobytes() for row in first}) == len(first)


# ---- images fed ahead


@pytest.fixture
def uploads(monkeypatch):
    """Numbers of images that training runs waited for, one number an upload."""
    counts, upload = [], Executor._upload

    def counted(self, names, feeds):
        counts.extend(len(feeds[name]) for name in names)
        upload(self, names, feeds)

    monkeypatch.setattr(Executor, "_upload", counted)
    return counts


UPLOADS = {
    # an epoch's first step, and its last, which is smaller
    ("train.accumulate=1",): [7, 3] * 2,
    ("train.accumulate=1", "train.drop_last=true"): [7] * 2,
    # slices of 4 and 3, but the last step is one of 3, as many as in the slice before
    ("train.accumulate=2",): [4, 3] * 4 * 2,
    # slices of 3, 3 and 1
    ("train.accumulate=3",): [*([3, 1] * 4), 3] * 2,
}


@pytest.mark.parametrize("options", UPLOADS)
def test_feeding_ahead_saves_uploads_and_changes_no_bit(tmp_path, monkeypatch, uploads, options):
    fixed = ("network.dropout=0.5", "evaluate.every_epochs=1", *options)
    monkeypatch.setattr(rehearsal, "MEASURE_BELOW_MS", 0.0)
    _, result, tensors = trained(tmp_path / "a", *fixed)
    assert uploads == UPLOADS[options]
    uploads.clear()
    with monkeypatch.context() as patch:  # every part uploads its own
        patch.setattr(cut, "is_frozen", lambda value: False)
        unknown = trained(tmp_path / "b", *fixed)
    assert sum(uploads) == 2 * (28 if "train.drop_last=true" in options else 31)
    uploads.clear()
    with monkeypatch.context() as patch:  # images belong to their own run
        patch.setattr(planset, "lower", lambda *given, ahead, **named: lower(*given, **named))
        plain = trained(tmp_path / "c", *fixed)
    assert uploads == []
    for _, other, found in (unknown, plain):
        assert (other.loss, other.accuracy) == (result.loss, result.accuracy)
        assert all(np.array_equal(tensors[name], found[name]) for name in tensors)


@pytest.mark.parametrize("at", [2, 4, 5])
def test_feeding_ahead_goes_on_after_a_kill_as_if_nothing_had_happened(tmp_path, uploads, at):
    _, whole, expected = trained(tmp_path / "a")
    killer = Silent(lambda info: os.kill(os.getpid(), signal.SIGTERM) if info.step == at else None)
    made = make(tmp_path / "b", listener=killer)
    with pytest.raises(Interrupted):
        made.run()
    made.backend.close()
    uploads.clear()
    checkpoint = latest(tmp_path / "b" / "checkpoints")
    _, result, tensors = trained(tmp_path / "b", checkpoint=checkpoint)
    rehearsed = uploads[: -len(AFTER_KILL[at])]
    assert uploads[len(rehearsed) :] == AFTER_KILL[at]
    assert (result.loss, result.accuracy) == (whole.loss, whole.accuracy)
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)


AFTER_KILL = {2: [7, 3, 7, 3], 4: [3, 7, 3], 5: [7, 3]}
"""Uploads that the steps after a kill wait for."""


# ---- order and rates


def test_every_epoch_visits_every_image_once_in_a_new_order(tmp_path, watch):
    made, _, _ = trained(tmp_path)
    split = made.prepared.source.train
    name = {image.tobytes(): i for i, image in enumerate(split.images(np.arange(IMAGES)))}
    assert len(name) == IMAGES
    steps = [run for run in watch if run["mode"] == "train"]
    assert [len(run["images"]) for run in steps] == [7, 7, 7, 7, 3] * 2
    orders = [[name[image.tobytes()] for run in steps[i : i + 5] for image in run["images"]] for i in (0, 5)]
    assert [sorted(order) for order in orders] == [list(range(IMAGES))] * 2
    assert orders[0] != orders[1]
    assert list(range(IMAGES)) not in orders
    labels = np.concatenate([run["labels"] for run in steps[:5]])
    assert np.array_equal(labels, split.labels(np.array(orders[0])))


def test_the_last_batch_is_dropped_if_asked(tmp_path, watch):
    _, result, _ = trained(tmp_path, "train.drop_last=true")
    assert result.steps == 8
    assert [len(run["images"]) for run in watch if run["mode"] == "train"] == [7] * 8


def test_every_step_has_the_rate_of_its_schedule(tmp_path, watch):
    listener = Silent()
    trained(tmp_path, listener=listener)
    expected = [rate(step) for step in range(10)]
    assert [float(run["step"]["lr"]) for run in watch if run["mode"] == "train"] == pytest.approx(expected)
    assert [info.lr for info in listener.steps] == pytest.approx(expected)


def test_a_run_ends_at_iterations_in_the_middle_of_an_epoch(tmp_path):
    listener = Silent()
    made, result, _ = trained(tmp_path, "train.iterations=7", listener=listener)
    assert result.steps == 7
    assert [step for step, *_ in listener.tests] == [5, 7]
    assert latest(made.folder.checkpoints).name == "step-00000007"


# ---- prediction and memory


def test_a_short_step_is_measured_before_training_and_a_long_one_is_not(tmp_path, monkeypatch):
    made, result, tensors = trained(tmp_path / "a")
    assert made.predicted_from == "measured on this cpu"
    assert result.predicted_step_ms == made.predicted_step_ms > 0
    assert result.measured_step_ms > 0
    monkeypatch.setattr(rehearsal, "MEASURE_BELOW_MS", 0.0)
    other, result, same = trained(tmp_path / "b")
    assert other.predicted_from == "estimated from nominal CPU rates"
    assert result.predicted_step_ms == other.prepared.predicted_step_ms()
    assert all(np.array_equal(tensors[name], same[name]) for name in tensors)


@pytest.mark.parametrize("policy", ["base", "none", "conv", "all"])
def test_as_many_bytes_are_used_as_planned(tmp_path, policy):
    made, result, _ = trained(tmp_path, f"memory.policy={policy}", "train.iterations=1")
    assert result.used_bytes == made.prepared.plans.slab_bytes <= 64 * 2**20
    whole = made.prepared.plans["train", 7].plan
    assert result.used_bytes > whole.persistent_bytes


# ---- interruption and NaN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [3, 5, 10])
def test_a_signal_stops_after_its_step_and_resume_gives_the_same_bits(tmp_path, number, at):
    slices = ("network.dropout=0.5", "train.accumulate=2")
    _, whole, expected = trained(tmp_path / "a", *slices)
    before = signal.getsignal(number)
    interrupter = Silent(lambda info: os.kill(os.getpid(), number) if info.step == at else None)
    made = make(tmp_path / "b", *slices, listener=interrupter)
    with pytest.raises(Interrupted, match=signal.Signals(number).name) as caught:
        made.run()
    made.backend.close()
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before
    assert [info.step for info in interrupter.steps] == list(range(1, at + 1))
    checkpoint = latest(tmp_path / "b" / "checkpoints")
    state = load(checkpoint)[1]
    assert (state["step"], state["epoch"], state["position"]) == (at, at // 5, at % 5 * 7)
    listener = Silent()
    _, result, tensors = trained(tmp_path / "b", *slices, listener=listener, checkpoint=checkpoint)
    assert [info.step for info in listener.steps] == list(range(at + 1, 11))
    assert (result.loss, result.accuracy) == (whole.loss, whole.accuracy)
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)


def test_a_signal_during_evaluation_loses_nothing(tmp_path, monkeypatch):
    _, whole, expected = trained(tmp_path / "a")
    evaluate = Trainer.evaluate

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", interrupted)
    made = make(tmp_path / "b")
    with pytest.raises(Interrupted):
        made.run()
    made.backend.close()
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    listener = Silent()
    checkpoint = latest(tmp_path / "b" / "checkpoints")
    _, result, tensors = trained(tmp_path / "b", listener=listener, checkpoint=checkpoint)
    assert [step for step, *_ in listener.tests] == [5, 10]
    assert result.loss == whole.loss
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("slices", [1, 3])
def test_what_is_not_finite_never_reaches_the_weights(tmp_path, slices):
    made = make(tmp_path, "optimizer.lr=1e6", "schedule={name: constant}", f"train.accumulate={slices}")
    with pytest.raises(NotFiniteError, match=r"step \d: NaN or infinity first in layer '\w+' \(op '.*'\)"):
        made.run()
    tensors = made.tensors()
    made.backend.close()
    assert 0 < made.step < 10
    assert all(np.isfinite(value).all() for value in tensors.values())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("name", "layer"), [("conv1.weight", "conv1"), ("fc4.bias.momentum", "fc4")])
def test_an_update_that_overflowed_is_never_written(tmp_path, name, layer):
    made = make(tmp_path)
    made.step = 3
    good = made.checkpoint()
    tensors = made.tensors()
    tensors[name].flat[-1] = np.inf
    made.kept.write(tensors)
    made.step = 4
    words = rf"update of step 3: NaN or infinity in tensor '{name}' \(layer '{layer}'\).*'{good}', is from before it"
    with pytest.raises(NotFiniteError, match=words):
        made.checkpoint()
    made.backend.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
