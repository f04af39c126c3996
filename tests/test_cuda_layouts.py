"""NHWC on the cuda backend, without a GPU: what cuDNN is told, how candidates are judged, how weights come and go.

Kernels are compared with the CPU in test_cuda_kernels.py.
"""

from __future__ import annotations

import ctypes
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_cuda_search
from cuda_on_host import HostKernels
from test_cuda_capture import LateCuda, _numpy
from test_cuda_plans import VGG, h200
from test_cuda_search import KEY, device, search_of
from test_layouts import Silent

from vdnn.errors import PlanError, VdnnError
from vdnn.layers import Concat, Conv, Flatten, Graph, Linear, Op, Program, SoftmaxLoss, Update, lower
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.policy import Budget
from vdnn.networks import build
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cpu.half import run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda import cudnn_graph
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.cuda.cudnn_backend import Attribute, DeviceProperties
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS
from vdnn.runtime.backends.cuda.launch import Channels, Rows, rows_of
from vdnn.runtime.backends.cuda.measures import Measures
from vdnn.runtime.backends.cuda.op_costs import OpCosts
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.products import CONV_KINDS, LINEAR_KINDS, unplaced_problem
from vdnn.runtime.config import load_config
from vdnn.runtime.init import init_parameters
from vdnn.runtime.kept import Kept
from vdnn.runtime.planset import Recipe, build_plans
from vdnn.runtime.prepare import make_recipe, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

__all__ = ["device", "h200"]  # fixtures


def nhwc(ptr: int, shape: tuple[int, int, int, int], channels: int | None = None) -> DeviceArray:
    """A float32 batch, maybe some channels of one with `channels`."""
    n, c, h, w = shape
    step = channels or c
    return DeviceArray(ptr, shape, (h * w * step, 1, w * step, step), "float32", 4 * n * c * h * w, "NHWC")


# ---- what kernels and cuDNN are told


def test_pixels_are_rows_and_long_where_nothing_lies_between_them() -> None:
    whole, part = nhwc(256, (2, 8, 3, 5)), nhwc(272, (2, 8, 3, 5), 12)
    op = Op("the-op", "relu.forward", "the-layer", "forward", {}, {})
    assert whole == contiguous(256, (2, 8, 3, 5), "float32", "NHWC")
    x, y = rows_of(op, {"x": whole, "y": part}, "x", "y")
    assert (y.shape, y.strides) == ((30, 8), (12, 1))
    assert Rows.of(x, x) == Rows(1, 240, 4)
    short = Rows.of(x, y)
    assert short == Rows(30, 8, 4, short=True)
    assert short.args == (8, 30, -4)
    assert Rows.of(x, rows_of(op, {"x": nhwc(260, (2, 8, 3, 5), 12)}, "x")[0]).args == (8, 30, -1)
    sums = Channels.of(y)
    assert sums.args == (8, 1, 30, 1, 30, -4)


def test_chwn_is_one_image_of_channels_or_images_of_n_channels() -> None:
    n, c, h, w = 4, 3, 2, 5
    memory = np.arange(n * c * h * w, dtype=np.float32).reshape(c, h, w, n)
    batch = contiguous(memory.ctypes.data, (n, c, h, w), "float32", "CHWN")
    assert batch.strides == (1, h * w * n, w * n, n)
    assert (batch.is_images_last, batch.is_channels_last) == (True, False)
    one, images = batch.one_image(), batch.channel_images()
    assert (_numpy(one)[0, :, :, 0] == memory.reshape(c, -1)).all()
    assert (images.is_channels_last, images.shape, images.pixel_stride) == (True, (c, n, h, w), n)
    assert (_numpy(images) == memory.transpose(0, 3, 1, 2)).all()
    second = DeviceArray(batch.ptr + 4 * h * w * n, (n, 2, h, w), batch.strides, "float32", 8 * h * w * n, "CHWN")
    op = Op("the-op", "relu.forward", "the-layer", "forward", {}, {})
    (rows,) = rows_of(op, {"x": second}, "x")  # some channels lie without gaps
    assert (_numpy(rows).reshape(2, -1) == memory[1:].reshape(2, -1)).all()
    assert Rows.of(rows) == Rows(1, 2 * h * w * n, 4)
    assert Channels.of(rows).args[:3] == (2, h * w * n, h * w * n)
    assert not contiguous(0, (4, 3)).is_images_last


class Refusing:
    """Kernels of which none may be launched."""

    dtype = "float32"

    def launch(self, name: str, blocks: int, args: Any, stream: Any) -> None:
        raise AssertionError(name)


def test_two_layouts_in_one_call_are_refused() -> None:
    op = Op("the-op", "dropout.forward", "the-layer", "forward", {}, {}, {"p": 0.5, "key": 1})
    arrays = {"x": contiguous(0, (2, 8, 3, 5)), "y": nhwc(0, (2, 8, 3, 5)), "step": contiguous(0, (64,), "uint8")}
    with pytest.raises(VdnnError, match=r"op 'the-op' .*: expected batches of one layout, got NCHW and NHWC"):
        CUDA_KERNELS["dropout.forward"](op, arrays, Refusing(), None)
    arrays["y"] = contiguous(0, (2, 8, 3, 5), "float32", "CHWN")
    for kind in ("dropout.forward", "relu.forward", "lrn.forward", "copy.forward"):
        with pytest.raises(VdnnError, match=r"op 'the-op' .*: expected batches of one layout, got NCHW and CHWN"):
            CUDA_KERNELS[kind](op, arrays, Refusing(), None)
    wrong = DeviceArray(0, (2, 8, 3, 5), (120, 15, 5, 1), "float32", 960, "NHWC")
    with pytest.raises(VdnnError, match=r"tensor 'x': expected float32 whose images .*got float32 NHWC with strides"):
        rows_of(op, {"x": wrong}, "x")


def test_a_channel_slice_states_its_strides_and_alignment() -> None:
    graph = Graph("fork", (3, 7, 7), 10)
    one = graph.add("one", Conv(5, 3, padding=1), graph.input)
    two = graph.add("two", Conv(4, 1), graph.input)
    joined = graph.add("join", Concat(), (one, two))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), graph.add("flat", Flatten(), joined)))
    program = lower(graph, 2, layout="NHWC")
    problems = {
        op.name: unplaced_problem(op, program) for op in program.ops if op.kind in ("conv.forward", "conv.wgrad")
    }
    for name in ("one.forward", "two.forward", "one.wgrad", "two.wgrad"):
        assert problems[name].layout == "NHWC"
        assert problems[name].y_strides == (9 * 49, 1, 9 * 7, 9)
        assert problems[name].strides()["x"] == (3 * 49, 1, 3 * 7, 3)
    assert problems["one.forward"].strides()["w"] == (27, 1, 9, 3)
    assert (problems["one.forward"].alignment, problems["two.forward"].alignment) == (16, 4)  # five floats in
    plain = {op.name: unplaced_problem(op, lower(graph, 2)) for op in lower(graph, 2).ops if op.kind == "conv.forward"}
    assert str(problems["two.forward"]) != str(plain["two.forward"])
    assert str(problems["two.forward"]).endswith(", NHWC")


# ---- cuDNN's plans


@pytest.mark.parametrize("direction", OPERANDS)
def test_tensor_cores_need_no_copies_of_images(h200: DeviceProperties, direction: str) -> None:
    """Where NCHW takes 1568 MiB of workspace, see test_cuda_plans.py."""
    problem = ConvProblem(direction, VGG, (64, 64, 3, 3), VGG, padding=(1, 1), layout="NHWC")
    plans = cudnn_graph.plans(h200, problem, tensor_cores=True)
    first = next(plan for plan in plans if "TENSOR_CORE" in plan.notes)
    assert first.workspace_bytes < 2**20
    assert cudnn_graph.plan(h200, problem, first.algorithm).workspace_bytes == first.workspace_bytes


@pytest.mark.parametrize("direction", OPERANDS)
def test_cudnn_describes_channels_last(h200: DeviceProperties, direction: str) -> None:
    problem = ConvProblem(
        *(direction, (2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6)), y_strides=(360, 1, 60, 10), alignment=8, layout="NHWC"
    )
    wanted = {(2, 4, 8, 8): (256, 1, 32, 4), (6, 4, 3, 3): (36, 1, 12, 4), (2, 6, 6, 6): (360, 1, 60, 10)}
    built = cudnn_graph.plans(h200, problem, tensor_cores=True)[0]._plans[False]
    told = json.loads(built.get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))["operationGraph"]["tensors"]
    assert {tuple(tensor["dim"]): tuple(tensor["stride"]) for tensor in told} == wanted


# ---- how candidates are judged


@dataclass
class Plan:
    """A plan that computes in NHWC on the host, with an error."""

    algorithm: str
    problem: ConvProblem
    error: float = 0.0
    strays: bool = False
    workspace_bytes: int = 0
    deterministic: bool = True
    notes: tuple[str, ...] = ()
    time_ms: float = 1.0
    runs: list[int] = field(default_factory=list)

    def run(self, handle: Any, a: int, b: int, out: int, workspace: int, accumulate: bool) -> None:
        test_cuda_search.clock.at_ms += self.time_ms
        names = OPERANDS[self.problem.direction]
        first, second, result = (self.view(role, ptr) for role, ptr in zip(names, (a, b, out), strict=True))
        formulas = {"forward": "nchw,kc->nkhw", "dgrad": "kc,nkhw->nchw", "wgrad": "nchw,nkhw->kc"}
        arrays = [
            array[:, :, 0, 0] if name == "w" else array for array, name in zip((first, second), names, strict=False)
        ]
        found = np.einsum(formulas[self.problem.direction], *(array.astype(np.float64) for array in arrays))
        result[...] = found.reshape(result.shape) * (1 + self.error)
        if self.strays:  # into the channel that follows the last one
            (ctypes.c_float * 5).from_address(out)[4] = 0.0

    def view(self, role: str, ptr: int) -> Any:
        shape, strides = getattr(self.problem, role), self.problem.strides()[role]
        memory = (ctypes.c_float * (shape[0] * strides[0])).from_address(ptr)
        return np.ndarray(shape, np.float32, memory, 0, [4 * step for step in strides])


@pytest.mark.parametrize("direction", OPERANDS)
@pytest.mark.parametrize("channels", [4, 7])
def test_results_in_nhwc_are_compared_with_float64(device: Any, direction: str, channels: int) -> None:
    strides = (36 * channels, 1, 6 * channels, channels)
    problem = ConvProblem(
        *(direction, (2, 3, 6, 6), (4, 3, 1, 1), (2, 4, 6, 6)), y_strides=strides, alignment=4, layout="NHWC"
    )
    plans: list[Any] = [Plan("IMPLICIT_GEMM", problem, time_ms=3), Plan("graph:eng1", problem, 1e-6, time_ms=2)]
    plans.append(Plan("WINOGRAD", problem, 1e-3))
    made, _ = search_of(device, plans)
    assert made.candidates(problem) == (Candidate("graph:eng1", 2.0), Candidate("IMPLICIT_GEMM", 3.0))
    assert re.fullmatch(r"error \d\.\de-0[34] against float64", made.known[str(problem)].left_out["WINOGRAD"])
    assert made.key["layout"] == KEY["layout"]


def test_what_writes_over_the_channels_of_others_is_left_out(device: Any) -> None:
    problem = ConvProblem(
        *("forward", (2, 3, 6, 6), (4, 3, 1, 1), (2, 4, 6, 6)), y_strides=(252, 1, 42, 7), alignment=4, layout="NHWC"
    )
    plans: list[Any] = [Plan("IMPLICIT_GEMM", problem), Plan("graph:eng1", problem, strays=True, time_ms=0.5)]
    made, _ = search_of(device, plans)
    assert made.candidates(problem) == (Candidate("IMPLICIT_GEMM", 1.0),)
    assert made.known[str(problem)].left_out == {"graph:eng1": "writes between the channels it is given"}


# ---- weights come and go


@pytest.mark.parametrize(("layout", "order"), [("NHWC", (0, 2, 3, 1)), ("CHWN", (1, 2, 3, 0))])
def test_filters_are_written_and_read_in_logical_order(
    monkeypatch: pytest.MonkeyPatch, layout: str, order: tuple[int, ...]
) -> None:
    graph = build("lenet")

    def costs(program: Any) -> CostTable:
        table = {op.name: (Candidate("default", 1.0),) for op in program.ops}
        return CostTable(table, CopyRates(1.0, 1.0, 1.0, 1.0), "made up")

    recipe = Recipe(Update(momentum=0.9), layout=layout)
    plans = build_plans(graph, [("train", 2)], costs, "none", Budget(), recipe)
    plan = plans["train", 2].plan
    backend = LateCuda(plan, ("compute", "out", "in"), monkeypatch)
    monkeypatch.setattr(backend._runtime, "deviceSynchronize", lambda: None, raising=False)
    kept, weights = Kept(plans, backend), init_parameters(graph, seed=3)
    kept.write(weights)
    read = kept.read()
    for name, value in weights.items():
        assert read[name].flags.c_contiguous
        assert (read[name] == value).all(), name
    filters = weights["conv2.weight"]
    spec, slab = kept.specs["conv2.weight"], backend._rooms[0]
    found = slab[plan.persistent["conv2.weight"] :][: filters.nbytes].view(np.float32)
    assert spec.layout == layout
    assert (found == filters.transpose(order).ravel()).all()


def test_some_images_of_a_batch_in_chwn_are_not_read_as_a_whole() -> None:
    some = DeviceArray(0, (2, 3, 4, 4), (1, 80, 20, 5), "float32", 384, "CHWN")  # two images of five
    with pytest.raises(PlanError, match="expected all images of a tensor in CHWN, got"):
        object.__new__(CudaBackend).read(some)
    op = Op("the-op", "relu.forward", "the-layer", "forward", {}, {})
    with pytest.raises(
        VdnnError, match=r"or without any in CHWN order, got float32 CHWN with strides \(1, 80, 20, 5\)"
    ):
        rows_of(op, {"x": some}, "x")


def test_some_channels_of_a_batch_in_nhwc_are_not_read_as_a_whole() -> None:
    backend = object.__new__(CudaBackend)
    with pytest.raises(PlanError, match="expected a whole tensor in NHWC, got 3 of 7 channels"):
        backend.read(nhwc(0, (2, 3, 4, 4), 7))


# ---- the whole backend


class HostCuda(LateCuda):
    """The cuda backend with vdnn's own kernels on the host, and products by the cpu backend in place of libraries.

    dtype: of activations.
    """

    dtype = "float32"

    def open(self, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        """It was made open, with these sizes."""

    def launch(self, op: Op, arrays: Any, stream: str) -> None:
        """The kernels, when their time has come."""
        self._streams[stream].add(lambda: self._compute(op, arrays))

    def _compute(self, op: Op, arrays: Any) -> None:
        if op.kind in (*CONV_KINDS, *LINEAR_KINDS):
            unused = ("b", "workspace") if op.kind in LINEAR_KINDS else ("b",)
            alone = replace(op, attrs={key: value for key, value in op.attrs.items() if key != "activation"})
            operands = {name: _numpy(array) for name, array in arrays.items() if name not in unused}
            run_rounded(KERNELS[op.kind], alone, operands)
        kernel = CUDA_KERNELS.get(op.kind)
        if kernel is not None:
            kernel(op, arrays, HostKernels(dtype=self.dtype), None)


def costs_on_host(program: Program) -> CostTable:
    """Candidates of the cuda backend; of convolutions those of the cpu backend."""
    cuda, cpu = object.__new__(CudaBackend), CpuBackend()
    # with no memory for measurements every time is an estimate
    times = OpTimes(cuda.launch, None, 0, SimpleNamespace(ops={}), 1000.0)  # type: ignore[arg-type]
    cuda.costs = OpCosts(lambda layout: Measures(None, times), "NHWC")  # type: ignore[arg-type]
    table = {op.name: (cpu if op.kind in CONV_KINDS else cuda).candidates(op, program) for op in program.ops}
    return CostTable(table, CopyRates(1.0, 1.0, 1.0, 1.0), "made up")


NETWORKS = {
    "lenet": ("network.dropout=0.5", "train.batch_size=4"),
    "googlenet": ("network.image_size=47", "network.classes=10", "train.batch_size=1", "optimizer.lr=0.0003"),
}


@pytest.mark.parametrize(
    ("network", "precision"), [("lenet", "fp32"), ("googlenet", "fp32"), ("lenet", "bf16"), ("lenet", "fp16")]
)
def test_a_step_with_the_kernels_and_plans_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, precision: str
) -> None:
    base = ("data.source=synthetic", "data.train_images=8", "data.test_images=2", "memory.limit=null", "device=cpu")
    outcomes = []
    for layout in ("nchw", "nhwc", "chwn") if network == "lenet" else ("nchw", "nhwc"):
        options = (*base, *NETWORKS[network], f"memory.layout={layout}", "memory.policy=all", "evaluate.batch_size=2")
        options += (f"precision={precision}",)
        config = load_config(network, options)
        prepared = prepare(config)
        if layout != "nchw":
            recipe, keys = make_recipe(config, prepared.source), prepared.steps.keys()
            plans = build_plans(prepared.graph, keys, costs_on_host, "all", prepared.budget, recipe)
            backend = HostCuda(plans, ("compute", "out", "in"), monkeypatch)  # type: ignore[arg-type]
            monkeypatch.setattr(backend._runtime, "deviceSynchronize", lambda: None, raising=False)
            backend.caps, backend.dtype = prepared.backend.caps, config.dtype
            prepared = replace(prepared, backend=backend, plans=plans)
        folder = tmp_path / layout
        folder.mkdir()
        made, losses = Trainer(prepared, RunFolder(folder), Silent()), []
        made.start()
        size, split = config.train.batch_size, prepared.source.train
        for step in range(2):
            images, labels = (f(np.arange(step * size, (step + 1) * size)) for f in (split.images, split.labels))
            losses.append(made.train_step(images, labels, config.optimizer.lr, None)[0])
            made.step += 1
        outcomes.append((losses, made.tensors()))
    (losses, tensors), *rest = outcomes
    close = 1e-5 if precision == "fp32" else 1e-2  # rounded to 8 or 11 digits after every layer, in another order
    for found, others in rest:
        assert found == pytest.approx(losses, rel=close)
        for name, wanted in tensors.items():
            assert np.linalg.norm(others[name] - wanted) <= 10 * close * np.linalg.norm(wanted) + 1e-6, name
