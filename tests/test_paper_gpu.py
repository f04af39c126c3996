"""Measured runs of the paper's cases: on the CPU with LeNet, whose steps take milliseconds."""

from __future__ import annotations

import json
import os

import pytest

from vdnn.bench import paper_gpu, paper_processes
from vdnn.bench.paper_files import read_runs
from vdnn.bench.paper_gpu import Bench, classifier_of, measure_missing
from vdnn.bench.paper_processes import Order, measure_apart
from vdnn.bench.paper_runs import Case
from vdnn.bench.paper_tasks import Task
from vdnn.cli.main import main
from vdnn.errors import BackendUnavailable, VdnnError
from vdnn.layers import Update, lower
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL
from vdnn.networks import build
from vdnn.runtime.driver import find_driver

BATCH = 16
TASKS = (
    Task(Case("lenet", BATCH, "base", PERFORMANCE_OPTIMAL, "layer")),
    Task(Case("lenet", BATCH, "dyn", PERFORMANCE_OPTIMAL, "layer")),
    Task(Case("lenet", BATCH, "dyn", PERFORMANCE_OPTIMAL, "reuse"), best=True),
    Task(Case("lenet", BATCH, "all", MEMORY_OPTIMAL, "layer")),
)


def lenet(name):
    return build("lenet", dropout=0.0)


@pytest.fixture
def bench(monkeypatch):
    """LeNet on the CPU; its classifier is not timed alone, for on a busy machine that may take longer than a step."""
    monkeypatch.setattr(Bench, "_classifier_ms", lambda self, case, timed: timed.step_ms / 4)
    return Bench("cpu", steps=2, limit_bytes=16 * 2**20, graph_of=lenet)


def test_runs_are_measured_once_kept_and_gone_on_with(tmp_path, bench, monkeypatch):
    said: list[str] = []
    measured = read_runs(tmp_path)
    measure_missing(bench, TASKS[:2], tmp_path, measured, said.append)
    assert len(said) == len(measured.runs) == 2
    assert not any("not measured" in line for line in said), said
    again = read_runs(tmp_path)
    assert again.runs == measured.runs
    assert again.machine == measured.machine == bench.machine != ""
    measure_missing(bench, TASKS, tmp_path, again, said.append)
    assert len(said) == 4
    assert set(again.best) == {("lenet", BATCH)}
    assert len(list((tmp_path / "runs").iterdir())) == 4
    monkeypatch.setattr(Bench, "run", lambda self, task: pytest.fail("measured already"))
    measure_missing(bench, TASKS, tmp_path, read_runs(tmp_path), said.append)
    for path in (tmp_path / "runs").iterdir():
        facts = json.loads(path.read_text("utf-8"))["facts"]
        assert {"machine", "date", "commit"} <= set(facts)


def test_what_a_run_says(bench):
    run = bench.run(TASKS[3])
    assert run.case == TASKS[3].case
    assert run.fits
    assert run.step_ms > run.feature_ms > 0
    # inputs of two convolutions and two pools: 1x28x28, 20x24x24, 20x12x12, 50x8x8
    assert run.offloaded_bytes == BATCH * 4 * (784 + 11520 + 2880 + 3200)
    assert run.host_bytes >= run.offloaded_bytes
    rows = {row.name: row for row in run.layers}
    conv = rows["conv2"]
    assert (conv.kind, conv.x_bytes, conv.y_bytes) == ("conv", BATCH * 4 * 2880, BATCH * 4 * 3200)
    assert conv.forward_ms > 0
    assert conv.backward_ms > 0
    assert rows["conv1"].reuse_distance_ms > conv.reuse_distance_ms > 0
    assert run.average_bytes < run.peak_bytes < bench.limit_bytes


def test_a_case_that_does_not_fit_runs_without_the_limit_and_says_so(bench):
    assert bench.run(TASKS[0]).fits  # base is never limited, and is small enough here
    bench.limit_bytes = 2 * 2**20
    base, moved = bench.run(TASKS[0]), bench.run(TASKS[3])
    assert not base.fits
    assert not moved.fits  # weights and their gradients alone take more
    assert moved.peak_bytes < base.peak_bytes


def test_one_failure_is_told_and_the_others_go_on(tmp_path, bench, monkeypatch):
    whole = Bench.run
    monkeypatch.setattr(Bench, "run", lambda self, task: 1 / 0 if task.best else whole(self, task))
    said: list[str] = []
    measured = read_runs(tmp_path)
    measure_missing(bench, TASKS[1:], tmp_path, measured, said.append)
    assert [line.partition(": not measured: ")[2] for line in said] == ["", "ZeroDivisionError: division by zero", ""]
    assert len(measured.runs) == 2
    assert not measured.best


def test_after_the_time_budget_nothing_more_is_begun(tmp_path, bench, monkeypatch):
    times = iter((0.0, 1.0, 11.0))
    monkeypatch.setattr(paper_gpu, "monotonic", lambda: next(times))
    said: list[str] = []
    measured = read_runs(tmp_path)
    measure_missing(bench, TASKS, tmp_path, measured, said.append, budget_s=10)
    assert len(measured.runs) == 1
    assert "10 s are over: 3 run(s)" in said[-1]


def test_a_device_that_is_not_there_ends_it(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise BackendUnavailable("device 'cuda' is not available")

    monkeypatch.setattr("vdnn.runtime.prepare.open_device", refuse)
    with pytest.raises(BackendUnavailable):
        measure_missing(Bench("cuda", graph_of=lenet), TASKS, tmp_path, read_runs(tmp_path), print)


def test_feature_extraction_is_the_step_less_the_classifier_that_is_trained_alone(monkeypatch):
    trained = []
    whole = Bench._train

    def train(self, prepared):
        trained.append(prepared.graph)
        return whole(self, prepared)

    monkeypatch.setattr(Bench, "_train", train)
    monkeypatch.setattr(paper_gpu, "median", lambda times: 100.0 if len(trained) == 1 else 30.0)
    monkeypatch.setattr(paper_gpu, "input_gradient_ms", lambda timed: 7.0)
    bench = Bench("cpu", steps=2, graph_of=lenet)
    assert bench.run(TASKS[0]).feature_ms == pytest.approx(100 - 30 - 7)
    alone = trained[1]
    assert alone.input_shape == (50, 4, 4)
    assert [node.name for node in alone.nodes.values()] == ["flat", "fc3", "relu3", "fc4", "loss"]
    monkeypatch.setattr(paper_gpu, "input_gradient_ms", lambda timed: 77.0)
    with pytest.raises(VdnnError, match="too busy"):
        bench.run(TASKS[0])


@pytest.mark.parametrize("network", ["alexnet", "googlenet", "vgg19"])
def test_the_classifier_has_the_weights_of_the_whole_networks(network):
    graph = build(network)
    alone = classifier_of(graph)
    linear = [node.name for node in graph.nodes.values() if node.layer.kind == "linear"]
    for name in linear:
        assert alone.parameters(alone.nodes[name]) == graph.parameters(graph.nodes[name])
    assert not any(node.layer.kind == "conv" for node in alone.nodes.values())
    lower(alone, 2, "train", update=Update(momentum=0.0)).validate()


# ---- processes


class Cpu(Bench):
    """What a child measures with in these tests."""

    def __init__(self, device, steps):
        super().__init__(device, steps, graph_of=lenet)


def test_an_order_reads_back_and_is_carried_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Bench, "_classifier_ms", lambda self, case, timed: timed.step_ms / 4)
    monkeypatch.setattr(paper_processes, "Bench", Cpu)
    order = Order("cpu", 2, str(tmp_path), TASKS[:2], 60.0)
    assert Order.from_json(order.to_json()) == order
    monkeypatch.setattr("sys.argv", ["paper_processes", order.to_json()])
    assert paper_processes.main() == 0
    assert len(read_runs(tmp_path).runs) == 2
    assert capsys.readouterr().out.count("a step") == 2


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Has children run a line of Python instead, on the order's JSON as `order`; returns a way to set that line."""

    def set_line(line):
        (tmp_path / "stand_in.py").write_text(
            f"import json, os, sys\norder = json.loads(sys.argv[1])\n{line}\n", "utf-8"
        )

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(paper_processes, "MODULE", "stand_in")
    return set_line


NETWORKS = (*TASKS, Task(Case("alexnet", 8, "base", PERFORMANCE_OPTIMAL, "layer")))


def test_every_network_has_a_process_of_its_own_and_a_failed_one_is_told(tmp_path, child):
    child(
        "print(order['tasks'][0]['case']['network'], len(order['tasks'])); sys.stderr.write('why\\nthis'); os._exit(9)"
    )
    said: list[str] = []
    measure_apart(Order("cuda", 2, str(tmp_path), NETWORKS), said.append)
    assert said == [
        "lenet 4",
        "lenet (16): the process that measures ended with 9: this",
        "alexnet 1",
        "alexnet (8): the process that measures ended with 9: this",
    ]


def test_without_the_device_there_is_one_error(tmp_path, child):
    child("sys.stderr.write('device cuda is not available'); sys.exit(2)")
    with pytest.raises(BackendUnavailable, match=r"^device cuda is not available$"):
        measure_apart(Order("cuda", 2, str(tmp_path), NETWORKS), print)


def test_the_time_budget_is_of_all_processes(tmp_path, child, monkeypatch):
    child("print(order['budget_s'])")
    times = iter((0.0, 4.0, 11.0))
    monkeypatch.setattr(paper_processes, "monotonic", lambda: next(times))
    said: list[str] = []
    measure_apart(Order("cuda", 2, str(tmp_path), NETWORKS, 10.0), said.append)
    assert said[0] == "6.0"
    assert "1 run(s) left" in said[1]


def test_a_signal_ends_the_child_too(tmp_path, child):
    child("import time; print(os.getpid(), flush=True); time.sleep(60)")
    seen: list[int] = []

    def interrupt(line):
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_apart(Order("cuda", 2, str(tmp_path), NETWORKS), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


@pytest.mark.skipif(find_driver().gpus > 0, reason="there is a GPU here")
def test_the_command_says_that_there_is_no_gpu(tmp_path, capsys):
    assert main(["tables", "fig12", "--networks", "alexnet", "--device", "cuda", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "device 'cuda' is not available" in captured.err


@pytest.mark.gpu
def test_cases_of_alexnet_on_the_gpu(tmp_path):
    bench = Bench("cuda", steps=2)
    tasks = [
        Task(Case("alexnet", 128, policy, PERFORMANCE_OPTIMAL, join), best)
        for policy, join, best in (("base", "layer", False), ("all", "layer", False), ("dyn", "reuse", True))
    ]
    measured = read_runs(tmp_path)
    measure_missing(bench, tasks, tmp_path, measured, print)
    assert len(measured.runs) == 2
    assert len(measured.best) == 1
    for run in (*measured.runs.values(), *measured.best.values()):
        assert run.fits
        assert 0 < run.feature_ms < run.step_ms
        assert sum(row.forward_ms + row.backward_ms for row in run.layers) > 0
