"""Programs in bfloat16 and float16 on the CPU: every op against float64 on the same numbers, to half a unit in the last
place; which tensors are 16 bits wide; and channels of zeros behind the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from interpreter import Array, Run
from test_cpu_gradients import GRAPHS, ONE_LAYER, between

from vdnn.layers import BatchNorm, Concat, Conv, Graph, Op, Pool, Program, Relu, Update, lower
from vdnn.layers.op import PHASES
from vdnn.memory.passes import WORKSPACE
from vdnn.networks import NETWORKS, build
from vdnn.runtime.backends.cpu.half import BFLOAT16, FLOAT16, widen
from vdnn.runtime.backends.cpu.kernels import KERNELS

UPDATE = Update(momentum=0.9, weight_decay=1e-3)
HALF_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Most that rounding to nearest changes a number by, relative to it: half a unit of a fraction of 7 or 10 bits."""
LEAST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}
"""Half of the smallest number."""
SUMS = 2e-5
"""What float32 sums may add, relative to the largest number of a tensor."""
WORKSPACES = 2
"""Bytes of a workspace in float64 for one in float32."""


def exact(array: Array) -> Array:
    """A copy in float64; whole numbers stay what they are."""
    if array.dtype in (BFLOAT16, FLOAT16):
        array = widen(array)
    return array.astype(np.float64 if array.dtype.kind == "f" else array.dtype)


def narrow_arguments(op: Op, program: Program, dtype: str) -> set[str]:
    return {argument for argument, name in op.writes.items() if program.tensors[name].dtype == dtype}


class Checked(Run):
    """A run whose every op is compared with the same op in float64 on the same numbers."""

    def __init__(self, program: Program, dtype: str, **options: int) -> None:
        super().__init__(program, **options)
        self.dtype, self.kinds = dtype, set[str]()

    def check(self) -> None:
        for phase in PHASES:
            for op, arrays in self.ops:
                if op.phase == phase:
                    wanted = self.in_float64(op, arrays)
                    self.launch(op, arrays)
                    self.compare(op, arrays, wanted)
                    self.kinds.add(op.kind)

    @staticmethod
    def in_float64(op: Op, arrays: Mapping[str, Array]) -> dict[str, Array]:
        copies: dict[str, Array] = {}
        for argument, array in arrays.items():
            same = next((a for a in copies if arrays[a] is array), None)
            copies[argument] = copies[same] if same else exact(array)
        if WORKSPACE in copies:
            copies[WORKSPACE] = np.zeros(WORKSPACES * copies[WORKSPACE].nbytes + 4096, np.uint8)
        KERNELS[op.kind](op, **copies)
        return {argument: copies[argument] for argument in op.writes}

    def compare(self, op: Op, arrays: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        narrow = narrow_arguments(op, self.program, self.dtype)
        for argument, right in wanted.items():
            got = exact(arrays[argument])
            if right.dtype.kind != "f":
                assert (got == right).all(), op.name
                continue
            slack = SUMS * np.abs(right).max(initial=0.0)
            if argument in narrow:
                slack = slack + HALF_UNITS[self.dtype] * np.abs(right) + LEAST[self.dtype]
            assert (np.abs(got - right) <= slack).all(), (op.name, argument, np.abs(got - right).max())


CASES: dict[str, Callable[[], Graph]] = {
    **{name: lambda layers=layers: between(*layers) for name, layers in ONE_LAYER.items()},
    **{graph.__name__: graph for graph in GRAPHS},
}


@pytest.mark.parametrize("dtype", HALF_UNITS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_op_is_float64_rounded(dtype: str, layout: str, fuse: bool) -> None:
    kinds: set[str] = set()
    options: dict[str, Any] = {"layout": layout, "fuse": fuse, "update_together": fuse}
    for name, graph in CASES.items():
        for algorithm in (0, 1) if "conv" in name else (0,):
            program = lower(graph(), 4, update=UPDATE, dtype=dtype, pad_channels=8, **options)
            run = Checked(program, dtype, seed=3, algorithm=algorithm)
            run.check()
            kinds |= run.kinds
    assert kinds >= {"conv.wgrad", "linear.dgrad", "batchnorm.backward", "lrn.backward"}
    assert kinds >= ({"relu.bias_backward", "sgd.update_all"} if fuse else {"relu.backward", "sgd.update"})
    assert kinds >= {f"{kind}{'_all' if fuse else ''}" for kind in ("filter.prepare", "batchnorm.update_stats")}


@pytest.mark.parametrize("dtype", HALF_UNITS)
def test_evaluation_is_float64_rounded(dtype: str) -> None:
    for name in ("batchnorm after relu", "several_kinds_on_one_tensor"):
        Checked(lower(CASES[name](), 3, "eval", dtype=dtype), dtype, seed=1).check()


def without_kinks() -> Graph:
    """Where no choice between numbers is made, so that rounding moves the gradient a little and never far."""
    graph = Graph("smooth", (3, 6, 6), 3)
    x = graph.add("conv1", Conv(8, 3, padding=1), graph.input)
    x = graph.add("bn1", BatchNorm(), x)
    x = graph.add("pool1", Pool("average", 2), x)
    x = graph.add("conv2", Conv(8, 3, padding=1, bias=False), x)
    return head(graph, x)


def head(graph: Graph, x: str) -> Graph:
    from vdnn.layers import Flatten, Linear, SoftmaxLoss

    flat = graph.add("flat", Flatten(), x)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(graph.classes), flat))
    return graph


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("float16", 0.003)])
def test_gradients_of_a_network_are_those_of_float64_within_rounding(dtype: str, most: float) -> None:
    """A dozen roundings of at most 2^-8 (2^-11) lie before each weight gradient; they partly cancel."""
    runs = {name: Run(lower(without_kinks(), 16, dtype=name), seed=2) for name in ("float64", dtype)}
    for run in runs.values():
        run.run("forward")
        run.run("backward")
    assert abs(runs[dtype].loss() / runs["float64"].loss() - 1) < most
    for name, spec in runs[dtype].program.tensors.items():
        if spec.role == "wgrad" and name != "conv1.bias.grad":  # which the norm behind it makes 0
            right = runs["float64"].values[name]
            error = np.linalg.norm(runs[dtype].values[name] - right) / np.linalg.norm(right)
            assert 0 < error < most, name


# ---- which tensors are narrow


@pytest.mark.parametrize("network", NETWORKS)
def test_activations_are_half_as_wide_and_nothing_else(network: str) -> None:
    graph = build(network)
    wide, narrow = (lower(graph, 2, update=UPDATE, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wide.persistent == narrow.persistent
    products = {op.layer for op in wide.ops if op.kind in ("conv.forward", "linear.forward")}
    assert {name for name in narrow.tensors if name not in wide.tensors} == {f"{n}.weight.used" for n in products}
    for name, spec in wide.tensors.items():
        halved = spec.role in ("act", "grad") and not name.endswith(".probs")
        assert narrow.tensors[name].dtype == ("bfloat16" if halved else spec.dtype), name
        assert narrow.tensors[name].nbytes == spec.nbytes // (1 + halved), name


def test_the_weight_is_prepared_before_its_layer_and_read_by_both_products() -> None:
    for mode in ("train", "first", "last", "eval"):
        program = lower(build("lenet"), 2, mode, dtype="float16")
        names = [op.name for op in program.ops]
        ops = {op.name: op for op in program.ops}
        for layer in ("conv1", "conv2", "fc3", "fc4"):
            assert names.index(f"{layer}.prepare") == names.index(f"{layer}.forward") - 1
            prepare = ops[f"{layer}.prepare"]
            assert (prepare.kind, prepare.phase, prepare.layer) == ("filter.prepare", "forward", layer)
            assert prepare.reads == {"w": f"{layer}.weight"}
            assert prepare.writes == {"y": f"{layer}.weight.used"}
            assert program.tensors[f"{layer}.weight.used"].role == "aux"
            assert not prepare.accumulate
            readers = {op.name for op in program.ops if f"{layer}.weight.used" in op.reads.values()}
            backward = {f"{layer}.dgrad"} if mode != "eval" and layer != "conv1" else set()
            assert readers == {f"{layer}.forward", *backward}
    assert not any(op.kind == "filter.prepare" for op in lower(build("lenet"), 2).ops)


# ---- channels of zeros


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_padded_channels_change_nothing(mode: str) -> None:
    graph = build("vgg16")
    programs = [
        lower(graph, 2, mode, update=UPDATE, dtype="float32", layout="NHWC", pad_channels=multiple)
        for multiple in (1, 8)
    ]
    assert programs[1].tensors["data"].shape == (2, 8, 224, 224)
    assert programs[1].tensors["conv1_1.weight.used"].shape == (64, 8, 3, 3)
    assert programs[1].tensors["images"].shape == (2, 3, 224, 224)
    if mode == "train":
        assert programs[1].tensors["conv1_1.weight.grad"].shape == (64, 3, 3, 3)


@pytest.mark.parametrize("algorithm", [0, 1])
def test_padded_channels_give_the_same_gradients(algorithm: int) -> None:
    def fork() -> Graph:
        graph = Graph("fork", (3, 7, 7), 3)
        branches = [graph.add("a", Conv(4, 3, stride=2), graph.input), graph.add("b", Conv(2, 1, stride=2), "data")]
        branches[1] = graph.add("pool", Pool("max", 2, stride=1), branches[1])
        return head(graph, graph.add("relu", Relu(), graph.add("cat", Concat(), branches)))

    runs = [
        Run(lower(fork(), 5, update=UPDATE, dtype="float64", layout="NHWC", pad_channels=n), 4, algorithm=algorithm)
        for n in (1, 4)
    ]
    for run in runs:
        for phase in PHASES:
            run.run(phase)
    assert runs[1].values["data"].shape == (5, 4, 7, 7)
    assert (runs[1].values["data"][:, 3] == 0).all()
    assert (runs[1].values["data"][:, :3] == runs[0].values["data"]).all()
    for name in runs[0].program.tensors:
        if name != "data":
            np.testing.assert_allclose(runs[1].values[name], runs[0].values[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("layer", "layout"),
    [(Conv(4, 3), "NCHW"), (Conv(3, 3, groups=3), "NHWC"), (Pool("max", 2), "NHWC"), (BatchNorm(), "NHWC")],
)
def test_channels_are_padded_only_where_zeros_do_no_harm(layer: Conv | Pool | BatchNorm, layout: str) -> None:
    graph = Graph("one", (3, 6, 6), 3)
    both = [graph.add("conv", Conv(layer.channels if isinstance(layer, Conv) else 3, 3, padding=1), "data")]
    both.append(graph.add("other", layer, graph.input))
    head(graph, graph.add("cat", Concat(), [graph.add(f"p{x}", Pool("max", "global"), x) for x in both]))
    program = lower(graph, 2, layout=layout, pad_channels=8)
    assert program.tensors["data"].shape == (2, 3, 6, 6)
    assert not any(op.kind == "filter.prepare" for op in program.ops)
