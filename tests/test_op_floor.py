"""The table of ops beside their floors: what is counted, what is timed, and what is added up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vdnn.bench import op_floor
from vdnn.bench.op_count import Work, work_of
from vdnn.bench.op_floor import Row, Watched, main, markdown, measure, rows_of, totals
from vdnn.bench.op_rates import Rates, rates_of
from vdnn.bench.peers_cases import Case
from vdnn.errors import BackendUnavailable
from vdnn.layers import Graph, Update, lower
from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.conv import Conv
from vdnn.layers.flatten import Flatten
from vdnn.layers.linear import Linear
from vdnn.layers.op import Op, Program
from vdnn.layers.softmax_loss import SoftmaxLoss
from vdnn.networks import build

RATES = Rates(copy_gbps=100.0, tflops=2.0)
LENET = Case("lenet", 4, "fp32", "ours", device="cpu", seconds=0)


def program(side: int = 8, **options: Any) -> Program:
    """conv 6 -> 4 in two groups, 3x3; batch norm; linear to 5; of 2 images."""
    g = Graph("small", (6, side, side), classes=5)
    x = g.add("conv", Conv(4, 3, padding=1, groups=2), g.input)
    x = g.add("norm", BatchNorm(), x)
    x = g.add("fc", Linear(5), g.add("flat", Flatten(), x))
    g.add("loss", SoftmaxLoss(), x)
    return lower(g, 2, update=Update(momentum=0.9), **options)


def op_of(found: Program, kind: str) -> Op:
    return next(op for op in found.ops if op.kind == kind)


@pytest.mark.parametrize(
    ("kind", "operations", "numbers"),
    [
        # 2 images, 4 of 8x8 outputs, 3 of the 6 channels each, 3x3: a product and a sum
        ("conv.forward", 2 * (2 * 4 * 64) * 27, 2 * 6 * 64 + 4 * 27 + 4 + 2 * 4 * 64),
        ("conv.wgrad", 2 * (2 * 4 * 64) * 27, 2 * 6 * 64 + 2 * 4 * 64 + 4 * 27),
        ("linear.forward", 2 * 2 * 5 * 256, 2 * 256 + 5 * 256 + 5 + 2 * 5),
        ("linear.wgrad", 2 * 2 * 5 * 256, 2 * 256 + 2 * 5 + 5 * 256),
        ("linear.dgrad", 2 * 2 * 5 * 256, 5 * 256 + 2 * 5 + 2 * 256),
        # x and y; weight, bias and what is kept of 4 channels: mean, invstd
        ("batchnorm.forward", 0, 2 * (2 * 4 * 64) + 4 * 4),
        ("conv.bgrad", 0, 2 * 4 * 64 + 4),
    ],
)
def test_bytes_and_operations_are_those_of_the_definition(kind: str, operations: int, numbers: int) -> None:
    found = program()
    assert work_of(op_of(found, kind), found) == Work(4 * numbers, operations)


def test_what_is_added_to_is_read_too() -> None:
    found = program()
    plain = op_of(found, "conv.wgrad")
    added = replace(plain, accumulate=("dw",))
    assert work_of(added, found).nbytes - work_of(plain, found).nbytes == 4 * 4 * 27


def test_a_batch_norm_beyond_the_cache_reads_its_input_twice() -> None:
    found = program(side=1300)
    x = 4 * 2 * 4 * 1300 * 1300
    assert x > 50 * 2**20
    assert work_of(op_of(found, "batchnorm.forward"), found).nbytes == 3 * x + 4 * 4 * 4
    backward = op_of(found, "batchnorm.backward")
    once = sum(found.tensors[t].nbytes for t in (*backward.reads.values(), *backward.writes.values()))
    assert work_of(backward, found).nbytes == once + 2 * x


def test_a_padded_filter_counts_as_the_one_it_was_made_from() -> None:
    found = program()
    conv = op_of(found, "conv.forward")
    weight = conv.reads["w"]
    wide = replace(found.tensors[weight], name="used", role="aux", shape=(4, 8, 3, 3))
    prepare = Op("conv.prepare", "filter.prepare", "conv", "forward", {"w": weight}, {"y": "used"})
    padded = replace(conv, reads={**conv.reads, "w": "used"})
    ops = tuple(padded if op is conv else op for op in found.ops)
    changed = replace(found, tensors={**found.tensors, "used": wide}, ops=(prepare, *ops))
    assert work_of(padded, changed).operations == work_of(conv, found).operations


def test_the_floor_is_the_longer_of_moving_and_multiplying() -> None:
    heavy, wide = Work(10**6, 4 * 10**9), Work(10**9, 4 * 10**9)
    assert (heavy.floor_ms(RATES), heavy.bound(RATES)) == (pytest.approx(2.0), "products")
    assert (wide.floor_ms(RATES), wide.bound(RATES)) == (pytest.approx(10.0), "bytes")


# ---- times


class Clocked:
    """A backend whose kernels take as many ms as their op says, and whose captures run when replayed."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, list[str]()
        self.todo: list[Callable[[], None]] | None = None
        self.description = "clocked"

    def _do(self, work: Callable[[], None]) -> None:
        if self.todo is None:
            work()
        else:
            self.todo.append(work)

    def mark(self, stream: str) -> list[float]:
        at: list[float] = []

        def reach() -> None:
            self.now += 0.25
            at[:] = [self.now]

        self._do(reach)
        return at

    def between_ms(self, first: list[float], second: list[float]) -> float:
        return second[0] - first[0] - 0.25

    def launch(self, op: Op, arrays: Any, stream: str) -> None:
        def run() -> None:
            self.now += op.attrs["ms"]
            self.log.append(op.name)

        self._do(run)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.todo = []
        body()
        done, self.todo = self.todo, None

        def replay() -> None:
            for work in done:
                work()

        return replay


def ops(*times_ms: float) -> list[Op]:
    return [Op(f"op{i}", "add.forward", "add", "forward", {}, {}, {"ms": t}) for i, t in enumerate(times_ms)]


def test_launches_are_timed_in_every_run_and_in_replays() -> None:
    backend = Clocked()
    watched = Watched(backend)  # type: ignore[arg-type]

    def step(todo: Sequence[Op]) -> None:
        for op in todo:
            watched.launch(op, {}, "compute")

    step(ops(3.0, 5.0))
    assert watched.times_ms() == ({"op0": 3.0, "op1": 5.0}, 0.0)
    step(ops(4.0, 6.0))
    assert watched.times_ms()[0] == {"op0": 4.0, "op1": 6.0}, "those of the latest run"
    replay = watched.capture(lambda: step(ops(7.0, 8.0)))
    replay()
    replay()
    assert watched.times_ms() == ({"op0": 7.0, "op1": 8.0}, 0.0)
    assert backend.log == ["op0", "op1"] * 4
    assert watched.description == "clocked"


def test_every_op_of_a_step_has_a_time() -> None:
    measured = measure(LENET)
    assert measured.times_ms.keys() == {op.name for op in measured.program.ops}
    assert all(time > 0 for time in measured.times_ms.values())
    assert not measured.captured
    assert 0 <= measured.mark_ms < 1


@pytest.mark.gpu
def test_ops_are_timed_within_replays() -> None:
    measured = measure(replace(LENET, device="cuda", batch=256))
    assert measured.captured
    assert all(time > 0 for time in measured.times_ms.values())
    assert measured.mark_ms < 0.05
    whole = sum(measured.times_ms.values())
    assert 0.3 * measured.step_ms < whole < measured.step_ms + 0.02 * len(measured.times_ms)


# ---- the table


def row(what: str, kind: str, time_ms: float, floor_ms: float, bound: str = "bytes") -> Row:
    return Row(what, kind, kind.split(".")[0], 1, time_ms, floor_ms, 10, 100, bound)


ROWS = [row("a", "conv.forward", 5, 4, "products"), row("b", "conv.dgrad", 4, 1), row("c", "pool.forward", 9, 3)]


def test_groups_are_sums_in_the_order_of_what_is_above_the_floor() -> None:
    by_layer = totals(ROWS, "layer")
    assert [(r.what, r.count, r.time_ms, r.floor_ms, r.gap_ms) for r in by_layer] == [
        ("pool", 1, 9, 3, 6),
        ("conv", 2, 9, 5, 4),
    ]
    assert [(r.nbytes, r.operations, r.bound) for r in by_layer] == [(10, 100, "bytes"), (20, 200, "products")]
    assert [r.what for r in totals(ROWS, "kind")] == ["pool.forward", "conv.dgrad", "conv.forward"]


def test_rows_begin_with_what_is_furthest_above_its_floor() -> None:
    found = program()
    times = dict.fromkeys((op.name for op in found.ops), 1.0)
    slow = op_of(found, "batchnorm.backward")
    times[slow.name] = 50.0
    g = Graph("small", (6, 8, 8), classes=5)
    g.add("norm", BatchNorm(), g.input)
    measured = op_floor.Measured(found, times, 0.001, 60.0, True, "machine")
    rows = rows_of(measured, g, RATES)
    assert (rows[0].what, rows[0].layer) == (slow.name, "batchnorm")
    assert [r.gap_ms for r in rows] == sorted((r.gap_ms for r in rows), reverse=True)
    assert len(rows) == len(found.ops)
    text = markdown("title", measured, RATES, rows)
    assert f"| {slow.name} | 1 | 50.0000 |" in text
    assert "60.000 ms" in text


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    words = ["lenet:4", "--precision", "fp32", "--device", "cpu", "--copy-gbps", "5", "--tflops", "0.1"]
    assert main(words) == 0, "although the digits of LeNet's own configuration are no made-up images"
    found = json.loads((tmp_path / "op_floor_lenet_4_fp32_cpu.json").read_text())["results"]
    graph = build("lenet")
    assert {r["layer"] for r in found["ops"]} <= {node.layer.kind for node in graph.nodes.values()} | {
        "input",
        "update",
    }
    whole = sum(r["time_ms"] for r in found["ops"])
    for part in ("by_layer_kind", "by_op_kind"):
        assert np.isclose(sum(r["time_ms"] for r in found[part]), whole)
        assert sum(r["count"] for r in found[part]) == len(found["ops"])
    assert (tmp_path / "op_floor_lenet_4_fp32_cpu.md").read_text() in capsys.readouterr().out
    assert main([*words, "-o", "data.source=mnist"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "images of a benchmark are synthetic, got 'mnist'" in said


def test_every_case_has_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    rates = ["--copy-gbps", "5", "--tflops", "0.1"]
    monkeypatch.setattr(op_floor, "check_device", lambda device: None)
    plain = measure(LENET)
    monkeypatch.setattr(op_floor, "measure", lambda case, capture: plain)
    for words, name in (
        (["lenet:4"], "lenet_4_bf16"),
        (["lenet:8"], "lenet_8_bf16"),
        (["lenet:4", "--precision", "tf32"], "lenet_4_tf32"),
        (["lenet:4", "--program", "ours-1GiB"], "lenet_4_bf16_ours-1GiB"),
        (["lenet:4", "--device", "cpu"], "lenet_4_bf16_cpu"),
        (["lenet:4", "--uncaptured"], "lenet_4_bf16_uncaptured"),
        (["lenet:4", "-o", "memory.layout=nchw"], "lenet_4_bf16_memory.layout=nchw"),
        (["lenet:4", "-o", "memory={layout: nchw}"], "lenet_4_bf16_memory=-layout-nchw-"),
    ):
        before, titles = set(tmp_path.iterdir()), {path.read_text().split("\n")[0] for path in tmp_path.glob("*.md")}
        assert main([*words, *rates]) == 0
        assert {path.name for path in set(tmp_path.iterdir()) - before} == {
            f"op_floor_{name}.json",
            f"op_floor_{name}.md",
        }
        title = (tmp_path / f"op_floor_{name}.md").read_text().split("\n")[0]
        assert title not in titles or words[1:] in (["--device", "cpu"], ["--uncaptured"]), (
            "these two are told below it"
        )
    monkeypatch.setenv("OUT", str(tmp_path / f"op_floor_{name}.md"))
    monkeypatch.setattr(op_floor, "measure", lambda case, capture: pytest.fail("measured"))
    capsys.readouterr()
    assert main(["lenet:4", *rates]) == 2, "said before anything is measured"
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["unknown:4"], "no configuration named 'unknown'"),
        (["lenet:none"], "expected NETWORK:IMAGES"),
        (["lenet:4", "-o", "no.such=1"], "no"),
        (["lenet:4", "-o", "device=simulated"], "device: the case says cpu, an option simulated"),
        (["lenet:4", "-o", "train.batch_size=8"], "train.batch_size: the case says 4, an option 8"),
        (["lenet:4", "--program", "ours-1KiB"], "expected ours, ours-accumK or one of"),
        (["lenet:4", "--program", "ours-accum2"], "--program: expected ours or ours-LIMIT, got 'ours-accum2'"),
        (["lenet:4", "--program", "torch-plain"], "--program: expected ours or ours-LIMIT, got 'torch-plain'"),
    ],
)
def test_what_is_wrong_with_the_case_is_said_before_rates_are_missed(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(op_floor, "rates_of", lambda precision, device: pytest.fail("measured"))
    assert main([*words, "--precision", "fp32", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_rates_that_cannot_be_measured_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "false")
    for given in ([], ["--copy-gbps", "5"], ["--tflops", "1"]):
        assert main(["lenet:4", "--precision", "fp32", "--device", "cpu", *given]) == 2
        assert "--copy-gbps" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is here")
def test_a_missing_pytorch_is_named_without_the_class_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BackendUnavailable, match=r"could not be measured \(PyTorch cannot be imported "):
        rates_of("fp32", "cpu")


def test_the_last_word_of_an_error_is_shown_without_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "class AcceleratorError(RuntimeError): pass\nraise AcceleratorError('no such GPU')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"could not be measured \(no such GPU\); state"):
        rates_of("fp32", "cuda")


def test_one_stated_rate_is_taken_and_the_other_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(op_floor, "rates_of", lambda precision, device: RATES)
    assert main(["lenet:4", "--precision", "fp32", "--device", "cpu", "--copy-gbps", "7"]) == 0
    found = json.loads((tmp_path / "op_floor_lenet_4_fp32_cpu.json").read_text())["results"]
    assert found["rates"] == {"copy_gbps": 7.0, "tflops": RATES.tflops}
