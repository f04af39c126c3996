"""The picture of a plan: what is behind it, and that a file of the right kind comes out."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from vdnn.errors import ConfigError
from vdnn.layers import Conv, Flatten, Graph, Linear, Relu, SoftmaxLoss, Update, lower
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Alloc, CopyOut, Free, Launch
from vdnn.memory.policy import Budget, make_plan
from vdnn.memory.report import CATEGORIES, make_report
from vdnn.networks import build
from vdnn.runtime.devices import open_device
from vdnn.runtime.plots import COLORS, draw_plan, peak_lines, timeline
from vdnn.runtime.prepare import backend_costs

UPDATE = Update(momentum=0.9)


def planned(graph, batch, policy, mode="train", algorithms="memory-optimal"):
    """plan, program with algorithms, decisions, costs on the simulated Titan X."""
    backend, _ = open_device("simulated", "titan-x-maxwell")
    program = lower(graph, batch, mode, update=UPDATE)
    costs = backend_costs(backend, program)
    decisions, plan = make_plan(program, costs, policy, Budget(algorithms=algorithms))
    return plan, apply_decisions(program, decisions), decisions, costs


def chain(layers):
    """A network of many small convolutions."""
    graph = Graph("chain", (3, 8, 8), 10)
    x = graph.input
    for i in range(layers):
        x = graph.add(f"relu{i}", Relu(), graph.add(f"conv{i}", Conv(4, 3, padding=1), x))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), graph.add("flat", Flatten(), x)))
    return graph


@pytest.mark.parametrize("algorithms", ["memory-optimal", "performance-optimal"])
@pytest.mark.parametrize("policy", ["base", "none", "conv", "all"])
@pytest.mark.parametrize("network", ["alexnet", "googlenet", "resnet18"])
def test_the_highest_level_is_the_ideal_peak_of_the_report(network, policy, algorithms):
    case = planned(build(network), 16, policy, algorithms=algorithms)
    report, lines = make_report(*case), timeline(*case)
    total = lines.total()
    assert total.max() == report.ideal_peak_bytes
    at = int(total.argmax())
    assert {name: int(lines.levels[name][at]) for name in CATEGORIES} == dict(report.by_category)
    assert lines.edges[0] == 0
    assert lines.edges[-1] == pytest.approx(report.predicted_step_ms)
    assert (np.diff(lines.edges) >= 0).all()
    assert len(lines.edges) == len(total) + 1


def test_the_levels_of_a_small_plan_are_those_counted_by_hand():
    graph = Graph("hand", (1, 4, 4), 2)
    x = graph.add("conv1", Conv(2, 3, padding=1), graph.input)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(2), graph.add("flat", Flatten(), x)))
    program = lower(graph, 8, "train")
    ops = [op.name for op in program.ops]
    costs = CostTable({name: (Candidate("x", 2.0**i),) for i, name in enumerate(ops)}, CopyRates(1, 1, 2, 0), "by hand")
    decisions, plan = make_plan(program, costs, "none", Budget())
    case = plan, apply_decisions(program, decisions), decisions, costs
    lines = timeline(*case)
    live = {name: program.tensors[name].nbytes for name in program.persistent}
    expected, highest = [], 0
    for step in plan.steps:
        if isinstance(step, Alloc):
            live[step.storage] = step.nbytes
        elif isinstance(step, Free):
            del live[step.storage]
        highest = max(highest, sum(-(-n // 256) * 256 for n in live.values()))
        if isinstance(step, Launch):
            expected.append(highest)
            highest = sum(-(-n // 256) * 256 for n in live.values())
    assert lines.total()[:-1].tolist() == expected
    # kernels of 1, 2, 4, ... ms one after the other, once the first feeds have come
    assert np.diff(lines.edges)[1:-1].tolist() == pytest.approx([2.0**i for i in range(1, len(ops))])
    weights = sum(-(-4 * n // 256) * 256 for n in (2 * 9, 2, 2 * 32, 2))
    assert set(lines.levels["weights"].tolist()) == {weights}


def test_copies_and_the_start_of_backward_are_those_of_the_clock():
    case = planned(build("alexnet"), 16, "all")
    plan, report, lines = case[0], make_report(*case), timeline(*case)
    outs = [step for step in plan.steps if isinstance(step, CopyOut)]
    assert len(lines.copies["out"]) >= len(outs) > 3
    assert sum(length for _, length in lines.copies["out"]) == pytest.approx(report.copy_out_ms)
    assert sum(length for _, length in lines.copies["in"]) == pytest.approx(report.copy_in_ms)
    assert 0 < lines.backward_ms < report.predicted_step_ms
    assert timeline(*planned(build("alexnet"), 16, "none", mode="eval")).backward_ms is None


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("b.SVG", b"<?xml"), ("c.pdf", b"%PDF"), ("a.b.png", b"\x89PNG")]
)
def test_a_file_of_the_kind_its_name_says(tmp_path, name, magic):
    path = tmp_path / name
    draw_plan(*planned(build("lenet"), 8, "all"), str(path))
    assert path.read_bytes().startswith(magic)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_the_text_of_the_picture(tmp_path):
    case = planned(build("lenet"), 8, "conv")
    path = tmp_path / "x.svg"
    draw_plan(*case, str(path))
    text = path.read_text("utf-8")
    for part in ("lenet", "batch size 8", "policy conv", "simulated", "modelled by profile titan-x-maxwell"):
        assert part in text  # glyphs are outlines, but every text is also there as a comment
    for part in ("forward", "backward", "copies to host", "copies from host", "ideal peak", "slab", *CATEGORIES):
        assert part.replace("_", " ") in text


def test_slab_and_ideal_peak_are_one_line_where_they_are_equal_and_two_where_not():
    report = make_report(*planned(build("lenet"), 8, "conv"))
    equal = replace(report, device_peak_bytes=3 * 2**20, ideal_peak_bytes=3 * 2**20)
    ((nbytes, label, *_),) = peak_lines(equal)
    assert nbytes == 3 * 2**20
    assert ("slab" in label, "ideal peak" in label, "3.0 MiB" in label) == (True, True, True)
    slab, ideal = peak_lines(replace(equal, device_peak_bytes=4 * 2**20))
    assert (slab[:2], ideal[:2]) == ((4 * 2**20, "slab 4.0 MiB"), (3 * 2**20, "ideal peak 3.0 MiB"))
    assert slab[2:] != ideal[2:]


def test_only_modelled_times_are_called_simulated(tmp_path):
    plan, program, decisions, costs = planned(build("lenet"), 8, "none")
    measured = CostTable(costs.candidates, costs.rates, "measured on this cpu")
    path = tmp_path / "x.svg"
    draw_plan(plan, program, decisions, measured, str(path))
    assert "measured on this cpu" in path.read_text("utf-8")
    assert "simulated" not in path.read_text("utf-8")


def test_a_large_plan_is_drawn_in_time(tmp_path):
    case = planned(chain(700), 2, "all")
    assert len(case[0].steps) > 20_000
    started = time.process_time()
    draw_plan(*case, str(tmp_path / "x.png"))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("name", ["x.bmp", "x", "x.png.txt", ".png"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    case = planned(build("lenet"), 8, "none")
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        draw_plan(*case, str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(tmp_path):
    case = planned(build("lenet"), 8, "none")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for name in ("file/x.png", "folder.png"):
        with pytest.raises(ConfigError, match="cannot be written"):
            draw_plan(*case, str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder.png"]


def test_colours_differ_for_eyes_that_confuse_red_and_green():
    """Distance of every two category colours in Lab, as a deuteranope sees them (Viénot, Brettel and Mollon 1999)."""
    seen = {name: _lab(_deuteranope(COLORS[name])) for name in CATEGORIES}
    for one in CATEGORIES:
        for two in CATEGORIES:
            if one < two:
                assert np.linalg.norm(seen[one] - seen[two]) > 15, (one, two)


def _linear(color):
    value = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _deuteranope(color):
    to_lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    blind = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    return np.clip(np.linalg.inv(to_lms) @ blind @ to_lms @ _linear(color), 0, 1)


def _lab(linear):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
