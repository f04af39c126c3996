"""The CUDA kernels, run on the host thread by thread, against the CPU backend: every kind, layout and thread order."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, HostKernels, array_of
from interpreter import Array, Run

from vdnn.bench.gpu_kernels import check
from vdnn.bench.kernel_cases import all_cases, normal, unknown
from vdnn.bench.kernel_check import BATCHED, LAYOUTS, STORE, UNIT_ROUNDOFF, Case, difference
from vdnn.errors import VdnnError
from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Linear,
    Lrn,
    Op,
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)
from vdnn.layers.op import PHASES
from vdnn.runtime.backends.cpu.half import run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.prepare import store_filter_gradient
from vdnn.runtime.backends.cuda.source import signatures, source
from vdnn.runtime.bfloat16 import from_bfloat16, host_dtype
from vdnn.runtime.step import new_step

ELSEWHERE = {"conv.wgrad", "conv.dgrad", "linear.wgrad", "linear.dgrad"}
"""Kinds that libraries compute alone."""


CASES: dict[str, list[Case]] = {}
for _case in all_cases():
    CASES.setdefault(_case.kind, []).append(_case)


def test_every_kind_has_a_kernel_and_cases() -> None:
    assert set(CUDA_KERNELS) == set(KERNELS) - ELSEWHERE == set(CASES) - {STORE}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CASES)
def test_kernels_agree_with_the_cpu(kind: str, dtype: str) -> None:
    host = Host(dtype=dtype)
    calls, failures = check(host, CASES[kind], note=lambda text: None)
    assert calls == len(CASES[kind]) * len(LAYOUTS)
    assert failures == []
    RUN[dtype].update(host.kernels.launched)


RUN: dict[str, set[str]] = {"float32": set(), "bfloat16": set()}


@pytest.mark.parametrize("kind", CASES)
def test_they_agree_in_float16_too(kind: str) -> None:
    host = Host(dtype="float16")
    layouts = ("channels", "aligned channels of NHWC")
    found = {(case.name, layout): difference(case, layout, host) for case in CASES[kind] for layout in layouts}
    assert [(*place, wrong) for place, wrong in found.items() if wrong] == []


@pytest.mark.parametrize(("layout", "dtype"), [("channels", "float32"), ("channels of NHWC", "bfloat16")])
@pytest.mark.parametrize("kind", CASES)
def test_the_order_of_threads_and_blocks_changes_nothing(kind: str, layout: str, dtype: str) -> None:
    falling = Host(falling=True, dtype=dtype)
    assert [case.name for case in CASES[kind] if difference(case, layout, falling)] == []


@pytest.mark.parametrize("kind", ["input.normalize", "dropout.forward", "dropout.backward"])
def test_nor_does_it_in_chwn(kind: str) -> None:
    """Of kernels that only CHWN has."""
    falling = Host(falling=True, dtype="float16")
    assert [case.name for case in CASES[kind] if difference(case, "CHWN", falling)] == []


@pytest.mark.parametrize("dtype", RUN)
def test_every_kernel_is_run(dtype: str) -> None:
    if not RUN[dtype]:
        pytest.skip("the test of all kinds was not run")
    columns, taps = {"softmax_columns", "softmax_columns_sum"}, {"tap_rows", "tap_sums"}
    elsewhere = {"fill_bytes", "check_bytes", "transform_bricks"} | columns | taps  # which have tests of their own
    assert RUN[dtype] | elsewhere == set(signatures(source()))


# ---- 16 bits


EDGES = (0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 1e5, 3.4e38, 2.0**-24, 2.0**-25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_16_bits_are_rounded_to_nearest_even(dtype: str) -> None:
    """All 65536 numbers, what lies half between neighbours, and edges: float32 to 16 bits, and back by an update."""
    every = np.arange(2**16, dtype=np.uint16)
    known = from_bfloat16(every) if dtype == "bfloat16" else every.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        between = (known[:-1] + (known[1:] - known[:-1]) / 2).astype(np.float32)
        near = np.concatenate([np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))])
        subnormal = 2.0**-24 * np.arange(-2100, 2100, 0.25)
        values = np.concatenate([known, between, near, subnormal, EDGES]).astype(np.float32)
    values = np.concatenate([values, np.zeros(-len(values) % 8, np.float32)])
    kernels, halves = HostKernels(dtype=dtype), np.zeros(len(values), host_dtype(dtype))
    arrays = {"w": array_of(values), "y": array_of(halves)}
    CUDA_KERNELS["filter.prepare"](op("filter.prepare"), arrays, kernels, None)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).astype(np.float32) if dtype == "float16" else _nearest_bfloat16(values)
    got = from_bfloat16(halves) if dtype == "bfloat16" else halves.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()
    back = unknown(len(values))
    store_filter_gradient(array_of(back), array_of(halves), False, kernels, None)
    np.testing.assert_array_equal(back, want)


def _nearest_bfloat16(values: Array) -> Array:
    """By its definition, in float64: 8 binary digits from the first one on, or multiples of 2^-133."""
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(wide))), -126)
        unit = 2.0 ** (np.where(np.isfinite(exponent), exponent, 0) - 7)
        found = np.rint(wide / unit) * unit  # rint takes the even one of two
        found = np.where(np.abs(found) >= 2.0**128, np.copysign(np.inf, wide), found)
    return np.where(np.isfinite(wide), found, wide).astype(np.float32)


def test_what_a_product_has_done_is_not_done_again() -> None:
    done = Op("op", "conv.forward", "conv", "forward", {}, {}, {"activation": "relu", "algorithm": "fused:graph:eng1"})
    kernels, y = HostKernels(), normal(1, 2, 3, 3)
    CUDA_KERNELS["conv.forward"](done, {"y": array_of(y), "b": array_of(normal(2))}, kernels, None)
    assert kernels.launched == []


def test_a_kernel_refuses_the_storage_of_another_run() -> None:
    x = array_of(normal(2, 3))
    with pytest.raises(VdnnError, match=r"tensor 'x': expected bfloat16 whose .*got float32"):
        CUDA_KERNELS["relu.forward"](op("relu.forward"), {"x": x, "y": x}, HostKernels(dtype="bfloat16"), None)


def test_the_check_sees_a_wrong_number_and_a_stray_byte() -> None:
    class Vandal(Host):
        def run(self, content: Array, work: Any) -> Array:
            after = super().run(content, work)
            after[self.at] ^= 1
            return after

        at = 0

    case = Case("relu", "relu.forward", {"x": normal(1, 1, 3, 3)}, {"y": unknown(1, 1, 3, 3)})
    vandal = Vandal()
    assert "1 bytes written outside of the results, the first at 0" in str(difference(case, "whole", vandal))
    vandal.at = 512 + 20  # y lies after x, each on a multiple of 256 after a gap
    assert "y: 1 of 9 differ" in str(difference(case, "whole", vandal))


# ---- sizes beyond 32 bits


MAP_NORESERVE = 0x4000  # of Linux; the mmap module of Python 3.11 has no name for it


def sparse(count: int, dtype: str = "float32") -> Array:
    """`count` numbers in memory that exists where it is touched only."""
    nbytes = count * np.dtype(dtype).itemsize
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype)
    except OSError:
        pytest.skip(f"this system gives no {nbytes} bytes of memory that is not there")


def far_apart(array: Array) -> Array:
    """The same two images, 2^32 elements and a few from each other."""
    step = 2**32 + 64
    room = sparse(step + array[0].size, str(array.dtype))
    strides = (array.itemsize * step, *array.strides[1:])
    view = np.lib.stride_tricks.as_strided(room, array.shape, strides, writeable=True)
    view[...] = array
    return view


FAR = [
    next(case for case in cases if all(len(v) == 2 for a, v in {**case.reads, **case.writes}.items() if a in BATCHED))
    for kind, cases in CASES.items()
    if kind not in ("filter.prepare", STORE, "batchnorm.update_stats", "layout.transform")
    and not kind.startswith("sgd.")
    and not kind.endswith("_all")
]


@pytest.mark.parametrize("case", FAR, ids=lambda case: case.kind)
def test_images_more_than_two_to_the_32_elements_apart(case: Case) -> None:
    arrays = {name: value.copy() for name, value in {**case.reads, **case.writes}.items()}
    placed = {a: far_apart(v) if a in BATCHED and v.ndim > 1 else v for a, v in arrays.items()}
    if case.kind == "add.forward":
        placed["b"] = far_apart(arrays["b"])
    launch(replace(case, over={}), placed)
    for argument, want in replace(case, over={}).expected().items():
        np.testing.assert_allclose(placed[argument], want, rtol=1e-4, atol=1e-5)


def launch(case: Case, arrays: Mapping[str, Array]) -> None:
    scratch = np.zeros(workspace_bytes(case.kind, {a: v.shape for a, v in arrays.items()}) + 1, np.uint8)
    placed = {name: array_of(value) for name, value in {**arrays, "workspace": scratch}.items()}
    CUDA_KERNELS[case.kind](case.op, placed, HostKernels(), None)


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    """Only the last blocks are run: their numbers are right, those before are not touched."""
    count, tail = 2**31 + 5001, 3 * 4096
    last = HostKernels(blocks=lambda blocks: (blocks - 3, blocks))
    record = new_step(0.5, 1.0, 0, 0)
    dw, w, v = sparse(count), sparse(count), sparse(count)
    for array in (dw, w):
        array[-tail:] = np.arange(tail) % 7
    whole = {"dw": (1, count), "w": (1, count), "v": (1, count)}
    arrays = {name: contiguous(a.ctypes.data, whole[name]) for name, a in (("dw", dw), ("w", w), ("v", v))}
    arrays |= {name: array_of(record) for name in ("step", "status")}
    attrs = {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0}
    CUDA_KERNELS["sgd.update"](op("sgd.update", **attrs), arrays, last, None)
    first = -(-count // 4096) * 4096 - 3 * 4096
    expected = (np.arange(tail) % 7)[first - count :]
    assert (w[first:] == expected - 0.5 * expected).all()
    assert (v[first:] == expected).all()
    assert (v[first - 4096 : first] == 0).all()
    CUDA_KERNELS["add.forward"](op("add.forward"), {"a": arrays["w"], "b": arrays["v"], "y": arrays["dw"]}, last, None)
    assert (dw[first:] == 1.5 * expected).all()
    dw[-1] = np.inf
    CUDA_KERNELS["sgd.update"](op("sgd.update", **attrs), arrays, last, None)
    assert record[28] == 1


def op(kind: str, accumulate: tuple[str, ...] = (), **attrs: Any) -> Op:
    return Op("the-op", kind, "the-layer", "forward", {}, {}, attrs, accumulate)


# ---- what a GPU cannot raise


@pytest.mark.parametrize("label", [-1, 5, 2**31 - 1])
def test_an_unknown_label_makes_loss_and_gradient_nan(label: int) -> None:
    x, labels = normal(2, 5), np.array([3, label], np.int32)
    probs, loss, correct, dx = unknown(2, 5), unknown(2), np.full(2, 9, np.uint8), normal(2, 5)
    values = {"x": x, "labels": labels, "probs": probs, "loss": loss, "correct": correct, "dx": dx}
    arrays = {name: array_of(array) for name, array in (*values.items(), ("step", new_step(0.1, 0.5, 0, 0)))}
    CUDA_KERNELS["softmax_loss.forward"](op("softmax_loss.forward", label_smoothing=0.0), arrays, HostKernels(), None)
    CUDA_KERNELS["softmax_loss.backward"](
        op("softmax_loss.backward", label_smoothing=0.0, weight=1.0), arrays, HostKernels(), None
    )
    assert np.isnan(loss).tolist() == [False, True]
    assert np.isnan(dx).tolist() == [[False] * 5, [True] * 5]
    assert np.isfinite(probs).all()
    assert correct[1] == 0


def test_a_nan_score_is_the_first_choice_as_in_numpy() -> None:
    x = np.array([[1, np.nan, 5, np.nan], [2, 2, 2, 2]], np.float32)
    correct = np.full(2, 9, np.uint8)
    values = {"x": x, "labels": np.array([1, 0], np.int32), "probs": unknown(2, 4), "loss": unknown(2)}
    arrays = {name: array_of(array) for name, array in (*values.items(), ("correct", correct))}
    CUDA_KERNELS["softmax_loss.forward"](op("softmax_loss.forward", label_smoothing=0.0), arrays, HostKernels(), None)
    assert correct.tolist() == [1, 1]
    assert np.isnan(values["probs"]).all(axis=1).tolist() == [True, False]


# ---- a whole network


def everything() -> Graph:
    g = Graph("everything", (3, 12, 10), classes=5)
    stem = g.add("relu1", Relu(), g.add("conv1", Conv(8, 3, padding=1), g.input))
    stem = g.add("pool1", Pool("max", 3, stride=2, ceil_mode=True), g.add("norm1", Lrn(size=5, alpha=0.3), stem))
    left = g.add("left", Conv(4, 1), stem)
    right = g.add("right_norm", BatchNorm(), g.add("right", Conv(4, 3, padding=1, bias=False), stem))
    both = g.add("concat", Concat(), [left, g.add("right_relu", Relu(), right), left])
    block = g.add("norm2", BatchNorm(), g.add("conv2", Conv(12, 3, padding=1, bias=False), both))
    total = g.add("relu2", Relu(), g.add("add", Add(), [block, both]))
    small = g.add("pool2", Pool("average", 3, stride=2, padding=1), total)
    hidden = g.add("drop", Dropout(0.4), g.add("fc1", Linear(11), g.add("flat", Flatten(), small)))
    g.add("loss", SoftmaxLoss(label_smoothing=0.1), g.add("fc2", Linear(5), hidden))
    return g


MODES = [("train", False), ("train", True), ("last", True), ("eval", False)]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("mode", "indices"), MODES)
@pytest.mark.parametrize("fuse", [False, True])
def test_a_whole_step_agrees_with_the_cpu(mode: str, indices: bool, layout: str, fuse: bool) -> None:
    update = Update(momentum=0.9, weight_decay=1e-3)
    made = {"pool_indices": indices, "layout": layout, "fuse": fuse, "update_together": fuse}
    program = lower(everything(), 6, mode, update=update, **made)
    assert indices is any("indices" in op.reads for op in program.ops)
    on_cpu, on_gpu = both(program, layout)
    for name, array in on_cpu.storages.items():
        wanted, got = array.astype(np.float64), on_gpu.storages[name].astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-6 * max(1, np.abs(wanted).max()), err_msg=name)
    kinds = {op.kind for op in program.ops}
    missing = set(CUDA_KERNELS) - kinds
    never = {"batchnorm.inference", "filter.prepare", "filter.prepare_all", "softmax.forward"}
    never |= {f"{kind}{'' if fuse else '_all'}" for kind in ("sgd.update", "batchnorm.update_stats")}
    heads = {"softmax_loss.forward", "softmax_loss.backward"}
    never |= heads if fuse else {"relu.bias_backward", "softmax_loss.train"}
    replaced = {"relu.forward", "relu.backward", "add.forward"} if fuse else set()  # maybe all of them
    assert mode == "eval" or missing - {"layout.transform"} - replaced == never
    assert ("layout.transform" in missing) is (layout == "NCHW")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_fused_kernels_give_the_same_bits(layout: str) -> None:
    update, found = Update(momentum=0.9, weight_decay=1e-3), []
    for fuse in (False, True):
        program = lower(
            everything(), 6, update=update, pool_indices=True, layout=layout, fuse=fuse, update_together=fuse
        )
        assert fuse is any(op.kind == "relu.bias_backward" for op in program.ops)
        found.append(both(program, layout)[1].storages)
    plain, fused = found
    for name in (*program.persistent, *program.fetches):
        np.testing.assert_array_equal(fused[name], plain[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_op_of_a_step_in_16_bits_agrees_with_the_cpu(dtype: str, fuse: bool) -> None:
    """Each op of both begins with the same bytes: no rounding of an earlier one is carried on."""
    made = {"dtype": dtype, "layout": "NHWC", "pad_channels": 8, "fuse": fuse, "update_together": fuse}
    program = lower(everything(), 6, "train", update=Update(momentum=0.9), pool_indices=True, **made)
    on_cpu, on_gpu, kernels = Run(program, 4), Run(program, 4), HostKernels(dtype=dtype)
    for (op, arrays), (_, others) in zip(on_cpu.ops, on_gpu.ops, strict=True):
        for name, storage in on_cpu.storages.items():
            on_gpu.storages[name][...] = storage
        run_rounded(KERNELS[op.kind], op, arrays)
        compute(program, op, others, "NHWC", kernels)
        for name, array in on_cpu.storages.items():
            wanted, got = _numbers(array), _numbers(on_gpu.storages[name])
            size = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
            close = 2 * UNIT_ROUNDOFF[dtype] if array.dtype.itemsize == 2 else 1e-5
            np.testing.assert_allclose(got, wanted, rtol=close, atol=close * size, err_msg=f"{op.name}: {name}")
    assert {op.kind for op in program.ops} >= {"filter.prepare", "sgd.update_all" if fuse else "sgd.update"}


def _numbers(array: Array) -> Array:
    return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


def both(program: Program, layout: str) -> tuple[Run, Run]:
    """The program on the CPU, and with the CUDA kernels, products then by the CPU."""
    on_cpu, on_gpu, kernels = Run(program, 4), Run(program, 4), HostKernels()
    for phase in PHASES:
        on_cpu.run(phase)
    for op, arrays in on_gpu.ops:
        compute(program, op, arrays, layout, kernels)
    return on_cpu, on_gpu


def compute(program: Program, op: Op, arrays: Mapping[str, Array], layout: str, kernels: HostKernels) -> None:
    """One op by its CUDA kernel; the product alone by the CPU, as a library computes it."""
    kernel = CUDA_KERNELS.get(op.kind)
    if kernel is None:
        run_rounded(KERNELS[op.kind], op, arrays)
        return
    if op.kind in ("conv.forward", "linear.forward"):
        alone = replace(op, attrs={key: value for key, value in op.attrs.items() if key != "activation"})
        run_rounded(KERNELS[op.kind], alone, {name: array for name, array in arrays.items() if name != "b"})
    scratch = np.zeros(workspace_bytes(op.kind, {a: v.shape for a, v in arrays.items()}, layout), np.uint8)
    layouts = {a: program.tensors[t].layout for a, t in {**op.reads, **op.writes}.items()}
    placed = {name: array_of(array, layouts[name]) for name, array in arrays.items() if name != "workspace"}
    kernel(op, {**placed, "workspace": array_of(scratch)}, kernels, None)
