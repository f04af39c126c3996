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
from vdnn.bench.peers_table import grouped, markdown, verdict
from vdnn.bench.peers_timing import spread, steps_for
from vdnn.errors import BackendUnavailable, BudgetError, ConfigError
from vdnn.units import GIB

LENET = Case("lenet", 4, "fp32", "ours", device="cpu", options=("data.source=synthetic",), seconds=0)


# ---- cases


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", Program(None)),
        ("ours-12GiB", Program(None, 12 * GIB)),
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
    "name", ["torch", "torch-fast", "torch-accum0", "torch-graph+compile", "ours-12", "theirs", ""]
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
        main([*words[:-4], "--programs", "torch-fast"])
    assert "torch-fast" not in runs.read_text()


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
    assert free.memory == pytest.approx(19 / 57)
    limited = verdict(groups["tf32", 12 * GIB])
    assert (limited.ours, limited.speed, limited.memory) == (None, None, None)
    assert verdict(groups["bf16", None]).theirs is None


def test_the_table_shows_every_case_and_why_one_is_missing() -> None:
    lines = markdown(RESULTS).splitlines()
    assert "| vgg16(256) | tf32 |  | torch-compile | 120.00 | 100.00 | 1.20 | 57.0 | 19.0 | 0.33 |" in lines
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
