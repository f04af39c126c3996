"""Studies of algorithms under limits: fronts, totals, sentences, tables, and the script that measures them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vdnn.bench import gpu_algos
from vdnn.errors import ConfigError, DataError
from vdnn.layers import Conv, Flatten, Graph, Linear, Relu, SoftmaxLoss, Update, lower
from vdnn.memory.costs import Candidate
from vdnn.networks import build
from vdnn.runtime import algo_plots
from vdnn.runtime.algo_sources import Source, backend_source, table_source, without_epilogue
from vdnn.runtime.algorithm_table import AlgorithmTable, Measured, load_table, read_table, stored_names
from vdnn.runtime.algos import (
    ConvCosts,
    Study,
    limit_text,
    make_study,
    ms_text,
    purchases,
    sorted_limits,
    study_json,
    totals_csv,
)
from vdnn.runtime.backends.cuda.products import CONV_KINDS, unplaced_problem
from vdnn.runtime.config import load_config
from vdnn.runtime.devices import open_device
from vdnn.runtime.planset import Recipe
from vdnn.runtime.prepare import make_recipe

MIB = 2**20
FACTS = {"gpu": "Made Up 1", "driver": 1, "cudnn": 91901, "layout": "NCHW", "precision": "fp32", "method": 2}
RECIPE = Recipe(Update(momentum=0.9))
NOWHERE = Source(lambda op, program: None, "made up", True, "fp32")


def two_convs() -> Graph:
    graph = Graph("two", (3, 8, 8), 10)
    x = graph.add("relu", Relu(), graph.add("one", Conv(4, 3, padding=1), graph.input))
    x = graph.add("two", Conv(4, 3, padding=1), x)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), graph.add("flat", Flatten(), x)))
    return graph


def table_of(graph: Graph, batches: tuple[int, ...], facts: dict[str, Any] = FACTS) -> AlgorithmTable:
    """A table in which a fast algorithm needs 1 MiB an image."""
    table = AlgorithmTable(facts)
    for batch in batches:
        program = lower(graph, batch, "train", update=Update(momentum=0.9))
        for op in program.ops:
            if op.kind in CONV_KINDS:
                rows = (Candidate("FAST", 0.1 * batch, batch * MIB), Candidate("SLOW", 0.3 * batch, 0, False))
                table.problems[str(unplaced_problem(op, program))] = Measured(rows, None, {"FFT": "refused"})
    return table


# ---- one convolution

CANDIDATES = st.lists(
    st.builds(Candidate, st.sampled_from("ABC"), st.integers(1, 9).map(float), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(CANDIDATES, st.none() | st.integers(0, 9))
def test_the_front_is_what_nothing_beats_and_holds_every_choice(candidates, limit):
    conv = ConvCosts("conv", "forward", 8, tuple(candidates))
    front = conv.pareto()

    points = {(c.time_ms, c.workspace_bytes) for c in candidates}

    def beaten(point):
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    assert {(c.time_ms, c.workspace_bytes) for c in front} == {point for point in points if not beaten(point)}
    fits = [c.time_ms for c in candidates if limit is None or c.workspace_bytes <= limit]
    chosen = conv.fastest(limit)
    if fits:
        assert chosen.time_ms == min(fits)
    else:
        assert chosen.workspace_bytes == min(c.workspace_bytes for c in candidates)
    assert (chosen.time_ms, chosen.workspace_bytes) in {(c.time_ms, c.workspace_bytes) for c in front}


# ---- the network


def study_of(*convs: ConvCosts) -> Study:
    return Study("made up", 8, NOWHERE, convs)


ONE = ConvCosts("a", "forward", 8, (Candidate("FFT", 1.0, 64 * MIB), Candidate("GEMM", 3.0, 0)))
TWO = ConvCosts("b", "wgrad", 8, (Candidate("ALGO_1", 2.0, 8 * MIB), Candidate("ALGO_0", 2.5, MIB)))


def test_a_total_is_the_sum_of_what_fits():
    study = study_of(ONE, TWO)
    rows = {limit: study.total(limit) for limit in (0, MIB, 8 * MIB, None)}
    assert {limit: row.time_ms for limit, row in rows.items()} == {0: 5.5, MIB: 5.5, 8 * MIB: 5.0, None: 3.0}
    assert {limit: row.over for limit, row in rows.items()} == {0: 1, MIB: 0, 8 * MIB: 0, None: 0}
    assert [rows[limit].workspace_bytes for limit in (0, None)] == [MIB, 64 * MIB]
    assert rows[None].by_direction == {"forward": 1.0, "dgrad": 0, "wgrad": 2.0}
    assert rows[None].divided_ms is None
    assert [total.limit_bytes for total in study.curve()] == [0, MIB, 8 * MIB, 64 * MIB]


def test_every_change_of_a_total_is_on_the_curve():
    study = make_study(build("alexnet"), RECIPE, 32, backend_source(open_device("simulated", "h200")[0]))
    curve = study.curve()
    for low, high in pairwise(curve):
        assert (low.time_ms, low.divided_ms) >= (high.time_ms, 0)
        between = study.total((low.limit_bytes + high.limit_bytes) // 2)
        assert (between.time_ms, between.divided_ms) == (low.time_ms, low.divided_ms)
    assert curve[-1].time_ms == study.total(None).time_ms
    assert all(total.divided_ms <= total.time_ms * (1 + 1e-12) for total in curve)


def test_what_a_higher_limit_buys_is_said_layer_by_layer():
    sentences = purchases(study_of(ONE, TWO), [0, MIB, 8 * MIB, None])
    assert sentences == [
        "0 B → 1.0 MiB: nothing gained",
        "1.0 MiB → 8.0 MiB: 0.500 ms less in all; 0.500 ms less with 7.0 MiB more in b wgrad",
        "8.0 MiB → no limit: 2.00 ms less in all; 2.00 ms less with 64.0 MiB more in a forward",
    ]
    little = ConvCosts("c", "dgrad", 8, (Candidate("FFT", 0.01, 3 * 2**10), Candidate("GEMM", 268.4, 0)))
    (sentence,) = purchases(study_of(little), [0, MIB])
    assert sentence == "0 B → 1.0 MiB: 268 ms less in all; 268 ms less with 3.0 KiB more in c dgrad"


def test_a_division_counts_where_it_is_faster_or_nothing_else_fits():
    half = (Candidate("FFT", 0.75, 32 * MIB),)
    conv = ConvCosts("a", "forward", 8, ONE.candidates, {8: ONE.candidates, 4: half})
    assert [conv.divided_ms(limit) for limit in (0, 32 * MIB, 64 * MIB)] == [3.0, 1.5, 1.0]
    large = ConvCosts("a", "forward", 8, ONE.candidates[:1], {8: ONE.candidates[:1], 4: half})
    assert [large.divided_ms(limit) for limit in (0, 32 * MIB)] == [1.0, 1.5]  # slower, but it keeps the limit
    assert study_of(conv, TWO).total(32 * MIB).divided_ms == 1.5 + 2.0


def test_limits_and_times_in_words():
    assert sorted_limits([None, 5, 0, 5, None]) == [0, 5, None]
    assert [limit_text(limit) for limit in (0, 64 * MIB, None)] == ["0 B", "64.0 MiB", "no limit"]
    times = {
        1234.56: "1,235",
        268.4: "268",
        9.996: "10.0",
        1.94: "1.94",
        0.0321: "0.0321",
        4e-6: "0.00000400",
        0.0: "0",
    }
    assert {ms: ms_text(ms) for ms in times} == {ms: f"{text} ms" for ms, text in times.items()}


def test_the_csv_has_a_row_a_limit_and_the_json_everything():
    study = study_of(ONE, TWO)
    rows = list(csv.DictReader(StringIO(totals_csv([study.total(0), study.total(None)]))))
    assert [row["limit_bytes"] for row in rows] == ["0", ""]
    assert [float(row["time_ms"]) for row in rows] == [5.5, 3.0]
    assert [row["micro_batched_ms"] for row in rows] == ["", ""]
    data = json.loads(json.dumps(study_json(study, [0, None])))
    assert [row["time_ms"] for row in data["limits"]] == [5.5, 3.0]
    assert [c["pareto"] for c in data["layers"][0]["candidates"]] == [True, True]
    assert (data["modelled"], data["precision"], data["source"]) == (True, "fp32", "made up")


# ---- tables


def test_a_table_is_read_back_and_serves_the_network_it_was_made_of(tmp_path):
    graph = two_convs()
    table_of(graph, (8, 4)).save(tmp_path / "made.json")
    table = load_table(str(tmp_path / "made.json"))
    assert table.source == "measured on Made Up 1, cuDNN 9.19.1"
    assert table.problems == table_of(graph, (8, 4)).problems
    study = make_study(graph, RECIPE, 8, table_source(table))
    # the first convolution needs no gradient of the images
    directions = [(conv.layer, conv.direction) for conv in study.convs]
    assert sorted(directions) == sorted(
        set(product(("one", "two"), ("forward", "dgrad", "wgrad"))) - {("one", "dgrad")}
    )
    assert not study.source.modelled
    assert study.total(None).time_ms == pytest.approx(5 * 0.8)
    assert study.total(4 * MIB).time_ms == pytest.approx(5 * 2.4)
    assert study.total(4 * MIB).divided_ms == pytest.approx(5 * 0.8)
    assert study.total(3 * MIB).divided_ms == pytest.approx(5 * 2.4)


def test_a_table_that_lacks_one_convolution_serves_none():
    graph = two_convs()
    table = table_of(graph, (8,))
    assert make_study(graph, RECIPE, 9, table_source(table)) is None
    del table.problems[next(iter(table.problems))]
    assert make_study(graph, RECIPE, 8, table_source(table)) is None


def test_an_unknown_layer_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no convolution 'tow', it has: one, two .*did you mean 'two'"):
        make_study(two_convs(), RECIPE, 8, NOWHERE, layer="tow")


def test_times_keep_five_digits_and_bytes_all(tmp_path):
    rows = (Candidate("A", 1.23456789, 2**40 + 1, True, "tf32"),)
    AlgorithmTable(FACTS, {"p": Measured(rows, 7, {})}).save(tmp_path / "t.json")
    (found,) = load_table(str(tmp_path / "t.json")).problems["p"].candidates
    assert found == Candidate("A", 1.2346, 2**40 + 1, True, "tf32")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"facts": {}, "problems": {}}', '{"facts": {"gpu": "a"}, "problems": []}'),
        json.dumps({"facts": FACTS, "problems": {"p": {"candidates": [["A", 1]], "limit_bytes": None}}}),
        json.dumps({"facts": {**FACTS, "cudnn": float("inf")}, "problems": {}}),
        "[" * 100_000,
    ],
)
def test_a_damaged_table_is_one_error_with_a_next_step(text):
    with pytest.raises(DataError, match=r"'x.json' is no table of algorithms: .*gpu_algos writes one"):
        read_table(text, "x.json")


def test_a_table_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="there is no stored table 'h300', stored: "):
        load_table("h300")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_table(str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", stored_names())
def test_a_stored_table_is_whole(name):
    table = load_table(name)
    assert table.facts["method"] >= 2
    assert name.endswith(f"-{gpu_algos.table_name((table.precision, table.layout))}")
    for key, found in table.problems.items():
        assert found.candidates, key
        times = [c.time_ms for c in found.candidates]
        assert times == sorted(times)
        assert times[0] > 0
        assert {c.math for c in found.candidates} <= {"fp32", table.precision}


# ---- pictures


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_of_a_study_is_written(tmp_path, suffix):
    study = make_study(two_convs(), RECIPE, 8, backend_source(open_device("simulated", "h200")[0]))
    path = tmp_path / f"study.{suffix}"
    algo_plots.draw_study(study, [0, MIB, None], str(path))
    assert path.stat().st_size > 5000
    assert algo_plots.title(study).endswith("modelled, not measured: modelled by profile h200")
    algo_plots.draw_study(study_of(ConvCosts("a", "forward", 8, (Candidate("A", 1.0),))), [0], str(path))


# ---- the script that measures


class FakeSearch:
    """Knows every problem as soon as it is asked, but one."""

    def __init__(self, precision: str, layout: str, fails: str = "", seconds: float = 0.0, clock: Any = None):
        self.precision, self.key = precision, {**FACTS, "precision": precision, "layout": layout}
        self.known: dict[str, Measured] = {}
        self.asked: list[str] = []
        self.fails, self.seconds, self.clock = fails, seconds, clock

    def candidates(self, problem: Any) -> tuple[Candidate, ...]:
        self.asked.append(str(problem))
        if self.clock is not None:
            self.clock.now += self.seconds
        if self.fails and self.fails in str(problem):
            raise RuntimeError("an unknown error of the driver")
        self.known[str(problem)] = Measured((Candidate("GEMM", 1.0),), None)
        return self.known[str(problem)].candidates


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def measure(*arguments: str, made: dict[str, FakeSearch], **options: Any) -> int:
    def opened(precision: str, layout: str) -> Any:
        name = precision if layout == "NCHW" else f"{precision}-{layout.lower()}"
        made[name] = FakeSearch(precision, layout, **options)
        return made[name]

    return gpu_algos.main(list(arguments), opened)


def test_the_script_writes_tables_that_serve_their_networks(out, tmp_path, capsys):
    made: dict[str, FakeSearch] = {}
    empty = tmp_path / "empty"
    assert measure("alexnet:128", "lenet:64", "--tables", str(empty), made=made) == 0
    assert sorted(path.name for path in out.iterdir()) == ["made-up-1-fp32.json", "made-up-1-tf32.json"]
    for precision in ("fp32", "tf32"):
        asked = made[precision].asked
        assert len(set(asked)) == len(asked)
        table = load_table(str(out / f"made-up-1-{precision}.json"))
        assert table.precision == precision
        assert set(table.problems) == set(asked)
        source = table_source(table)
        for network, batch, divided in (("lenet", 64, False), ("alexnet", 128, True)):
            study = make_study(build(network), replace(RECIPE, fuse=precision == "tf32"), batch, source)
            assert (study.total(None).divided_ms is not None) == divided
    said = capsys.readouterr().out
    assert "in made-up-1-tf32.json" in said
    # once more: nothing is left to do
    assert measure("alexnet:128", "lenet:64", "--tables", str(out), made=made) == 0
    assert made["fp32"].asked == made["tf32"].asked == []


def test_the_script_goes_on_where_it_was_out_of_time(out, monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu_algos, "monotonic", lambda: clock.now)
    made: dict[str, FakeSearch] = {}
    options = {"made": made, "seconds": 7.0, "clock": clock}
    total = len(list(gpu_algos.worklist(["vgg16:64"], [], ("fp32", "NCHW"))))
    arguments = ("vgg16:64", "--minutes", "1", "--tables", str(out))
    rounds, found = 0, 0
    while found < total:
        before = clock.now
        assert measure(*arguments, **options) == 0
        assert clock.now - before < 60 + 2 * 7  # each precision may overrun by one problem
        found = len(load_table(str(out / "made-up-1-fp32.json")).problems)
        rounds += 1
        assert rounds < 20
    assert rounds > 2
    assert "out of time before vgg16:64 conv" in capsys.readouterr().out


def test_the_script_leaves_out_what_fails_and_a_table_of_another_driver(out, capsys):
    made: dict[str, FakeSearch] = {}
    arguments = ("lenet:8", "--precisions", "fp32", "--tables", str(out))
    table_of(two_convs(), (8,), {**FACTS, "driver": 0}).save(out / "made-up-1-fp32.json")
    assert measure(*arguments, made=made, fails="wgrad") == 0
    table = load_table(str(out / "made-up-1-fp32.json"))
    assert set(table.problems) == {key for key in made["fp32"].asked if "wgrad" not in key}
    said = capsys.readouterr()
    assert "of another driver, cuDNN or method" in said.out
    assert "an unknown error of the driver" in said.err


def test_tables_of_tensor_cores_in_nhwc_serve_what_training_runs(out, tmp_path, capsys):
    made: dict[str, FakeSearch] = {}
    options = ("--precisions", "tf32,bf16", "--layouts", "nhwc", "--tables", str(tmp_path / "empty"))
    assert measure("alexnet:128", *options, made=made) == 0
    names = {f"made-up-1-{precision}-nhwc" for precision in ("tf32", "bf16")}
    assert {path.stem for path in out.iterdir()} == names
    assert "in made-up-1-bf16-nhwc.json" in capsys.readouterr().out
    for precision, dtype in (("tf32", "float32"), ("bf16", "bfloat16")):
        table = load_table(str(out / f"made-up-1-{precision}-nhwc.json"))
        assert (table.precision, table.layout) == (precision, "NHWC")
        assert all(f", {dtype}, NHWC" in key for key in table.problems)
        recipe = make_recipe(load_config("alexnet", [f"precision={precision}"]))
        assert recipe.fuse
        assert not without_epilogue(table, build("alexnet"), recipe, 128)
        assert make_study(build("alexnet"), recipe, 128, table_source(table)) is not None
        # the first layer reads images with its stride in their channels
        assert any("x (128, 48, 57, 57)" in key and "stride (1, 1), padding (0, 0)" in key for key in table.problems)
        assert make_study(build("alexnet"), RECIPE, 128, table_source(table)) is None


def test_a_table_without_epilogues_serves_the_convolutions_alone():
    graph = two_convs()
    table = table_of(graph, (8,))
    assert not without_epilogue(table, graph, RECIPE, 8)
    assert without_epilogue(table, graph, replace(RECIPE, fuse=True), 8)
    plain = make_study(graph, RECIPE, 8, table_source(table), micro_batches=False)
    fused = make_study(graph, replace(RECIPE, fuse=True), 8, table_source(table), micro_batches=False)
    assert [conv.candidates for conv in fused.convs] == [conv.candidates for conv in plain.convs]


@pytest.mark.parametrize("arguments", [("vgg17:8",), ("vgg16",), ("vgg16:0",), ("lenet:8", "--precisions", "fp64")])
def test_the_script_refuses_what_it_cannot_measure(arguments):
    with pytest.raises(SystemExit) as ended:
        measure(*arguments, made={})
    assert ended.value.code == 2
