"""memory.layout auto on a GPU: what is measured, what is chosen, what a run keeps that goes on; the sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_layout_choice import concat_of_branches, counted, drawn_times, images, residual_block

from vdnn.cli.main import main
from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.layers.rewrite import rewritten
from vdnn.memory.costs import Candidate
from vdnn.memory.layout import LAYOUTS, LayoutTimes, Rule
from vdnn.memory.layout_search import LEAST_GAIN, choose_known, search_layouts, single_layouts
from vdnn.networks import build
from vdnn.runtime.backend import Caps
from vdnn.runtime.config import load_config
from vdnn.runtime.devices import open_device
from vdnn.runtime.layout_meter import bound_ms
from vdnn.runtime.layout_sweep import Point, Sweep, channels_of, images_of, known_rule, products, sweep
from vdnn.runtime.layouts import choose_layouts, layout_rule, with_choices
from vdnn.runtime.planset import layout_of_plan, plan_name
from vdnn.runtime.prepare import backend_costs, make_recipe

# ---- the search


class Meter:
    """Tells times, and notes what it was asked."""

    def __init__(self, times: LayoutTimes) -> None:
        self.times = times
        self.asked: list[tuple[str, ...]] = []

    def layer(self, name: str, layout: str) -> float:
        """Of a layer."""
        self.asked.append((name, layout))
        return self.times.layers[layout].get(name, 0.0)

    def transform(self, *move: str) -> float:
        """Of a transform."""
        self.asked.append(move)
        return self.times.transforms[move]  # type: ignore[index]


def lowered(times: LayoutTimes, share: float) -> LayoutTimes:
    """Bounds of these times."""
    layers = {layout: {name: share * ms for name, ms in own.items()} for layout, own in times.layers.items()}
    return LayoutTimes(layers, {move: share * ms for move, ms in times.transforms.items()})


@pytest.mark.parametrize("make", [residual_block, concat_of_branches])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_bounds_change_what_is_measured_and_not_what_is_chosen(make: Any, share: float, seed: int) -> None:
    graph = rewritten(make(), "train", pool_indices=True, fuse=True)
    times = drawn_times(graph, seed)
    names = images(graph)
    best = min(
        counted(graph, dict(zip(names, combo, strict=True)), times) for combo in product(LAYOUTS, repeat=len(names))
    )
    single = min(counted(graph, dict.fromkeys(names, layout), times) for layout in LAYOUTS)
    meter = Meter(times)
    found, known = search_layouts(graph, lowered(times, share), meter.layer, meter.transform)
    chosen = {name: choice.layout for name, choice in found.items()}
    total = counted(graph, chosen, times)
    assert sorted(chosen) == sorted(names)
    assert total <= single + 1e-9
    assert total == pytest.approx(best if best < (1 - LEAST_GAIN) * single else single)
    assert len(meter.asked) == len(set(meter.asked)), "something was measured twice"
    assert not any((name, layout) in known.bounds for name, layout in chosen.items())


def test_what_a_bound_rules_out_is_never_measured() -> None:
    graph = rewritten(build("alexnet"), "train", pool_indices=True, fuse=True)
    names = (graph.input, *graph.nodes)
    layers = {"NCHW": dict.fromkeys(names, 2.0), "NHWC": dict.fromkeys(names, 1.0), "CHWN": dict.fromkeys(names, 9.0)}
    pairs = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]]
    times = LayoutTimes(layers, {(name, *pair): 1.0 for name in images(graph) for pair in pairs})
    meter = Meter(times)
    found, known = search_layouts(graph, lowered(times, 0.5), meter.layer, meter.transform)
    assert {choice.layout for choice in found.values()} == {"NHWC"}
    assert not [asked for asked in meter.asked if "CHWN" in asked]
    assert "at least 4.500 in CHWN" in found["conv1"].reason
    assert found["conv1"].reason.endswith("in NHWC as all layers: no mix of layouts gains 1%")
    assert ("conv1", "CHWN") in known.bounds


def test_a_gain_that_may_be_noise_is_not_taken() -> None:
    graph = rewritten(build("lenet"), "train", pool_indices=True, fuse=True)
    names = (graph.input, *graph.nodes)
    pairs = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]]

    def layouts(gain_ms: float) -> set[str]:
        layers = {layout: dict.fromkeys(names, 1.0) for layout in LAYOUTS}
        layers["CHWN"] |= {"conv1": 1.0 - gain_ms, "conv2": 3.0}
        times = LayoutTimes(layers, {(name, *pair): 0.0 for name in images(graph) for pair in pairs})
        meter = Meter(times)
        found, _ = search_layouts(graph, times, meter.layer, meter.transform)
        return {choice.layout for choice in found.values()}

    assert len(layouts(0.01)) == 1
    assert "CHWN" in layouts(0.5)


def test_known_times_take_the_same_way() -> None:
    """What a mix has to gain is given, and no time is a bound any more."""
    graph = rewritten(build("lenet"), "train", pool_indices=True, fuse=True)
    times, names = drawn_times(graph, 0), images(graph)
    sums = {layout: counted(graph, dict.fromkeys(names, layout), times) for layout in LAYOUTS}
    assert single_layouts(graph, times) == tuple(sorted(sums, key=lambda layout: sums[layout]))
    best = min(
        counted(graph, dict(zip(names, combo, strict=True)), times) for combo in product(LAYOUTS, repeat=len(names))
    )
    gain = 1 - best / min(sums.values())
    assert gain > 0
    for needed, most in ((0.9 * gain, best), (1.1 * gain, min(sums.values()))):
        found, known = choose_known(graph, times, needed)
        assert counted(graph, {name: choice.layout for name, choice in found.items()}, times) == pytest.approx(most)
        assert not any("at least" in choice.reason for choice in found.values())
        assert not known.bounds


def test_a_layout_without_an_algorithm_is_not_chosen() -> None:
    graph = rewritten(build("lenet"), "train", pool_indices=True, fuse=True)
    times = drawn_times(graph, 5)
    times.layers["CHWN"]["conv1"] = float("inf")  # type: ignore[index]
    meter = Meter(times)
    found, _ = search_layouts(graph, lowered(times, 0.0), meter.layer, meter.transform)
    assert found["conv1"].layout != "CHWN"


# ---- a machine that measures


GPU = Caps("cuda", True, False, "made up", 2**34, None, "measured", measured_costs=True, memory_gbps=4000.0)  # type: ignore[arg-type]


class Measuring:
    """A backend that says of every op what its layout takes; convolutions are quick in `quick`."""

    def __init__(self, quick: Mapping[str, str], caps: Caps = GPU) -> None:
        self.caps, self.quick = replace(caps, rates=open_device("simulated")[0].caps.rates), quick
        self.asked: set[tuple[str, str]] = set()

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """One."""
        names = (*op.writes.values(), *op.reads.values())
        specs = [program.tensors[name] for name in names if program.tensors[name].role in ("act", "grad")]
        layout = next((spec.layout for spec in specs if len(spec.shape) == 4), "")
        self.asked.add((op.layer, layout))
        quick = self.quick.get(op.kind.split(".")[0])
        return (Candidate("default", 100.0 if quick is not None and layout != quick else 20.0),)

    def knows_all(self, op: Op, program: Program) -> bool:
        """Yes."""
        return True


def choices_on(quick: Mapping[str, str], *options: str, recorded: Any = None, network: str = "lenet") -> Any:
    backend: Any = Measuring(quick)
    config = load_config(network, ["device=cuda", "data.source=synthetic", *options])
    recipe = make_recipe(config)
    found = choose_layouts(
        config, build(network), [("train", 64)], lambda p: backend_costs(backend, p), recipe, backend, recorded
    ).choices
    return config, recipe, found, backend


def test_auto_mixes_layouts_where_that_is_quicker() -> None:
    config, recipe, found, _ = choices_on({"conv": "CHWN", "pool": "NHWC", "layout": ""})
    assert [found[name].layout for name in ("conv1", "pool1", "conv2", "pool2")] == ["CHWN"] * 4, "transforms cost 100"
    config, recipe, found, _ = choices_on({"conv": "CHWN", "pool": "NHWC"})
    assert [found[name].layout for name in ("conv1", "pool1", "conv2", "pool2")] == ["CHWN", "NHWC"] * 2
    made = with_choices(recipe, config, found)
    assert made.layouts == found
    assert {"conv1_to_nhwc", "pool1_to_chwn"} <= set(made.lower(build("lenet"), ("train", 4)).tensors)


@pytest.mark.parametrize(("layout", "precision"), [("NHWC", "bf16"), ("NCHW", "fp32"), ("CHWN", "fp32")])
def test_one_layout_everywhere_is_as_if_it_had_been_asked_for(layout: str, precision: str) -> None:
    config, recipe, found, _ = choices_on({"conv": layout, "pool": layout}, f"precision={precision}")
    assert {choice.layout for choice in found.values()} == {layout}
    made = with_choices(recipe, config, found)
    asked = load_config("lenet", ["device=cuda", f"memory.layout={layout.lower()}", f"precision={precision}"])
    wanted = make_recipe(asked)
    assert (made.layout, made.layouts) == (layout, {})
    graph = build("lenet")
    assert made.lower(graph, ("train", 4)).digest() == wanted.lower(graph, ("train", 4)).digest()


def test_the_first_convolution_is_costed_as_it_runs() -> None:
    """In NHWC for tensor cores with its stride in channels."""
    seen: set[tuple[int, ...]] = set()

    class Looking(Measuring):
        def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
            if op.name == "conv1.forward":
                seen.add((*program.tensors[op.reads["x"]].shape, program.tensors[op.reads["x"]].layout))  # type: ignore[arg-type]
            return super().candidates(op, program)

    backend: Any = Looking({"conv": "NHWC"})
    config = load_config("alexnet", ["device=cuda", "data.source=synthetic", "precision=bf16"])
    recipe = make_recipe(config)
    choose_layouts(config, build("alexnet"), [("train", 8)], lambda p: backend_costs(backend, p), recipe, backend)
    assert {shape[1] for shape in seen if shape[-1] == "NHWC"} == {48}
    assert {shape[1] for shape in seen if shape[-1] != "NHWC"} <= {3}


def test_a_run_goes_on_in_the_layout_that_its_plans_are_named_by() -> None:
    quick = {"conv": "NCHW", "pool": "NCHW"}
    old = {"train/64/NHWC/bfloat16": {"conv1.forward": "graph:eng1"}, "eval/10/NHWC/bfloat16": {}}
    config, recipe, found, backend = choices_on(quick, "precision=bf16", recorded=old)
    assert not backend.asked
    assert with_choices(recipe, config, found).layout_name == "NHWC"
    _, _, found, _ = choices_on(quick, "precision=fp32", recorded=old)
    assert {choice.layout for choice in found.values()} == {"NCHW"}, "a record of another precision"
    mixed = {"layouts": {"data": "CHWN", "conv1": "CHWN", "conv2": "NCHW"}, "train/64/MIXED": {"conv1.forward": "A"}}
    config, recipe, found, _ = choices_on(quick, recorded=mixed)
    assert {name: choice.layout for name, choice in found.items()} == mixed["layouts"]
    assert with_choices(recipe, config, found).layout_name == "MIXED"
    _, _, found, _ = choices_on(quick, "precision=bf16", recorded=mixed)
    assert {choice.layout for choice in found.values()} == {"NCHW"}


def test_the_layout_in_the_name_of_a_plan() -> None:
    for layout, dtype in product(LAYOUTS, ("float32", "bfloat16")):
        assert layout_of_plan(plan_name(("train", 64), layout, dtype), dtype) == layout
    assert layout_of_plan("train/64/MIXED", "float32") is None
    assert layout_of_plan("train/64", "bfloat16") is None
    assert layout_of_plan("layouts", "float32") is None


@pytest.mark.parametrize("options", [("memory.candidates=named",), ("memory.paper_search=true",)])
def test_the_paper_has_one_layout(options: tuple[str, ...]) -> None:
    config = load_config("lenet", options)
    assert config.layout_policy_on("cuda") is None
    assert config.layout_on("cuda") == "NCHW"


def test_elsewhere_auto_is_what_it_was() -> None:
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        nhwc = "NCHW" if precision == "fp32" else "NHWC"
        for device, layout in (("cpu", "NCHW"), ("simulated", nhwc)):
            config = load_config("lenet", [f"precision={precision}"])
            assert config.layout_policy_on(device) is None
            assert config.layout_on(device) == layout
    assert load_config("lenet").layout_policy_on("cuda") == "shortest"
    assert load_config("lenet", ["memory.layout=study"]).pad_channels_on("cuda") == 1


# ---- bounds


def test_bounds_of_bytes_and_of_products() -> None:
    program = products(256, 64, "CHWN", "float32")
    op = program.ops[0]
    caps = replace(GPU, memory_gbps=4000.0, fp32_gflops=60_000.0)
    products_ms = 2 * 64 * 384 * 13 * 13 * 256 * 9 / 60e12 * 1e3
    assert bound_ms(op, program, caps) == pytest.approx(products_ms)
    assert bound_ms(op, program, replace(caps, precision="tf32")) == pytest.approx(products_ms / 8)
    cudnn = products(256, 64, "NCHW", "float32")
    nbytes = 4 * (64 * 256 * 169 + 384 * 256 * 9 + 64 * 384 * 169)
    assert nbytes < 32 * 2**20
    assert bound_ms(cudnn.ops[0], cudnn, caps) == pytest.approx(nbytes / 16e12 * 1e3)
    large = products(256, 512, "NCHW", "float32")
    nbytes = 4 * (512 * 256 * 169 + 384 * 256 * 9 + 512 * 384 * 169)
    assert bound_ms(large.ops[0], large, caps) == pytest.approx(nbytes / 4e12 * 1e3)
    assert bound_ms(op, program, replace(caps, memory_gbps=0.0, fp32_gflops=0.0)) == 0.0


# ---- the sweep


def points(*faster: str) -> tuple[Point, ...]:
    sizes = (16, 32, 64, 128)
    return tuple(Point(n, n, 1.0, 0.5 if layout == "C" else 2.0) for n, layout in zip(sizes, faster, strict=True))


def test_thresholds_are_where_the_curves_cross() -> None:
    assert channels_of(points(*"CCNN")) == 64
    assert channels_of(points(*"CNCN")) == 128, "from there on, not once"
    assert channels_of(points(*"NNNN")) == 1
    assert channels_of(points(*"CCCC")) == 129
    assert images_of(points(*"NNCC")) == 64
    assert images_of(points(*"NCNC")) == 128
    assert images_of(points(*"NNNN")) == 129
    assert images_of(points(*"CCCC")) == 1


class Convolutions:
    """Quick in CHWN for fewer than 64 channels, or from 256 images on."""

    def __init__(self) -> None:
        facts = {"gpu": "NVIDIA Made Up", "driver": 13000, "cudnn": 91900}
        self.caps = replace(GPU, facts=facts)

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Two, of which the slower must not count."""
        n, c = program.tensors["x"].shape[:2]
        quick = "CHWN" if c < 64 or n >= 256 else "NCHW"
        ms = 1.0 if program.tensors["x"].layout == quick else 2.0
        return (Candidate("A", 9.0), Candidate("B", ms))

    def close(self) -> None:
        """Nothing to do."""


def test_a_sweep_is_kept_and_the_study_goes_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend: Any = Convolutions()
    config = load_config("alexnet", ["memory.layout=study", "device=cuda"])
    assert known_rule(backend.caps) is None
    assert layout_rule(config, backend.caps) == Rule()
    monkeypatch.setattr("vdnn.cli.layouts.open_device", lambda *given, **options: (backend, "made up"))
    assert main(["layouts", "calibrate", "--json"]) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert (data["channels"], data["images"]) == (64, 256)
    assert "C 3, N 64: 6.000 ms in NCHW, 3.000 ms in CHWN" in said.err
    rule = known_rule(backend.caps)
    assert rule is not None
    assert (rule.channels, rule.images) == (64, 256)
    assert rule.source == "found on NVIDIA Made Up in fp32 by 'vdnn layouts calibrate'"
    assert layout_rule(config, backend.caps) == rule
    given = load_config("alexnet", ["memory.layout=study", "memory.layout_channels=7"])
    assert (layout_rule(given, backend.caps).channels, layout_rule(given, backend.caps).images) == (7, 256)
    assert known_rule(replace(backend.caps, precision="tf32")) is None
    assert known_rule(replace(backend.caps, facts={**backend.caps.facts, "driver": 12000})) is None
    assert main(["layouts", "calibrate"]) == 0
    assert "CHWN if C < 64 or N >= 256, else NCHW; thresholds: found on NVIDIA Made Up" in capsys.readouterr().out
    (file,) = (tmp_path / "vdnn" / "algorithms").iterdir()
    for damaged in ("{", '{"facts": {}}', '{"facts": {}, "by_channels": [], "by_images": []}'):
        file.write_text(damaged)
        assert known_rule(backend.caps) is None


def test_there_is_nothing_to_calibrate_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts", "calibrate", "--device", "cpu"]) == 2
    assert "measures convolutions on a GPU, and this would be device cpu" in capsys.readouterr().err
    assert main(["layouts", "calibrate", "--precision", "fp64"]) == 2
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        sweep(open_device("simulated")[0])


def test_the_swept_layer_is_the_study_s() -> None:
    program = products(256, 64, "NCHW", "bfloat16")
    assert program.tensors["x"].shape == (64, 256, 13, 13)
    assert program.tensors["y"].shape == (64, 384, 13, 13)
    assert program.tensors["dw"].dtype == "float32"
    assert [op.kind for op in program.ops] == ["conv.forward", "conv.wgrad", "conv.dgrad"]
    assert Sweep({"gpu": "g", "precision": "fp32"}, points(*"CCNN"), points(*"NNCC")).rule().images == 64
