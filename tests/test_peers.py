"""The comparison with PyTorch: which cases there are, processes that fail or hang, what the table makes of results."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vdnn.bench import peers
from vdnn.bench.peers import Card, Store, compile_ahead, main, measure_all
from vdnn.bench.peers_cases import Case, Program, Recipe, parse_network, parse_program, schedule
from vdnn.bench.peers_ours import measure, running
from vdnn.bench.peers_table import grouped, leanest, markdown, verdict
from vdnn.bench.peers_timing import spread, steps_for
from vdnn.errors import BackendUnavailable, BudgetError, ConfigError
from vdnn.units import GIB

LENET = Case("lenet", 4, "fp32", "ours", device="cpu", seconds=0)


# ---- cases


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", Program(None)),
        ("ours-12GiB", Program(None, 12 * GIB)),
        ("ours-accum4", Program(None, None, 4)),
        ("ours-accum2-3GiB", Program(None, 3 * GIB, 2)),
        ("torch-plain", Program(Recipe())),
        ("torch-compile", Program(Recipe(compiled=True))),
        ("torch-graph", Program(Recipe(graph=True))),
        ("torch-accum4-512MiB", Program(Recipe(accumulate=4), GIB // 2)),
        ("torch-ckpt+accum2", Program(Recipe(checkpoint=True, accumulate=2))),
        ("torch-offload", Program(Recipe(offload=True))),
        ("torch-budget", Program(Recipe(compiled=True, budget=0.5))),
    ],
)
def test_the_name_of_a_program_says_what_it_does(name: str, expected: Program) -> None:
    assert parse_program(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "torch-fast",
        "torch-accum0",
        "torch-graph+compile",
        "ours-12",
        "ours-accum",
        "ours-accum0",
        "theirs",
        "",
    ],
)
def test_other_names_are_errors(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_program(name)


@pytest.mark.parametrize("text", ["vgg16", "vgg16:", "vgg16:x", ":8", "vgg16:0"])
def test_a_network_comes_with_its_batch(text: str) -> None:
    assert parse_network("vgg16:256") == ("vgg16", 256)
    with pytest.raises(ConfigError):
        parse_network(text)


def test_cases_go_network_by_network_with_pytorch_before_and_after_ours() -> None:
    cases = schedule(["a:1", "b:2"], ["tf32", "bf16"], ["torch-compile", "ours"], closing=True, device="cpu")
    around = [("torch-compile", 1), ("ours", 1), ("torch-compile", 2)]
    assert [(c.network, c.precision) for c in cases] == [
        (n, p) for n in ("a", "b") for p in ("tf32", "bf16") for _ in around
    ]
    assert [(c.program, c.repeat) for c in cases] == around * 4
    assert len({c.key for c in cases}) == len(cases)
    assert all(Case.from_json(json.loads(json.dumps(c.to_json()))) == c for c in cases)
    assert len(schedule(["a:1"], ["tf32"], ["torch-compile", "ours"], closing=False)) == 2


def test_overrides_of_ours_make_another_case_of_ours_alone() -> None:
    changed = replace(LENET, ours=("memory.fuse=false",))
    assert changed.key != LENET.key
    assert replace(changed, program="torch-plain").key == replace(LENET, program="torch-plain").key


# ---- processes

FAKE = """
import json, os, subprocess, sys, time
case = json.loads(sys.argv[1])
with open(sys.argv[0] + ".runs", "a") as runs:
    runs.write(case["program"] + "\\n")
if len(sys.argv) == 2:
    sys.exit()
if case["program"] == "torch-graph":
    sys.exit("words before the end")
if case["program"] == "torch-offload":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(sys.argv[0] + ".child", "w").write(str(child.pid))
    time.sleep(60)
if case["program"] == "torch-ckpt":
    sys.exit(2)
found = {"failed": "does not fit: too much"} if case["program"] == "torch-plain" else {"step_ms": 4.0}
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that does nothing but end in the way that its program's name stands for."""
    path = tmp_path / "worker.py"
    path.write_text(FAKE)
    monkeypatch.setattr(peers, "WORKER", [sys.executable, str(path)])
    return path


def cases(*programs: str) -> list[Case]:
    return [Case("lenet", 8, "fp32", name) for name in programs]


def test_every_end_of_a_process_is_a_result_and_is_not_measured_again(worker: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    todo = cases("torch-compile", "torch-plain", "torch-graph", "torch-offload", "ours")
    store = Store.open(tmp_path / "out", "command")
    assert measure_all(todo, store, lines.append, timeout_s=2.5)
    compiled, plain, graph, offload, ours = (store.results[case.key] for case in todo)
    assert compiled["step_ms"] == ours["step_ms"] == 4.0
    assert plain["failed"] == "does not fit: too much"
    assert graph["failed"] == "the process ended with 1: words before the end"
    assert offload["failed"] == "no result within 2 s"
    assert "2,000 images/s" in lines[0]
    assert len(lines) == 5

    again = Store.open(tmp_path / "out", "command")
    assert again.results == json.loads(json.dumps(store.results)), "what lies on disk is all of it"
    assert measure_all(todo, again, lines.append, timeout_s=2.5)
    assert len((tmp_path / "worker.py.runs").read_text().splitlines()) == 5
    assert "torch-compile" in (tmp_path / "out" / "peers.md").read_text()


def test_what_a_stopped_process_has_started_ends_with_it(worker: Path, tmp_path: Path) -> None:
    measure_all(cases("torch-offload"), Store.open(tmp_path / "out", ""), lambda text: None, timeout_s=2.5)
    child = int((tmp_path / "worker.py.child").read_text())
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")


def test_a_case_cut_short_by_the_budget_is_no_result(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lines = Store.open(tmp_path / "out", ""), list[str]()
    todo = cases("torch-compile", "torch-offload", "ours")
    assert not measure_all(todo, store, lines.append, timeout_s=30.0, budget_s=19.0)
    assert not store.results, "too little is left to begin one"
    monkeypatch.setattr(peers, "LEAST_S", 0.1)
    assert not measure_all(todo, store, lines.append, timeout_s=30.0, budget_s=2.0)
    assert "time is over" in lines[-1]
    assert list(store.results) == [todo[0].key]


def test_a_missing_library_is_an_error_and_no_result(worker: Path, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out", "")
    with pytest.raises(BackendUnavailable):
        measure_all(cases("torch-ckpt"), store, lambda text: None, timeout_s=5.0)
    assert not store.results


def test_cases_are_compiled_ahead_side_by_side(worker: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    compile_ahead(cases("torch-compile", "torch-budget", "torch-plain"), 2, 20.0, lines.append)
    assert len(lines) == 3
    assert sorted((tmp_path / "worker.py.runs").read_text().split()) == ["torch-budget", "torch-compile", "torch-plain"]


def test_the_command_measures_goes_on_and_tries_again(
    worker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    words = ["--device", "cpu", "--networks", "lenet:8", "--precisions", "fp32", "--out", str(tmp_path / "out")]
    words += ["--programs", "torch-plain", "ours", "--timeout", "5"]
    assert main(words) == 0
    assert "| lenet(8) on cpu | fp32 |" in capsys.readouterr().out
    runs = tmp_path / "worker.py.runs"
    assert runs.read_text().split() == ["torch-plain", "ours", "torch-plain"]
    assert main([*words, "--retry"]) == 0
    assert runs.read_text().split()[3:] == ["torch-plain", "torch-plain"]
    with pytest.raises(SystemExit):
        main([*words[:-5], "--programs", "torch-fast"])
    assert "torch-fast" not in runs.read_text()
    capsys.readouterr()
    alone = [*words[:-5], "--programs", "torch-plain", "torch-graph", "--once", "--timeout", "5"]
    for _ in range(2):  # measured just now, and kept from the last time
        assert main(alone) == 1, "no case has times"
        assert "every case failed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--table",)])
@pytest.mark.parametrize("place", ["file", "file/inner", "a\0b", "~nobody-of-that-name/x"])
def test_a_folder_that_cannot_be_is_one_line_and_2(
    worker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    words = ["--device", "cpu", "--networks", "lenet:8", "--precisions", "fp32", "--programs", "ours"]
    assert main([*words, "--out", place, *more]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert not Path("worker.py.runs").exists(), "said before anything is measured"


def test_what_lies_there_and_is_no_study_is_one_line(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    out = tmp_path / "out"
    assert main(["--table", "--out", str(out)]) == 2
    assert "holds no results" in capsys.readouterr().err
    assert not out.exists()
    words = [
        "--device",
        "cpu",
        "--networks",
        "lenet:8",
        "--programs",
        "torch-ckpt",
        "ours",
        "--once",
        "--out",
        str(out),
    ]
    assert main(words) == 2, "its library is not there"
    assert capsys.readouterr().err.count("\n") == 1
    for text in ("{", "[]", '{"results": []}', "\xff"):
        (out / "peers.json").write_bytes(text.encode("latin-1"))
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "is no file of this study" in said


def test_a_card_without_nvml_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card = Card()
    assert card.used_bytes() is None
    card.settle()


# ---- the table


def result(program: str, precision: str = "tf32", **found: Any) -> dict[str, Any]:
    return {"case": Case("vgg16", 256, precision, program).to_json(), "machine": "H", **found}


RESULTS = [
    result("torch-compile", step_ms=118.0, reserved_bytes=57 * GIB, allocated_bytes=30 * GIB, held_bytes=60 * GIB),
    result("torch-plain", step_ms=140.0, reserved_bytes=30 * GIB, held_bytes=31 * GIB),
    result("ours", step_ms=100.0, held_bytes=19 * GIB, peak_bytes=18 * GIB, planned_bytes=18 * GIB, predicted_ms=95.0),
    result("torch-compile", step_ms=122.0, reserved_bytes=56 * GIB, held_bytes=60 * GIB),
    result("torch-accum4-12GiB", step_ms=150.0, reserved_bytes=8 * GIB),
    result("ours-12GiB", failed="does not fit: | 12 GiB"),
    result("ours", "bf16", step_ms=40.0, held_bytes=9 * GIB),
]


def test_ratios_are_of_the_fastest_programs_of_either_side() -> None:
    groups = {(group[2], group[3]): lines for group, lines in grouped(RESULTS).items()}
    free = verdict(groups["tf32", None])
    assert free.theirs is not None
    assert free.theirs.program == "torch-compile"
    assert free.theirs.step_ms == 120.0, "the mean of both measurements"
    assert free.theirs.drift == pytest.approx(2 / 120)
    assert free.speed == pytest.approx(1.2)
    assert free.memory == pytest.approx(18 / 57), "both without their contexts"
    limited = verdict(groups["tf32", 12 * GIB])
    assert (limited.ours, limited.speed, limited.memory) == (None, None, None)
    assert verdict(groups["bf16", None]).theirs is None


def test_the_leanest_program_is_one_that_is_as_fast() -> None:
    more = [
        result("ours-accum2", step_ms=119.0, planned_bytes=9 * GIB),
        result("ours-accum4", step_ms=121.0, planned_bytes=5 * GIB),
        result("ours-10GiB", step_ms=105.0, planned_bytes=10 * GIB),
        result("ours-accum2-8GiB", step_ms=120.0, planned_bytes=7 * GIB),
        result("ours-accum4", "bf16", step_ms=20.0, planned_bytes=1 * GIB),
    ]
    groups = grouped([*RESULTS, *more])
    free, bf16 = (next(g for g in groups if g[2] == kind and g[3] is None) for kind in ("tf32", "bf16"))
    lean = leanest(groups, free)
    assert lean is not None
    assert (lean.program, lean.memory_gib) == ("ours-accum2-8GiB", 7.0)
    assert leanest(groups, bf16) is None, "nothing to be as fast as"
    assert " | ours-accum2-8GiB | 120.00 | 7.0 | 0.12 |" in markdown([*RESULTS, *more])
    assert leanest(grouped([RESULTS[0], result("ours", step_ms=119.0)]), free) is None, "slower"


def test_the_table_shows_every_case_and_why_one_is_missing() -> None:
    lines = markdown(RESULTS).splitlines()
    lean = "ours | 100.00 | 18.0 | 0.32"
    assert f"| vgg16(256) | tf32 |  | torch-compile | 120.00 | 100.00 | 1.20 | 57.0 | 18.0 | 0.32 | {lean} |" in lines
    row = "| vgg16(256) | tf32 |  | ours | 100.00 |  | 95.00 | 2,560 | 18.00 | 18.00 | 19.00 |  |"
    assert row in lines
    failed = next(line for line in lines if "does not fit" in line)
    assert failed.count("|") == row.count("|"), "a bar in the reason makes no column"
    assert "12.0 GiB" in failed
    assert lines[-1]


def test_machines_that_differ_are_named() -> None:
    assert "several" not in markdown(RESULTS)
    assert "several" in markdown([*RESULTS, {**RESULTS[0], "machine": "another"}])


def test_steps_fill_the_time_within_bounds() -> None:
    assert [steps_for(ms, 1.0) for ms in (0.0, 10.0, 10_000.0)] == [200, 100, 8]
    assert steps_for(1.0, 0) == 2
    assert spread([3.0, 1.0, 2.0, 4.0, 5.0]) == {"step_ms": 3.0, "low_ms": 2.0, "high_ms": 4.0}


# ---- ours


def test_ours_takes_whole_steps() -> None:
    found = measure(LENET)
    assert found["step_ms"] > 0
    assert found["policy"] == "none"
    assert 1.5 < found["losses"][0] < 4, "ten classes"
    assert 0 < found["peak_bytes"] <= found["planned_bytes"]


def test_a_network_whose_own_data_are_files_is_measured_on_made_up_images(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--networks", "lenet:8", "--programs", "ours", "--precisions", "fp32", "--seconds", "0"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "peers.json").read_text())["results"].values()
    assert found["step_ms"] > 0
    with pytest.raises(ConfigError, match="images of a benchmark are synthetic, got 'mnist'"):
        measure(replace(LENET, options=("data.source=mnist",)))


def test_ours_keeps_a_limit_or_says_that_it_does_not_fit() -> None:
    with running(replace(LENET, program="ours-8MiB")) as run:
        assert run.trainer.prepared.plans.slab_bytes <= 8 * 2**20
        assert run.chain_ms(2) is None, "nothing is captured here"
    with pytest.raises(BudgetError), running(replace(LENET, program="ours-1MiB")):
        pass


@pytest.mark.gpu
def test_a_chain_of_replays_takes_as_long_as_steps_do() -> None:
    with running(replace(LENET, device="cuda", batch=64)) as run:
        losses = [run.step() for _ in range(3)]
        times = run.chain_ms(20)
        assert times is not None
        assert len(times) == 20
        begin = time.perf_counter()
        losses += [run.step() for _ in range(5)]
        assert 0 < min(times) <= 1000 * (time.perf_counter() - begin)
        assert np.isfinite(losses).all()
