"""Plans of cuDNN's graph API for a GPU that is not there, described by its properties.

Skipped, with the reason, where cuDNN is not installed or is of a version that cannot.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vdnn.errors import BackendUnavailable
from vdnn.runtime.backends.cuda import cudnn_graph
from vdnn.runtime.backends.cuda.cudnn import (
    Cudnn,
    CudnnError,
)
from vdnn.runtime.backends.cuda.cudnn_backend import Attribute, DeviceProperties, Type
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.libraries import load_cudnn
from vdnn.runtime.backends.cuda.search import shortlist, trial_order

H200 = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150754820096,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "l2CacheSize": 62914560,
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": 13000,
    "deviceName": "NVIDIA H200",
    "smCountOrigin": 0,
    "oversizedSharedMemoryPerBlock": 0,
    "memoryBusWidth": 6144,
}
"""An H200 as cuDNN describes it."""

VGG = (64, 64, 224, 224)


@pytest.fixture(scope="module")
def h200() -> DeviceProperties:
    try:
        api = Cudnn(load_cudnn())
    except BackendUnavailable as error:
        pytest.skip(str(error))
    if not 91100 <= api.shared_library.version < 92700:
        pytest.skip(f"cuDNN {api.shared_library.version_text} does not list plans without a driver; 9.11 to 9.26 do")
    return DeviceProperties(api, json=json.dumps(H200))


def test_device_properties_come_back_as_they_were_given(h200: DeviceProperties) -> None:
    assert json.loads(h200.to_json()) == H200


# plans without tensor cores of the VGG layer 64x64x224x224 in NCHW fp32 on an H200, as counted by the reference binding
# with cuDNN 9.19 (heuristics A and FALLBACK)
FP32_PLANS = {"forward": 8, "dgrad": 7, "wgrad": 6}


@pytest.mark.parametrize("direction", FP32_PLANS)
def test_the_plans_of_a_vgg_layer(h200: DeviceProperties, direction: str) -> None:
    problem = ConvProblem(direction, VGG, (64, 64, 3, 3), VGG, padding=(1, 1))
    exact = cudnn_graph.plans(h200, problem)
    every = cudnn_graph.plans(h200, problem, tensor_cores=True)
    if h200.api.shared_library.version // 100 == 919:
        assert len(exact) == FP32_PLANS[direction]
    assert 0 < len(exact) < len(every)
    assert [plan.algorithm for plan in exact] == [
        plan.algorithm for plan in every if not cudnn_graph.INEXACT & set(plan.notes)
    ]
    assert len({plan.algorithm for plan in every}) == len(every)
    assert min(plan.workspace_bytes for plan in exact) == 0
    # tensor cores want NHWC: the copies of x and y, 784 MiB each, are in the workspace
    tensor_core = [plan for plan in every if "TENSOR_CORE" in plan.notes]
    assert tensor_core[0].workspace_bytes >= 2 * 4 * np.prod(VGG)
    assert {plan.deterministic for plan in exact} == ({True} if direction == "forward" else {True, False})


@pytest.mark.parametrize("direction", FP32_PLANS)
def test_the_short_list_of_a_vgg_layer_has_a_choice_of_workspaces(h200: DeviceProperties, direction: str) -> None:
    problem = ConvProblem(direction, VGG, (64, 64, 3, 3), VGG, padding=(1, 1))
    every = cudnn_graph.plans(h200, problem, tensor_cores=True)
    kept = shortlist(every)
    assert kept[:8] == every[:8]
    assert [plan for plan in kept if plan.workspace_bytes <= 2**20] == [
        plan for plan in every if plan.workspace_bytes <= 2**20
    ]
    assert len(kept) < len(every)
    reference = trial_order(every)[0]
    assert reference.workspace_bytes == 0
    assert not cudnn_graph.INEXACT & set(reference.notes)


@pytest.mark.parametrize("direction", FP32_PLANS)
def test_a_recorded_label_gives_the_same_plan(h200: DeviceProperties, direction: str) -> None:
    problem = ConvProblem(direction, (32, 64, 28, 28), (96, 64, 1, 1), (32, 96, 28, 28))
    for plan in cudnn_graph.plans(h200, problem, tensor_cores=True):
        again = cudnn_graph.plan(h200, problem, plan.algorithm)
        assert (again.workspace_bytes, again.notes) == (plan.workspace_bytes, plan.notes)


def test_the_workspace_is_enough_with_accumulation(h200: DeviceProperties) -> None:
    # split-K filter gradients of a 1x1 layer need more bytes when they accumulate
    problem = ConvProblem("wgrad", (32, 64, 28, 28), (96, 64, 1, 1), (32, 96, 28, 28))
    size = Attribute.EXECUTION_PLAN_WORKSPACE_SIZE
    for plan in cudnn_graph.plans(h200, problem, tensor_cores=True):
        needed = [built.get(size, Type.INT64)[0] for built in plan._plans.values()]
        assert plan.workspace_bytes == max(needed)


@pytest.mark.parametrize(
    ("direction", "roles"),
    [
        ("forward", {"X": "x", "W": "w", "Y": "y"}),
        ("dgrad", {"dX": "x", "W": "w", "dY": "y"}),
        ("wgrad", {"X": "x", "dW": "w", "dY": "y"}),
    ],
)
def test_cudnn_describes_the_problem_that_was_meant(
    h200: DeviceProperties, direction: str, roles: dict[str, str]
) -> None:
    shapes = {"x": (2, 4, 13, 15), "w": (6, 2, 3, 2), "y": (2, 6, 6, 19)}
    strides = {"x": (9 * 195, 195, 15, 1), "w": (12, 6, 2, 1), "y": (7 * 114, 114, 19, 1)}
    problem = ConvProblem(
        *(direction, shapes["x"], shapes["w"], shapes["y"], (2, 1), (1, 3), (2, 2), 2, strides["x"], strides["y"], 4)
    )
    for accumulate, built in cudnn_graph.plans(h200, problem)[0]._plans.items():
        told = json.loads(built.get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]
        tensors = {tensor["name"]: tensor for tensor in told["tensors"]}
        node = told["nodes"][0]
        for role, name in roles.items():
            tensor = tensors[node[role]]
            assert (tuple(tensor["dim"]), tuple(tensor["stride"])) == (shapes[name], strides[name])
            assert (tensor["ptrAlignment"], tensor["dataType"]) == (4, "CUDNN_DATA_FLOAT")
        assert (node["alpha"], node["beta"]) == (1.0, float(accumulate))
        assert (node["stride"], node["pad"], node["dilation"], node["groupCount"]) == ([2, 1], [1, 3], [2, 2], 2)
        assert (node["mode"], node["mathPrec"]) == ("CUDNN_CROSS_CORRELATION", "CUDNN_DATA_FLOAT")


@pytest.mark.parametrize("direction", OPERANDS)
def test_a_graph_plan_hands_over_each_operand_under_its_own_name(
    h200: DeviceProperties, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ConvProblem(direction, (2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6))
    plan = cudnn_graph.plans(h200, problem)[0]
    told = json.loads(plan._plans[True].get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]
    shapes = {tensor["name"]: tuple(tensor["dim"]) for tensor in told["tensors"]}
    api = h200.api
    given: dict[int, list[int]] = {}
    executed: list[int] = []
    original = api._functions["cudnnBackendSetAttribute"]

    def set_attribute(descriptor: int, attribute: int, type_: int, count: int, array: Any) -> Any:
        given[attribute] = list(array)
        return original(descriptor, attribute, type_, count, array)

    def execute(handle: int, built: int, pack: int) -> int:
        executed.append(built)
        return 0

    monkeypatch.setitem(api._functions, "cudnnBackendSetAttribute", set_attribute)
    monkeypatch.setitem(api._functions, "cudnnBackendExecute", execute)
    handle: Any = SimpleNamespace(api=api, pointer=1)
    plan.run(handle, 0x1000, 0x2000, 0x3000, 0x4000, True)
    operands = {"x": problem.x, "w": problem.w, "y": problem.y}
    names = given[Attribute.VARIANT_PACK_UNIQUE_IDS]
    assert [shapes[str(name)] for name in names] == [operands[name] for name in OPERANDS[direction]]
    assert given[Attribute.VARIANT_PACK_DATA_POINTERS] == [0x1000, 0x2000, 0x3000]
    assert given[Attribute.VARIANT_PACK_WORKSPACE] == [0x4000]
    assert executed == [plan._plans[True].pointer]


def test_slices_groups_strides_and_dilation_have_plans(h200: DeviceProperties) -> None:
    sliced = {"x_strides": (12 * 323, 323, 19, 1), "y_strides": (11 * 323, 323, 19, 1), "alignment": 4}
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (((3, 5, 17, 19), (7, 5, 3, 3), (3, 7, 17, 19)), {"padding": (1, 1), **sliced}),
        (((8, 96, 27, 27), (256, 48, 5, 5), (8, 256, 27, 27)), {"padding": (2, 2), "groups": 2}),
        (((8, 3, 59, 59), (24, 3, 11, 11), (8, 24, 13, 13)), {"stride": (4, 4)}),
        (((3, 6, 21, 23), (10, 6, 3, 3), (3, 10, 21, 23)), {"padding": (2, 2), "dilation": (2, 2)}),
    ]
    for shapes, options in cases:
        for direction in OPERANDS:
            plans = cudnn_graph.plans(h200, ConvProblem(direction, *shapes, **options))
            assert any(plan.deterministic for plan in plans), (direction, shapes)


def test_labels_that_mean_nothing_are_refused(h200: DeviceProperties) -> None:
    problem = ConvProblem("forward", (2, 4, 8, 8), (4, 4, 3, 3), (2, 4, 6, 6))
    with pytest.raises(ValueError, match="'FFT' is not a label of the graph API"):
        cudnn_graph.plan(h200, problem, "FFT")
    with pytest.raises(CudnnError, match="algorithm graph:eng9999") as caught:
        cudnn_graph.plan(h200, problem, "graph:eng9999")
    assert caught.value.likely_cause == "unsupported"


def test_shapes_that_do_not_fit_are_refused(h200: DeviceProperties) -> None:
    problem = ConvProblem("forward", (2, 4, 8, 8), (4, 4, 3, 3), (2, 4, 7, 6))
    with pytest.raises(CudnnError, match=r"y \(2, 4, 7, 6\)"):
        cudnn_graph.plans(h200, problem)
