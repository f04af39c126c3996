"""The folder of a run: names, metrics after a resume, files written whole; each against what should lie on disk."""

from __future__ import annotations

import os

import pytest

from vdnn.errors import CheckpointError, ConfigError
from vdnn.runtime.files import write_file
from vdnn.runtime.run_folder import COLUMNS, Metrics, RunFolder

HEADER = "step,epoch,split,loss,accuracy,lr,images_per_s\n"


def test_metrics_are_rows_under_a_header(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.start()
    metrics.write(step=5, epoch=1, split="train", loss="0.5", accuracy="0.25", lr="0.1", images_per_s="10.0")
    metrics.write(step=5, epoch=1, split="test", loss="0.75", accuracy="1")
    assert ",".join(COLUMNS) + "\n" == HEADER
    assert metrics.path.read_text() == HEADER + "5,1,train,0.5,0.25,0.1,10.0\n5,1,test,0.75,1,,\n"
    assert metrics.has(5, "test")
    assert not metrics.has(6, "test")


def test_a_row_is_written_once(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.start()
    for loss in (1, 2):
        metrics.write(step=5, epoch=1, split="test", loss=loss)
    assert metrics.path.read_text() == HEADER + "5,1,test,1,,,\n"


@pytest.mark.parametrize(
    ("resumed", "kept"), [(10, "5,1,test,1,,,\n10,2,test,2,,,\n"), (9, "5,1,test,1,,,\n"), (0, "")]
)
def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path, resumed, kept):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "5,1,test,1,,,\n10,2,test,2,,,\n15,3,test,3,,,\n")
    metrics = Metrics(path)
    metrics.start(resumed)
    assert path.read_text() == HEADER + kept
    metrics.write(step=15, epoch=3, split="test", loss=9)
    assert path.read_text() == HEADER + kept + "15,3,test,9,,,\n"


@pytest.mark.parametrize("cut", ["1", "15", "15,3,te", "15,3,test,0.1"])
def test_a_row_that_a_kill_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "10,2,test,2,,,\n" + cut)
    Metrics(path).start(20)
    assert path.read_text() == HEADER + "10,2,test,2,,,\n"


def test_metrics_that_are_lost_start_anew(tmp_path):
    Metrics(tmp_path / "metrics.csv").start(5)
    assert (tmp_path / "metrics.csv").read_text() == HEADER


def test_a_new_run_takes_the_first_free_name(tmp_path):
    wanted = str(tmp_path / "runs" / "lenet")
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet"
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet"  # still empty
    (tmp_path / "runs" / "lenet" / "x").touch()
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet-2"
    (tmp_path / "runs" / "lenet-2" / "x").touch()
    assert RunFolder.create(wanted).path == tmp_path / "runs" / "lenet-3"


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


def test_the_run_of_a_checkpoint(tmp_path):
    inside = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert RunFolder.of_checkpoint(inside).path == tmp_path / "run"
    assert RunFolder.of_checkpoint(tmp_path / "else" / "step-00000005").path == tmp_path / "else"


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
    with pytest.raises(ConfigError, match=r"x\.json' cannot be written: No space left on device"):
        write_file(path, b"two")
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
