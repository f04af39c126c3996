"""The folder of a run: names, metrics after a resume, files written whole; each against what should lie on disk."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import numpy as np
import pytest

from vdnn.errors import CheckpointError, ConfigError, VdnnError
from vdnn.runtime.checkpoint import save
from vdnn.runtime.files import write_file
from vdnn.runtime.run_folder import COLUMNS, Metrics, RunFolder, belongs

HEADER = "step,epoch,split,loss,accuracy,lr,images,images_per_s,loss_scale,skipped_steps\n"


def test_metrics_are_rows_under_a_header(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.start()
    metrics.write(step=5, epoch=1, split="train", loss="0.5", accuracy="0.25", lr="0.1", images=20, images_per_s="10.0")
    metrics.write(step=5, epoch=1, split="test", loss="0.75", accuracy="1")
    assert ",".join(COLUMNS) + "\n" == HEADER
    assert metrics.path.read_text() == HEADER + "5,1,train,0.5,0.25,0.1,20,10.0,,\n5,1,test,0.75,1,,,,,\n"
    assert metrics.has(5, "test")
    assert not metrics.has(6, "test")


def test_a_row_is_written_once(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.start()
    for loss in (1, 2):
        metrics.write(step=5, epoch=1, split="test", loss=loss)
    assert metrics.path.read_text() == HEADER + "5,1,test,1,,,,,,\n"


@pytest.mark.parametrize(
    ("resumed", "kept"), [(10, "5,1,test,1,,,,,,\n10,2,test,2,,,,,,\n"), (9, "5,1,test,1,,,,,,\n"), (0, "")]
)
def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path, resumed, kept):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "5,1,test,1,,,,,,\n10,2,test,2,,,,,,\n15,3,test,3,,,,,,\n")
    metrics = Metrics(path)
    metrics.start(resumed)
    assert path.read_text() == HEADER + kept
    metrics.write(step=15, epoch=3, split="test", loss=9)
    assert path.read_text() == HEADER + kept + "15,3,test,9,,,,,,\n"


@pytest.mark.parametrize("cut", ["1", "15", "15,3,te", "15,3,test,0.1"])
def test_a_row_that_a_kill_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "10,2,test,2,,,,,,\n" + cut)
    Metrics(path).start(20)
    assert path.read_text() == HEADER + "10,2,test,2,,,,,,\n"


def test_rows_of_an_earlier_run_are_found_and_left_alone(tmp_path):
    path = tmp_path / "metrics.csv"
    assert not Metrics(path).on_disk(10, "test")
    path.write_text(text := HEADER + "10,2,train,2,,,,,,\n10,2,test,2,,,,,,\n15,3,test,0")
    assert Metrics(path).on_disk(10, "test")
    assert not Metrics(path).on_disk(15, "test")  # cut off by a kill
    assert path.read_text() == text


def test_rows_without_a_column_of_today_are_kept(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,epoch,split,loss,accuracy,lr,images_per_s\n5,1,train,2,1,0.1,9.5\n")
    Metrics(path).start(5)
    assert path.read_text() == HEADER + "5,1,train,2,1,0.1,,9.5,,\n"


ODD = [
    "x,1,test,1",
    "²,1,test,1",
    "-1,1,test,1",
    "9" * 30 + ",1,test,1",
    "1e3,1,test,1",
    "5",
    "5,1,tset",
    "\0,\0",
    "\xff\xfe",
]


@pytest.mark.parametrize("row", [*ODD, '5,1,test,"' + "x" * 200_000])
def test_rows_that_make_no_sense_are_dropped(tmp_path, row):
    path = tmp_path / "metrics.csv"
    path.write_bytes(f"{HEADER}3,1,test,1,,,,,,\n".encode() + row.encode("latin-1", "replace") + b"\n")
    metrics = Metrics(path)
    assert metrics.on_disk(3, "test")
    metrics.start(10**9)
    assert path.read_text() == f"{HEADER}3,1,test,1,,,,,,\n"


def test_metrics_that_are_lost_start_anew(tmp_path):
    Metrics(tmp_path / "metrics.csv").start(5)
    assert (tmp_path / "metrics.csv").read_text() == HEADER


def test_a_new_run_takes_the_first_free_name(tmp_path):
    wanted = str(tmp_path / "runs" / "lenet")
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet"
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet-2"  # empty or not, the first is another's
    (tmp_path / "runs" / "lenet-3").mkdir()
    assert RunFolder.create(f"{wanted}/").path == tmp_path / "runs" / "lenet-4"
    assert RunFolder.create(f"{wanted}//./").path == tmp_path / "runs" / "lenet-5"
    assert not list((tmp_path / "runs" / "lenet").iterdir())


def test_runs_that_start_together_get_a_folder_each(tmp_path):
    wanted, together = str(tmp_path / "runs" / "race"), Barrier(8)

    def start(number):
        together.wait()
        return RunFolder.create(wanted).path

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(start, range(8)))
    assert sorted(path.name for path in made) == ["race", *(f"race-{number}" for number in range(2, 9))]


def test_only_one_process_at_a_time_writes_to_a_run(tmp_path):
    with RunFolder.create(str(tmp_path / "run")) as folder:
        for name in ("config.yaml", "plan.json"):
            (folder.path / name).touch()
        checkpoint = folder.checkpoints / "step-00000001"
        checkpoint.mkdir(parents=True)
        with pytest.raises(CheckpointError, match="in use by another process"):
            RunFolder.of_checkpoint(checkpoint)
    with RunFolder.of_checkpoint(checkpoint) as again:
        assert again.path == folder.path


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("a\0b", "NUL"),
        ("~nosuchuser/run", "there is no such user"),
        (".", "names no new folder"),
        ("/", "names no new folder"),
        ("run/..", "names no new folder"),
        ("x" * 300, "File name too long"),
    ],
)
def test_an_output_that_can_be_no_folder(tmp_path, monkeypatch, wanted, words):
    monkeypatch.chdir(tmp_path)
    for use in (RunFolder.create, lambda wanted: RunFolder.find_checkpoint("auto", wanted)):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            use(wanted)
        assert caught.value.exit_code == 2
        if use is RunFolder.create or "long" not in words:
            assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_no_fault_of_the_name(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(VdnnError, match="No space left") as caught:
        RunFolder.create(str(tmp_path / "run"))
    assert caught.value.exit_code == 1


def complete_checkpoint(folder, step):
    fields = {"network": "lenet", "step": step, "epoch": 0, "position": 0, "seed": 0}
    return save(folder, {"w": np.zeros(1)}, {**fields, "schedule": {}, "algorithms": {}, "config": {}}, keep=9)


@pytest.mark.parametrize("name", ["run[1]", "run*", "a?", "run #3", "-x", "x(2)+"])
def test_a_name_with_characters_that_mean_something_elsewhere(tmp_path, name):
    wanted = str(tmp_path / name)
    first, second = RunFolder.create(wanted), RunFolder.create(wanted)
    assert [path.name for path in (first.path, second.path)] == [name, f"{name}-2"]
    (tmp_path / f"{name}x").mkdir()
    newest = complete_checkpoint(second.checkpoints, 3)
    assert RunFolder.find_checkpoint("auto", f"{wanted}/") == newest


def test_a_run_that_got_nowhere_leaves_no_trace(tmp_path):
    with suppress(ConfigError), RunFolder.create(str(tmp_path / "a" / "b" / "run")) as folder:
        folder.write("config.yaml", "x")
        folder.metrics.start()
        (folder.checkpoints / ".writing-step-00000001").mkdir(parents=True)
        raise ConfigError("no")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ConfigError("no"), KeyboardInterrupt()])
def test_what_a_run_has_done_stays(tmp_path, error):
    def fail(folder, act):
        with suppress(type(error)), folder:
            folder.metrics.start()
            act(folder)
            raise error

    fail(RunFolder.create(str(tmp_path / "saved")), lambda folder: complete_checkpoint(folder.checkpoints, 1))
    fail(RunFolder.create(str(tmp_path / "told")), lambda folder: folder.metrics.write(step=1, split="train"))
    (tmp_path / "old").mkdir()
    fail(RunFolder(tmp_path / "old"), lambda folder: None)  # not made by this process
    stays = ["old", "saved"] if isinstance(error, KeyboardInterrupt) else ["old", "saved", "told"]
    assert sorted(path.name for path in tmp_path.iterdir()) == stays


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"'.*file' is a file"):
        RunFolder.create(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(str(tmp_path / "file" / "run"))


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    RunFolder.create(str(tmp_path / "lenet"))
    with pytest.raises(CheckpointError, match="nothing to resume"):
        RunFolder.find_checkpoint("auto", str(tmp_path / "lenet"))


def damage(checkpoint):
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize("resume", ["auto", "lenet"])
def test_if_every_checkpoint_is_damaged_each_is_named(tmp_path, resume):
    folder = tmp_path / "lenet" / "checkpoints"
    for step in (3, 5):
        damage(complete_checkpoint(folder, step))
    with pytest.raises(
        CheckpointError, match=r"nothing to resume: step 5 is damaged \(.*\), step 3 is damaged \("
    ) as e:
        RunFolder.find_checkpoint(resume if resume == "auto" else str(tmp_path / resume), str(tmp_path / "lenet"))
    assert str(e.value).endswith("; the same command without --resume starts anew")
    said = []
    whole = complete_checkpoint(tmp_path / "lenet-2" / "checkpoints", 2)
    os.utime(whole, (0, 0))  # an older run: it is all that is left
    assert RunFolder.find_checkpoint("auto", str(tmp_path / "lenet"), said.append) == whole
    assert len(said) == 1
    assert said[0].endswith("going on from step 2")


def test_a_run_belongs_to_its_output_under_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a-2", "ab", "x/a-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    same = [("a", "a"), ("a", "./a/"), ("a", str(tmp_path / "a")), ("a", "x/../a"), ("a", "link"), ("a-2", "a")]
    other = [("a", "a-2"), ("a", "b"), ("ab", "a"), ("a-2", "b"), ("x/a-2", "a"), ("x/a-2", "x/a")]
    assert [pair for pair in same if not belongs(tmp_path / pair[0], pair[1])] == []
    assert [pair for pair in other if belongs(tmp_path / pair[0], pair[1])] == []


def killed(path, rows=""):
    """A run's folder as a kill before the first checkpoint leaves it."""
    (path / "checkpoints" / ".writing-step-00000001").mkdir(parents=True)
    (path / "config.yaml").touch()
    (path / "plan.json").touch()
    (path / "metrics.csv").write_text(HEADER + rows)


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_run_without_a_checkpoint_yet_is_named(tmp_path, resume):
    (tmp_path / "lenet").mkdir()
    killed(tmp_path / "lenet-2")
    with pytest.raises(CheckpointError) as caught:
        RunFolder.find_checkpoint(str(tmp_path / "lenet-2") if resume == "path" else resume, str(tmp_path / "lenet"))
    assert f"the run in '{tmp_path / 'lenet-2'}' has no checkpoint yet" in str(caught.value)
    assert "the same command without --resume starts anew" in str(caught.value)


def test_a_run_that_left_nothing_gives_its_folder_to_the_next(tmp_path):
    killed(tmp_path / "run")
    with RunFolder.create(str(tmp_path / "run")) as folder:
        assert (folder.path, folder.reused) == (tmp_path / "run", True)
        with RunFolder.create(str(tmp_path / "run")) as second:  # the first is in use now
            assert (second.path, second.reused) == (tmp_path / "run-2", False)
        folder.metrics.start()
        complete_checkpoint(folder.checkpoints, 1)
    assert RunFolder.find_checkpoint("auto", str(tmp_path / "run")).name == "step-00000001"


def test_runs_that_take_an_abandoned_folder_together_have_one_each(tmp_path):
    killed(tmp_path / "race")
    together = Barrier(8)

    def start(number):
        together.wait()
        return RunFolder.create(str(tmp_path / "race"))

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(start, range(8)))
    assert len({folder.path for folder in made}) == 8
    assert sum(folder.reused for folder in made) <= 1


@pytest.mark.parametrize(
    "add",
    [
        lambda path: (path / "metrics.csv").write_text(f"{HEADER}1,1,train,0.5,0.5,0.1,8,9.0,,\n"),
        lambda path: (path / "metrics.csv").write_text(f"{HEADER}what a kill cut o"),
        lambda path: (path / "metrics.csv").unlink(),
        lambda path: (path / "notes.txt").touch(),
        lambda path: complete_checkpoint(path / "checkpoints", 1),
        lambda path: (path / "checkpoints" / "aside-step-00000009").mkdir(),
        lambda path: (path / "checkpoints" / ".replaced-step-00000009").mkdir(),
    ],
)
def test_a_folder_with_anything_worth_keeping_is_left_alone(tmp_path, add):
    killed(tmp_path / "run")
    add(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with RunFolder.create(str(tmp_path / "run")) as folder:
        assert (folder.path, folder.reused) == (tmp_path / "run-2", False)
    assert sorted(path for path in tmp_path.rglob("*") if path != folder.path) == before


def test_the_run_of_a_checkpoint(tmp_path):
    inside = tmp_path / "run" / "checkpoints" / "step-00000005"
    inside.mkdir(parents=True)
    assert RunFolder.of_checkpoint(inside) is None  # a folder of that name, but no run around it
    for name in ("config.yaml", "plan.json"):
        (tmp_path / "run" / name).touch()
        (tmp_path / name).touch()
    (tmp_path / "best").symlink_to(inside)
    for given in (inside, tmp_path / "best"):
        with RunFolder.of_checkpoint(given) as folder:
            assert folder.path.samefile(tmp_path / "run")
    assert RunFolder.of_checkpoint(tmp_path / "else" / "step-00000005") is None


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    write_file(path, b"one")
    write_file(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_file(path, b"one")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(VdnnError, match=r"x\.json' cannot be written: No space left on device") as caught:
        write_file(path, b"two")
    assert caught.value.exit_code == 1
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(path, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["nowhere/x", ".", "folder", "a\0b"])
def test_a_place_that_cannot_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(f"{tmp_path}/{name}", b"x")
    assert os.listdir(tmp_path) == ["folder"]
