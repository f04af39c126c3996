"""Convolutions in CHWN as the search measures them: real kernels on the host, against float64, kept by layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cuda_on_host import HostKernels
from test_cuda_search import KEY, Device, device

from vdnn.layers import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import measures as measures_module
from vdnn.runtime.backends.cuda import op_costs as op_costs_module
from vdnn.runtime.backends.cuda.chwn_plans import ChwnPlans
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem, contiguous
from vdnn.runtime.backends.cuda.measures import MeasuresByLayout
from vdnn.runtime.backends.cuda.op_costs import OpCosts, layout_of
from vdnn.runtime.backends.cuda.op_trial import op_key
from vdnn.runtime.backends.cuda.products import applies_epilogue, tail_bytes
from vdnn.runtime.backends.cuda.search import Search

__all__ = ["device"]  # a fixture

CHWN = {**KEY, "layout": "CHWN"}
SHAPES = {"x": (4, 3, 7, 6), "w": (8, 3, 3, 3), "y": (4, 8, 4, 3)}
PROBLEM = ConvProblem("forward", *SHAPES.values(), stride=(2, 2), padding=(1, 1), layout="CHWN")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_every_variant_agrees_with_float64(device: Device, direction: str, dtype: str) -> None:
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    stream = device.cuda.Stream(non_blocking=True)
    plans = ChwnPlans(HostKernels(dtype=dtype), stream)  # type: ignore[arg-type]
    said: list[str] = []
    search = Search(plans, CHWN, 2**30, stream, precision=precision, note=said.append)
    problem = replace(PROBLEM, direction=direction, dtype=dtype)
    if direction == "forward":
        problem = replace(problem, epilogue="bias+relu")
    found = search.candidates(problem)
    assert found, said
    assert not search.known[str(problem)].left_out, said
    assert {c.algorithm for c in found} == {plan.algorithm for plan in plans.plans(problem)}
    assert all(c.algorithm.startswith("DIRECT_") and c.deterministic for c in found)
    assert {c.math for c in found} <= {"fp32", precision}
    if direction == "wgrad":
        assert {c.math for c in found} == {"fp32"}, "filter gradients are sums of exact products, kept in float32"


def test_some_images_of_a_batch_agree_too(device: Device) -> None:
    """Between the pixels of a slice lie those of the other images."""
    stream = device.cuda.Stream(non_blocking=True)
    search = Search(ChwnPlans(HostKernels(), stream), CHWN, 2**30, stream)  # type: ignore[arg-type]
    strides = {role: contiguous((12, *SHAPES[role][1:]), "CHWN") for role in "xy"}
    for direction in ("forward", "dgrad", "wgrad"):
        problem = replace(PROBLEM, direction=direction, x_strides=strides["x"], y_strides=strides["y"])
        assert "with strides" in str(problem)
        assert search.candidates(problem)
        assert not search.known[str(problem)].left_out


def test_a_wrong_kernel_is_left_out(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = device.cuda.Stream(non_blocking=True)
    kernels = HostKernels()
    plans = ChwnPlans(kernels, stream)  # type: ignore[arg-type]
    first = plans.plans(PROBLEM)[0].algorithm
    launch = kernels.launch

    def without_padding(name: str, blocks: int, args: Any, stream: Any) -> None:
        table = args[0].copy()
        if name.endswith(first.removeprefix("DIRECT_")):
            table["of"]["pad_down"] = 0
        launch(name, blocks, [table, *args[1:]], stream)

    monkeypatch.setattr(kernels, "launch", without_padding)
    search = Search(plans, CHWN, 2**30, stream)
    found = search.candidates(PROBLEM)
    assert first not in {c.algorithm for c in found}
    assert found
    assert search.known[str(PROBLEM)].left_out[first].startswith("error ")


def test_own_kernels_leave_nothing_behind_their_workspace() -> None:
    half = replace(PROBLEM, direction="wgrad", dtype="bfloat16")
    assert half.scratch_bytes == tail_bytes(half, "DIRECT_64x64") == 0
    assert half.dtypes() == {"x": "bfloat16", "w": "float32", "y": "bfloat16", "b": "float32"}
    cudnn = replace(half, layout="NHWC")
    assert cudnn.scratch_bytes == 2 * 8 * 27
    assert set(cudnn.dtypes().values()) == {"bfloat16"}
    assert applies_epilogue(replace(PROBLEM, epilogue="relu"), "DIRECT_64x64")
    assert not applies_epilogue(PROBLEM, "DIRECT_64x64")
    assert not applies_epilogue(replace(PROBLEM, layout="NCHW", epilogue="relu"), "GEMM")


# ---- tables by layout


def opened(device: Device) -> MeasuresByLayout:
    stream = device.cuda.Stream(non_blocking=True)
    key = {name: value for name, value in KEY.items() if name != "layout"}
    kernels: Any = HostKernels()
    return MeasuresByLayout(None, kernels, lambda *given: None, stream, key, 2**30)  # type: ignore[arg-type]


def test_each_layout_has_a_table_under_the_key_that_it_always_had(device: Device) -> None:
    measures = opened(device)
    for layout in ("NCHW", "NHWC"):
        before = Search(None, {**KEY, "layout": layout}, 2**30, None)  # type: ignore[arg-type]
        assert measures.of(layout).search.path == before.path
    assert measures.of("CHWN").search.path not in {measures.of(layout).search.path for layout in ("NCHW", "NHWC")}
    assert measures.of("CHWN") is measures.of("CHWN")
    assert "kernels" in measures.of("CHWN").search.key, "other kernels are measured anew"
    assert "taps" not in measures.of("NHWC").search.key
    in_tf32 = replace(measures, precision="tf32", _opened={})
    assert {layout: "taps" in in_tf32.of(layout).search.key for layout in ("NCHW", "NHWC", "CHWN")} == {
        "NCHW": False,
        "NHWC": True,
        "CHWN": False,
    }
    measures.of("NHWC").search.keep_op("an op", 1.0)
    measures.flush()
    assert opened(device).of("NHWC").search.ops == {"an op": 1.0}
    assert opened(device).of("NCHW").search.ops == {}


def of_layout(layout: str, kind: str = "relu.forward") -> tuple[Op, Program]:
    specs = [TensorSpec(name, "act", (4, 8, 3, 3), layout=layout) for name in ("x", "y")]
    op = Op("op", kind, "op", "forward", {"x": "x"}, {"y": "y"})
    return op, Program("one", 4, "train", {s.name: s for s in specs}, (op,), (), (), (), "", "")


def test_an_op_is_kept_by_the_layout_of_its_images() -> None:
    assert [layout_of(*of_layout(layout), "NHWC") for layout in ("NCHW", "NHWC", "CHWN")] == ["NCHW", "NHWC", "CHWN"]
    specs = [TensorSpec("w", "weight", (4, 8, 3, 3), layout="CHWN"), TensorSpec("y", "act", (4, 8))]
    op = Op("op", "linear.forward", "op", "forward", {"w": "w"}, {"y": "y"})
    program = Program("one", 4, "train", {s.name: s for s in specs}, (op,), (), (), (), "", "")
    assert layout_of(op, program, "NHWC") == "NHWC"


class Times:
    """Times by variant, and what was asked for."""

    def __init__(self, **ms: float) -> None:
        self.ms, self.asked = ms, []

    def time_ms(self, op: Op, program: Program, workspace_bytes: int, variant: str = "") -> float:
        """As told."""
        self.asked.append(variant)
        return self.ms[variant or "only"]


def test_each_variant_of_a_kernel_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(only=1.0, A=2.0, B=0.5)
    costs = OpCosts(lambda layout: measures_module.Measures(None, times), "NCHW")  # type: ignore[arg-type]
    op, program = of_layout("CHWN")
    monkeypatch.setattr(op_costs_module, "VARIANTS", {"relu.forward": lambda op, program: ("A", "B")})
    assert costs.candidates(op, program) == (Candidate("B", 0.5), Candidate("A", 2.0))
    for labels in ((), ("A",)):
        monkeypatch.setattr(op_costs_module, "VARIANTS", {"relu.forward": lambda op, program, labels=labels: labels})
        assert costs.candidates(op, program) == (Candidate("default", 1.0),)


def test_transforms_and_pools_have_variants() -> None:
    x, y = TensorSpec("x", "act", (64, 32, 8, 8)), TensorSpec("y", "act", (64, 32, 8, 8), layout="CHWN")
    op = Op("t", "layout.transform", "t", "forward", {"x": "x"}, {"y": "y"})
    program = Program("one", 64, "train", {"x": x, "y": y}, (op,), (), (), (), "", "")
    labels = op_costs_module.VARIANTS[op.kind](op, program)
    assert {"TILED", "VECTOR"} <= set(labels)
    assert {"pool.forward", "pool.backward"} <= set(op_costs_module.VARIANTS)
    told = replace(op, attrs={"algorithm": "TILED"})
    assert op_key(told, program, 0) == op_key(op, program, 0)  # the variant is added to the key where there are several
