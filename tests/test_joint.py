"""Running statistics and 16-bit filters of all layers by one op each: the bits of single ops, plans, and peaks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from host_cupy import HostCupy
from interpreter import Array, Run
from test_cuda_kernels import compute, everything

from vdnn.errors import VdnnError
from vdnn.layers import Op, Program, Update, lower
from vdnn.layers.op import PHASES
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import Budget, make_plan
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.backends.cpu.half import run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, KernelSet
from vdnn.runtime.profile import load_profile, model_costs

JOINT = ("filter.prepare_all", "batchnorm.update_stats_all")
UPDATE = Update(momentum=0.9, weight_decay=1e-4)
HALF = {"dtype": "bfloat16", "layout": "NHWC", "pad_channels": 8, "fuse": True}


def singles(op: Op) -> list[Op]:
    """The ops that `op` stands for, in the order of their numbers."""
    found: dict[int, Op] = {}
    for argument in (*op.reads, *op.writes):
        name, number = argument.rstrip("0123456789"), int(argument[len(argument.rstrip("0123456789")) :])
        attrs = {key: values[number] for key, values in op.attrs.items()}
        one = Op(f"{op.name}.{number}", op.kind.removesuffix("_all"), op.layer, op.phase, {}, {}, attrs)
        one = found.setdefault(number, one)
        one = replace(one, **{key: {**getattr(one, key), name: of[argument]} for key, of in parts(op, argument)})
        found[number] = replace(one, accumulate=(*one.accumulate, *[name][: argument in op.accumulate]))
    return [found[number] for number in range(len(found))]


def parts(op: Op, argument: str) -> list[tuple[str, Mapping[str, str]]]:
    """Of reads and writes the one with this argument."""
    return [(key, of) for key, of in (("reads", op.reads), ("writes", op.writes)) if argument in of]


def said(op: Op) -> tuple[object, ...]:
    """What an op computes, whatever it is called."""
    return op.kind, sorted(op.reads.items()), sorted(op.writes.items()), sorted(op.attrs.items()), sorted(op.accumulate)


# ---- programs


@pytest.mark.parametrize(("network", "norms"), [("resnet50", 53), ("googlenet_bn", 57), ("vgg16", 0)])
@pytest.mark.parametrize("mode", ["train", "first", "last"])
def test_a_step_has_one_op_of_each(network: str, norms: int, mode: str) -> None:
    graph = build(network)
    joined = lower(graph, 4, mode, update=UPDATE, update_together=True, **HALF)
    single = lower(graph, 4, mode, update=UPDATE, **HALF)
    kinds, before = (Counter(op.kind for op in program.ops) for program in (joined, single))
    assert before["batchnorm.update_stats"] == norms
    assert [kinds[kind] for kind in JOINT] == [1, 1 if norms else 0]
    assert kinds["filter.prepare"] == 1  # of the images, whose channels are padded
    assert kinds["batchnorm.update_stats"] == 0
    forward = [op for op in joined.ops if op.phase == "forward"]
    assert forward[0].name == "filters"
    assert not norms or forward[-1].name == "running_stats"
    assert joined.persistent == single.persistent
    assert joined.tensors == single.tensors
    for kind in JOINT:
        ones = [op for op in single.ops if op.kind == kind.removesuffix("_all")]
        others = [one for op in joined.ops if op.kind == kind for one in singles(op)]
        kept = [said(op) for op in joined.ops if op.kind == kind.removesuffix("_all")]
        assert sorted(map(said, others)) == sorted(said(op) for op in ones if said(op) not in kept)


def test_evaluation_and_updates_one_by_one_join_nothing() -> None:
    graph = build("resnet18")
    for mode, together in (("eval", True), ("train", False)):
        program = lower(graph, 2, mode, update_together=together, **HALF)
        assert not {op.kind for op in program.ops} & set(JOINT)
    wide = lower(graph, 2, update_together=True, fuse=True)
    assert [op.name for op in wide.ops if op.kind in JOINT] == ["running_stats"]


# ---- the same bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["train", "first", "last"])
def test_a_step_gives_the_bits_of_single_ops(mode: str, dtype: str) -> None:
    made = {"update": UPDATE, "dtype": dtype, "layout": "NHWC", "pad_channels": 8}
    runs = [Run(lower(everything(), 6, mode, update_together=together, **made), 4) for together in (False, True)]
    for run in runs:
        before = {name: array.copy() for name, array in run.storages.items() if "running" in name}
        for phase in PHASES:
            run.run(phase)
        assert all((run.storages[name] != array).any() for name, array in before.items())
    one, joint = runs
    assert {op.kind for op, _ in joint.ops} >= set(JOINT[dtype == "float32" :])
    for name in (*one.program.persistent, *one.program.fetches):
        np.testing.assert_array_equal(joint.storages[name], one.storages[name], err_msg=name)


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cuda_joint_ops_give_the_bits_of_single_ones(dtype: str, falling: bool) -> None:
    """Each begins with the same bytes, of a whole network whose products are the CPU's."""
    program = lower(everything(), 6, update=UPDATE, update_together=True, dtype=dtype, layout="NHWC", pad_channels=8)
    one, joint, kernels = Run(program, 4), Run(program, 4), HostKernels(dtype=dtype, falling=falling)
    seen = []
    for (op, arrays), (_, others) in zip(joint.ops, one.ops, strict=True):
        if op.kind not in JOINT:
            for run_arrays in (arrays, others):
                run_rounded(KERNELS[op.kind], op, run_arrays)
            continue
        seen.append(op.kind)
        compute(program, op, arrays, "NHWC", kernels)
        for single in singles(op):
            values = {argument: one.values[t] for argument, t in {**single.reads, **single.writes}.items()}
            compute(program, single, values, "NHWC", kernels)
        for name, array in one.storages.items():
            np.testing.assert_array_equal(joint.storages[name], array, err_msg=f"{op.name}: {name}")
    assert seen == [*JOINT[dtype == "float32" :]]


@pytest.mark.parametrize(("count", "launches"), [(62, 1), (63, 2)])
def test_statistics_go_into_few_launches(count: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = HostCupy(HostKernels())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    held = {f"{name}{i}": np.ones(300, np.float32) for i in range(count) for name in ("mean", "invstd")}
    held |= {f"running_{name}{i}": np.zeros(300, np.float32) for i in range(count) for name in ("mean", "var")}
    attrs = {"momentum": [0.5] * count, "eps": [0.0] * count, "count": [2 + i for i in range(count)]}
    stats = op("batchnorm.update_stats_all", attrs)
    CUDA_KERNELS[stats.kind](stats, placed(held), KernelSet(), cupy.cuda.Stream(non_blocking=True))
    for i in range(count):
        assert (held[f"running_mean{i}"] == 0.5).all()
        np.testing.assert_allclose(held[f"running_var{i}"], 0.5 * (2 + i) / (1 + i), rtol=1e-6)
    check(cupy, "batchnorm_update_stats_all", launches)


@pytest.mark.parametrize(("count", "launches"), [(120, 1), (121, 2)])
def test_filters_go_into_few_launches(count: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = HostCupy(HostKernels(dtype="float16"))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    held: dict[str, Array] = {f"w{i}": np.full((3, 8 * i + 8), i, np.float32) for i in range(count)}
    held |= {f"y{i}": np.zeros((3, 8 * i + 8), np.float16) for i in range(count)}
    filters = op("filter.prepare_all", {})
    CUDA_KERNELS[filters.kind](filters, placed(held), KernelSet("float16"), cupy.cuda.Stream(non_blocking=True))
    assert all((held[f"y{i}"] == i).all() for i in range(count))
    check(cupy, "filter_prepare_all", launches)
    held["y0"] = np.zeros((3, 16), np.float16)
    with pytest.raises(VdnnError, match=r"'filter\.prepare_all': expected filters of one shape"):
        CUDA_KERNELS[filters.kind](filters, placed(held), KernelSet("float16"), cupy.cuda.Stream(non_blocking=True))


def check(cupy: HostCupy, kernel: str, launches: int) -> None:
    """A kernel's arguments have 4 KiB."""
    assert [launch[1] for launch in cupy.launches] == [kernel] * launches
    assert all(sum(value.nbytes for value in launch[-1]) < 4096 for launch in cupy.launches)


def op(kind: str, attrs: Mapping[str, object]) -> Op:
    return Op(kind, kind, "the-layer", "forward", {}, {}, dict(attrs))


def placed(arrays: Mapping[str, Array]) -> dict[str, object]:
    return {name: array_of(array) for name, array in arrays.items()}


# ---- plans


def split(program: Program) -> Program:
    """`program` with single ops, each filter made right before it is read first."""
    ops, wanted = list[Op](), dict[str, Op]()
    for each in program.ops:
        if each.kind == "filter.prepare_all":
            wanted |= {one.writes["y"]: one for one in singles(each)}
            continue
        ops += [wanted.pop(tensor) for tensor in each.reads.values() if tensor in wanted]
        ops += singles(each) if each.kind == "batchnorm.update_stats_all" else [each]
    assert not wanted
    return replace(program, ops=tuple(ops))


@pytest.mark.parametrize(
    ("network", "policy"),
    [("resnet50", "none"), ("googlenet_bn", "dyn"), *(("resnet18", policy) for policy in ("base", "all", "conv"))],
)
def test_joint_ops_are_planned_and_cost_no_memory(network: str, policy: str) -> None:
    """Nor at the peak, where all filters live in both; placement may differ by a little."""
    program = lower(build(network), 16, update=UPDATE, update_together=True, **HALF)
    slabs = []
    for each in (program, split(program)):
        each.validate()
        decisions, plan = make_plan(each, model_costs(each, load_profile("titan-x-maxwell")), policy, Budget())
        verify(apply_decisions(each, decisions), plan)
        slabs.append(plan.slab_bytes)
    assert slabs[0] <= 1.01 * slabs[1]
