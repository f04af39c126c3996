"""The search in 16 bits and with an epilogue, with plans and a device of the tests: operands, errors, choices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_cuda_search
from test_cuda_search import device, search_of

from vdnn.layers import Conv, Flatten, Graph, Linear, SoftmaxLoss, lower
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import search
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.exact import exact_pieces
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, PERIOD, Operands, load, store
from vdnn.runtime.backends.cuda.products import unplaced_problem
from vdnn.runtime.backends.cuda.search import Search, shortlist, trial_order
from vdnn.runtime.backends.cuda.trial import Trial

__all__ = ["device"]

SHAPES = ((2, 8, 6, 6), (16, 8, 1, 1), (2, 16, 6, 6))
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}


@dataclass
class Plan:
    """A plan that multiplies on the host and rounds what it stores, as well or badly as told."""

    algorithm: str
    problem: ConvProblem
    time_ms: float = 1.0
    workspace_bytes: int = 0
    error: float = 0.0
    forgets: str = ""
    wrong: bool = False
    deterministic: bool = True
    notes: tuple[str, ...] = ("TENSOR_CORE",)
    runs: list[int] = field(default_factory=list)

    def run(self, handle: Any, a: int, b: int, out: int, workspace: int, accumulate: bool, *bias: int) -> None:
        test_cuda_search.clock.at_ms += self.time_ms
        assert bool(bias) == self.algorithm.startswith("fused:")
        names = OPERANDS[self.problem.direction]
        bits = {role: self.view(role, ptr) for role, ptr in zip(names, (a, b, out), strict=True)}
        values = {role: load(array, self.problem.dtype).astype(float) for role, array in bits.items()}
        formula = {"forward": "nchw,kc->nkhw", "dgrad": "kc,nkhw->nchw", "wgrad": "nchw,nkhw->kc"}
        arrays = [values[role][:, :, 0, 0] if role == "w" else values[role] for role in names[:2]]
        found = np.einsum(formula[self.problem.direction], *arrays)
        found *= 1 + self.error * np.sign(np.sin(np.arange(found.size))).reshape(found.shape)
        if bias:
            count = self.problem.w[0]
            memory = (ctypes.c_char * (count * NUMPY_DTYPES_SIZE[self.problem.dtype])).from_address(bias[0])
            numbers = load(np.frombuffer(memory, NUMPY_DTYPES[self.problem.dtype]), self.problem.dtype)
            if self.forgets != "bias":
                found += numbers[:, None, None]
            if self.forgets != "relu":
                found = np.maximum(found, 0)
        if self.wrong:  # neither in the first plane of the first image nor in the last of the last
            found[0, found.shape[1] // 2] = 1.0
        stored = store(found.reshape(bits[names[2]].shape).astype(np.float32), self.problem.dtype)
        bits[names[2]][...] = stored

    def view(self, role: str, ptr: int) -> Any:
        shape, strides = getattr(self.problem, role), self.problem.strides()[role]
        kind = np.dtype(NUMPY_DTYPES[self.problem.dtype])
        memory = (ctypes.c_char * (shape[0] * strides[0] * kind.itemsize)).from_address(ptr)
        return np.ndarray(shape, kind, memory, 0, [kind.itemsize * step for step in strides])


NUMPY_DTYPES_SIZE = {name: np.dtype(kind).itemsize for name, kind in NUMPY_DTYPES.items()}


def problem_of(direction: str, dtype: str, layout: str = "NHWC", **options: Any) -> ConvProblem:
    return ConvProblem(direction, *SHAPES, dtype=dtype, layout=layout, **options)


# ---- operands


def test_what_tensor_cores_cut_off_in_tf32_is_admitted(device: Any) -> None:
    """On an H200 cuDNN's fastest filter gradients of VGG-16(256) are 1.1e-3 to 2.7e-3 away from float64."""
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((100, 5000), (5000, 100)))
    cut = [(operand.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(float) for operand in (a, b)]
    exact = a.astype(float) @ b.astype(float)
    assert 6e-4 < np.linalg.norm(cut[0] @ cut[1] - exact) / np.linalg.norm(exact) < 8e-4  # operands alone
    problem = problem_of("wgrad", "float32", "NHWC")
    errors = {"graph:eng68": 2.7e-3, "graph:eng1": 1e-6, "graph:eng17": 1e-2}
    plans: list[Any] = [Plan(label, problem, n + 1.0, error=error) for n, (label, error) in enumerate(errors.items())]
    made, _ = search_of(device, plans, precision="tf32")
    found = made.candidates(problem)
    assert [(c.algorithm, c.math) for c in found] == [("graph:eng68", "tf32"), ("graph:eng1", "fp32")]
    assert made.known[str(problem)].left_out.keys() == {"graph:eng17"}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_host_knows_what_lies_on_the_device(device: Any, dtype: str, layout: str) -> None:
    x_strides = {"NCHW": (12 * 36, 36, 6, 1), "NHWC": (12 * 36, 1, 72, 12)}[layout]  # 8 of 12 channels
    problem = problem_of("forward", dtype, layout, x_strides=x_strides)
    operands = Operands(problem)
    stream = device.cuda.Stream(non_blocking=True)
    count = 2 * 12 * 36
    address = device.malloc(count * NUMPY_DTYPES_SIZE[dtype])
    operands.fill("x", address, count, device.cuda.runtime, stream)
    found = load(Plan("", problem).view("x", address), dtype)
    for i, first, channels in ((0, 0, 8), (1, 3, 2), (1, 7, 1)):
        assert (operands.read("x", i, first, channels) == found[i, first : first + channels]).all()
    assert abs(float(found.std()) - (0.25 if dtype == "float16" else 1.0)) < 0.1
    assert len(np.unique(found)) > 100


def test_a_block_is_repeated_over_long_operands(device: Any) -> None:
    images = (3, 8, 256, 512)  # one image is a block
    problem = ConvProblem("wgrad", images, (8, 8, 1, 1), images, dtype="bfloat16", layout="NHWC")
    operands = Operands(problem)
    assert operands.repeat == 1
    address = device.malloc(2 * 3 * PERIOD)
    operands.fill("y", address, 3 * PERIOD, device.cuda.runtime, device.cuda.Stream(non_blocking=True))
    found = Plan("", problem).view("y", address)
    assert (found[0] == found[2]).all()
    assert (load(found[1, 5], "bfloat16") == operands.read("y", 1, 5, 1)[0]).all()


@pytest.mark.parametrize("repeat", [1, 2, 3, 5, 8])
def test_a_filter_gradient_of_repeated_images_is_that_of_all(repeat: int) -> None:
    problem = ConvProblem("wgrad", (5, 3, 7, 6), (4, 3, 3, 2), (5, 4, 4, 5), stride=(2, 1), padding=(1, 0))
    rng = np.random.default_rng(7)
    images = {"x": rng.standard_normal((repeat, 3, 7, 6)), "y": rng.standard_normal((repeat, 4, 4, 5))}

    def read(role: str, i: int, first: int, count: int) -> Any:
        return images[role][i % repeat, first : first + count]

    for short, whole in zip(exact_pieces(problem, read, repeat), exact_pieces(problem, read), strict=True):
        np.testing.assert_allclose(short.values, whole.values, rtol=1e-12)


# ---- what is admitted


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", OPERANDS)
def test_rounding_of_what_is_stored_is_admitted_and_no_more(
    device: Any, direction: str, dtype: str, layout: str
) -> None:
    problem = problem_of(direction, dtype, layout)
    error = 3 * search.TOLERANCE[PRECISIONS[dtype]]
    plans: list[Any] = [Plan("graph:eng1", problem, 2.0), Plan("graph:eng2", problem, 1.0, error=error)]
    made, _ = search_of(device, plans, precision=PRECISIONS[dtype])
    found = made.candidates(problem)
    assert [(c.algorithm, c.math) for c in found] == [("graph:eng1", PRECISIONS[dtype])]
    assert made.known[str(problem)].left_out["graph:eng2"].startswith("error ")
    tail = problem.scratch_bytes
    assert tail == (16 * 8 * 2 if direction == "wgrad" else 0)
    assert found[0].workspace_bytes == tail
    assert found[0].time_ms == pytest.approx(2.0 + (search.LAUNCH_MS if tail else 0))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_fused_plan_is_judged_by_what_it_makes_of_bias_and_relu(device: Any, dtype: str, layout: str) -> None:
    problem = problem_of("forward", dtype, layout, epilogue="bias+relu")
    plans: list[Any] = [
        Plan("graph:eng1", problem.plain, 3.0),
        Plan("fused:graph:eng2", problem, 2.0),
        Plan("fused:graph:eng3", problem, 1.0, forgets="bias"),
        Plan("fused:graph:eng4", problem, 1.0, forgets="relu"),
        Plan("fused:graph:eng5", problem, 1.0, wrong=True),
        Plan("graph:eng6", problem.plain, 1.0, wrong=True),
    ]
    made, said = search_of(device, plans, precision=PRECISIONS[dtype])
    assert [c.algorithm for c in made.candidates(problem)] == ["fused:graph:eng2", "graph:eng1"]
    left_out = made.known[str(problem)].left_out
    assert set(left_out) == {"fused:graph:eng3", "fused:graph:eng4", "fused:graph:eng5", "graph:eng6"}
    assert left_out["fused:graph:eng5"].startswith("differs from others")  # where float64 does not look
    assert "bias+relu" in said[0]
    assert not device.memory


def test_the_pass_that_a_plan_leaves_to_a_kernel_counts(device: Any) -> None:
    problem = problem_of("forward", "bfloat16", epilogue="bias+relu")
    nbytes = 2 * 2 * 16 * 36 * 2  # y is read and written in 16 bits
    plans: list[Any] = [Plan("graph:eng1", problem.plain, 1.0, 640), Plan("fused:graph:eng2", problem, 1.3, 640)]
    fast, _ = search_of(device, plans, precision="bf16", stream_gbps=nbytes / 1e6 / 0.1)  # in 0.1 ms
    found = fast.candidates(problem)
    assert [c.algorithm for c in found] == ["graph:eng1", "fused:graph:eng2"]
    assert found[0].time_ms == pytest.approx(1.1 + search.LAUNCH_MS)
    assert found[0].workspace_bytes == 640
    assert found[1].workspace_bytes == 768 + 2 * 16  # a copy of the bias in 16 bits lies behind
    slow = Search(
        *(fast.products, {**test_cuda_search.KEY, "gpu": "slow"}, 2**30, fast.stream),
        precision="bf16",
        stream_gbps=nbytes / 1e6 / 0.5,
    )
    assert [c.algorithm for c in slow.candidates(problem)] == ["fused:graph:eng2", "graph:eng1"]
    gradient = problem_of("wgrad", "bfloat16")
    assert slow.rest_ms(gradient, "graph:eng1") > search.LAUNCH_MS
    assert slow.rest_ms(problem_of("wgrad", "float32"), "graph:eng1") == 0.0
    assert slow.rest_ms(problem.plain, "graph:eng1") == 0.0


def test_a_bias_has_its_own_place(device: Any) -> None:
    stream = device.cuda.Stream(non_blocking=True)
    plain, fused = problem_of("forward", "bfloat16"), problem_of("forward", "bfloat16", epilogue="bias+relu")
    sizes = [Trial(problem, None, stream, 0, 0).nbytes for problem in (plain, fused)]  # type: ignore[arg-type]
    assert sizes[1] - sizes[0] == 512


# ---- what is tried


def listed(*labels: str, nbytes: int = 0) -> list[Any]:
    return [SimpleNamespace(algorithm=label, workspace_bytes=nbytes, notes=("TENSOR_CORE",)) for label in labels]


def test_the_brief_list_ends_where_plans_without_workspace_are_many() -> None:
    graph = listed(*(f"graph:eng{i}" for i in range(30)))
    named = listed("IMPLICIT_PRECOMP_GEMM")
    assert shortlist([*named, *graph], brief=True) == [*named, *graph[:8]]
    assert len(shortlist([*named, *graph])) == 31
    large = listed(*(f"graph:eng{i}" for i in range(100, 110)), nbytes=2**30)
    assert shortlist([*large, *graph], brief=True) == [*large[:8], *graph[:8]]
    fused = listed(*(f"fused:graph:eng{i}" for i in range(30)))
    assert shortlist([*named, *graph, *fused], brief=True) == [*named, *graph[:3], *fused[:8]]
    assert shortlist([*named, *large, *fused], brief=True) == [*named, *large[:3], *fused[:8]]


def test_fused_plans_are_tried_first_but_for_the_reference() -> None:
    plans = [*listed("PRECOMP", nbytes=5), *listed("graph:a", "graph:b"), *listed("fused:graph:c")]
    assert [p.algorithm for p in trial_order(plans)] == ["graph:a", "fused:graph:c", "graph:b", "PRECOMP"]
    assert [p.algorithm for p in trial_order(plans[3:])] == ["fused:graph:c"]


def test_tables_of_fp32_in_nchw_stay_valid_and_others_are_told_apart(device: Any) -> None:
    keys = {}
    for precision, layout in (("fp32", "NCHW"), ("fp32", "NHWC"), ("tf32", "NCHW"), ("bf16", "NHWC"), ("fp16", "NHWC")):
        made = Search(None, {**test_cuda_search.KEY, "layout": layout}, 1, None, precision=precision)  # type: ignore
        keys[made.path] = made.key
    assert len(keys) == 5
    assert next(iter(keys.values())) == {**test_cuda_search.KEY, "precision": "fp32", "method": 2}


# ---- slices


@pytest.mark.parametrize("direction", OPERANDS)
def test_a_slice_of_a_16_bit_batch_has_a_problem_of_its_own(direction: str) -> None:
    graph = Graph("two", (3, 9, 9), 10)
    conv = graph.add("conv2", Conv(16, 3, padding=1), graph.add("conv1", Conv(8, 3, padding=1), graph.input))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), graph.add("flat", Flatten(), conv)))
    options: dict[str, Any] = {"dtype": "bfloat16", "layout": "NHWC", "pad_channels": 8}
    for images in (8, 4):
        program = lower(graph, images, **options)
        op = next(op for op in program.ops if op.name == f"conv2.{direction}")
        problem = unplaced_problem(op, program)
        assert (problem.x, problem.y) == ((images, 8, 9, 9), (images, 16, 9, 9))
        assert (problem.dtype, problem.layout, problem.alignment) == ("bfloat16", "NHWC", 16)
    first = unplaced_problem(next(op for op in program.ops if op.name == "conv1.wgrad"), program)
    assert (first.x, first.w, first.channels) == ((4, 8, 9, 9), (8, 8, 3, 3), 3)


def test_candidates_of_16_bits_are_kept_with_their_math(device: Any) -> None:
    problem = problem_of("dgrad", "bfloat16")
    made, _ = search_of(device, [Plan("graph:eng1", problem)], precision="bf16")  # type: ignore[list-item]
    assert made.candidates(problem) == (Candidate("graph:eng1", 1.0, 0, True, "bf16"),)
    again, _ = search_of(device, [], precision="bf16")
    assert again.candidates(problem) == made.candidates(problem)
