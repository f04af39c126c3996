"""Measuring the memory-efficiency study without a GPU, the files of rows, and `vdnn tables` with its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_study_tables import pool_row, step_row

from vdnn.bench import harness, peers_ours, study
from vdnn.bench.peers_cases import Case
from vdnn.bench.study_cases import LAYOUTS, PARTS, choose_parts, convolutions, networks
from vdnn.bench.study_conv_gpu import measure as measure_convolutions
from vdnn.bench.study_conv_gpu import problem_of, worklist
from vdnn.bench.study_files import Recorder, file_name, read_file, read_rows
from vdnn.bench.study_networks import measure as measure_networks
from vdnn.bench.study_table import NOT_MEASURED, cells
from vdnn.bench.study_tables import make_tables, page, write_tables
from vdnn.cli import study_tables as cli
from vdnn.cli.main import main
from vdnn.errors import BackendUnavailable, ConfigError, DataError, VdnnError
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.memory.costs import Candidate
from vdnn.runtime.driver import Driver

# ---- files


def test_rows_are_kept_and_read_back(tmp_path):
    recorder = Recorder(tmp_path, "networks", "a command", "GPU One")
    recorder.add(step_row("LeNet", "fp32", "nchw", 1.0, 1.0))
    assert recorder.has(case="LeNet", layout="nchw")
    assert not recorder.has(case="LeNet", layout="auto")
    kept = read_rows("networks", tmp_path)
    assert kept.rows[0]["step_ms"] == 1.0
    assert kept.machine.startswith("measured on GPU One, commit ")
    assert Recorder(tmp_path, "networks", "a command", "GPU One").has(case="LeNet")
    with pytest.raises(DataError, match="holds rows of GPU One, this is GPU Two"):
        Recorder(tmp_path, "networks", "a command", "GPU Two")


NESTED = '{"facts": {}, "results": ' + 10**5 * "["
HUGE = 10**400


def test_rows_of_a_folder_come_before_those_that_come_with_vdnn(tmp_path):
    stored, folder = tmp_path / "stored", tmp_path / "out"
    stored.mkdir()
    folder.mkdir()
    Recorder(stored, "pooling", "c", "H200").add(pool_row("POOL1", "CHWN", "ours", 1.0))
    (stored / file_name("pooling")).rename(stored / f"h200_{file_name('pooling')}")
    assert read_rows("pooling", folder, stored).machine.startswith("measured on H200")
    Recorder(folder, "pooling", "c", "GPU One").add(pool_row("POOL1", "CHWN", "ours", 1.0))
    assert read_rows("pooling", folder, stored).machine.startswith("measured on GPU One")
    assert read_rows("layouts", folder, stored).machine == NOT_MEASURED


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"facts": {}, "results": {}}', '{"facts": {}, "results": {"rows": [1]}}', NESTED],
)
def test_a_damaged_file_is_named(text, tmp_path):
    path = tmp_path / file_name("layouts")
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match="holds no measured rows"):
        read_file(path)
    assert main(["tables", "layouts", "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("change", [{"losses": "x"}, {"losses": -1}, {"losses": [None]}, {"step_ms": HUGE}])
def test_damaged_numbers_of_networks_are_named(change, tmp_path, capsys):
    row = {**step_row("LeNet", "fp32", "nchw", 1.0, 1.0), **change}
    (tmp_path / file_name("networks")).write_text(json.dumps({"facts": {}, "results": {"rows": [row]}}), "utf-8")
    assert main(["tables", "networks", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "row 1 (LeNet)" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), HUGE])
def test_times_and_rates_that_are_none_are_named(value, tmp_path, capsys):
    for key in ("time_us", "gbps"):
        row = {**pool_row("POOL1", "CHWN", "ours", 1.0), key: value}
        (tmp_path / file_name("pooling")).write_text(json.dumps({"facts": {}, "results": {"rows": [row]}}), "utf-8")
        assert main(["tables", "pooling", "--out", str(tmp_path)]) == 2
        assert f"row 1 (POOL1): '{key}' is missing or wrong: expected a number above 0" in capsys.readouterr().err


def test_tables_are_written_with_a_page(tmp_path):
    tables = make_tables(PARTS, tmp_path)
    assert write_tables(tmp_path, tables) == tmp_path / "study.html"
    found = {path.name for path in tmp_path.iterdir()}
    pictures = {f"{part}.png" for part in ("layouts", "pooling", "networks")}
    assert found == pictures | {"study.html", "study.json", *(f"{p}.{end}" for p in PARTS for end in ("md", "csv"))}
    data = json.loads((tmp_path / "study.json").read_text("utf-8"))
    assert [table["table"] for table in data["tables"]] == list(PARTS)
    text = page(tables, {"layouts": b"png"})
    assert text.count("data:image/png;base64,") == 1
    assert "<script" not in text
    assert text.count("<section") == text.count("</section>") == len(PARTS)
    header, rows = cells(tables[0])
    assert all(len(row) == len(header) for row in rows)


# ---- measuring, without a GPU


class FakeSearch:
    def __init__(self, kind, fails=()):
        self.kind, self.fails, self.asked = kind, fails, []

    def candidates(self, problem):
        self.asked.append(problem)
        if problem.x[0] in self.fails:
            raise VdnnError("no room")
        return (Candidate("fast", 0.1, 0, True, "fp32"), Candidate("slow", 0.2, 1024, True, "fp32"))


def test_convolutions_are_measured_forward_first_and_kept(tmp_path):
    opened = {}

    def open_search(precision, layout):
        return opened.setdefault((precision, layout), FakeSearch((precision, layout), fails=(32,)))

    recorder = Recorder(tmp_path, "layouts", "test")
    assert measure_convolutions(recorder, open_search, float("inf"), lambda text: None) == 0
    assert list(opened) == [
        ("fp32", "NCHW"),
        ("fp32", "CHWN"),
        ("tf32", "NHWC"),
        ("bf16", "NHWC"),
        ("bf16", "CHWN"),
        ("fp32", "NHWC"),
    ]
    directions = [row["direction"] for row in recorder.rows]
    assert directions == sorted(directions, key=["forward", "wgrad", "dgrad"].index)
    failed = [row for row in recorder.rows if row["time_us"] is None]
    assert {row["case"] for row in failed} == {"CONV9", "CONV10", "CONV11", "CONV12"}
    row = next(row for row in recorder.rows if row["case"] == "CONV8")
    assert row["tflops"] == pytest.approx(convolutions()["CONV8"].operations / 1e-4 / 1e12)
    before = len(opened["fp32", "NCHW"].asked)
    again = Recorder(tmp_path, "layouts", "test")
    assert measure_convolutions(again, open_search, float("-inf")) == len(failed)  # they would be tried again
    assert len(opened["fp32", "NCHW"].asked) == before
    fresh = Recorder(tmp_path / "..", "other", "test")
    assert measure_convolutions(fresh, open_search, float("-inf")) == len(list(worklist()))


@pytest.mark.parametrize(("precision", "channels"), [("fp32", 3), ("tf32", 4), ("bf16", 8)])
def test_images_are_padded_in_nhwc_as_in_training(precision, channels):
    case = convolutions()["CONV9"]
    problem = problem_of(case, "wgrad", precision, "NHWC")
    assert (problem.x[1], problem.w[1]) == (channels, channels)
    assert problem.channels == (None if channels == 3 else 3)
    assert problem_of(case, "forward", precision, "NHWC").channels is None
    assert problem_of(case, "forward", precision, "CHWN").x == case.x
    assert problem.y == (32, 64, 224, 224)
    assert (problem.stride, problem.padding) == ((1, 1), (1, 1))


def test_networks_are_measured_with_the_trainer_and_kept(tmp_path, monkeypatch):
    small = {name: case for name, case in networks().items() if name == "LeNet"}
    monkeypatch.setattr("vdnn.bench.study_networks.networks", lambda: small)
    monkeypatch.setattr("vdnn.bench.study_networks.PRECISIONS", ("fp32",))
    ran = []

    def measure(case: Case):
        ran.append(case)
        if "memory.layout=chwn" in case.ours:
            raise VdnnError("no room")
        return measured(case)

    measured = peers_ours.measure
    monkeypatch.setattr(peers_ours, "measure", measure)
    recorder = Recorder(tmp_path, "networks", "test")
    assert measure_networks(recorder, float("inf"), lambda text: None, "cpu", 0.0) == 0
    assert [row["layout"] for row in recorder.rows] == ["nchw", "nhwc", "chwn", "study", "auto"]
    assert [row["step_ms"] is None for row in recorder.rows] == [False, False, True, False, False]
    assert {case.batch for case in ran} == {128}
    losses = [row["losses"][0] for row in recorder.rows if row["step_ms"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert measure_networks(Recorder(tmp_path, "networks", "test"), float("-inf")) == 1  # chwn would be tried again


def test_without_a_gpu_a_part_says_so_and_keeps_nothing(tmp_path, monkeypatch):
    def unavailable(*args, **kwargs):
        raise BackendUnavailable("no GPU")

    monkeypatch.setattr("vdnn.runtime.backends.cuda.backend.CudaBackend.__init__", unavailable)
    monkeypatch.setattr("vdnn.bench.peers_ours.measure", unavailable)
    said = []
    assert study.run(("layouts", "networks"), tmp_path, 10, said.append) == 1
    assert [text.partition(":")[0] for text in said] == ["layouts", "networks"]
    assert all("no GPU" in text for text in said)
    assert not list(tmp_path.iterdir())


def test_a_part_that_fails_costs_no_other(tmp_path, monkeypatch):
    def fail(recorder, deadline, note):
        raise VdnnError("no room")

    def work(recorder, deadline, note):
        recorder.add(pool_row("POOL1", "CHWN", "ours", 1.0))
        return 3, 0

    monkeypatch.setattr(study, "MEASURE", {"layouts": fail, "pooling": work})
    said = []
    assert study.run(("layouts", "pooling"), tmp_path, 10, said.append) == 1
    assert "no room" in said[0]
    assert "1 rows in study_pooling.json, 3 cases left for want of time" in said[1]
    assert study.run(("pooling",), tmp_path, 10, said.append) == 0


def test_parts_that_are_programs_of_their_own_give_their_rows(tmp_path, monkeypatch):
    program = ModuleType("vdnn.bench.gpu_softmax")

    def run(words):
        rows = [{"case": "CLASS1", "n": 128, "k": 10, "method": "ours", "time_us": 2.0, "gbps": 5.0, "share": 0.5}]
        Path(os.environ["OUT"], "found.json").write_text(json.dumps({"facts": {}, "results": {"rows": rows}}))
        return 0

    program.main = run
    monkeypatch.setitem(sys.modules, "vdnn.bench.gpu_softmax", program)
    monkeypatch.setenv("OUT", "elsewhere")
    assert study.run(("softmax",), tmp_path, 10, lambda text: None) == 0
    assert os.environ["OUT"] == "elsewhere"
    assert read_rows("softmax", tmp_path).rows[0]["case"] == "CLASS1"


# ---- the command


def test_words_choose_tables():
    assert choose_parts(["networks", "layouts"]) == ("layouts", "networks")
    assert choose_parts(["study"]) == PARTS
    assert choose_parts(["fig14"]) == ()


def test_the_command_prints_tables_of_both_papers(capsys, tmp_path):
    assert main(["tables", "pooling", "fig12", "--networks", "alexnet", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "## Pooling: POOL1 to POOL10" in said.out
    assert "Figure 12" in said.out
    assert "## Layouts" not in said.out
    assert said.err.splitlines() == [
        "--networks, --profile and --steps apply to the vDNN paper's figures, not to the study's tables",
        f"wrote {tmp_path}/index.html",
        f"wrote {tmp_path}/study.html",
    ]
    assert [path.name for path in sorted(tmp_path.glob("*.csv")) if path.stem in PARTS] == ["pooling.csv"]


def test_tables_that_are_there_are_kept(tmp_path):
    assert main(["tables", "pooling", "--out", str(tmp_path)]) == 0
    assert main(["tables", "layouts", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "study.json").read_text("utf-8"))
    assert [table["table"] for table in data["tables"]] == ["layouts", "pooling"]
    assert main(["tables", "compare", str(tmp_path), str(tmp_path)]) == 2


def test_a_comparison_of_study_folders_says_why_there_is_none(tmp_path, capsys):
    assert main(["tables", "layouts", "--out", str(tmp_path)]) == 0
    assert main(["tables", "compare", str(tmp_path), str(tmp_path)]) == 2
    assert "the memory-efficiency study's tables only" in capsys.readouterr().err


def test_an_incomplete_row_is_named_and_stops_no_other_table(tmp_path, capsys):
    row = '{"case": "CLASS1", "n": 1, "k": 2, "time_us": 1, "dtype": "float32"}'
    (tmp_path / "study_softmax.json").write_text(f'{{"facts": {{}}, "results": [{row}]}}', "utf-8")
    assert main(["tables", "softmax", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "study_softmax.json', row 1 (CLASS1): 'method' is missing" in error
    assert error.count("\n") == 1
    assert main(["tables", "layouts", "--out", str(tmp_path)]) == 0


def test_options_of_the_other_paper_are_refused(capsys):
    for words in (["pooling", "--steps", "3"], ["softmax", "--networks", "lenet"], ["networks", "--networks", "x"]):
        assert main(["tables", *words]) == 2
    assert "no network 'x'" in capsys.readouterr().err
    assert main(["tables", "networks", "--networks", "lenet", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["study"]
    assert {row["network"] for row in table["rows"]} == {"LeNet"}


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "find_driver", lambda: Driver(0, "no driver"))
    for device, part in (("cuda", "pooling"), ("cpu", "pooling"), ("cuda", "fig11")):
        assert main(["tables", part, "--device", device, "--out", str(tmp_path / "out")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        if device == "cuda":
            assert "device 'cuda' is not available: no driver; leave out --device" in err
    assert not (tmp_path / "out").exists()


def test_json_has_every_number(capsys):
    assert main(["tables", "study", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["study"]
    assert [table["table"] for table in data["study"]] == list(PARTS)


def test_an_unknown_word_names_what_there_is(capsys):
    assert main(["tables", "poling"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pooling" in error
    assert "fig14" in error


def test_a_gpu_measures_each_table_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    ran = []

    def run(command, stdout, pass_fds, env):  # by which the process ends with this one
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2, raising=False)
    said = []
    cli.study_tables(("layouts", "pooling"), tmp_path, "cuda", 100.0, said.append)
    assert [words[:6] for words in ran] == [
        ["-m", "vdnn.bench.study", name, "--out", str(tmp_path), "--seconds"] for name in ("layouts", "pooling")
    ]
    assert [int(words[6]) for words in ran] == [50, 100]
    assert len(said) == 1
    assert "pooling: not everything could be measured (exit code 1)" in said[0]
    with pytest.raises(ConfigError, match="are measured on cuda only"):
        cli.study_tables(("layouts",), tmp_path, "cpu", None, said.append)
    assert len(ran) == 2


def test_layouts_of_the_study_are_those_of_the_program():
    assert set(LAYOUTS) == set(MEMORY_ORDERS)
