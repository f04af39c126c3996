"""vdnn-train where things go wrong: NaN at the very end, signals at any moment, runs beside each other, odd names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripts import Ended, command, environment, refused, script

SMALL = (
    "lenet",
    *("-o", "network={name: lenet, dropout: 0.5}"),
    *("-o", "data={source: synthetic, train_images: 60, test_images: 20}"),
    *("-o", "train={epochs: 2, batch_size: 6}"),
    *("-o", "optimizer={lr: 0.01}"),
    *("-o", "memory={limit: 64MiB}"),
    *("--device", "cpu"),
)
"""10 steps an epoch."""


def train(cwd, *arguments):
    return script("vdnn-train", *arguments, cwd=cwd)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- what is not finite


@pytest.mark.parametrize("options", [(), ("-o", "evaluate.every_epochs=0"), ("-o", "checkpoint.keep=1")])
def test_an_overflow_in_the_last_step_ends_with_4(tmp_path, options):
    ended = train(tmp_path, *SMALL, "--iterations", 1, "--lr", "1e38", "--output", "run", *options)
    refused(ended, 4, "step 1", "NaN or infinity", "layer '", "learning rate 1e+38", "No checkpoint was written before")
    assert "done:" not in ended.out
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_fault_found_by_evaluation_leaves_the_good_checkpoint_even_if_one_is_kept(tmp_path):
    run = (*SMALL, "--output", "run", "-o", "checkpoint.keep=1")
    assert train(tmp_path, *run, "--iterations", 5).code == 0
    good = files(tmp_path / "run" / "checkpoints" / "step-00000005")
    ended = train(tmp_path, *run, "--resume", "--iterations", 6, "--lr", "1e37")
    refused(ended, 4, "step 6", "The last checkpoint, 'run/checkpoints/step-00000005', is from before it")
    assert [name for name in names(tmp_path / "run" / "checkpoints") if name.startswith("step")] == ["step-00000005"]
    assert files(tmp_path / "run" / "checkpoints" / "step-00000005") == good
    assert train(tmp_path, *run, "--resume", "--iterations", 6).code == 0


# ---- runs beside each other


def test_two_runs_started_together_have_a_folder_each(tmp_path):
    words = command("vdnn-train", *SMALL, "--iterations", 2, "--output", "race")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(words, cwd=tmp_path, env=environment(), **pipes) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert names(tmp_path) == ["race", "race-2"]
    assert sorted(line for out in said for line in out.splitlines() if line.startswith("output: "))[0][-4:] == "race"
    one, two = (load_file(next(tmp_path.glob(f"{run}/checkpoints/*/*.safetensors"))) for run in ("race", "race-2"))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_run_that_is_going_on_cannot_be_resumed_beside_itself(tmp_path):
    run = (*SMALL, "--output", "run", "--epochs", 10_000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("vdnn-train", *run), cwd=tmp_path, env=environment(), **pipes) as process:
        for line in process.stdout:
            if line.startswith("test "):
                break
        beside = train(tmp_path, *run, "--resume")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
    refused(beside, 2, "run folder 'run' is in use by another process")
    assert names(tmp_path) == ["run"]


def test_checkpoints_after_the_one_resumed_from_never_win_again(tmp_path):
    run = (*SMALL, "--output", "run")
    assert train(tmp_path, *run).code == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    assert names(checkpoints) == ["step-00000010", "step-00000020"]
    newest = files(checkpoints / "step-00000020")
    other = train(tmp_path, *run, "--resume", checkpoints / "step-00000010", "--iterations", 13, "--lr", "0.02")
    assert other.code == 0, other.error
    assert "checkpoint from after step 10, where this run goes on, is now" in other.out
    assert names(checkpoints) == ["aside-step-00000020", "step-00000010", "step-00000013"]
    assert sorted(files(checkpoints / "aside-step-00000020").values()) == sorted(newest.values())
    assert "resuming from run/checkpoints/step-00000013" in train(tmp_path, *run, "--resume").out


def test_a_checkpoint_outside_a_run_is_read_and_nothing_is_written_beside_it(tmp_path):
    assert train(tmp_path, *SMALL, "--output", "run", "--epochs", 1).code == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        (mine / name).write_text("mine")
    (tmp_path / "run" / "checkpoints" / "step-00000010").rename(mine / "step-00000010")
    before = files(mine)
    ended = train(tmp_path, *SMALL, "--output", "next", "--resume", "mine/step-00000010")
    assert ended.code == 0, ended.error
    assert "note: 'mine/step-00000010' lies in no run's folder" in ended.out
    assert "output: next\n" in ended.out
    assert files(mine) == before
    assert names(tmp_path / "next") == ["checkpoints", "config.yaml", "metrics.csv", "plan.json"]
    state = json.loads((tmp_path / "next" / "checkpoints" / "step-00000020" / "state.json").read_text())["state"]
    assert state["step"] == 20


@pytest.mark.parametrize("how", ["--output", "-o"])
def test_another_output_branches_and_the_run_it_comes_from_is_only_read(tmp_path, how):
    assert train(tmp_path, *SMALL, "--output", "o/a", "-o", "checkpoint.keep=2").code == 0
    source = tmp_path / "o" / "a"
    before, times = files(source), {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    assert names(source / "checkpoints") == ["step-00000010", "step-00000020"]
    folders = [source, *(path for path in source.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    output = ("--output", "o/b") if how == "--output" else ("-o", "output=o/b")
    branch = (
        *SMALL,
        *output,
        "--resume",
        "o/a/checkpoints/step-00000010",
        "--iterations",
        13,
        "-o",
        "checkpoint.keep=1",
    )
    ended = train(tmp_path, *branch)
    for folder in folders:
        folder.chmod(0o755)
    assert ended.code == 0, ended.error
    assert "note: this run branches from the one in 'o/a', which is only read\n" in ended.out
    assert "output: o/b\n" in ended.out
    assert (files(source), {path: path.stat().st_mtime_ns for path in source.rglob("*")}) == (before, times)
    assert names(tmp_path / "o" / "b" / "checkpoints") == ["step-00000013"]
    lines = (tmp_path / "o" / "b" / "metrics.csv").read_text().splitlines()[1:]
    assert [line.split(",")[:3] for line in lines] == [["10", "1", "test"], ["13", "2", "train"], ["13", "2", "test"]]
    again = train(tmp_path, *branch[: len(SMALL) + 2], "--resume", "--iterations", 15)
    assert "resuming from o/b/checkpoints/step-00000013" in again.out
    assert files(source) == before


def test_a_branch_goes_on_to_the_weights_of_its_origin(tmp_path):
    assert train(tmp_path, *SMALL, "--output", "a").code == 0
    assert train(tmp_path, *SMALL, "--output", "b", "--resume", "a/checkpoints/step-00000010").code == 0
    ends = [load_file(tmp_path / name / "checkpoints" / "step-00000020" / "weights.safetensors") for name in "ab"]
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    nothing = train(tmp_path, *SMALL, "--output", "c", "--resume", "a")
    refused(nothing, 2, "no step is left for a branch of 'a' in 'c'", "step 20", "raise --epochs or --iterations")
    assert names(tmp_path) == ["a", "b"]
    for name in ("a", "./a/"):  # its own output: no branch
        assert "already complete at step 20" in train(tmp_path, *SMALL, "--output", name, "--resume", "a").out


# ---- damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[:500], "expected [0-9,]+ bytes, got 500"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "SHA-256"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, damage, why):
    run = (*SMALL, "--output", "run", "-o", "evaluate.every_epochs=0")
    for steps in (6, 9):
        assert train(tmp_path, *run, *["--resume"] * (steps == 9), "--iterations", steps).code == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000009"
    weights = newest / "weights.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    refused(train(tmp_path, *run, "--resume", newest), 2, "weights.safetensors")
    ended = train(tmp_path, *run, "--resume", "--iterations", 10)
    assert ended.code == 0, ended.error
    found = rf"^note: step 9 is damaged \(.*weights.safetensors': .*{why}.*\), going on from step 6$"
    assert re.search(found, ended.out, re.MULTILINE), ended.out
    assert "resuming from run/checkpoints/step-00000006" in ended.out
    assert names(tmp_path / "run" / "checkpoints") == ["aside-step-00000009", "step-00000006", "step-00000010"]


# ---- names


@pytest.mark.parametrize("name", ["run #3", "2024", "null", "true", "a: b", "[x]*?", "run/"])
def test_an_output_is_taken_as_it_is_written(tmp_path, name):
    plain = name.rstrip("/")
    for expected in (plain, f"{plain}-2"):
        ended = train(tmp_path, *SMALL, "--iterations", 1, "--output", name)
        assert ended.code == 0, ended.error
        assert (tmp_path / expected / "checkpoints" / "step-00000001").is_dir()
    assert names(tmp_path) == sorted([plain, f"{plain}-2"])
    resumed = train(tmp_path, *SMALL, "--iterations", 1, "--output", name, "--resume")
    assert f"resuming from {plain}-2/checkpoints/step-00000001" in resumed.out


BAD = {
    "nobody's home as output": (["--output", "~nosuchuser/x"], ["there is no such user"]),
    "nobody's home as data": (["-o", "data={source: mnist, path: ~nosuchuser/x}"], ["there is no such user"]),
    "NUL in output": (["-o", 'output="a\\0b"'], ["NUL"]),
    "no name": (["--output", "."], ["names no new folder"]),
    "unknown key of -o": (["-o", "foo.bar=1"], ["-o foo.bar=1: unknown key 'foo'"]),
    "huge warm-up": (["-o", "schedule.warmup_epochs=1e308"], ["schedule.warmup_epochs", "10^6"]),
    "huge gamma": (["-o", "schedule={name: step, gamma: 1e300}"], ["schedule.gamma", "at most 1"]),
    "many digits": (["--epochs", "9" * 400], ["--epochs: expected a whole number from 1 to 10^12"]),
    "rate beyond float32": (["--lr", "1e39"], ["--lr: expected a number above 0, at most 1e38"]),
    "null as profile": (["--profile", "null"], ["unknown profile 'null'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_one_line_and_2_and_nothing_is_written(tmp_path, case):
    options, parts = BAD[case]
    refused(train(tmp_path, *SMALL, "--iterations", 1, *options), 2, *parts)
    assert not list(tmp_path.iterdir())


# ---- signals and the disk


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_in_one_line_and_leaves_no_half_made_run(tmp_path, number):
    started = time.perf_counter()
    train(tmp_path, "--version")
    loading_s = time.perf_counter() - started  # most of it is libraries; before them Python itself answers signals
    for fifth in range(2, 12):
        cwd = tmp_path / str(fifth)
        cwd.mkdir()
        words = command("vdnn-train", *SMALL, "--output", "runs/run", "--epochs", 10_000)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, cwd=cwd, env=environment(), **pipes) as process:
            time.sleep(loading_s * fifth / 5)
            process.send_signal(number)
            out, error = process.communicate(timeout=60)
        refused(Ended(process.returncode, out, error), 128 + number, f"interrupted by {signal.Signals(number).name}")
        assert names(cwd) == (["runs"] if "checkpoint written" in error else [])


@pytest.mark.parametrize("after", ["device:", "plan:", "output:", "predicted:"])
def test_a_signal_before_the_first_step_leaves_nothing(tmp_path, after):
    words = command("vdnn-train", *SMALL, "--output", "runs/run", "--epochs", 10_000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), **pipes) as process:
        for line in process.stdout:
            if line.startswith(after):
                process.send_signal(signal.SIGTERM)
                break
        out, error = process.communicate(timeout=60)
    refused(Ended(process.returncode, out, error), 143, "interrupted by SIGTERM")
    left = sorted(path.name for path in tmp_path.glob("runs/run*"))
    assert left == (["run"] if "checkpoint written" in error else [])


def test_a_reader_that_goes_away_before_the_first_step_leaves_nothing(tmp_path):
    words = command("vdnn-train", *SMALL, "--output", "run", "--epochs", 10_000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_during_the_run_ends_with_1(tmp_path):
    """A limit on the size of files stands for the full disk: the small files fit, the weights do not."""
    limited = 'trap "" XFSZ; ulimit -f 200; exec "$@"'
    words = ["bash", "-c", limited, "bash", *command("vdnn-train", *SMALL, "--iterations", 2, "--output", "run")]
    run = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    refused(Ended(run.returncode, run.stdout, run.stderr), 1, "step-00000002' cannot be written", "File too large")
    assert os.listdir(tmp_path / "run" / "checkpoints") == []
