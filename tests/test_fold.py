"""The first convolution's stride in the channels of images and filters: the same network as without, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from interpreter import Array, Run
from plan_lab import Case, Lab, Machine
from test_sliced_plans import case_of, random_slices, same_to_rounding

from vdnn.errors import VdnnError
from vdnn.layers import Conv, Flatten, Graph, Linear, Op, Pool, Program, Relu, SoftmaxLoss, Update, lower
from vdnn.layers.op import PHASES
from vdnn.memory.verify import verify
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.prepare import backend_costs
from vdnn.runtime.step import new_step

UPDATE = Update(momentum=0.9, weight_decay=1e-3)
MEAN, STD = (0.45, 0.5, 0.4, 0.55), (0.2, 0.25, 0.3, 0.35)


def network(conv: Conv, image: tuple[int, int, int]) -> Graph:
    graph = Graph("first", image, 3)
    x = graph.add("relu1", Relu(), graph.add("conv1", conv, graph.input))
    flat = graph.add("flat", Flatten(), graph.add("pool1", Pool("average", "global"), x))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), flat))
    return graph


def lowered(graph: Graph, multiple: int, mode: str = "train", **options: Any) -> Program:
    channels = graph.input_shape[0]
    made = {"mean": MEAN[:channels], "std": STD[:channels], "update": UPDATE, "dtype": "float64", "layout": "NHWC"}
    return lower(graph, 3, mode, pad_channels=multiple, **{**made, **options})


def steps(program: Program, count: int = 3, algorithm: int = 0) -> tuple[list[float], Run]:
    run, losses = Run(program, seed=5, algorithm=algorithm), []
    for step in range(count):
        run.storages["step"][...] = new_step(0.1, 1 / program.batch, step, 7)
        for phase in PHASES:
            run.run(phase)
        losses.append(run.loss())
    return losses, run


def cases() -> Iterator[tuple[Conv, tuple[int, int, int]]]:
    sizes = [(1, 13, 11), (3, 12, 15), (4, 17, 14)]
    for stride, padding in product((2, 3, 4), (0, 1, 2, 3)):
        for extra in (0, 1, 3):
            kernel = stride + extra
            yield Conv(5, (kernel, stride + (extra + 1) % 3), stride=stride, padding=padding), sizes[kernel % 3]
    yield Conv(4, 7, stride=2, padding=(3, 1), bias=False), (3, 18, 16)
    yield Conv(4, 11, stride=4, padding=2), (3, 35, 35)


@pytest.mark.parametrize("multiple", [2, 8])
def test_a_folded_stride_changes_nothing(multiple: int) -> None:
    for conv, image in cases():
        graph = network(conv, image)
        plain, folded = lowered(graph, 1), lowered(graph, multiple)
        stride = plain.ops[[op.kind for op in plain.ops].index("conv.forward")].attrs["stride"][0]
        channels = -(-stride * stride * image[0] // multiple) * multiple
        assert folded.tensors["data"].shape[:2] == (3, channels), conv
        for algorithm in (0, 1):
            (losses, run), (wanted, other) = (steps(program, algorithm=algorithm) for program in (folded, plain))
            np.testing.assert_allclose(losses, wanted, rtol=1e-12)
            for name in plain.persistent:
                np.testing.assert_allclose(run.values[name], other.values[name], rtol=1e-12, atol=1e-14, err_msg=name)


def test_the_gradient_is_that_of_finite_differences() -> None:
    graph = network(Conv(2, (5, 4), stride=3, padding=1), (2, 9, 10))
    run = Run(lowered(graph, 8), seed=2)

    def loss() -> float:
        run.run("forward")
        return run.loss()

    loss()
    run.run("backward")
    found, weight = run.values["conv1.weight.grad"].copy(), run.values["conv1.weight"]
    assert found.shape == weight.shape == (2, 2, 5, 4)
    for place in np.ndindex(weight.shape):
        middle, apart = weight[place], []
        for step in (1e-5, -1e-5):
            weight[place] = middle + step
            apart.append(loss())
        weight[place] = middle
        assert found[place] == pytest.approx((apart[0] - apart[1]) / 2e-5, rel=1e-5, abs=1e-8), place


def test_gradients_of_parts_are_added() -> None:
    graph = network(Conv(5, 7, stride=2, padding=3), (3, 15, 14))
    plain, folded = ([lowered(graph, multiple, mode) for mode in ("first", "last")] for multiple in (1, 8))
    found: list[Array] = []
    for first, last in (plain, folded):
        run = Run(first, seed=3)
        for program in (first, last):
            part = Run(program, seed=3, shared={name: run.storages[name] for name in program.persistent})
            for phase in ("forward", "backward"):
                part.run(phase)
        found.append(run.values["conv1.weight.grad"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("conv", "image"), [(Conv(4, 7, stride=2, padding=3), (3, 10, 9)), (Conv(4, 4, stride=4), (1, 9, 8))]
)
def test_images_and_filters_lie_as_defined(conv: Conv, image: tuple[int, int, int]) -> None:
    program = lowered(network(conv, image), 8)
    run = Run(program, seed=1)
    run.run("forward")
    x = run.values["images"] / 255
    x = (x - np.array(MEAN[: image[0]])[:, None, None]) / np.array(STD[: image[0]])[:, None, None]
    w, used, data = (run.values[name] for name in ("conv1.weight", "conv1.weight.used", "data"))
    make = next(op for op in program.ops if op.kind == "input.normalize")
    fold, (top, left) = make.attrs["fold"], make.attrs["padding"]
    for n, channel, i, j in np.ndindex(data.shape):
        (a, b), c = divmod(channel // image[0], fold), channel % image[0]
        row, column = fold * i + a - top, fold * j + b - left
        there = a < fold and 0 <= row < image[1] and 0 <= column < image[2]
        assert data[n, channel, i, j] == pytest.approx(x[n, c, row, column] if there else 0, rel=1e-12, abs=0)
    for k, channel, i, j in np.ndindex(used.shape):
        (a, b), c = divmod(channel // image[0], fold), channel % image[0]
        r, s = fold * i + a, fold * j + b
        there = a < fold and r < w.shape[2] and s < w.shape[3]
        assert used[k, channel, i, j] == (w[k, c, r, s] if there else 0)


FOLDED: list[tuple[Conv, dict[str, Any]]] = [
    (Conv(4, 3, stride=2, dilation=2), {}),
    (Conv(4, 3, stride=(2, 1)), {}),
    (Conv(4, 3, stride=1), {}),
    (Conv(4, 2, stride=3), {}),
    (Conv(3, 3, stride=2, groups=3), {}),
    (Conv(4, 3, stride=2), {"layout": "NCHW"}),
    (Conv(4, 3, stride=2), {"layout": "CHWN"}),
    (Conv(4, 3, stride=2), {"pad_channels": 1}),
]


@pytest.mark.parametrize(("conv", "options"), FOLDED)
def test_strides_that_stay(conv: Conv, options: dict[str, Any]) -> None:
    made = {"layout": "NHWC", "pad_channels": 8, **options}
    program = lower(network(conv, (3, 11, 11)), 2, **made)
    assert program.tensors["data"].shape[2:] == (11, 11)
    assert not any("fold" in op.attrs for op in program.ops)


def test_a_second_reader_of_the_images_keeps_the_stride() -> None:
    graph = network(Conv(4, 3, stride=2), (3, 11, 11))
    flat = graph.add("flat2", Flatten(), graph.add("conv2", Conv(2, 3, stride=2), graph.input))
    graph.add("loss2", SoftmaxLoss(weight=0.3), graph.add("fc2", Linear(3), flat))
    program = lower(graph, 2, layout="NHWC", pad_channels=8)
    assert program.tensors["data"].shape == (2, 8, 11, 11)


def test_what_the_ops_say() -> None:
    program = lower(network(Conv(4, 7, stride=2, padding=3), (3, 16, 20)), 2, layout="NHWC", pad_channels=8)
    ops = {op.kind: op for op in program.ops}
    assert program.tensors["data"].shape == (2, 16, 11, 13)
    assert program.tensors["conv1.weight.used"].shape == (4, 16, 4, 4)
    assert program.tensors["conv1.weight.grad"].shape == (4, 3, 7, 7)
    assert (ops["input.normalize"].attrs["fold"], ops["input.normalize"].attrs["padding"]) == (2, [3, 3])
    assert ops["filter.prepare"].attrs == {"fold": 2}
    alone = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    assert ops["conv.forward"].attrs == alone
    assert ops["conv.wgrad"].attrs == {**alone, "fold": 2}
    assert "conv.dgrad" not in ops


# ---- plans


@pytest.mark.parametrize("fuse", [False, True])
def test_every_policy_and_slices_of_the_batch_give_the_same_bits(fuse: bool) -> None:
    """Planned in the fewest bytes, verified, and run in the worst order of streams; and what an unfolded plan gives."""
    lab, cases = Lab("resnet18", 3, steps=2, image_size=64, narrow=4, classes=10), list[Case]()
    for multiple, policies in ((1, ("none",)), (8, ("base", "none", "all", "dyn"))):
        lab.program = lower(lab.graph, 3, update=UPDATE, ahead=True, layout="NHWC", pad_channels=multiple, fuse=fuse)
        lab.costs = backend_costs(CpuBackend(), lab.program)
        cases += [lab.case(policy, tight=True) for policy in policies]
    assert lab.program.tensors["data"].shape == (3, 16, 35, 35)
    slices = {op: rows for op, rows in random_slices(lab, Random(3)).items() if op.startswith("conv1.")}
    assert set(slices) == {"conv1.forward", "conv1.wgrad"}
    cases += [case_of(lab, policy, slices, tight=True) for policy in ("none", "all")]
    machine = Machine(lab, cases, ("out", "in", "compute"))
    for case in cases:
        verify(case.program, case.plan)
    plain, *found = (machine.run(case, case.plan) for case in cases)
    machine.close()
    folded, sliced = found[:4], found[4:]
    assert all(outcome.equals(folded[0]) for outcome in folded)
    assert sliced[0].equals(sliced[1])
    for outcome in (folded[0], sliced[0]):
        same_to_rounding(cases[0], outcome, plain)


def test_a_workspace_that_is_too_small_is_named() -> None:
    op = Op("c.wgrad", "conv.wgrad", "c", "backward", {}, {}, {"fold": 2, "algorithm": "GEMM_BATCH"})
    arrays = {"x": np.zeros((1, 4, 2, 2)), "dy": np.zeros((1, 1, 1, 1)), "dw": np.zeros((1, 1, 3, 3))}
    with pytest.raises(VdnnError, match=r"layer 'c', algorithm GEMM_BATCH\): expected a workspace of \d+ bytes"):
        KERNELS["conv.wgrad"](op, **arrays)
