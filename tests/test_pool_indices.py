"""Pools that write their winners down: losses and weights are the same bits, and what is kept for backward is less.

The other form, in which backward reads x and y, is checked against loops and finite differences elsewhere.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from interpreter import Run
from plan_lab import Lab, Machine, narrowed, reference

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
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)
from vdnn.layers.op import PHASES
from vdnn.memory.liveness import storage_uses
from vdnn.memory.plan import CopyOut
from vdnn.networks import NETWORKS, build
from vdnn.runtime.backends.cpu.backend import CpuBackend
from vdnn.runtime.prepare import backend_costs

SGD = Update(momentum=0.9, weight_decay=5e-4)


class Net(Graph):
    """Images of 2x13x12; `head` closes the network."""

    def __init__(self) -> None:
        super().__init__("net", (2, 13, 12), classes=3)

    def conv(self, x: str, name: str, channels: int = 4) -> str:
        return self.add(name, Conv(channels, 3, padding=1), x)

    def relu(self, x: str, name: str, channels: int = 4) -> str:
        return self.add(f"{name}_relu", Relu(), self.conv(x, name, channels))

    def head(self, *tensors: str) -> Net:
        flat = [self.add(f"flat_{t}", Flatten(), t) for t in tensors]
        x = self.add("join", Concat(), flat) if len(flat) > 1 else flat[0]
        self.add("loss", SoftmaxLoss(), self.add("fc", Linear(3), x))
        return self


def both(graph: Graph, mode: str = "train", batch: int = 3, dtype: str = "float32") -> tuple[Program, Program]:
    """Without indices and with them."""
    plain, indexed = (lower(graph, batch, mode, update=SGD, dtype=dtype, pool_indices=on) for on in (False, True))
    return plain, indexed


def equal_after_steps(graph: Graph, batch: int = 3, steps: int = 2, dtype: str = "float32") -> bool:
    """Whether losses and everything that persists are the same bits in both forms after each of `steps`."""
    runs = [Run(program, 5, algorithm=1) for program in both(graph, batch=batch, dtype=dtype)]
    for _ in range(steps):
        for run in runs:
            for phase in PHASES:
                run.run(phase)
        one, two = runs
        names = [
            name for name in one.storages if name in one.program.persistent or name.endswith(("loss", "weight.grad"))
        ]
        assert any(name.endswith("weight.grad") for name in names)
        if any(one.storages[name].tobytes() != two.storages[name].tobytes() for name in names):
            return False
        assert all(np.isfinite(one.storages[name]).all() for name in names if name != "step")
    return True


def folded(graph: Graph) -> set[str]:
    """ReLUs without a backward op of their own."""
    program = both(graph)[1]
    own = {op.layer for op in program.ops if op.kind == "relu.backward"}
    return {node.name for node in graph.nodes.values() if isinstance(node.layer, Relu)} - own


def masking(graph: Graph) -> set[str]:
    """Pools whose backward reads their y."""
    return {op.layer for op in both(graph)[1].ops if op.kind == "pool.backward" and "y" in op.reads}


# ---- the same bits

WINDOWS = {
    "2x2": Pool("max", 2),
    "overlapping": Pool("max", 3, stride=2),
    "ceil": Pool("max", 3, stride=2, ceil_mode=True),
    "padded": Pool("max", 3, stride=2, padding=1),
    "same": Pool("max", 3, stride=1, padding=1),
    "uneven": Pool("max", (3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True),
    "gaps": Pool("max", 1, stride=2),
    "global": Pool("max", "global"),
    "average": Pool("average", 3, stride=2),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("pool", WINDOWS.values(), ids=WINDOWS)
def test_conv_relu_pool(pool: Pool, dtype: str) -> None:
    net = Net()
    x = net.add("pool", pool, net.relu(net.relu(net.input, "a"), "b"))
    net.head(net.conv(x, "c"))
    assert folded(net) == ({"b_relu"} if pool.mode == "max" else set())
    assert equal_after_steps(net, dtype=dtype)


@pytest.mark.parametrize(
    ("network", "options", "narrow"),
    [
        ("lenet", {}, 1),
        ("alexnet", {"image_size": 64, "classes": 10}, 4),
        ("googlenet", {"image_size": 64, "classes": 10}, 4),
        ("vgg16", {"image_size": 32, "classes": 10}, 8),
        ("resnet18", {"image_size": 64, "classes": 10}, 8),
    ],
    ids=str,
)
def test_networks(network: str, options: dict[str, int], narrow: int) -> None:
    graph = narrowed(build(network, **options), narrow)
    assert equal_after_steps(graph, batch=2)


@pytest.mark.parametrize("network", ["lenet", "googlenet"])
def test_plans_give_what_the_other_form_gives(network: str) -> None:
    """Planned, verified and run in the worst order of streams, against the other form op by op."""
    options = {} if network == "lenet" else {"image_size": 64, "classes": 10}
    lab = Lab(network, 1, steps=2, narrow=1 if network == "lenet" else 4, **options)
    expected = reference(lab, lab.case("none"))
    lab.program = lower(lab.graph, 1, update=SGD, ahead=bool(lab.program.ahead), pool_indices=True)
    lab.costs = backend_costs(CpuBackend(), lab.program)
    cases = [lab.case(policy, tight=True) for policy in ("base", "none", "all", "dyn")]
    assert any(isinstance(step, CopyOut) for step in cases[2].plan.steps)
    machine = Machine(lab, cases, ("out", "in", "compute"))
    for case in cases:
        assert machine.run(case, case.plan).equals(expected), case.name
    machine.close()


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    assert equal_after_steps(random_net(random.Random(seed)), batch=2, steps=1)


def random_net(rng: random.Random) -> Graph:
    """Layers on random earlier tensors, pools and ReLUs more often than others."""
    net = Net()
    tensors = [net.conv(net.input, "stem")]
    layers = [Relu(), Relu(), Lrn(size=3), Dropout(0.3), BatchNorm(), Pool("average", 2, ceil_mode=True)]
    layers += [pool for pool in WINDOWS.values() if pool.kernel != "global"] + [Pool("max", 3, stride=1, padding=1)] * 3
    for i in range(rng.randint(4, 12)):
        x = tensors[-1] if rng.random() < 0.6 else rng.choice(tensors)
        fits = [t for t in tensors if net.shape(t)[1:] == net.shape(x)[1:]]
        same = [t for t in fits if net.shape(t) == net.shape(x)]
        chance, name = rng.random(), f"n{i}"
        if chance < 0.25:
            tensors.append(net.relu(x, name, rng.randint(1, 4)) if rng.random() < 0.7 else net.conv(x, name))
        elif chance < 0.4:
            tensors.append(net.add(name, Concat(), [x, rng.choice(fits)]))
        elif chance < 0.5:
            tensors.append(net.add(name, Add(), [x, rng.choice(same)]))
        else:
            layer = rng.choice(layers)
            if isinstance(layer, Pool) and min(net.shape(x)[1:]) < 4:
                layer = Relu()
            tensors.append(net.add(name, layer, x))
    return net.head(*(t for t, consumers in net.consumers.items() if not consumers))


# ---- where the mask of a ReLU is left to the pool

POOL = Pool("max", 3, stride=2, padding=1)


def inception(*layers: str) -> tuple[Net, str]:
    """Branches "conv" or "relu", concatenated."""
    net = Net()
    stem = net.relu(net.input, "stem")
    branches = [getattr(net, layer)(stem, f"{layer}{i}") for i, layer in enumerate(layers)]
    return net, net.add("cat", Concat(), branches)


def test_a_concatenation_of_relus_is_masked_by_its_pool() -> None:
    net, cat = inception("relu", "relu", "relu")
    net.head(net.conv(net.add("pool", POOL, cat), "after"))
    assert folded(net) == {"relu0_relu", "relu1_relu", "relu2_relu"}
    program = both(net)[1]
    assert {program.storage(program.ops[i].reads["dy"]) for i in dgrads(program, "relu")} == {"cat.grad"}
    assert equal_after_steps(net)


def dgrads(program: Program, prefix: str) -> list[int]:
    """Places of the ops that give gradients of what branches read."""
    return [i for i, op in enumerate(program.ops) if op.kind == "conv.dgrad" and op.layer.startswith(prefix)]


def test_a_branch_without_a_relu_keeps_negative_winners() -> None:
    net, cat = inception("relu", "conv")
    net.head(net.add("pool", POOL, cat))
    assert folded(net) == set()
    assert equal_after_steps(net)


def test_two_concatenations_in_one_are_looked_through() -> None:
    net, cat = inception("relu", "relu")
    outer = net.add("outer", Concat(), [cat, net.relu("stem_relu", "third")])
    net.head(net.add("pool", POOL, outer))
    assert folded(net) == {"relu0_relu", "relu1_relu", "third_relu"}
    assert equal_after_steps(net)


def test_the_same_branch_twice_is_not_masked() -> None:
    net = Net()
    relu = net.relu(net.input, "a")
    net.head(net.add("pool", POOL, net.add("cat", Concat(), [relu, relu])))
    assert folded(net) == set()
    assert equal_after_steps(net)


def test_what_another_layer_reads_is_not_masked() -> None:
    for reader in (Conv(4, 1), POOL, Relu(), Flatten()):
        for shared in ("a", "a_relu", "cat"):
            net = Net()
            relu = net.relu(net.input, "a")
            cat = net.add("cat", Concat(), [relu, net.relu(net.input, "b")])
            ends = [net.add("pool", POOL, cat)]
            loose = net.add("other", reader, shared)
            ends += [net.conv(loose, "other_conv")] if not isinstance(reader, Flatten) else []
            for end in ends:
                net.add(f"flat_{end}", Flatten(), end)
            vectors = [f"flat_{end}" for end in ends] + ([loose] if isinstance(reader, Flatten) else [])
            net.add("loss", SoftmaxLoss(), net.add("fc", Linear(3), net.add("join", Concat(), vectors)))
            assert masking(net) <= {"other"}, (reader, shared)
            assert "a_relu" not in folded(net)
            assert equal_after_steps(net), (reader, shared)


def test_a_relu_on_the_images_gives_no_gradient_to_drop() -> None:
    net = Net()
    net.head(net.conv(net.add("pool", POOL, net.add("relu", Relu(), net.input)), "conv"))
    assert masking(net) == set()
    assert equal_after_steps(net)


def test_a_layer_in_place_over_y_leaves_the_mask_alone() -> None:
    net = Net()
    net.head(net.conv(net.add("drop", Dropout(0.4), net.add("pool", POOL, net.relu(net.input, "a"))), "after"))
    plain, indexed = both(net)
    assert plain.storage("drop") == indexed.storage("drop") == "drop"
    assert equal_after_steps(net)
    net = Net()  # without a ReLU below, y is not needed, and may be written over
    net.head(net.conv(net.add("relu", Relu(), net.add("pool", POOL, net.conv(net.input, "a"))), "after"))
    plain, indexed = both(net)
    assert (plain.storage("relu"), indexed.storage("relu")) == ("relu", "pool")
    assert equal_after_steps(net)


# ---- what is kept


def test_nothing_changes_unless_asked_for_and_never_in_evaluation() -> None:
    graph = build("vgg16")
    assert lower(graph, 2).digest() == lower(graph, 2, pool_indices=False).digest()
    assert lower(graph, 2, "eval").digest() == lower(graph, 2, "eval", pool_indices=True).digest()
    for mode in ("train", "first", "middle", "last"):
        assert "pool1.indices" in lower(graph, 2, mode, pool_indices=True).tensors


def test_a_byte_says_one_of_255_places() -> None:
    for size, fits in (((15, 17), True), ((16, 16), False)):
        assert Pool("max", size).can_index_winners((1, 20, 20)) is fits
        assert Pool("max", "global").can_index_winners((1, *size)) is fits
    assert not Pool("average", 2).can_index_winners((1, 4, 4))
    net = Graph("net", (1, 18, 18), classes=3)
    pools = net.add("wide", Pool("max", "global"), net.add("relu", Relu(), net.add("conv", Conv(4, 1), net.input)))
    net.add("loss", SoftmaxLoss(), net.add("fc", Linear(3), net.add("flat", Flatten(), pools)))
    plain, indexed = both(net)
    assert plain.digest() == indexed.digest()
    assert equal_after_steps(net)


def test_vgg_frees_the_map_before_each_pool() -> None:
    """Configuration E: 64x224x224, 128x112x112, 256x56x56, 512x28x28 and 512x14x14 numbers of four bytes an image."""
    plain, indexed = (storage_uses(program) for program in both(build("vgg19"), batch=1))
    maps = {f"conv{group}_{last}": 4 * c * side**2 for group, last, c, side in GROUPS}
    for name, nbytes in maps.items():
        assert plain[name].nbytes == indexed[name].nbytes == nbytes
        assert plain[name].backward_first is not None
        assert indexed[name].backward_first is None
    kept = {name for name, use in indexed.items() if use.backward_first is not None and use.forward_last is not None}
    before = {name for name, use in plain.items() if use.backward_first is not None and use.forward_last is not None}
    assert before - kept == set(maps)
    assert {name: indexed[name].nbytes for name in kept - before} == {
        f"pool{group}.indices": c * (side // 2) ** 2 for group, _, c, side in GROUPS
    } | {"pool5.indices": 25_088 // 256 * 256}


GROUPS = ((1, 2, 64, 224), (2, 2, 128, 112), (3, 4, 256, 56), (4, 4, 512, 28), (5, 4, 512, 14))


@pytest.mark.parametrize("network", sorted(set(NETWORKS) - {"vgg116", "vgg216", "vgg316", "vgg416"}))
def test_no_max_pool_reads_its_input_again(network: str) -> None:
    program = lower(build(network), 2, pool_indices=True)
    for op in program.ops:
        if op.kind == "pool.backward":
            assert "x" not in op.reads
            assert ("indices" in op.reads) is (op.attrs["mode"] == "max")
