"""Fused programs: what is left unfused, equal bits, gradients by finite differences, and the bytes they take."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import test_pool_indices
from interpreter import Run
from plan_lab import Lab, Machine, reference
from test_lower_random import random_graph
from test_trainer import trained

from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Linear,
    Pool,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)
from vdnn.layers.op import PHASES
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import MEMORY_OPTIMAL, Budget, make_plan
from vdnn.memory.schedule import live_bytes
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.networks.parts import conv_relu, hidden, scores
from vdnn.runtime.backends.cpu.backend import CpuBackend
from vdnn.runtime.prepare import backend_costs
from vdnn.runtime.profile import load_profile, model_costs

UPDATE = Update(momentum=0.9, nesterov=True, weight_decay=5e-4, decay_bias_and_norm=False)


def blank(size: int = 6) -> Graph:
    return Graph("case", (2, size, size), classes=3)


def finish(g: Graph, x: str) -> Graph:
    x = g.add("flat", Flatten(), x) if len(g.shape(x)) == 3 else x
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(3), x))
    return g


# ---- what is fused

FULLY = (
    "lenet",
    "cifar10",
    "alexnet",
    "zfnet",
    "overfeat",
    "vgg16",
    "googlenet",
    "googlenet_bn",
    "resnet18",
    "resnet50",
)


@pytest.mark.parametrize("network", FULLY)
def test_no_relu_and_no_sum_of_the_networks_is_left(network: str) -> None:
    graph = build(network)
    for mode in ("train", "eval"):
        plain, fused = (
            Counter(op.kind for op in lower(graph, 2, mode, pool_indices=True, fuse=fuse).ops) for fuse in (False, True)
        )
        assert plain["relu.forward"] > 0
        assert (fused["relu.forward"], fused["add.forward"]) == (0, 0)
        assert fused["copy.forward"] == plain["copy.forward"] == 0
        # what had a ReLU of its own has a mask in another op, but where a pool has dropped the gradient
        masks = sum("activation" in op.attrs and op.phase == "backward" for op in lower(graph, 2, mode, fuse=True).ops)
        masks += sum(op.kind == "relu.bias_backward" for op in lower(graph, 2, mode, fuse=True).ops)
        assert masks == (plain["relu.forward"] if mode == "train" else 0)


def kinds(g: Graph) -> list[tuple[str, str, bool]]:
    """Layer, kind and whether a ReLU is applied, of what is neither an update nor outside of the case."""
    program = lower(g, 2, fuse=True)
    ends = ("data", "fc", "loss")
    return [(op.layer, op.kind, "activation" in op.attrs) for op in program.ops if op.layer not in ends]


def test_a_relu_of_a_tensor_read_by_others_stays() -> None:
    g = blank()
    x = g.add("conv", Conv(2, 3, padding=1), g.input)
    finish(g, g.add("sum", Add(), [g.add("relu", Relu(), x), x]))
    assert kinds(g)[:3] == [
        ("conv", "conv.forward", False),
        ("relu", "relu.forward", False),
        ("sum", "add.forward", False),
    ]


def test_a_relu_may_have_several_readers() -> None:
    g = blank()
    x = g.add("relu", Relu(), g.add("conv", Conv(2, 3, padding=1), g.input))
    finish(g, g.add("cat", Concat(), [g.add("a", Conv(2, 1), x), g.add("b", Conv(2, 1), x)]))
    assert [row for row in kinds(g) if row[0] == "conv"] == [
        ("conv", "conv.forward", True),
        ("conv", "relu.bias_backward", False),
        ("conv", "conv.wgrad", False),
        ("conv", "sgd.update", False),
        ("conv", "sgd.update", False),
    ]


def test_a_relu_whose_pool_drops_the_gradient_needs_no_backward_op() -> None:
    g = blank()
    x = g.add("relu", Relu(), g.add("conv", Conv(2, 3, padding=1), g.input))
    finish(g, g.add("pool", Pool("max", 2), x))
    program = lower(g, 2, pool_indices=True, fuse=True)
    ops = {op.name: op for op in program.ops}
    assert ops["conv.forward"].attrs["activation"] == "relu"
    assert "conv.bgrad" in ops
    assert "conv.bias_backward" not in ops
    readers = [op.name for op in program.ops if "conv" in op.reads.values()]
    assert readers == ["pool.forward"]


def test_a_convolution_without_bias_masks_its_gradient_in_place() -> None:
    g = blank()
    x = g.add("relu", Relu(), g.add("conv", Conv(2, 3, bias=False), g.input))
    program = lower(finish(g, x), 2, fuse=True)
    op = next(op for op in program.ops if op.kind == "relu.backward")
    assert (op.name, op.layer) == ("conv.relu_backward", "conv")
    assert op.reads["y"] == "conv"
    assert program.storage(op.writes["dx"]) == program.storage(op.reads["dy"])


def test_a_branch_of_a_concatenation_is_masked_in_its_channels() -> None:
    g = blank()
    a, b = (g.add(f"relu_{n}", Relu(), g.add(n, Conv(2, 3, padding=1), g.input)) for n in "ab")
    program = lower(finish(g, g.add("after", Conv(2, 3), g.add("cat", Concat(), [a, b]))), 2, fuse=True)
    assert not [op for op in program.ops if op.kind.startswith(("copy", "concat"))]
    assert {(t.storage, t.channel) for t in (program.tensors[n] for n in "ab")} == {("cat", 0), ("cat", 2)}
    places = [program.tensors[op.writes["dx"]] for op in program.ops if op.kind == "relu.bias_backward"]
    assert [(t.storage, t.channel) for t in places] == [("cat.grad", 2), ("cat.grad", 0)]


def block(g: Graph, x: str, *, late: bool = False, relu: bool = True) -> str:
    """A residual block whose shortcut has a norm; the main branch comes after the shortcut if `late`."""

    def branch(name: str) -> str:
        return g.add(f"{name}_bn", BatchNorm(), g.add(name, Conv(2, 3, padding=1, bias=False), x))

    names = ("short", "main") if late else ("main", "short")
    made = {name: branch(name) for name in names}
    total = g.add("sum", Add(), [made["main"], made["short"]])
    return g.add("relu", Relu(), total) if relu else total


@pytest.mark.parametrize("late", [False, True])
def test_the_later_of_two_norms_takes_the_sum(late: bool) -> None:
    g = blank()
    x = g.add("stem", Conv(2, 3, padding=1), g.input)
    program = lower(finish(g, block(g, x, late=late)), 2, fuse=True)
    taker, other = ("main_bn", "short_bn") if late else ("short_bn", "main_bn")
    ops = {op.name: op for op in program.ops}
    assert ops[f"{taker}.forward"].reads["z"] == other
    assert ops[f"{taker}.forward"].attrs == {"eps": 1e-5, "activation": "relu"}
    back = ops[f"{taker}.backward"]
    assert back.reads["y"] == taker
    assert program.storage(back.writes["dz"]) == program.storage(back.reads["dy"])
    assert program.storage(back.writes["dx"]) != program.storage(back.reads["dy"])
    assert ops[f"{other}.backward"].reads["dy"] == back.writes["dz"]
    assert "activation" not in ops[f"{other}.backward"].attrs


def test_the_gradient_of_a_sum_without_relu_is_shared() -> None:
    g = blank()
    x = g.add("stem", Conv(2, 3, padding=1), g.input)
    program = lower(finish(g, block(g, x, relu=False)), 2, fuse=True)
    ops = {op.name: op for op in program.ops}
    assert "dz" not in ops["short_bn.backward"].writes
    assert ops["main_bn.backward"].reads["dy"] == ops["short_bn.backward"].reads["dy"]


def test_a_norm_adds_no_term_that_is_made_later_or_whose_gradient_gets_a_term_between() -> None:
    g = blank()
    x = g.add("stem", Conv(2, 3, padding=1), g.input)
    norm = g.add("bn", BatchNorm(), x)
    finish(g, g.add("sum", Add(), [norm, g.add("later", Conv(2, 1), g.input)]))
    assert ("sum", "add.forward", False) in kinds(g)
    g = blank()
    x = g.add("stem", Conv(2, 3, padding=1), g.input)
    norm = g.add("bn", BatchNorm(), g.add("c", Conv(2, 1), x))
    between = g.add("between", Conv(2, 1), x)
    finish(g, g.add("cat", Concat(), [g.add("sum", Add(), [norm, x]), between]))
    assert ("sum", "add.forward", False) in kinds(g)


def test_a_norm_with_relu_reads_no_output_in_backward() -> None:
    g = blank()
    x = g.add("relu", Relu(), g.add("bn", BatchNorm(), g.add("c", Conv(2, 3, bias=False), g.input)))
    program = lower(finish(g, x), 2, fuse=True)
    op = next(op for op in program.ops if op.kind == "batchnorm.backward")
    assert set(op.reads) == {"x", "dy", "weight", "bias", "mean", "invstd"}
    assert op.attrs["activation"] == "relu"


# ---- equal bits


def states(graph: Graph, batch: int, steps: int, **options: object) -> list[tuple[list[float], dict[str, bytes]]]:
    """Losses and all persistent bytes after `steps` steps: unfused and fused, each with both ways to update."""
    found = []
    for fuse in (False, True):
        for together in (False, True):
            program = lower(graph, batch, update=UPDATE, fuse=fuse, update_together=together, **options)  # type: ignore[arg-type]
            run, losses = Run(program, seed=3), []
            for _ in range(steps):
                for phase in PHASES:
                    run.run(phase)
                losses.append(run.loss())
            found.append((losses, {name: run.storages[name].tobytes() for name in sorted(program.persistent)}))
    return found


def check_equal(found: list[tuple[list[float], dict[str, bytes]]]) -> None:
    losses, weights = found[0]
    assert np.isfinite(losses).all()
    for other_losses, other in found[1:]:
        assert other_losses == losses
        assert [name for name in weights if weights[name] != other[name]] == []
        assert other.keys() == weights.keys()


def inceptions() -> Graph:
    """Two modules of GoogLeNet with batch normalisation, small."""
    g = Graph("inceptions", (3, 12, 12), classes=3)

    def unit(name: str, x: str, channels: int, kernel: int) -> str:
        x = g.add(name, Conv(channels, kernel, padding=kernel // 2, bias=False), x)
        return g.add(f"{name}_relu", Relu(), g.add(f"{name}_bn", BatchNorm(), x))

    x = g.add("pool", Pool("max", 3, stride=2), unit("stem", g.input, 8, 3))
    for m in ("a", "b"):
        pooled = g.add(f"{m}_pool", Pool("max", 3, stride=1, padding=1), x)
        branches = [unit(f"{m}1", x, 4, 1), unit(f"{m}2b", unit(f"{m}2a", x, 3, 1), 5, 3), unit(f"{m}3", pooled, 3, 1)]
        x = g.add(m, Concat(), branches)
    return finish(g, g.add("drop", Dropout(0.3), g.add("last", Pool("average", "global"), x)))


def vgg_like() -> Graph:
    """Groups of convolutions and pools, then linear layers with dropout, small."""
    g = Graph("vgg-like", (3, 16, 16), classes=3)
    x = g.input
    for group, filters in enumerate((4, 8, 8)):
        for i in range(2):
            x = conv_relu(g, f"{group}_{i}", x, Conv(filters, 3, padding=1))
        x = g.add(f"pool{group}", Pool("max", 2), x)
    x = hidden(g, "6", g.add("flat", Flatten(), x), 20, dropout=0.5)
    scores(g, "8", hidden(g, "7", x, 20, dropout=0.5), label_smoothing=0.1)
    return g


NETWORKS = {
    "lenet": lambda: build("lenet"),
    "resnet18": lambda: build("resnet18", image_size=32, classes=10),
    "inceptions": inceptions,
    "vgg": vgg_like,
    "block": lambda: finish(g := blank(), block(g, g.add("stem", Conv(2, 3, padding=1), g.input))),
    "block_late": lambda: finish(g := blank(), block(g, g.input, late=True)),
    "sum": lambda: finish(g := blank(), block(g, g.input, relu=False)),
}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("network", NETWORKS)
def test_fused_networks_and_updates_are_the_same_bits(network: str, layout: str) -> None:
    check_equal(states(NETWORKS[network](), 4, 3, pool_indices=layout == "NCHW", layout=layout))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("network", ["lenet", "inceptions"])
def test_a_relu_of_16_bit_numbers_is_the_same_bits_before_and_after_rounding(network: str, layout: str) -> None:
    """But for sums: a fused one is not rounded before the norm's result has been added."""
    check_equal(states(NETWORKS[network](), 4, 2, dtype="bfloat16", layout=layout, pad_channels=8))


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_sums_of_gradients_keep_their_order(first: int) -> None:
    for seed in range(first, first + 60):
        check_equal(states(random_graph(seed, fusible=0.7), 3, 1))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_pools_that_drop_gradients_for_fused_relus(first: int) -> None:
    for seed in range(first, first + 10):
        check_equal(states(test_pool_indices.random_net(Random(seed)), 2, 1, pool_indices=True))


@pytest.mark.parametrize(
    ("network", "options"),
    [("lenet", {}), ("resnet18", {"image_size": 64, "narrow": 4, "classes": 10})],
    ids=["lenet", "resnet18"],
)
def test_plans_of_fused_programs_give_what_unfused_ones_give(network: str, options: dict[str, int]) -> None:
    """Planned, verified and run in the worst order of streams, against the unfused program op by op."""
    lab = Lab(network, 2, steps=2, **options)
    expected = reference(lab, lab.case("none"))
    update = Update(momentum=0.9, weight_decay=5e-4)
    for together in (False, True):
        lab.program = lower(lab.graph, 2, update=update, ahead=True, fuse=True, update_together=together)
        lab.costs = backend_costs(CpuBackend(), lab.program)
        cases = [lab.case(policy, tight=True) for policy in ("base", "none", "all", "dyn")]
        machine = Machine(lab, cases, ("out", "in", "compute"))
        for case in cases:
            verify(case.program, case.plan)
            assert machine.run(case, case.plan).equals(expected), case.name
        machine.close()


def test_fusion_and_the_way_to_update_change_no_bit(tmp_path: Path) -> None:
    """Also where the update of all weights comes after slices of the batch, and where maps leave the device."""
    expected = trained(tmp_path / "plain", "memory.fuse=false", "memory.update=layer")[1:]
    for fuse, update, policy in (("true", "layer", "all"), ("true", "together", "none"), ("false", "together", "all")):
        options = (f"memory.fuse={fuse}", f"memory.update={update}", f"memory.policy={policy}")
        result, tensors = trained(tmp_path / f"{fuse}-{update}", *options)[1:]
        assert (result.loss, result.accuracy) == (expected[0].loss, expected[0].accuracy)
        assert all(np.array_equal(tensors[name], value) for name, value in expected[1].items())
    sliced = [
        trained(tmp_path / f"sliced-{update}", f"memory.update={update}", "train.accumulate=3")[2]
        for update in ("layer", "together")
    ]
    assert all(np.array_equal(sliced[1][name], value) for name, value in sliced[0].items())


# ---- bytes


@pytest.mark.parametrize("network", [name for name in FULLY if name != "resnet50"])
def test_a_fused_program_takes_no_more_bytes(network: str) -> None:
    """Under every policy: what is live at once exactly, what the places come to within a hundredth."""
    graph, profile = build(network), load_profile("titan-x-maxwell")
    for mode, policy in (("train", "base"), ("train", "none"), ("train", "conv"), ("train", "all"), ("eval", "none")):
        live, slabs, moved = [], [], []
        for fuse in (False, True):
            program = lower(graph, 4, mode, update=UPDATE, ahead=mode == "train", pool_indices=True, fuse=fuse)
            costs = model_costs(program, profile)
            decisions, plan = make_plan(program, costs, policy, Budget(algorithms=MEMORY_OPTIMAL))
            planned = apply_decisions(program, decisions)
            verify(planned, plan)
            live.append(max(live_bytes(planned, decisions.offload)))
            slabs.append(plan.slab_bytes)
            moved.append(plan.host_bytes)
        assert live[1] <= live[0], (mode, policy)
        assert slabs[1] <= 1.01 * slabs[0], (mode, policy)
        assert moved[1] <= moved[0], (mode, policy)


def test_a_gradient_is_no_view_of_channels_of_vectors() -> None:
    """Images behind a flatten and a ReLU take channels of a sum of vectors: their gradient needs bytes of its own."""
    for fuse in (False, True):
        g = blank()
        short = g.add("flat_a", Flatten(), g.add("a", Conv(2, 6), g.input))
        x = g.add("relu", Relu(), g.add("flat_b", Flatten(), g.add("b", Conv(2, 3), g.input)))
        program = lower(finish(g, g.add("join", Concat(), [short, x])), 2, fuse=fuse)
        decisions, plan = make_plan(program, backend_costs(CpuBackend(), program), "none", Budget())
        verify(apply_decisions(program, decisions), plan)
        assert program.tensors["b.grad"].view_of is None
