"""vdnn-train with bad options, files, data and limits: one line that names the fault, an exit code, nothing written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from scripts import refused, script
from small_run import SMALL, train

from vdnn.runtime.config import load_config, packaged_configs

BAD_OPTIONS = {
    "unknown key": (["-o", "train.batchsize=4"], ["train.batchsize", "did you mean 'batch_size'?"]),
    "batch 0": (["-b", "0"], ["-b/--batch-size: expected a whole number from 1 to 10^12, got 0"]),
    "negative rate": (["--lr", "-0.1"], ["--lr: expected a number above 0", "got -0.1"]),
    "rate that is no number": (["--lr", "fast"], ["--lr: ", "'fast'"]),
    "bytes of no unit": (["--memory-limit", "12 XB"], ["--memory-limit: ", "12GiB, 12 GB or 12000000000", "12 XB"]),
    "unknown policy": (["--policy", "al"], ["--policy: expected base, none, all, conv or dyn, got 'al'"]),
    "unknown device": (["--device", "gpu"], ["--device: ", "auto, cpu, cuda or simulated", "'gpu'"]),
    "the same by -o": (["-o", "train.batch_size=0"], ["-o train.batch_size=0: train.batch_size: expected", "got 0"]),
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
    planned, used = re.findall(r"(?:planned|used at most) [\d.]+ MiB \(([\d,]+) bytes\)", works.out)
    assert planned == used
    assert int(used.replace(",", "")) <= smallest
    assert "MiB (--memory-limit), " in works.out


def test_cuda_where_there_is_none(tmp_path):
    doctor = script("vdnn", "doctor", cwd=tmp_path)
    if "no NVIDIA driver" not in doctor.out:
        pytest.skip("there is a GPU here")
    ended = train(tmp_path, *SMALL, "--device", "cuda")
    refused(ended, 2, "device 'cuda' is not available", "libcuda.so.1", "--device cpu", "--device simulated")
    assert not list(tmp_path.iterdir())
