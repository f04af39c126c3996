"""Where vdnn algos takes its times from, what it leaves out or cannot know, and that it says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_algos import table_of
from test_algos_cli import MODELLED, lenet_table, no_gpu, run

from vdnn.cli import algo_choice
from vdnn.cli.main import main
from vdnn.errors import BackendUnavailable
from vdnn.memory.costs import Candidate
from vdnn.networks import build
from vdnn.runtime import algorithm_table, devices
from vdnn.runtime.algorithm_table import Measured
from vdnn.runtime.driver import Driver

__all__ = ["lenet_table", "no_gpu"]


def test_a_driver_without_cupy_is_noted_and_stored_tables_are_taken(capsys, monkeypatch, lenet_table):
    """Here CuPy or the GPU is missing, whatever the driver says."""
    finding = "the NVIDIA driver finds 1 GPU(s)"

    def refused(*arguments, **options):
        raise BackendUnavailable("CuPy is not installed; pip install 'vdnn[cuda13]'")

    load = algo_choice.load_table
    monkeypatch.setattr(algo_choice, "find_driver", lambda: Driver(1, finding))
    monkeypatch.setattr(devices, "find_driver", lambda: Driver(1, finding))
    monkeypatch.setattr(devices, "CudaBackend", refused)
    monkeypatch.setattr(algo_choice, "stored_names", lambda: ["made-up"])
    monkeypatch.setattr(algo_choice, "load_table", lambda name: load(lenet_table))
    words = f"the GPU is not used: {finding}, but CuPy is not installed; pip install 'vdnn[cuda13]'"
    for options in ((), ("--device", "auto")):
        said = run(capsys, "lenet", "-b", 8, *options, "--json")
        assert said.err.startswith(f"note: {words}\nnote: no GPU that can be used: times are from the stored table")
        data = json.loads(said.out)
        assert data["notes"][0] == words
        assert not data["modelled"]
    asked = run(capsys, "lenet", "-b", 8, "--device", "cuda", code=2).err
    assert "CuPy is not installed" in asked
    assert asked.endswith("leave out --device: times then come from a stored table, or are modelled\n")
    assert "train" not in asked


def test_a_damaged_stored_table_is_named_and_passed_over(capsys, no_gpu, monkeypatch, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setattr(algorithm_table, "resources", SimpleNamespace(files=lambda package: tmp_path))
    monkeypatch.setattr(algo_choice, "stored_names", lambda: ["broken"])
    said = run(capsys, "alexnet", "--json")
    assert str(tmp_path / "broken.json") in said.err
    assert "reinstall vdnn" in said.err
    assert "no stored table that can be read knows alexnet" in said.err
    data = json.loads(said.out)
    assert data["modelled"]
    assert len(data["notes"]) == 2
    asked = run(capsys, "alexnet", "--table", "broken", code=2).err
    assert str(tmp_path / "broken.json") in asked
    assert asked.count("\n") == 1


@pytest.mark.parametrize(("key", "value"), [("layout", 7), ("precision", "fp99"), ("gpu", None), ("cudnn", "9")])
def test_a_table_of_wrong_facts_is_one_line_and_2(capsys, tmp_path, lenet_table, key, value):
    data = json.loads(Path(lenet_table).read_text())
    data["facts"][key] = value
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    said = run(capsys, "lenet", "-b", 8, "--table", tmp_path / "wrong.json", code=2)
    assert said.err.startswith(f"vdnn algos: '{tmp_path / 'wrong.json'}' is no table of algorithms: facts: {key}: ")
    assert said.err.count("\n") == 1


def test_algorithms_that_the_configuration_refuses_are_left_out_and_it_says_so(capsys, lenet_table):
    options = ("lenet", "-b", 8, "--table", lenet_table)
    every = json.loads(run(capsys, *options, "--json").out)
    assert {c["algorithm"] for row in every["layers"] for c in row["candidates"]} == {"FAST", "SLOW"}
    only = json.loads(run(capsys, *options, "-o", "deterministic=true", "--json").out)
    assert {c["algorithm"] for row in only["layers"] for c in row["candidates"]} == {"FAST"}
    assert [row["time_ms"] for row in only["limits"]] == pytest.approx([4] * len(only["limits"]))
    assert "lenet, batch size 8, fp32, deterministic algorithms only: times measured" in only["heading"]
    assert "deterministic algorithms only, as deterministic: true asks" in only["notes"]
    table = algo_choice.load_table(lenet_table)
    for key, found in table.problems.items():
        rows = (Candidate("graph:eng1", 0.01), *found.candidates)
        table.problems[key] = Measured(rows, None)
    table.save(Path(lenet_table))
    named = json.loads(run(capsys, *options, "-o", "memory.candidates=named", "--json").out)
    assert {c["algorithm"] for row in named["layers"] for c in row["candidates"]} == {"FAST", "SLOW"}
    assert "named algorithms only, as memory.candidates: named asks" in named["notes"]
    modelled = run(capsys, "alexnet", "-o", "memory.candidates=named", *MODELLED).out
    assert "named algorithms only" in modelled
    cpu = run(capsys, "lenet", "-b", 2, "--device", "cpu", "-o", "memory.candidates=named")
    assert "device cpu has none" in cpu.err
    assert "named algorithms only" not in cpu.out


def test_a_table_without_any_algorithm_that_is_wanted_is_an_error(capsys, tmp_path):
    table = table_of(build("lenet"), (8,))
    for key, found in table.problems.items():
        table.problems[key] = Measured(found.candidates[1:], None)
    table.save(tmp_path / "slow.json")
    options = ("lenet", "-b", 8, "--table", tmp_path / "slow.json")
    run(capsys, *options)
    said = run(capsys, *options, "-o", "deterministic=true", code=2).err
    assert "the table has no deterministic algorithm for conv1 forward" in said


def test_what_micro_batches_are_known_is_said_in_the_table_and_in_json(capsys, tmp_path, lenet_table):
    table_of(build("lenet"), (8,)).save(tmp_path / "whole.json")
    words = "the table knows no slices of 4, 2 or 1 images"
    options = ("lenet", "-b", 8, "--table")
    said = run(capsys, *options, tmp_path / "whole.json").out
    assert words in said
    assert "micro-batched" not in said
    assert words in json.loads(run(capsys, *options, tmp_path / "whole.json", "--json").out)["notes"]
    assert words not in run(capsys, *options, tmp_path / "whole.json", "--no-micro-batches").out
    some = " ".join(run(capsys, *options, lenet_table).out.split())
    assert "micro-batched: batches divided into" in some
    assert "slices of 4 known for 5 of 5 convolutions" in some


def test_bytes_of_a_plan_are_not_mentioned_where_there_is_none(capsys, no_gpu):
    said = run(capsys, "alexnet", "--precision", "bf16").err
    assert "times are modelled in fp32" in said
    assert "bytes are as asked for" not in said
    assert main(["plan", "lenet", "--precision", "bf16", *MODELLED, "--json"]) == 0
    assert "bytes are as asked for" in capsys.readouterr().err


def test_limits_and_layouts_are_read_as_people_write_them(capsys):
    data = json.loads(run(capsys, "alexnet", *MODELLED, "--limits", "NONE,None,0.5KiB,1e3,512,0", "--json").out)
    assert [row["limit_bytes"] for row in data["limits"]] == [0, 512, 1000, None]
    once = json.loads(run(capsys, "alexnet", *MODELLED, "--layouts", "nchw,NCHW, nchw", "--json").out)
    assert "studies" not in once


def test_a_precision_by_any_option_is_compared_with_that_of_the_table(capsys, lenet_table):
    options = ("lenet", "-b", 8, "--table", lenet_table, "-o", "precision=tf32")
    assert "is of fp32, the precision asked for is tf32" in run(capsys, *options, code=2).err
