"""Filter gradients by products of rows among cuDNN's: which problems have them, what the search makes of them, and how
a step gets the one that its label names."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import test_cuda_search
from cuda_on_host import HostKernels, fenced
from host_cublas import HostCublas
from test_cuda_search import KEY, Device, device
from test_cuda_taps import STREAM, Array, Case, by_definition, problem_of

from vdnn.layers.op import Op
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import products as products_module
from vdnn.runtime.backends.cuda import tap_steps, taps
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.cublas import CublasError
from vdnn.runtime.backends.cuda.cudnn import CudnnError
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.products import Products, conv_problem
from vdnn.runtime.backends.cuda.search import Search
from vdnn.runtime.backends.cuda.tap_steps import Form, serves
from vdnn.runtime.backends.cuda.taps import TapPlans, shares_of

__all__ = ["device"]  # a fixture

# ---- which problems


WANTED = problem_of(256, 256, 14, 14, 192, (3, 3))
OTHERS: dict[str, dict[str, Any]] = {
    "direction": {"direction": "forward"},
    "dtype": {"dtype": "bfloat16"},
    "layout": {"layout": "NCHW"},
    "stride": {"stride": (2, 2), "y": (256, 192, 7, 7)},
    "no padding": {"padding": (0, 0), "y": (256, 192, 12, 12)},
    "more padding": {"padding": (2, 2), "y": (256, 192, 16, 16)},
    "dilation": {"dilation": (2, 2), "padding": (2, 2)},
    "groups": {"groups": 2, "w": (192, 128, 3, 3)},
    "few channels": {"x": (256, 48, 14, 14), "w": (192, 48, 3, 3)},
    "few products": {"w": (192, 256, 1, 1), "padding": (0, 0)},
    "few filters": {"y": (256, 48, 14, 14), "w": (48, 256, 3, 3)},
    "even window": {"w": (192, 256, 2, 2), "padding": (1, 1), "y": (256, 192, 15, 15)},
    "window beyond the image": {"x": (8, 256, 3, 1), "y": (8, 192, 3, 1)},
    "too large": {"x": (2**16, 256, 14, 14), "y": (2**16, 192, 14, 14)},
    "rows with gaps": {"x_strides": (512 * 224, 1, 512 * 16, 512)},
}


def taps_of(kernels: Any = None) -> TapPlans:
    return TapPlans(HostCublas().cublas, kernels, STREAM)


def test_the_plans_of_a_problem() -> None:
    labels = [plan.algorithm for plan in taps_of().plans(WANTED)]
    assert labels == ["TAPS_32", "TAPS_64"]  # 4 tiles of 128 x 128: 128 of 132
    one = problem_of(256, 1024, 14, 14, 768, (1, 1))
    assert [plan.algorithm for plan in taps_of().plans(one)] == ["TAPS_8", "TAPS_16"]  # of 48 tiles 384 in 3 rounds
    some = replace(WANTED, y_strides=(196 * 512, 1, 14 * 512, 512), alignment=4)
    assert [plan.algorithm for plan in taps_of().plans(some)] == labels


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_none(name: str) -> None:
    problem = replace(WANTED, **OTHERS[name])
    assert taps_of().plans(problem) == []
    if not name.startswith("few"):
        with pytest.raises(ValueError, match="has no algorithm 'TAPS_4'"):
            taps_of().plan(problem, "TAPS_4")


def test_a_label_that_is_none() -> None:
    assert taps_of().plan(WANTED, "TAPS_12").form.shares == 12
    for label in ("TAPS_", "TAPS_0", "TAPS_x", "FFT"):
        with pytest.raises(ValueError, match="has no algorithm"):
            taps_of().plan(WANTED, label)


@pytest.mark.parametrize(
    ("n", "c", "h", "k", "expected"),
    [
        (128, 1024, 15, 1024, (2, 4)),  # 64 tiles: 128 of 132 multiprocessors
        (256, 512, 28, 512, (8, 16)),
        (256, 256, 56, 256, (32, 64)),
        (256, 128, 28, 128, (126, 252)),
        (256, 192, 13, 384, (21, 42)),  # 6 tiles: 126 of 132
        (128, 1280, 7, 2048, (4, 8)),  # 160 tiles: 640 of 660
        (16, 256, 7, 256, (1,)),  # 784 numbers
        (32, 256, 14, 256, (12,)),
    ],
)
def test_shares_fill_the_multiprocessors_and_are_not_short(
    n: int, c: int, h: int, k: int, expected: tuple[int, ...]
) -> None:
    assert shares_of(problem_of(n, c, h, h, k, (3, 3))) == expected


# ---- among cuDNN's


@dataclass
class Library:
    """A plan of cuDNN's stand-in that is right and slow."""

    problem: ConvProblem
    time_ms: float = 1.0
    algorithm: str = "IMPLICIT_GEMM"
    workspace_bytes: int = 0
    deterministic: bool = True
    notes: tuple[str, ...] = ()

    def run(self, handle: Any, a: int, b: int, out: int, workspace: int, accumulate: bool) -> None:
        test_cuda_search.clock.at_ms += self.time_ms
        problem = self.problem
        (n, c, h, w), k = problem.x, problem.w[0]
        x, dy = numbers(a, (n, h, w, c)), numbers(b, (n, h, w, k))
        numbers(out, (k, *problem.w[2:], c))[...] = by_definition(problem, x, dy)


def numbers(address: int, shape: tuple[int, ...]) -> Array:
    flat = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address))
    return flat.reshape(shape)


def refuse(*arguments: Any, **options: Any) -> Any:
    raise CudnnError(3000, "CUDNN_STATUS_NOT_SUPPORTED", "made up")


SMALL = problem_of(8, 64, 6, 6, 64, (3, 3))


@dataclass
class Opened:
    """A search over the library's plan and taps."""

    device: Device
    blas: HostCublas
    search: Search
    said: list[str]


@pytest.fixture
def opened(device: Device, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(products_module.cudnn_conv, "plans", lambda handle, problem, **options: [Library(problem)])
    monkeypatch.setattr(products_module.cudnn_graph, "plans", refuse)
    monkeypatch.setattr(taps, "LEAST_LENGTH", 64)
    monkeypatch.setattr(taps, "LEAST_PRODUCTS", 200)
    monkeypatch.setattr(taps, "MULTIPROCESSORS", 2)
    blas, said = HostCublas(cuts=True), list[str]()
    stream = device.cuda.Stream(non_blocking=True)
    made = Products(None, blas.cublas, TapPlans(blas.cublas, HostKernels(), stream))  # type: ignore[arg-type]
    key = {**KEY, "layout": "NHWC"}
    return Opened(device, blas, Search(made, key, 2**30, stream, precision="tf32", note=said.append), said)


def tick(ms: float) -> Any:
    def move(*sizes: int) -> None:
        test_cuda_search.clock.at_ms += ms

    return move


def test_the_fastest_is_chosen_whichever_it_is(opened: Opened) -> None:
    opened.blas.on_product = tick(0.01)
    found = opened.search.candidates(SMALL)
    assert [c.algorithm for c in found] == ["TAPS_2", "TAPS_4", "IMPLICIT_GEMM"]
    assert found[0].time_ms == pytest.approx(0.09)
    assert [c.workspace_bytes for c in found] == [Form.of(SMALL, 2).nbytes, Form.of(SMALL, 4).nbytes, 0]
    assert [(c.math, c.deterministic) for c in found] == [("tf32", True), ("tf32", True), ("fp32", True)]
    assert opened.search.known[str(SMALL)].left_out == {}
    assert not opened.device.memory
    slow = replace(SMALL, alignment=8)
    opened.blas.on_product = tick(1)
    assert opened.search.candidates(slow)[0] == Candidate("IMPLICIT_GEMM", 1.0, 0, True, "fp32")


def test_what_cublas_refuses_is_left_out(opened: Opened) -> None:
    opened.blas.status = 15
    assert [c.algorithm for c in opened.search.candidates(SMALL)] == ["IMPLICIT_GEMM"]
    assert opened.search.known[str(SMALL)].left_out == {"TAPS_2": "NOT_SUPPORTED", "TAPS_4": "NOT_SUPPORTED"}
    with pytest.raises(CublasError, match=r"for 2 times c of shape \(64, 64\) with sums over"):
        opened.blas.cublas.gemm_of_rows((64, 64, 32), (0, 0, 0), (32, 32, 64), (32, 32, 64), 2)


def test_a_wrong_product_is_left_out(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if columns of the neighbouring row counted."""
    whole = tap_steps._columns

    def forgotten(places: Any, column: int) -> Any:
        return replace(whole(places, column), kernel="tap_rows", args=[*whole(places, 0).args[:6], 1, 1, 1, 0])

    monkeypatch.setattr(tap_steps, "_columns", forgotten)
    other = replace(SMALL, x=(12, 64, 6, 6), y=(12, 64, 6, 6))  # whose steps are not kept yet
    assert [c.algorithm for c in opened.search.candidates(other)] == ["IMPLICIT_GEMM"]
    assert all(why.startswith("error") for why in opened.search.known[str(other)].left_out.values())


def test_a_limit_leaves_out_what_needs_more(opened: Opened) -> None:
    room = test_cuda_search.Trial(SMALL, None, opened.search.stream, 0, 0).nbytes  # type: ignore[arg-type]
    opened.search.limit_bytes = room + 2**20
    assert [c.algorithm for c in opened.search.candidates(SMALL)] == ["IMPLICIT_GEMM"]
    assert not opened.search.knows_all(SMALL)


def test_they_are_asked_for_with_tensor_cores_and_all_algorithms(opened: Opened) -> None:
    made: Any = opened.search.products
    labels = {
        (cores, named): [p.algorithm for p in made.plans(SMALL, tensor_cores=cores, named_only=named)]
        for cores in (False, True)
        for named in (False, True)
    }
    both = labels.pop((True, False))
    assert both == ["IMPLICIT_GEMM", "TAPS_2", "TAPS_4"]
    assert all(found == ["IMPLICIT_GEMM"] for found in labels.values())


# ---- as an op of a step


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wanted", [8, 6])
def test_a_label_leads_to_its_plan_in_a_step(wanted: int, accumulate: bool) -> None:
    """Of padded channels those that dw has not are dropped afterwards."""
    case = Case(problem_of(4, 8, 5, 6, 12, (3, 3), alignment=16))
    (k, c, r, s), blas, kernels = case.problem.w, HostCublas(), HostKernels()
    old = np.random.default_rng(8).standard_normal((k, r, s, wanted)).astype(np.float32)
    dw = fenced(old.nbytes).view(np.float32).reshape(old.shape)
    dw[...] = old
    arrays: dict[str, DeviceArray] = {
        "x": contiguous(case.rooms["x"].ctypes.data, case.problem.x, "float32", "NHWC"),
        "dy": contiguous(case.rooms["y"].ctypes.data, case.problem.y, "float32", "NHWC"),
        "dw": contiguous(dw.ctypes.data, (k, wanted, r, s), "float32", "NHWC"),
    }
    attrs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1, "algorithm": "TAPS_3"}
    op = Op("c.wgrad", "conv.wgrad", "c", "backward", {}, {}, attrs, ("dw",) if accumulate else ())
    products = Products(None, blas.cublas, TapPlans(blas.cublas, kernels, STREAM))  # type: ignore[arg-type]
    problem = conv_problem(op, arrays)
    assert problem.w == (k, c, r, s)
    nbytes = products_module.workspace_bytes(products._plan(problem, "TAPS_3"), problem)
    workspace = fenced(nbytes)
    arrays["workspace"] = contiguous(workspace.ctypes.data, (nbytes,), "uint8")
    products.convolve(op, arrays, kernels, STREAM)
    expected = case.expected[..., :wanted] + (old if accumulate else 0)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-4)


def test_without_taps_a_label_of_theirs_is_unknown() -> None:
    with pytest.raises(ValueError, match="has no algorithm 'TAPS_3'"):
        Products(None, None)._plan(WANTED, "TAPS_3")  # type: ignore[arg-type]
    assert serves(WANTED)
