"""vdnn algos: what it prints, where its times come from, its files and its exit codes; and --precision everywhere."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from scripts import script
from test_algos import FACTS, MIB, table_of

from vdnn.cli import algo_choice
from vdnn.cli import algos as command
from vdnn.cli.main import main
from vdnn.cli.options import unmet_precision
from vdnn.memory.costs import Candidate
from vdnn.networks import build
from vdnn.runtime import algos
from vdnn.runtime.algo_sources import Source
from vdnn.runtime.algorithm_table import AlgorithmTable, Measured
from vdnn.runtime.backends.cuda.products import CONV_KINDS, unplaced_problem
from vdnn.runtime.config import load_config
from vdnn.runtime.driver import Driver
from vdnn.runtime.prepare import make_recipe

MODELLED = ("--profile", "h200")


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU or stored tables."""
    monkeypatch.setattr(algo_choice, "find_driver", lambda: Driver(0, "no driver"))
    monkeypatch.setattr(algo_choice, "stored_names", lambda: [])


@pytest.fixture
def lenet_table(tmp_path):
    table_of(build("lenet"), (8, 4)).save(tmp_path / "made.json")
    return str(tmp_path / "made.json")


def run(capsys, *arguments, code=0):
    assert main(["algos", *map(str, arguments)]) == code
    return capsys.readouterr()


@pytest.mark.parametrize(("network", "batch"), [("vgg16", 256), ("alexnet", 128)])
def test_a_network_is_studied_in_time(network, batch, tmp_path):
    started = time.perf_counter()
    ended = script("vdnn", "algos", network, "-b", batch, cwd=tmp_path)
    assert time.perf_counter() - started < 5
    assert ended.code == 0, ended.error
    assert "conv1" in ended.out
    assert "less in all; " in ended.out


def test_without_a_gpu_and_a_table_times_are_modelled_and_it_says_so(capsys, no_gpu):
    said = run(capsys, "alexnet")
    assert "no driver, and no stored table knows alexnet at batch size 128 in fp32" in said.err
    assert "times are modelled by profile h200" in said.err
    assert "(no measurement)" in said.out
    assert json.loads(run(capsys, "alexnet", "--json").out)["modelled"] is True


def test_without_a_gpu_a_stored_table_is_taken_if_it_knows_the_network(capsys, no_gpu, monkeypatch, lenet_table):
    table = algo_choice.load_table(lenet_table)
    monkeypatch.setattr(algo_choice, "stored_names", lambda: ["made-up"])
    monkeypatch.setattr(algo_choice, "load_table", lambda name: table)
    said = run(capsys, "lenet", "-b", 8, "--json")
    data = json.loads(said.out)
    assert "times are from the stored table made-up" in said.err
    assert (data["source"], data["modelled"]) == ("measured on Made Up 1, cuDNN 9.19.1", False)
    assert "modelled by profile" in run(capsys, "lenet", "-b", 9).err
    assert "modelled by profile" in run(capsys, "lenet", "-b", 8, "--precision", "tf32").err


def test_a_table_by_path_and_its_totals(capsys, lenet_table):
    data = json.loads(run(capsys, "lenet", "-b", 8, "--table", lenet_table, "--limits", "none,4MiB,0", "--json").out)
    assert [row["limit_bytes"] for row in data["limits"]] == [0, 4 * MIB, None]
    # two convolutions, of which the first needs no gradient of its input: 5 at 2.4 or 0.8 ms
    assert [row["time_ms"] for row in data["limits"]] == pytest.approx([12, 12, 4])
    assert [row["micro_batched_ms"] for row in data["limits"]] == pytest.approx([12, 4, 4])
    assert data["purchases"][1].startswith(
        "4.0 MiB → no limit: 8.00 ms less in all; 1.60 ms less with 8.0 MiB more in "
    )
    layers = {(row["layer"], row["direction"]) for row in data["layers"]}
    assert layers == {("conv1", "forward"), ("conv1", "wgrad"), *(("conv2", d) for d in algos.DIRECTIONS)}
    assert {c["layout"] for row in data["layers"] for c in row["candidates"]} == {"NCHW"}
    plain = run(capsys, "lenet", "-b", 8, "--table", lenet_table, "--no-micro-batches").out
    assert "micro" not in plain


def test_one_layer_shows_all_and_a_network_the_front(capsys):
    one = run(capsys, "alexnet", "--layer", "conv2", *MODELLED).out
    assert "IMPLICIT_GEMM" in one
    assert "conv1" not in one
    front = run(capsys, "alexnet", *MODELLED).out
    assert "IMPLICIT_GEMM" not in front
    assert "more are beaten" in front
    assert "IMPLICIT_GEMM" in run(capsys, "alexnet", "--all", *MODELLED).out


def test_totals_come_before_layers_and_small_times_have_digits(capsys):
    said = run(capsys, "lenet", "-b", 8, *MODELLED).out
    assert said.index("largest workspace") < said.index("nothing gained") < said.index("deterministic")
    assert " 0.0 " not in said
    assert " 0.00 " not in said


@pytest.mark.parametrize(("beaten", "words"), [(0, ""), (1, "; 1 more is beaten by"), (2, "; 2 more are beaten by")])
def test_one_is_not_many(capsys, beaten, words):
    slower = [algos.Candidate("GEMM", 2.0 + i, 0) for i in range(beaten)]
    conv = algos.ConvCosts("a", "forward", 8, (algos.Candidate("FFT", 1.0, 0), *slower))
    study = algos.Study("made up", 8, Source(lambda op, program: None, "made up", True, "fp32"), (conv,))
    command.print_study(study, [None], Console(width=160), everything=False)
    _, _, rest = capsys.readouterr().out.partition("as little workspace")
    assert rest.startswith(words or "\n")


def test_files_are_written(capsys, tmp_path):
    files = [tmp_path / "a.csv", tmp_path / "a.svg"]
    run(capsys, "alexnet", *MODELLED, "--csv", files[0], "--picture", files[1])
    rows = list(csv.DictReader(files[0].open()))
    times = [float(row["time_ms"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert len(rows) > 5
    assert files[1].read_bytes().startswith(b"<?xml")


def test_a_slice_of_an_accumulated_step_is_said(capsys):
    said = run(capsys, "lenet", "-b", 64, "-o", "train.accumulate=4", *MODELLED, "--json")
    assert "4 slices, of which one of 16 images is studied" in said.err
    assert json.loads(said.out)["batch_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("alexnet", "--layer", "conv9", *MODELLED), "has no convolution 'conv9', it has: conv1,"),
        (("alexnet", "--limits", "8MiB,much"), "--limits: 'much' is not an amount of bytes"),
        (("alexnet", "--limits", ""), "--limits: "),
        (("alexnet", "--limits", "0,0.5"), "--limits: '0.5' is no whole number of bytes"),
        (("alexnet", "--limits", "1.5 B"), "--limits: '1.5 B' is no whole number of bytes"),
        (("alexnet", "--limits", "0.0001KiB"), "--limits: '0.0001KiB' is no whole number of bytes"),
        (("alexnet", "--device", "cuda"), "; leave out --device: times then come from a stored table"),
        (("alexnet", "--picture", "a.txt"), "expected a file name that ends in"),
        (("alexnet", "--precision", "fp8"), "expected fp32, tf32, bf16 or fp16"),
        (("alexnet", "--table", "h300"), "no stored table 'h300'"),
        (("alexnet", "--device", "gpu"), "auto, cpu, cuda or simulated"),
        (("alexnet", "--profile", "h300"), "unknown profile 'h300'"),
        (("alexnet", "--csv", "/dev/null/a.csv", *MODELLED), "cannot be written"),
        (("alexnett",), "did you mean 'alexnet'"),
    ],
)
def test_bad_input_is_one_line_and_2(capsys, no_gpu, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    said = run(capsys, *arguments, code=2)
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert words in said.err


def test_a_table_that_lacks_the_network_or_the_precision_is_refused(capsys, lenet_table):
    options = ("lenet", "--table", lenet_table)
    assert "does not hold all convolutions of lenet" in run(capsys, *options, "-b", 9, code=2).err
    wrong = run(capsys, *options, "-b", 8, "--precision", "tf32", code=2).err
    assert f"is of {FACTS['precision']}, the precision asked for is tf32" in wrong


# ---- precision


def test_tf32_is_a_precision_and_others_are_not_met_in_silence(capsys):
    config = load_config("lenet", ["precision=tf32"])
    assert load_config("lenet").precision == "fp32"
    for caps, words in [
        (SimpleNamespace(name="cuda", simulated=False, precision="tf32"), None),
        (SimpleNamespace(name="cpu", simulated=False, precision="fp32"), "on device cpu products are computed in fp32"),
        (SimpleNamespace(name="simulated", simulated=True, precision="fp32"), "times are modelled in fp32"),
    ]:
        sentence = unmet_precision(config, caps)
        assert sentence is None if words is None else words in sentence
    assert main(["plan", "lenet", "--precision", "tf32", *MODELLED, "--json"]) == 0
    assert "on device simulated times are modelled in fp32" in capsys.readouterr().err
    assert "times are modelled in fp32" in run(capsys, "lenet", "--precision", "tf32", *MODELLED).err


def test_training_in_tf32_on_the_cpu_says_that_it_is_fp32(tmp_path):
    options = ("lenet", "--iterations", 1, "-b", 8, "--device", "cpu", "-o", "data.test_images=8", "--plan-only")
    said = script("vdnn-train", *options, "--precision", "tf32", cwd=tmp_path)
    assert said.code == 0, said.error
    assert "precision tf32 is for device cuda; on device cpu products are computed in fp32" in said.out + said.error
    assert "precision" not in script("vdnn-train", *options, cwd=tmp_path).error


# ---- layouts


@pytest.fixture
def half_table(tmp_path):
    """Of LeNet in bf16 and NHWC."""
    facts = {**FACTS, "precision": "bf16", "layout": "NHWC"}
    recipe = make_recipe(load_config("lenet", ["precision=bf16"]))
    table = AlgorithmTable(facts)
    for images in (8, 4):
        program = recipe.lower(build("lenet"), ("train", images))
        for op in program.ops:
            if op.kind in CONV_KINDS:
                rows = (Candidate("FAST", 1.0, 4096, math="bf16"),)
                table.problems[str(unplaced_problem(op, program))] = Measured(rows, None)
    table.save(tmp_path / "half.json")
    return str(tmp_path / "half.json")


def test_a_stored_table_is_taken_by_precision_and_layout(capsys, no_gpu, monkeypatch, lenet_table, half_table):
    tables = {"made-up-fp32": lenet_table, "made-up-bf16-nhwc": half_table}
    load = algo_choice.load_table
    monkeypatch.setattr(algo_choice, "stored_names", lambda: sorted(tables))
    monkeypatch.setattr(algo_choice, "load_table", lambda name: load(tables.get(name, name)))
    for options in (("--precision", "bf16"), ("--precision", "bf16", "--layouts", "NHWC")):
        said = run(capsys, "lenet", "-b", 8, *options, "--json")
        assert "times are from the stored table made-up-bf16-nhwc" in said.err
        data = json.loads(said.out)
        assert data["precision"] == "bf16"
        assert {(row["layout"], row["math"]) for layer in data["layers"] for row in layer["candidates"]} == {
            ("NHWC", "bf16")
        }
    assert "lenet, batch size 8, bf16, NHWC: times measured" in run(capsys, "lenet", "-b", 8, *options).out
    both = run(capsys, "lenet", "-b", 8, "--precision", "bf16", "--layouts", "nchw,nhwc", "--json")
    assert "no stored table knows lenet at batch size 8 in bf16: times are modelled" in both.err
    assert [study["modelled"] for study in json.loads(both.out)["studies"]] == [True, False]
    unknown = run(capsys, "lenet", "-b", 8, "--layouts", "nhwc").err
    assert "no stored table knows lenet at batch size 8 in fp32 and NHWC" in unknown
    unknown = run(capsys, "lenet", "-b", 8, "--layouts", "chwn").err
    assert "no stored table knows lenet at batch size 8 in fp32 and CHWN" in unknown


def test_what_is_shown_in_place_of_what_was_asked_for_is_in_the_heading_and_in_json(capsys, no_gpu):
    asked = ("alexnet", "--precision", "bf16", "--layouts", "NHWC")
    head = run(capsys, *asked).out.splitlines()[0]
    assert head == (
        "alexnet, batch size 128: asked for bf16, NHWC (no stored table has it); "
        "shown instead: fp32, NCHW, times modelled by profile h200 (no measurement)"
    )
    data = json.loads(run(capsys, *asked, "--json").out)
    assert (data["heading"], data["precision"], data["layout"]) == (head, "fp32", "NCHW")
    assert data["notes"][0] == head
    assert any("no stored table knows alexnet at batch size 128 in bf16 and NHWC" in note for note in data["notes"])
    assert any("times are modelled in fp32" in note for note in data["notes"])
    assert {c["layout"] for row in data["layers"] for c in row["candidates"]} == {"NCHW"}
    named = run(capsys, *asked, *MODELLED).out.splitlines()[0]
    assert "asked for bf16, NHWC; shown instead: fp32, NCHW" in named, "nobody has looked for a table"
    plain = run(capsys, "alexnet", *MODELLED)
    assert plain.out.startswith("alexnet, batch size 128, fp32: times modelled by profile h200 (no measurement)\n")
    assert json.loads(run(capsys, "alexnet", *MODELLED, "--json").out)["notes"] == []


@pytest.mark.parametrize(("option", "value"), [("--profile", "h200"), ("--device", "cpu")])
def test_a_table_and_another_source_of_times_are_refused(capsys, lenet_table, option, value):
    said = run(capsys, "lenet", "-b", 8, "--table", lenet_table, option, value, code=2)
    assert said.out == ""
    assert said.err == f"vdnn algos: --table takes its times from the table; leave out --table or {option}\n"
    run(capsys, "lenet", "-b", 8, "--table", lenet_table, "--device", "auto")


def test_a_table_by_path_brings_its_precision_and_layout(capsys, half_table):
    options = ("lenet", "-b", 8, "--table", half_table)
    assert json.loads(run(capsys, *options, "--json").out)["precision"] == "bf16"
    assert "the layout asked for is NCHW" in run(capsys, *options, "--layouts", "nchw", code=2).err
    assert "is of bf16, the precision asked for is fp16" in run(capsys, *options, "--precision", "fp16", code=2).err
    assert "expected nchw, nhwc, chwn" in run(capsys, "lenet", "--layouts", "hwcn", code=2).err
    wide = run(capsys, "lenet", "-b", 8, "--device", "cpu", "--layouts", "chwn").out
    assert "lenet, batch size 8, fp32, CHWN" in wide
    assert "GEMM_WIDE" in wide
    assert "show one layout" in run(capsys, "lenet", "--layouts", "nchw,nhwc", "--csv", "a.csv", code=2).err


def test_what_a_table_leaves_out_is_said(capsys, tmp_path, lenet_table):
    table_of(build("alexnet"), (8,)).save(tmp_path / "plain.json")
    words = "times of forward are of the convolutions alone"
    options = ("--table", str(tmp_path / "plain.json"), "--no-micro-batches")
    assert words in run(capsys, "alexnet", "-b", 8, *options).err
    assert words not in run(capsys, "alexnet", "-b", 8, *options, "-o", "memory.fuse=false").err
    assert words not in run(capsys, "lenet", "-b", 8, "--table", lenet_table).err  # which has no ReLU there


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("network", ["alexnet", "overfeat", "googlenet_bn", "resnet50", "vgg16", "vgg19"])
def test_tables_in_nhwc_know_the_networks_that_were_compared_with_pytorch(capsys, network, precision):
    batch = "256" if network in ("resnet50", "vgg16", "vgg19") else "128"
    options = ("-b", batch, "--precision", precision, "--layouts", "nhwc", "--json")
    assert main(["algos", network, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["modelled"], data["precision"]) == (False, precision)
    assert all(row["candidates"] for row in data["layers"])
    best = sum(min(c["time_ms"] for c in row["candidates"]) for row in data["layers"])
    peers = json.loads((Path(__file__).parents[1] / "bench/results/h200_peers.json").read_text())["results"]
    assert 0.4 < best / peers[f"{network}:{batch} {precision} ours"]["step_ms"] < 1, "of the step measured as a whole"


@pytest.mark.parametrize("words", [(), ("--layouts", "nhwc")])
def test_on_the_cpu_layouts_are_those_it_trains_in(words, capsys):
    assert main(["algos", "lenet", "--device", "cpu", "--precision", "bf16", "--no-micro-batches", *words]) == 0
    heading = capsys.readouterr().out.splitlines()
    assert any("bf16" in line and ("NHWC" in line) == bool(words) for line in heading[:2])


@pytest.mark.parametrize(
    ("option", "note"),
    [
        ("memory.layout=study", "memory.layout study chooses layer by layer; NCHW is shown, --layouts shows others"),
        ("memory.workspace_limit=64MiB", "memory.workspace_limit is not applied: --limits says"),
    ],
)
def test_what_is_not_applied_is_said(option, note, capsys):
    assert main(["algos", "alexnet", "-o", option, "--layer", "conv1", "--json"]) == 0
    assert any(text.startswith(note) for text in json.loads(capsys.readouterr().out)["notes"])
