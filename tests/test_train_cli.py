"""vdnn-train as a user starts it: a run's folder, what it says, and resume after signals and kills."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripts import command, environment, refused
from small_run import SMALL, train

from vdnn.memory.plan import Plan
from vdnn.runtime.config import load_config

RUN = (*SMALL, "-o", "train.accumulate=2", "--epochs", 15)
"""Steps of two parts, 3 and 3 images, the last 3 and 1."""


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def final(folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """Tensors and step of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return load_file(newest / "weights.safetensors"), json.loads((newest / "state.json").read_text())["state"]["step"]


# ---- a run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of RUN that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    ended = train(folder, *RUN, "--output", "run")
    assert ended.code == 0, ended.error
    return folder / "run", ended


def test_what_a_run_leaves_and_says(whole):
    folder, ended = whole
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.yaml", "metrics.csv", "plan.json"]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000238", "step-00000255"]
    assert ended.error == ""
    lines = ended.out.splitlines()
    assert any(line.startswith("device: CPU") for line in lines)
    assert any(line.startswith("data: synthetic images, no real data") for line in lines)
    assert any(line.startswith("note: train loss and accuracy are measured with dropout on") for line in lines)
    assert not any("smoothed" in line for line in lines)  # this LeNet's labels are not
    assert any(
        re.match(r"plan: policy dyn, device peak .* bytes\), limit 64.0 MiB \(-o memory\), nothing off", line)
        for line in lines
    )
    assert any(
        re.match(r"predicted: [\d.,]+ ms per step \(measured on this cpu\), 255 steps with .* [\d.,]+ (ms|s)", line)
        for line in lines
    )
    assert any(re.match(r"train +step +17/255 +epoch +1 +loss .* \(whole epoch\)", line) for line in lines)
    assert any(re.match(r"test +step +255 +epoch +15 +loss .* accuracy ", line) for line in lines)
    assert any(re.match(r"done: 255 steps, test accuracy .*synthetic", line) for line in lines)
    assert any(re.match(r"memory: planned (.* bytes\)), used at most \1, limit 64.0 MiB", line) for line in lines)
    assert "\x1b" not in ended.out


def test_the_files_of_a_run_are_what_was_asked_for(whole):
    folder, _ = whole
    config = load_config(str(folder / "config.yaml"))
    assert (config.network.name, config.train.batch_size, config.train.accumulate) == ("lenet", 6, 2)
    assert (config.optimizer.lr, config.data.train_images, config.output) == (0.01, 100, "run")
    assert Plan.from_json(json.loads((folder / "plan.json").read_text())).batch == 3
    tests = [row for row in rows(folder) if row["split"] == "test"]
    assert [int(row["step"]) for row in tests] == list(range(17, 256, 17))
    assert [int(row["epoch"]) for row in tests] == list(range(1, 16))
    trained = [row for row in rows(folder) if row["split"] == "train"]
    assert [(int(row["step"]), int(row["epoch"])) for row in trained] == [(17 * e, e) for e in range(1, 16)]
    assert {row["images"] for row in trained} == {"100"}
    assert {row["images"] for row in tests} == {"20"}
    assert float(trained[0]["loss"]) > 0.5 > float(trained[-1]["loss"])
    tensors, step = final(folder)
    assert step == 255
    assert tensors["fc3.weight"].shape == tensors["fc3.weight.momentum"].shape == (500, 800)


def test_an_output_that_is_taken_is_left_alone(tmp_path):
    short = (*SMALL, "--iterations", 2, "--output", "a/lenet")
    assert "output: a/lenet\n" in train(tmp_path, *short).out
    first = {path: path.read_bytes() for path in (tmp_path / "a" / "lenet").rglob("*") if path.is_file()}
    assert "output: a/lenet is taken, writing to a/lenet-2\n" in train(tmp_path, *short, "--seed", 1).out
    assert {path: path.read_bytes() for path in first} == first
    (tmp_path / "a" / "lenet-3").mkdir()  # another's, even if empty
    assert "output: a/lenet is taken, writing to a/lenet-4\n" in train(tmp_path, *short).out
    one, four = (final(tmp_path / "a" / name)[0] for name in ("lenet", "lenet-4"))
    assert all(np.array_equal(one[name], four[name]) for name in one)


def test_on_a_terminal_there_is_a_panel_that_is_drawn_anew(tmp_path):
    ours, theirs = pty.openpty()
    words = command("vdnn-train", *SMALL, "--output", "run")
    with subprocess.Popen(words, cwd=tmp_path, env={**environment(), "TERM": "xterm"}, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 65536):
                shown += piece
        assert process.wait(60) == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "\x1b[" in shown.decode()
    for part in (
        "lenet on cpu, synthetic images",
        "34 of 34, epoch 2",
        "accuracy",
        "after step 34",
        "images/s",
        "planned ",
    ):
        assert part in text
    assert "done: 34 steps" in text
    assert "train  step" not in text


# ---- without training


def test_the_printed_config_reads_back(tmp_path):
    ended = train(tmp_path, *RUN, "--memory-limit", "12GiB", "--policy", "conv", "--print-config")
    assert (ended.code, ended.error) == (0, "")
    (tmp_path / "mine.yaml").write_text(ended.out)
    again = train(tmp_path, "mine.yaml", "--print-config")
    assert again.out == ended.out
    config = load_config(str(tmp_path / "mine.yaml"))
    assert (config.memory.limit, config.memory.policy, config.train.batch_size) == (12 * 2**30, "conv", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_plan_only_plans_and_writes_nothing(tmp_path):
    ended = train(tmp_path, "alexnet", "--plan-only")
    assert (ended.code, ended.error) == (0, "")
    assert "plan: policy dyn" in ended.out
    assert re.search(
        r"note: on this cpu a step will take about [\d,.]+ s .* the whole run with its evaluations about [\d,.]+ h;",
        ended.out,
    )
    assert "train " not in ended.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("epochs", "slow"), [(2, False), (20000, True)])
def test_a_long_run_of_short_steps_is_said_to_be_long(tmp_path, epochs, slow):
    """20,000 epochs of 17 steps, each far below a second."""
    ended = train(tmp_path, *SMALL, "--device", "cpu", "--epochs", epochs, "--plan-only")
    assert ended.code == 0, ended.error
    assert ("note: on this cpu a step will take about" in ended.out) is slow
    assert ("the whole run with its evaluations about" in ended.out) is slow


def test_a_simulated_run_says_so_and_writes_nothing(tmp_path):
    options = ("-b", 64, "--policy", "all", "--device", "simulated", "--profile", "titan-x-maxwell")
    ended = train(tmp_path, "vgg16", *options)
    assert (ended.code, ended.error) == (0, "")
    assert "device: simulated NVIDIA GeForce GTX Titan X (Maxwell)" in ended.out
    assert "simulated (modelled by profile titan-x-maxwell): " in ended.out
    assert "No data was computed" in ended.out
    assert "no run folder is written" in ended.out
    assert not list(tmp_path.iterdir())


def test_what_is_not_followed_is_said(tmp_path):
    options = ("--profile", "h200", "-o", "schedule.gamma=0.5", "-b", 500, "--plan-only", "--device", "cpu")
    ended = train(tmp_path, *SMALL, *options)
    assert ended.code == 0, ended.error
    assert "note: schedule.gamma is not read by schedule cosine" in ended.out
    assert "note: profile 'h200' is not read by device cpu" in ended.out


def test_a_batch_larger_than_the_data_is_said_before_it_is_planned_and_measured(tmp_path):
    said = "note: train.batch_size is 500, but there are only 100 training images: a step trains 100\n"
    ended = train(tmp_path, *SMALL, "-b", 500, "--epochs", 2)
    assert ended.code == 0, ended.error
    assert ended.out.count(said) == 1
    times = r"^time: predicted .* per step, measured [\d.]+ m?s \(median\), \d+\.\d\d times that$"
    assert re.search(times, ended.out, re.MULTILINE)
    too_large = train(tmp_path, *SMALL, "-b", 500, "--memory-limit", "2MiB")
    refused(too_large, 3, "smallest budget that works")
    assert said in too_large.out


# ---- interruption


def interrupted(cwd, number, after, *arguments):
    """Start a run, send it signal `number` when it prints the line that begins with `after`; its end."""
    words = command("vdnn-train", *arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=cwd, env=environment(), **pipes) as process:
        for line in process.stdout:
            if re.match(after, line):
                process.send_signal(number)
                break
        out, error = process.communicate(timeout=60)
        return process.returncode, out, error


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_goes_on_to_the_same_bits(whole, tmp_path, number, code):
    got, _, error = interrupted(tmp_path, number, r"test +step +34 ", *RUN, "--output", "run")
    folder = tmp_path / "run"
    stopped = final(folder)[1]
    assert got == code
    assert 34 <= stopped < 255
    if number != signal.SIGKILL:
        assert f"interrupted by {signal.Signals(number).name}; checkpoint written to 'run/checkpoints/step-" in error
        assert "--resume" in error
        assert error.count("\n") == 1
    ended = train(tmp_path, *RUN, "--output", "run", "--resume")
    assert ended.code == 0, ended.error
    assert f"resuming from run/checkpoints/step-{stopped:08d} (step {stopped})\n" in ended.out
    assert "note:" not in ended.out
    expected, tensors = final(whole[0])[0], final(folder)[0]
    assert expected.keys() == tensors.keys()
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)
    found = rows(folder)
    assert len({(row["step"], row["split"]) for row in found}) == len(found)
    assert [int(row["step"]) for row in found] == sorted(int(row["step"]) for row in found)
    assert [row for row in found if row["split"] == "test"] == [r for r in rows(whole[0]) if r["split"] == "test"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_killed_before_its_first_checkpoint_is_named_and_replaced(tmp_path):
    long = (*SMALL, "-o", "data={source: synthetic, train_images: 20000, test_images: 20}", "--output", "run")
    interrupted(tmp_path, signal.SIGKILL, "predicted: ", *long)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["config.yaml", "metrics.csv", "plan.json"]
    refused(
        train(tmp_path, *SMALL, "--output", "run", "--resume"), 2, "'run' has no checkpoint yet", "without --resume"
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == left
    anew = train(tmp_path, *SMALL, "--output", "run", "--iterations", 2)
    assert anew.code == 0, anew.error
    assert "note: the run before in 'run' left no checkpoint" in anew.out
    assert "output: run\n" in anew.out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    before = rows(tmp_path / "run"), final(tmp_path / "run")[0]
    ended = train(tmp_path, *RUN, "--output", "run", "--resume")
    assert ended.code == 0, ended.error
    assert "already complete at step 255; raise --epochs or --iterations" in ended.out
    assert "done:" not in ended.out
    assert rows(tmp_path / "run") == before[0]
    assert all(np.array_equal(value, final(tmp_path / "run")[0][name]) for name, value in before[1].items())


def test_a_run_that_was_killed_before_its_last_evaluation_makes_up_for_it(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    path = tmp_path / "run" / "metrics.csv"
    before = path.read_text()
    path.write_text(before.rpartition("255,15,test")[0])
    ended = train(tmp_path, *RUN, "--output", "run", "--resume")
    assert ended.code == 0, ended.error
    assert "done: 255 steps" in ended.out
    assert path.read_text() == before


def test_a_limit_that_recorded_algorithms_do_not_keep_says_whose_they_are(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    ended = train(tmp_path, *RUN, "--output", "run", "--resume", "--memory-limit", "2MiB", "--epochs", 16)
    refused(ended, 3, "needs", "recorded in the checkpoint of step 255", "without --resume")


def test_an_epoch_in_two_runs_has_two_rows_that_add_up_to_it(tmp_path):
    """Means of 60 and 40 images of an epoch of 100 against the mean of the whole."""
    two = (*SMALL, "-o", "schedule={name: constant}", "--epochs", 1, "--output", "two")
    assert train(tmp_path, *two, "--iterations", 10).code == 0
    assert train(tmp_path, *two, "--resume").code == 0
    whole = train(tmp_path, *two[:-1], "whole")
    assert whole.code == 0, whole.error
    found = [(int(row["step"]), row["epoch"], row["split"], row["images"]) for row in rows(tmp_path / "two")]
    assert found == [
        (10, "1", "train", "60"),
        (10, "1", "test", "20"),
        (17, "1", "train", "40"),
        (17, "1", "test", "20"),
    ]
    parts = [row for row in rows(tmp_path / "two") if row["split"] == "train"]
    (together,) = [row for row in rows(tmp_path / "whole") if row["split"] == "train"]
    for name in ("loss", "accuracy"):
        mean = sum(int(row["images"]) * float(row[name]) for row in parts) / 100
        assert float(together[name]) == pytest.approx(mean, abs=2e-6), name


def test_a_resumed_run_says_what_has_changed(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    ended = train(tmp_path, *RUN, "--output", "run", "--resume", "run", "--lr", 0.02, "--epochs", 16)
    assert ended.code == 0, ended.error
    assert "note: optimizer.lr was 0.01, now 0.02\n" in ended.out
    assert "note: train.epochs was 15, now 16\n" in ended.out
    assert final(tmp_path / "run")[1] == 272


def test_a_checkpoint_that_cannot_be_used_is_refused_and_nothing_is_touched(whole, tmp_path):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    refused(train(tmp_path, *RUN, "--resume", "nowhere"), 2, "'nowhere' is no checkpoint", "state.json")
    refused(train(tmp_path, *RUN, "--output", "run", "--resume"), 2, "nothing to resume", "'run'")
    assert not list(tmp_path.iterdir())
    shutil.copytree(whole[0], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000255"
    weights = newest / "weights.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    before = files()
    refused(train(tmp_path, *RUN, "--resume", newest), 2, "weights.safetensors", "SHA-256")
    weights.write_bytes(intact)
    other = (*SMALL, "-o", "network.dropout=0.1", "--resume", newest)
    refused(train(tmp_path, *other), 2, "'dropout': 0.1")
    weights.write_bytes(intact[:1000])
    before[weights] = intact[:1000]
    refused(train(tmp_path, *RUN, "--resume", newest), 2, "weights.safetensors", "expected", "got 1,000")
    (newest / "state.json").write_text("{")
    before[newest / "state.json"] = b"{"
    refused(train(tmp_path, *RUN, "--resume", newest), 2, "state.json", "cannot be read")
    assert files() == before
    ended = train(tmp_path, *RUN, "--output", "run", "--resume")  # the one before it is whole
    assert "resuming from run/checkpoints/step-00000238" in ended.out
    assert re.search(r"^note: step 255 is damaged \(.*state.json.*\), going on from step 238$", ended.out, re.MULTILINE)
    assert ended.code == 0, ended.error


def test_nan_ends_with_4_and_leaves_the_checkpoints_before_it(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    before = final(tmp_path / "run")
    ended = train(tmp_path, *RUN, "--output", "run", "--resume", "--lr", "1e3", "--epochs", 40)
    refused(ended, 4, "NaN or infinity", "learning rate")
    assert re.match(r"vdnn-train: step 2\d\d: NaN or infinity first in layer '(conv|fc)\d' \(op '.*'\);", ended.error)
    after = final(tmp_path / "run")
    assert after[1] >= before[1] == 255
    assert all(np.isfinite(value).all() for value in after[0].values())
    assert (tmp_path / "run" / "checkpoints" / "step-00000255").is_dir()
