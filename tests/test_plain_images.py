"""Modelled times of first convolutions: those of images that are neither padded nor folded, whatever is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vdnn.cli.main import main
from vdnn.layers import Conv, Flatten, Graph, Linear, Program, SoftmaxLoss, lower
from vdnn.memory.clock import simulate
from vdnn.memory.decisions import Algorithm, Decisions, Slice
from vdnn.memory.passes import apply_decisions
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import POLICIES, Budget
from vdnn.networks import build
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.executor import Executor
from vdnn.runtime.measure import blank_feeds
from vdnn.runtime.prepare import backend_costs
from vdnn.runtime.profile import load_profile, model_costs

FIRST = ("conv1.forward", "conv1.wgrad")
NETWORKS = {
    "stride 4 folded": (11, 4, 2, (3, 64, 64)),
    "stride 2 folded, a side longer": (7, 2, 3, (3, 37, 50)),
    "padded": (3, 1, 1, (3, 40, 40)),
    "padded, FFT": (5, 1, 2, (1, 28, 28)),
    "eight channels": (5, 1, 2, (8, 28, 28)),
}


def network(name: str) -> Graph:
    kernel, stride, padding, image = NETWORKS[name]
    graph = Graph(name, image, 5)
    conv = graph.add("conv1", Conv(32, kernel, stride=stride, padding=padding), graph.input)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(5), graph.add("flat", Flatten(), conv)))
    return graph


def lowered(graph: Graph, dtype: str, padded: bool) -> Program:
    form: dict[str, Any] = {"layout": "NHWC", "pad_channels": 8} if padded else {"layout": "NCHW"}
    return lower(graph, 16, dtype=dtype, **form)


@pytest.mark.parametrize("profile", ["h200", "titan-x-maxwell"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(NETWORKS)[:4])
def test_a_first_convolution_takes_as_long_in_every_form(name: str, dtype: str, profile: str) -> None:
    machine = load_profile(profile)
    stored, plain = (lowered(network(name), dtype, padded) for padded in (True, False))
    assert stored.tensors["data"].nbytes > plain.tensors["data"].nbytes  # bytes are those that are stored
    expected = model_costs(plain, machine).candidates
    backend = SimulatedBackend(machine)
    ops = {op.name: op for op in stored.ops}
    for found in (model_costs(stored, machine).candidates, {o: backend.candidates(ops[o], stored) for o in FIRST}):
        for op in FIRST:
            times = {c.algorithm: c.time_ms for c in expected[op]}
            assert {c.algorithm: c.time_ms for c in found[op]} == times, op
            assert len(times) > 1


def test_workspaces_are_those_of_what_is_stored() -> None:
    """An FFT of images padded to 8 channels transforms 8 planes of each, as of images that have so many."""
    machine = load_profile("titan-x-maxwell")
    names = {"padded, FFT": True, "eight channels": False}
    programs = (lowered(network(name), "float32", padded) for name, padded in names.items())
    stored, wide = ({c.algorithm: c for c in model_costs(p, machine).candidates["conv1.forward"]} for p in programs)
    assert stored["FFT"].workspace_bytes == wide["FFT"].workspace_bytes > 0
    assert stored["FFT"].time_ms < wide["FFT"].time_ms


@pytest.mark.parametrize("sliced", [False, True])
def test_the_clock_and_the_simulated_backend_agree(sliced: bool) -> None:
    """The backend sees launches alone, in parts of the batch too."""
    backend = SimulatedBackend(load_profile("h200"))
    program = lowered(network("stride 4 folded"), "bfloat16", True)
    costs = backend_costs(backend, program)
    decisions: Decisions = POLICIES["none"](program, costs, Budget())
    if sliced:
        options = costs.slices
        assert options is not None
        best = min(options("conv1.forward", 8).candidates, key=lambda c: c.time_ms)
        half = Slice(8, Algorithm(best.algorithm, best.workspace_bytes))
        whole = {op: a for op, a in decisions.algorithms.items() if op != "conv1.forward"}
        decisions = replace(decisions, algorithms=whole, slices={"conv1.forward": (half, half)})
    planned, plan = apply_decisions(program, decisions), plan_program(program, decisions)
    timing = simulate(plan, planned, costs)
    backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
    Executor(backend, plan, planned).run(blank_feeds(planned))
    assert backend.elapsed_ms == pytest.approx(timing.total_ms)


@pytest.mark.parametrize(("name", "precision"), [("alexnet", "bf16"), ("alexnet", "tf32"), ("resnet50", "bf16")])
def test_a_plan_takes_the_time_that_its_note_says(
    capsys: pytest.CaptureFixture[str], name: str, precision: str
) -> None:
    """What is left are an op or two that NCHW has not, each of a few microseconds: the filters' form, a transform."""
    found = []
    for layout in ("auto", "nchw"):
        options = ["--profile", "h200", "--precision", precision, "--layout", layout, "-b", "32", "--policy", "none"]
        assert main(["plan", name, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    folded, plain = found
    assert folded["device_peak_bytes"] != plain["device_peak_bytes"]
    assert folded["predicted_step_ms"] == pytest.approx(plain["predicted_step_ms"], abs=0.02)
    times = [{row["layer"]: row["time_ms"] for row in data["layers"]} for data in found]
    first = next(iter(build(name).nodes))
    assert times[0][first] == pytest.approx(times[1][first], abs=0.005)
