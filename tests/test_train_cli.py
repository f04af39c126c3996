"""vdnn-train as a user starts it: a run's folder, resume after signals and kills, and bad input."""

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
from scripts import command, environment, refused, script

from vdnn.memory.plan import Plan
from vdnn.runtime.config import load_config, packaged_configs

SECTIONS = (
    "network={name: lenet, dropout: 0.5}",
    "data={source: synthetic, train_images: 100, test_images: 20}",
    "train={epochs: 2, batch_size: 6}",
    "optimizer={lr: 0.01}",
    "schedule={name: cosine}",
    "memory={limit: 64MiB}",
)
SMALL = ("lenet", *(word for section in SECTIONS for word in ("-o", section)))
"""17 steps an epoch, the last with 4 images."""
RUN = (*SMALL, "-o", "train.accumulate=2", "--epochs", 15)
"""Steps of two parts, 3 and 3 images, the last 3 and 1."""


def train(cwd, *arguments):
    return script("vdnn-train", *arguments, cwd=cwd)


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
    assert any(
        re.match(r"plan: policy dyn, device peak .* of 64.0 MiB, nothing offloaded; step", line) for line in lines
    )
    assert any(re.match(r"predicted: [\d.,]+ ms per step \(measured on this cpu\)", line) for line in lines)
    assert any(re.match(r"train +step +17/255 +epoch +1 +loss ", line) for line in lines)
    assert any(re.match(r"test +step +255 +epoch +15 +loss .* accuracy ", line) for line in lines)
    assert any(re.match(r"done: 255 steps, test accuracy .*synthetic", line) for line in lines)
    assert any(re.match(r"memory: planned (.*), used at most (.*), limit 64.0 MiB", line) for line in lines)
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
    assert [int(row["epoch"]) for row in trained if int(row["step"]) % 17 == 0] == list(range(1, 16))
    assert float(trained[0]["loss"]) > 0.5 > float(trained[-1]["loss"])
    tensors, step = final(folder)
    assert step == 255
    assert tensors["fc3.weight"].shape == tensors["fc3.weight.momentum"].shape == (500, 800)


def test_an_output_that_is_taken_is_left_alone(tmp_path):
    short = (*SMALL, "--iterations", 2, "--output", "a/lenet")
    assert "output: a/lenet\n" in train(tmp_path, *short).out
    first = {path: path.read_bytes() for path in (tmp_path / "a" / "lenet").rglob("*") if path.is_file()}
    assert "output: a/lenet-2\n" in train(tmp_path, *short, "--seed", 1).out
    assert {path: path.read_bytes() for path in first} == first
    (tmp_path / "a" / "lenet-3").mkdir()  # empty, so it is free
    assert "output: a/lenet-3\n" in train(tmp_path, *short).out
    one, three = (final(tmp_path / "a" / name)[0] for name in ("lenet", "lenet-3"))
    assert all(np.array_equal(one[name], three[name]) for name in one)


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
    for part in ("lenet on cpu, synthetic images", "step  34 of 34, epoch 2", "accuracy", "after step 34", "images/s"):
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
    assert re.search(r"note: on this cpu a step will take about [\d,.]+ s", ended.out)
    assert "train " not in ended.out
    assert not list(tmp_path.iterdir())


def test_a_simulated_run_says_so_and_writes_nothing(tmp_path):
    options = ("-b", 64, "--policy", "all", "--device", "simulated", "--profile", "titan-x-maxwell")
    ended = train(tmp_path, "vgg16", *options)
    assert (ended.code, ended.error) == (0, "")
    assert "device: simulated NVIDIA GeForce GTX Titan X (Maxwell)" in ended.out
    assert "simulated (modelled by profile titan-x-maxwell): " in ended.out
    assert "No data was computed" in ended.out
    assert not list(tmp_path.iterdir())


def test_what_is_not_followed_is_said(tmp_path):
    options = ("--profile", "h200", "-o", "schedule.gamma=0.5", "-b", 500, "--plan-only", "--device", "cpu")
    ended = train(tmp_path, *SMALL, *options)
    assert ended.code == 0, ended.error
    assert "note: schedule.gamma is not read by schedule cosine" in ended.out
    assert "note: train.batch_size is 500, but a step has only the 100 images there are" in ended.out
    assert "note: profile 'h200' is not read by device cpu" in ended.out


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


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    before = rows(tmp_path / "run"), final(tmp_path / "run")[0]
    ended = train(tmp_path, *RUN, "--output", "run", "--resume")
    assert ended.code == 0, ended.error
    assert "done: 255 steps" in ended.out
    assert rows(tmp_path / "run") == before[0]
    assert all(np.array_equal(value, final(tmp_path / "run")[0][name]) for name, value in before[1].items())


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
    refused(train(tmp_path, *RUN, "--resume", "--output", "run"), 2, "weights.safetensors", "SHA-256")
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


# ---- bad input

BAD_OPTIONS = {
    "unknown key": (["-o", "train.batchsize=4"], ["train.batchsize", "did you mean 'batch_size'?"]),
    "batch 0": (["-b", "0"], ["train.batch_size", "expected a whole number of 1 or more, got 0"]),
    "negative rate": (["--lr", "-0.1"], ["optimizer.lr", "expected a number above 0, got -0.1"]),
    "rate that is no number": (["--lr", "fast"], ["optimizer.lr", "'fast'"]),
    "bytes of no unit": (["--memory-limit", "12 XB"], ["memory.limit", "12GiB, 12 GB or 12000000000", "12 XB"]),
    "unknown policy": (["--policy", "al"], ["memory.policy", "base, none, all, conv or dyn", "'al'"]),
    "unknown device": (["--device", "gpu"], ["device", "auto, cpu, cuda or simulated", "'gpu'"]),
    "unknown profile": (["--profile", "h20"], ["unknown profile 'h20'", "did you mean 'h200'?"]),
    "unknown network": (["-o", "network.name=lenett"], ["unknown network 'lenett'", "did you mean 'lenet'?"]),
    "unknown option of the network": (["-o", "network.drop=0.1"], ["no option 'drop'", "did you mean 'dropout'?"]),
    "image too small": (["-o", "network.image_size=4"], ["layer 'conv1'", "expected", "got 4x4"]),
    "no such folder of data": (["-o", "data.source=mnist", "-o", "data.path=nowhere"], ["data folder 'nowhere'"]),
    "not KEY=VALUE": (["-o", "epochs"], ["expected key.path=value", "'epochs'"]),
    "unknown option": (["--batchsize", "4"], ["--batchsize 4", "--help"]),
    "output under a file": (["--output", "file/run"], ["output folder 'file/run' cannot be made", "--output"]),
    "output is a file": (["--output", "file"], ["output 'file' is a file", "--output"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_2_and_nothing_is_written(tmp_path, case):
    (tmp_path / "file").write_text("mine")
    options, parts = BAD_OPTIONS[case]
    refused(train(tmp_path, *SMALL, "--iterations", 1, *options), 2, *parts)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


BAD_FILES = {
    "unknown key": ("network:\n  name: lenet\ntrain:\n  epoch: 1\n", ["bad.yaml:4", "train.epoch", "'epochs'"]),
    "unknown section": ("network:\n  name: lenet\noptimiser:\n  lr: 1\n", ["bad.yaml:3", "'optimizer'"]),
    "key given twice": ("network:\n  name: lenet\n  name: lenet\n", ["bad.yaml:3", "network.name", "twice", "line 2"]),
    "wrong type": ("network: {name: lenet}\ntrain:\n  epochs: many\n", ["bad.yaml:3", "train.epochs", "'many'"]),
    "text for a number": ('network: {name: lenet}\noptimizer: {lr: "0.1"}\n', ["bad.yaml:2", "optimizer.lr", "'0.1'"]),
    "no YAML": ("network:\n  name: [lenet\n", ["bad.yaml:", "not valid YAML"]),
    "empty": ("", ["bad.yaml", "empty"]),
    "no network": ("train: {epochs: 1}\n", ["bad.yaml", "network"]),
    "no text": (b"\xff\xfe\x00\x01", ["bad.yaml", "UTF-8"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_line_with_file_and_line_and_2(tmp_path, case):
    text, parts = BAD_FILES[case]
    (tmp_path / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(train(tmp_path, "bad.yaml"), 2, *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_a_config_that_is_not_there(tmp_path):
    refused(train(tmp_path, "lenett"), 2, "no configuration named 'lenett'", "did you mean 'lenet'?")
    refused(train(tmp_path, "nothing-like-it"), 2, *packaged_configs())
    refused(train(tmp_path, "configs/lenet.yml"), 2, "no such file 'configs/lenet.yml'")
    refused(train(tmp_path, "."), 2, "cannot be read", "directory")
    refused(train(tmp_path), 2, "CONFIG", "--help")
    assert not list(tmp_path.iterdir())


def test_numbers_are_read_as_people_write_them(tmp_path):
    limits = "{limit: 12GiB, host_limit: 12 GB, workspace_limit: 12e9}"
    text = f"network: {{name: lenet}}\noptimizer: {{lr: 1e-3}}\nmemory: {limits}\n"
    (tmp_path / "good.yaml").write_text(text)
    printed = train(tmp_path, "good.yaml", "--print-config")
    assert printed.code == 0, printed.error
    for line in ("lr: 0.001", "limit: 12GiB", "host_limit: 12000000000", "workspace_limit: 12000000000"):
        assert f"  {line}\n" in printed.out


def test_a_data_file_that_is_missing_or_cut_off(tmp_path):
    packaged = Path(load_config.__code__.co_filename).parent / "data" / "mnist5k"
    shutil.copytree(packaged, tmp_path / "digits")
    images = tmp_path / "digits" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:5000])
    options = ("lenet", "--iterations", 1, "-o", "data.path=digits")
    refused(train(tmp_path, *options), 2, "digits/train-images-idx3-ubyte.gz", "gzip")
    images.unlink()
    refused(train(tmp_path, *options), 2, "train-images", "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_a_limit_that_is_too_small_ends_with_3_and_names_one_that_works(tmp_path):
    options = (*SMALL, "--iterations", 1, "--output", "run")
    ended = train(tmp_path, *options, "--memory-limit", "2MiB")
    refused(ended, 3, "at layer '", "needs", "budget 2.0 MiB (2,097,152 bytes)", "smallest budget that works")
    assert not list(tmp_path.iterdir())
    smallest = int(re.search(r"smallest budget.*?\(([\d,]+) bytes\)", ended.error)[1].replace(",", ""))
    refused(train(tmp_path, *options, "--memory-limit", smallest - 1), 3, f"budget {smallest / 2**20:.1f} MiB")
    assert not list(tmp_path.iterdir())
    works = train(tmp_path, *options, "--memory-limit", smallest)
    assert works.code == 0, works.error
    used = re.search(r"used at most ([\d.]+) MiB, limit ([\d.]+) MiB", works.out)
    assert float(used[1]) <= float(used[2])


def test_cuda_where_there_is_none(tmp_path):
    doctor = script("vdnn", "doctor", cwd=tmp_path)
    if "no NVIDIA driver" not in doctor.out:
        pytest.skip("there is a GPU here")
    ended = train(tmp_path, *SMALL, "--device", "cuda")
    refused(ended, 2, "device 'cuda' is not available", "libcuda.so.1", "--device cpu", "--device simulated")
    assert not list(tmp_path.iterdir())
