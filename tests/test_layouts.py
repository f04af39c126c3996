"""NHWC and CHWN give what NCHW gives: layer by layer, whole networks, and across layouts through a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from gradients import check_gradients
from interpreter import Array, Run
from scripts import refused, script
from small_run import SMALL, train
from test_cpu_gradients import GRAPHS, ONE_LAYER, between

from vdnn.layers import Flatten, Graph, Layer, Op, Program, Relu, TensorSpec, Update, lower
from vdnn.layers.op import PHASES
from vdnn.layers.tensor import element_strides, first_element
from vdnn.memory.slices import describe
from vdnn.networks import build
from vdnn.runtime.backends.cpu.chunks import in_memory_order
from vdnn.runtime.checkpoint import load_state
from vdnn.runtime.config import load_config
from vdnn.runtime.planset import Algorithms
from vdnn.runtime.prepare import prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.tensor_file import read_tensors
from vdnn.runtime.trainer import Trainer

UPDATE = Update(momentum=0.9, weight_decay=1e-3)
OTHERS = ("NHWC", "CHWN")
SUMS = ("conv.", "linear.", "batchnorm.", "lrn.", "softmax_loss.", "sgd.")
"""Kinds that add numbers, in an order of the layout's own."""


# ---- where numbers lie


def test_strides_and_first_elements() -> None:
    whole = TensorSpec("cat", "act", (2, 5, 3, 4), layout="NHWC")
    part = TensorSpec("b", "act", (2, 2, 3, 4), layout="NHWC", view_of="cat", channel=3)
    later = TensorSpec("c", "act", (1, 5, 3, 4), layout="NHWC", view_of="cat", image=1, slice_of="cat")
    memory = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for spec, wanted in ((whole, memory), (part, memory[..., 3:]), (later, memory[1:])):
        start, strides = first_element(spec, whole), element_strides(spec, whole)
        places = start + sum(step * index for step, index in zip(strides, np.indices(spec.shape), strict=True))
        assert (memory.reshape(-1)[places] == wanted.transpose(0, 3, 1, 2)).all(), spec.name


def test_strides_and_first_elements_in_chwn() -> None:
    whole = TensorSpec("cat", "act", (2, 5, 3, 4), layout="CHWN")
    part = TensorSpec("b", "act", (2, 2, 3, 4), layout="CHWN", view_of="cat", channel=3)
    later = TensorSpec("c", "act", (1, 5, 3, 4), layout="CHWN", view_of="cat", image=1, slice_of="cat")
    both = TensorSpec("d", "act", (1, 2, 3, 4), layout="CHWN", view_of="cat", channel=2, image=1, slice_of="e")
    memory = np.arange(5 * 3 * 4 * 2).reshape(5, 3, 4, 2)
    wanted = ((whole, memory), (part, memory[3:]), (later, memory[..., 1:]), (both, memory[2:4, ..., 1:]))
    for spec, numbers in wanted:
        start, strides = first_element(spec, whole), element_strides(spec, whole)
        places = start + sum(step * index for step, index in zip(strides, np.indices(spec.shape), strict=True))
        assert (memory.reshape(-1)[places] == numbers.transpose(3, 0, 1, 2)).all(), spec.name


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 'x': unknown layout 'HWCN'"):
        TensorSpec("x", "act", (1, 2, 3, 4), layout="HWCN")


@pytest.mark.parametrize("shape", [(3, 4, 2, 2), (3, 1, 2, 2), (3, 4, 1, 1), (1, 1, 1, 1), (2, 3)])
def test_the_memory_of_an_array_is_seen_and_never_copied(shape: tuple[int, ...]) -> None:
    memory = np.arange(np.prod(shape))
    arrays = [memory.reshape(shape)]
    if len(shape) == 4:
        n, c, h, w = shape
        arrays = [memory.reshape(n, h, w, c).transpose(0, 3, 1, 2), memory.reshape(c, h, w, n).transpose(3, 0, 1, 2)]
    for array in arrays:
        assert (in_memory_order(array) == memory).all()
        assert np.shares_memory(in_memory_order(array), memory)
    with pytest.raises(AttributeError):
        in_memory_order(np.arange(40).reshape(2, 5, 2, 2)[:, :3])


@pytest.mark.parametrize("layout", OTHERS)
def test_programs_in_another_layout(layout: str) -> None:
    program = lower(build("lenet"), 4, layout=layout, update=UPDATE)
    layouts = {name: spec.layout for name, spec in program.tensors.items() if len(spec.shape) == 4}
    assert {name for name, layout in layouts.items() if layout == "NCHW"} == {"images"}
    assert {"data", "conv1", "pool1.grad", "conv1.weight", "conv1.weight.grad", "conv1.weight.momentum"} <= set(layouts)
    plain = lower(build("lenet"), 4, update=UPDATE)
    assert {name: spec.shape for name, spec in plain.tensors.items()}.items() <= {
        name: spec.shape for name, spec in program.tensors.items()
    }.items()
    added = [op for op in program.ops if op.name not in {op.name for op in plain.ops}]
    assert [(op.name, op.kind, op.phase) for op in added] == [
        ("flat.transform", "layout.transform", "forward"),
        ("flat.transform_grad", "layout.transform", "backward"),
    ]
    assert Program.from_json(program.to_json()) == program
    assert program.digest() != plain.digest()


def test_a_network_that_flattens_single_pixels_moves_nothing() -> None:
    program = lower(build("resnet18", image_size=64, classes=10), 2, layout="NHWC")
    assert not [op for op in program.ops if op.kind == "layout.transform"]
    across = lower(build("resnet18", image_size=64, classes=10), 2, layout="CHWN")  # vectors are (N, C), pixels (C, N)
    assert [op.phase for op in across.ops if op.kind == "layout.transform"] == ["forward", "backward"]


# ---- every layer kind, against NCHW


def outcome(graph: Graph, layout: str, dtype: str, indices: bool, algorithm: int) -> Run:
    program = lower(graph, 4, update=UPDATE, dtype=dtype, layout=layout, pool_indices=indices)
    run = Run(program, seed=3, algorithm=algorithm)
    for phase in PHASES:
        run.run(phase)
    return run


def assert_agree(graph: Graph, indices: bool = False, algorithm: int = 0) -> None:
    """In float64, to 1e-12: losses, scores, and all gradients of weights and weights after the update."""
    plain = outcome(graph, "NCHW", "float64", indices, algorithm)
    roles = ("weight", "wgrad", "state", "loss")
    names = [s.name for s in plain.program.tensors.values() if s.role in roles or s.name.endswith(".probs")]
    for layout in OTHERS:
        other = outcome(graph, layout, "float64", indices, algorithm)
        for name in names:
            wanted = plain.storages[name]
            scale = max(1.0, float(np.abs(wanted.astype(np.float64)).max()))
            message = f"{name}, {layout}"
            np.testing.assert_allclose(other.storages[name], wanted, rtol=0, atol=1e-12 * scale, err_msg=message)


@pytest.mark.parametrize("layers", ONE_LAYER.values(), ids=ONE_LAYER)
def test_layers_agree(layers: list[Layer]) -> None:
    for algorithm in (0, 1):
        assert_agree(between(*layers), algorithm=algorithm)
    assert_agree(between(*layers, Relu()), indices=True)


@pytest.mark.parametrize("graph", GRAPHS)
def test_forks_and_joins_agree(graph: Callable[[], Graph]) -> None:
    assert_agree(graph())
    assert_agree(graph(), indices=True)


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("graph", GRAPHS[:3])
def test_gradients_are_central_differences(graph: Callable[[], Graph], layout: str) -> None:
    check_gradients(graph(), layout=layout)
    check_gradients(graph(), layout=layout, fuse=True)


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("graph", [*GRAPHS, lambda: between(*ONE_LAYER["lrn"], Flatten())])
def test_each_op_alone_in_float32(graph: Callable[[], Graph], layout: str) -> None:
    """On the same operands sums agree to 1e-6 of the largest number, what only moves or compares numbers to the bit."""
    programs = [lower(graph(), 4, update=UPDATE, layout=name) for name in ("NCHW", layout)]
    plain, other = (Run(program, seed=3) for program in programs)
    ops = {op.name: (op, arrays) for op, arrays in plain.ops}
    for op, arrays in other.ops:
        if op.name not in ops:  # a transform
            Run.launch(op, arrays)
            continue
        twin, wanted = ops[op.name]
        if op.accumulate != twin.accumulate:  # the transform adds in its place
            Run.launch(twin, wanted)
            Run.launch(op, arrays)
            continue
        for argument in (*op.reads, *op.accumulate):
            arrays[argument][...] = wanted[argument].reshape(arrays[argument].shape)  # a Flatten may have become an op
        Run.launch(twin, wanted)
        Run.launch(op, arrays)
        for argument in op.writes:
            check(op, argument, arrays[argument], wanted)


def check(op: Op, argument: str, got: Array, operands: Mapping[str, Array]) -> None:
    wanted = operands[argument]
    largest = max(float(np.abs(operands[name]).max()) for name in (*op.reads, argument) if name != "step")
    tolerance = 1e-6 * largest if op.kind.startswith(SUMS) else 0.0
    np.testing.assert_allclose(got.reshape(wanted.shape), wanted, 0, tolerance, err_msg=f"{op.name}, {argument}")


# ---- whole networks


SMALL_IMAGES = ("network.image_size=64", "network.classes=10", "optimizer.lr=0.0003", "train.batch_size=4")
NETWORKS: dict[str, tuple[str, ...]] = {
    "lenet": ("network.dropout=0.5", "optimizer.lr=0.02", "train.batch_size=16"),
    "alexnet": ("network.classes=10", "optimizer.lr=0.003", "train.batch_size=2", "data.train_images=10"),
    "googlenet": (*SMALL_IMAGES, "network.dropout=0.5"),
    "resnet18": SMALL_IMAGES,
}


ROUNDING = {"resnet18": 1e-4}
"""What batch norm of four images makes of rounding in five steps; in float64 the layouts agree to 1e-12 (below)."""


class Silent:
    """A listener that hears nothing."""

    def note(self, text: str) -> None:
        pass

    def step(self, info: Any) -> None:
        pass

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        pass


def losses(folder: Path, network: str, *overrides: str, recorded: Algorithms | None = None) -> list[float]:
    """Of five steps, with the algorithms that an earlier run has recorded."""
    folder.mkdir(parents=True)
    base = ("data.train_images=80", "data.test_images=2", "data.source=synthetic", "device=cpu", "memory.limit=null")
    config = load_config(network, [*base, "evaluate.batch_size=2", *NETWORKS[network], *overrides])
    prepared = prepare(config, recorded)
    assert prepared.plans.notes == ()
    made = Trainer(prepared, RunFolder(folder), Silent())
    found, size = [], config.train.batch_size
    try:
        made.start()
        for step in range(5):
            images, labels = (
                getattr(prepared.source.train, what)(np.arange(step * size, (step + 1) * size))
                for what in ("images", "labels")
            )
            found.append(made.train_step(images, labels, config.optimizer.lr, None)[0])
            made.step += 1
    finally:
        prepared.backend.close()
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_five_losses_agree(tmp_path: Path, network: str) -> None:
    plain = losses(tmp_path / "nchw", network)
    assert len({f"{loss:.3f}" for loss in plain}) > 1
    for layout in map(str.lower, OTHERS):
        other = losses(tmp_path / layout, network, f"memory.layout={layout}")
        np.testing.assert_allclose(other, plain, rtol=ROUNDING.get(network, 1e-5), err_msg=layout)


@pytest.mark.parametrize("network", ["resnet18", "googlenet"])
def test_whole_networks_agree_in_float64(network: str) -> None:
    """So that what five steps differ by in float32 is rounding."""
    graph, runs = build(network, image_size=64, classes=10), {}
    for layout in ("NCHW", *OTHERS):
        program = lower(graph, 3, update=UPDATE, dtype="float64", layout=layout, pool_indices=True, fuse=True)
        runs[layout] = run = Run(program, seed=3)
        run.run("forward")
        run.run("backward")
    plain = runs.pop("NCHW")
    for layout, run in runs.items():
        assert abs(run.loss() - plain.loss()) < 1e-12, layout
        for spec in plain.program.tensors.values():
            if spec.role == "wgrad":
                wanted = plain.storages[spec.name]
                tolerance = 1e-12 * float(np.abs(wanted).max())
                np.testing.assert_allclose(run.storages[spec.name], wanted, 0, tolerance, err_msg=spec.name)


@pytest.mark.parametrize("layout", OTHERS)
def test_policies_give_equal_bits(tmp_path: Path, layout: str) -> None:
    options = (f"memory.layout={layout.lower()}", "train.accumulate=2")
    first = losses(tmp_path / "none", "lenet", *options, "memory.policy=none")
    for policy in ("base", "all", "conv", "dyn"):
        order = "debug.stream_order=[in, out, compute]"
        again = losses(tmp_path / policy, "lenet", *options, f"memory.policy={policy}", "debug.poison=true", order)
        assert again == first, policy


@pytest.mark.parametrize(
    ("layout", "algorithms"), [("NHWC", ("GEMM_BATCH", "GEMM_TILE")), ("CHWN", ("GEMM_WIDE", "GEMM_WIDE_TILE"))]
)
def test_slices_of_a_batch_agree(tmp_path: Path, layout: str, algorithms: tuple[str, str]) -> None:
    options = (f"memory.layout={layout.lower()}", "memory.policy=dyn")
    parts = describe(zip((9, 7), algorithms, strict=True))
    ops = ("conv1.forward", "conv2.forward", "conv2.wgrad", "conv2.dgrad")
    recorded = {f"train/16/{layout}": dict.fromkeys(ops, parts)}
    sliced = losses(tmp_path / "sliced", "lenet", *options, recorded=recorded)
    np.testing.assert_allclose(sliced, losses(tmp_path / "whole", "lenet", *options), rtol=1e-5)


# ---- the command line, and checkpoints


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def test_a_checkpoint_of_one_layout_goes_on_in_the_other(tmp_path: Path) -> None:
    options = (*SMALL, "--epochs", "1", "-o", "schedule={name: constant}")
    names = ("nchw", "nhwc", "chwn")
    half = {name: [*options, "--iterations", "9", "--layout", name, "--output", name] for name in names}
    for arguments in half.values():
        assert train(tmp_path, *arguments).code == 0
    kept = {name: read_tensors(newest(tmp_path / name) / "weights.safetensors") for name in half}
    for layout in names[1:]:
        assert kept["nchw"].keys() == kept[layout].keys()
        for name, wanted in kept["nchw"].items():
            tolerance = 1e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(kept[layout][name], wanted, rtol=0, atol=tolerance, err_msg=name)
    ends = {}
    for name, other in (("nchw", "nhwc"), ("nhwc", "chwn"), ("chwn", "nchw"), ("nhwc", "nhwc")):
        output = f"{name}-{other}"
        copytree(tmp_path / name, tmp_path / output)  # a resumed run goes on in the folder of its checkpoint
        source = newest(tmp_path / output)
        ended = train(tmp_path, *options, "--layout", other, "--resume", source)
        assert ended.code == 0, ended.error
        ends[output] = read_tensors(newest(tmp_path / output) / "weights.safetensors")
        recorded = load_state(newest(tmp_path / output))["algorithms"]
        assert recorded
        ending = {"nchw": "", "nhwc": "/NHWC", "chwn": "/CHWN"}[other]
        assert all(plan.partition("/")[2].lstrip("0123456789") == ending for plan in recorded)
    for name, wanted in ends["nhwc-nhwc"].items():
        for output in ("nchw-nhwc", "nhwc-chwn", "chwn-nchw"):
            np.testing.assert_allclose(ends[output][name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("layout", [name.lower() for name in OTHERS])
def test_lenet_learns_in_another_layout(tmp_path: Path, layout: str) -> None:
    ended = train(tmp_path, "lenet", "--layout", layout, "--iterations", "60", "--output", "run")
    assert ended.code == 0, ended.error
    accuracy = re.search(r"test accuracy ([\d.]+)%", ended.out)
    assert accuracy is not None
    assert float(accuracy[1]) > 80
    assert f"layout: {layout}" in (tmp_path / "run" / "config.yaml").read_text()


def test_plans_in_nhwc_say_that_profiles_know_nchw(tmp_path: Path) -> None:
    ended = script(
        "vdnn", "plan", "alexnet", "-b", "8", "--layout", "nhwc", "--profile", "h200", "--json", cwd=tmp_path
    )
    assert ended.code == 0
    assert ended.error.count("note: layout nhwc is planned, but profiles know NCHW") == 1
    rows = {row["layer"]: row for row in json.loads(ended.out)["layers"]}
    assert rows["flat"]["time_ms"] > 0  # a transform is timed like any op
    wrong = script("vdnn", "plan", "alexnet", "--layout", "hwcn", cwd=tmp_path)
    refused(wrong, 2, "--layout: expected auto, nchw, nhwc, chwn, study or shortest")
