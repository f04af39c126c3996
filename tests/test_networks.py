"""The networks against what is published of them: parameters, map sizes, and the vDNN paper's bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from math import prod

import pytest

from vdnn.errors import ConfigError, ShapeError
from vdnn.layers import BatchNorm, Conv, Dropout, Graph, Pool, Program, SoftmaxLoss, lower
from vdnn.networks import NETWORKS, build, options

MIB = 2**20
MODES = ("train", "eval", "first", "middle", "last")

TORCHVISION_PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet_bn": 6_624_904,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
"""As torchvision's documentation lists them; googlenet without auxiliary heads."""

OTHER_PARAMETERS = {
    # Caffe's LeNet example: (25+1)*20 + (500+1)*50 + (800+1)*500 + 501*10
    "lenet": 431_080,
    # (75+1)*32 + (800+1)*32 + (800+1)*64 + (1024+1)*10
    "cifar10": 89_578,
    # the BVLC GoogLeNet without its auxiliary heads
    "googlenet": 6_998_552,
    # five convolutions, then 9216-4096-4096-1000
    "zfnet": (147 + 1) * 96 + (2400 + 1) * 256 + (2304 + 1) * 384 + (3456 + 1) * 384 + (3456 + 1) * 256 + 58_631_144,
    # six convolutions, then 25600-4096-4096-1000
    "overfeat": (147 + 1) * 96
    + (96 * 49 + 1) * 256
    + (256 * 9 + 1) * 512
    + (512 * 9 + 1) * (512 + 1024)
    + (1024 * 9 + 1) * 1024
    + (25600 + 1) * 4096
    + (4096 + 1) * (4096 + 1000),
}


@pytest.mark.parametrize(("name", "expected"), [*TORCHVISION_PARAMETERS.items(), *OTHER_PARAMETERS.items()])
def test_parameter_counts_are_the_published_ones(name: str, expected: int) -> None:
    assert build(name).parameter_count() == expected


def test_auxiliary_heads_add_the_published_parameters() -> None:
    # (512+1)*128 and (528+1)*128 for the 1x1 convolutions, then 2048-1024-1000 twice
    heads = 513 * 128 + 529 * 128 + 2 * (2049 * 1024 + 1025 * 1000)
    assert build("googlenet", aux_heads=True).parameter_count() == 6_998_552 + heads == 13_378_280


SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "lenet": {"conv1": (20, 24, 24), "pool1": (20, 12, 12), "conv2": (50, 8, 8), "pool2": (50, 4, 4), "fc3": (500,)},
    "cifar10": {"pool1": (32, 16, 16), "pool2": (32, 8, 8), "pool3": (64, 4, 4), "fc4": (10,)},
    "alexnet": {
        "conv1": (64, 55, 55),
        "pool1": (64, 27, 27),
        "conv2": (192, 27, 27),
        "pool2": (192, 13, 13),
        "conv3": (384, 13, 13),
        "pool5": (256, 6, 6),
        "fc8": (1000,),
    },
    "zfnet": {  # figure 3 of the paper
        "conv1": (96, 110, 110),
        "pool1": (96, 55, 55),
        "conv2": (256, 26, 26),
        "pool2": (256, 13, 13),
        "conv5": (256, 13, 13),
        "pool5": (256, 6, 6),
    },
    "overfeat": {  # table 3: inputs of 221, 36, 15 and 5 pixels
        "conv1": (96, 108, 108),
        "pool1": (96, 36, 36),
        "conv2": (256, 30, 30),
        "pool2": (256, 15, 15),
        "conv6": (1024, 15, 15),
        "pool6": (1024, 5, 5),
    },
    "googlenet": {  # table 1
        "conv1": (64, 112, 112),
        "pool1": (64, 56, 56),
        "conv2": (192, 56, 56),
        "pool2": (192, 28, 28),
        "inception_3a": (256, 28, 28),
        "inception_3b": (480, 28, 28),
        "inception_4a": (512, 14, 14),
        "inception_4d": (528, 14, 14),
        "inception_4e": (832, 14, 14),
        "inception_5b": (1024, 7, 7),
        "pool5": (1024, 1, 1),
    },
    "googlenet_bn": {"pool3": (480, 14, 14), "pool4": (832, 7, 7), "inception_5b": (1024, 7, 7)},
    "vgg16": {"pool1": (64, 112, 112), "conv3_3": (256, 56, 56), "conv5_3": (512, 14, 14), "pool5": (512, 7, 7)},
    "vgg416": {"conv1_82": (64, 224, 224), "conv5_84": (512, 14, 14), "pool5": (512, 7, 7)},
    "resnet18": {"layer1_1_relu": (64, 56, 56), "layer4_1_relu": (512, 7, 7)},
    "resnet50": {
        "conv1": (64, 112, 112),
        "pool1": (64, 56, 56),
        "layer1_2_relu": (256, 56, 56),
        "layer2_0_conv1": (128, 56, 56),
        "layer2_0_conv2": (128, 28, 28),
        "layer2_3_relu": (512, 28, 28),
        "layer3_5_relu": (1024, 14, 14),
        "layer4_2_relu": (2048, 7, 7),
        "pool5": (2048, 1, 1),
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_maps_have_the_published_sizes(name: str) -> None:
    graph = build(name)
    assert {tensor: graph.shape(tensor) for tensor in SIZES[name]} == SIZES[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vgg16", 13),
        ("vgg19", 16),
        ("vgg116", 116),
        ("vgg216", 216),
        ("vgg316", 316),
        ("vgg416", 416),
        ("overfeat", 6),
        ("googlenet", 57),
        ("resnet18", 20),
        ("resnet50", 53),
        ("resnet101", 104),
        ("resnet152", 155),
    ],
)
def test_numbers_of_convolutions(name: str, count: int) -> None:
    assert sum(node.layer.kind == "conv" for node in build(name).nodes.values()) == count


# ---- lowering


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_every_network_lowers_in_every_mode(name: str, mode: str) -> None:
    graph = build(name)
    program = lower(graph, 2, mode)  # validates itself
    updated = [op.writes["w"] for op in program.ops if op.kind == "sgd.update"]
    trainable = [
        f"{node.name}.{p.suffix}" for node in graph.nodes.values() for p in graph.parameters(node) if p.trainable
    ]
    assert sorted(updated) == (sorted(trainable) if mode in ("train", "last") else [])
    assert (program.loss, program.correct) == ("loss.loss", "loss.correct")
    assert prod(program.tensors["loss.probs"].shape) == 2 * graph.classes


def test_the_deepest_network_lowers_well_within_a_second() -> None:
    graph = build("vgg416")
    start = time.perf_counter()
    lower(graph, 32)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("name", NETWORKS)
def test_training_copies_nothing(name: str) -> None:
    """Concatenations and residual sums need no copy, neither of values nor of gradients."""
    kinds = Counter(op.kind for op in lower(build(name), 2).ops)
    assert kinds["copy.forward"] == 0


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_sums_are_in_place_and_their_gradient_is_shared(name: str) -> None:
    graph = build(name)
    program = lower(graph, 2)
    last = "bn2" if name == "resnet18" else "bn3"
    for block in (node.name.removesuffix("_add") for node in graph.nodes.values() if node.layer.kind == "add"):
        # bn, sum and ReLU: one storage
        assert program.storage(f"{block}_add") == program.storage(f"{block}_relu") == f"{block}_{last}"
        # the gradient of the sum lies over that of its ReLU, and is that of both terms
        backward = {op.name: op for op in program.ops if op.layer.startswith(block)}
        relu = backward[f"{block}_relu.backward"]
        dy = relu.writes["dx"]
        assert program.storage(dy) == program.storage(relu.reads["dy"])
        assert backward[f"{block}_{last}.backward"].reads["dy"] == dy
        assert f"{block}_{last}.grad" not in program.tensors
        if f"{block}_downsample_bn" in graph.nodes:
            assert backward[f"{block}_downsample_bn.backward"].reads["dy"] == dy
        else:  # the first convolution adds its term to the shortcut's
            dgrad = backward[f"{block}_conv1.dgrad"]
            assert dgrad.accumulate == ("dx",)
            assert dgrad.writes["dx"] == dy


def test_inception_branches_write_into_their_concatenation() -> None:
    program = lower(build("googlenet"), 2)
    branches = [("1x1", 0, 64), ("3x3", 64, 128), ("5x5", 192, 32), ("pool_proj", 224, 32)]  # 3a, table 1
    for label, channel, channels in branches:
        for tensor in (f"inception_3a_{label}", f"inception_3a_{label}_relu"):
            spec = program.tensors[tensor]
            assert (spec.storage, spec.channel, spec.shape[1]) == ("inception_3a", channel, channels)


# ---- bytes of the vDNN paper


def unique_mib(program: Program, tensors: Iterable[str]) -> float:
    return sum(program.tensors[s].nbytes for s in {program.storage(t) for t in tensors}) / MIB


@pytest.mark.parametrize(
    ("name", "batch", "all_mib", "conv_mib"),
    [
        ("alexnet", 128, 349, 165),
        ("overfeat", 128, 1157, 385),
        ("googlenet", 128, 2341, 1367),
        ("vgg19", 64, 4030, 2536),
        ("vgg19", 128, 8060, 5072),
        ("vgg19", 256, 16121, 10143),
    ],
)
def test_offloadable_bytes_are_those_of_the_vdnn_paper(name: str, batch: int, all_mib: int, conv_mib: int) -> None:
    """X of the convolutions, the images included, and of the pools (MICRO'16, figure 12), each storage once."""
    program = lower(build(name), batch)
    x = {kind: [op.reads["x"] for op in program.ops if op.kind == f"{kind}.forward"] for kind in ("conv", "pool")}
    assert unique_mib(program, x["conv"]) == pytest.approx(conv_mib, rel=0.005)
    assert unique_mib(program, x["conv"] + x["pool"]) == pytest.approx(all_mib, rel=0.005)


@pytest.mark.parametrize(
    ("name", "batch", "mib"),
    [("vgg19", 64, 4029), ("vgg19", 128, 8077), ("vgg19", 256, 16154), ("vgg216", 32, 31923), ("overfeat", 128, 1176)],
)
def test_feature_maps_are_those_of_the_vdnn_paper(name: str, batch: int, mib: int) -> None:
    """Figure 4: images and one Y per layer, ReLU in place, no dropout."""
    program = lower(build(name, dropout=0.0), batch)
    acts = [t for t, spec in program.tensors.items() if spec.role == "act"]
    assert unique_mib(program, acts) == pytest.approx(mib, rel=0.005)


# ---- what is particular


def test_auxiliary_heads_come_before_the_loss_and_only_in_training() -> None:
    graph = build("googlenet", aux_heads=True, label_smoothing=0.1)
    losses = {node.name: node.layer for node in graph.nodes.values() if isinstance(node.layer, SoftmaxLoss)}
    assert list(losses) == ["loss_aux1", "loss_aux2", "loss"]
    assert [layer.weight for layer in losses.values()] == [0.3, 0.3, 1.0]
    assert {layer.label_smoothing for layer in losses.values()} == {0.1}
    assert graph.loss.name == "loss"
    assert graph.shape("pool_aux1") == (512, 4, 4)
    assert graph.shape("pool_aux2") == (528, 4, 4)
    assert [graph.nodes[f"drop_aux{i}_1"].layer for i in (1, 2)] == [Dropout(0.7)] * 2
    for mode in MODES:
        fetched = {t for t in lower(graph, 1, mode).fetches if t.endswith(".loss")}
        assert fetched == ({"loss.loss"} if mode == "eval" else {f"{name}.loss" for name in losses})


def test_googlenet_bn_is_torchvisions() -> None:
    graph = build("googlenet_bn")
    convs = [node.layer for node in graph.nodes.values() if isinstance(node.layer, Conv)]
    norms = [node.layer for node in graph.nodes.values() if isinstance(node.layer, BatchNorm)]
    assert len(convs) == len(norms) == 57
    assert {norm.eps for norm in norms} == {0.001}
    assert Counter(conv.kernel for conv in convs) == {7: 1, 3: 1 + 9 * 2, 1: 1 + 9 * 4}
    assert not any(conv.bias for conv in convs)
    pools = {node.name: node.layer for node in graph.nodes.values() if isinstance(node.layer, Pool)}
    assert pools["pool4"] == Pool("max", 2, stride=2, ceil_mode=True)


def test_resnet_weights_start_as_torchvisions() -> None:
    def inits(graph: Graph, suffix: str) -> Counter[tuple[str, str]]:
        found = (
            (n.layer.kind, p.init) for n in graph.nodes.values() for p in graph.parameters(n) if p.suffix == suffix
        )
        return Counter(found)

    assert inits(build("resnet18"), "weight") == {
        ("conv", "kaiming_fan_out"): 20,
        ("batchnorm", "ones"): 20,
        ("linear", "normal:0.01"): 1,
    }
    assert inits(build("resnet18", zero_init_residual=True), "weight")["batchnorm", "zeros"] == 8
    assert inits(build("resnet18"), "bias") == {("batchnorm", "zeros"): 20, ("linear", "zeros"): 1}


@pytest.mark.parametrize("name", NETWORKS)
def test_common_options(name: str) -> None:
    size = options(name)["image_size"] + 32
    graph = build(name, classes=7, image_size=size, dropout=0.25, label_smoothing=0.1)
    assert graph.input_shape[1:] == (size, size)
    assert graph.shape(graph.loss.inputs[0]) == (7,)
    assert graph.loss.layer == SoftmaxLoss(label_smoothing=0.1)
    assert list(graph.nodes)[-1] == "loss"
    assert Dropout(0.25) in [node.layer for node in graph.nodes.values()]
    without = build(name, classes=7, image_size=size, dropout=0.0)
    assert "dropout" not in {node.layer.kind for node in without.nodes.values()}
    assert without.parameter_count() == graph.parameter_count()


# ---- errors


def test_unknown_network_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown network 'resnet51'.*did you mean 'resnet50'\?") as caught:
        build("resnet51")
    assert caught.value.exit_code == 2


def test_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        build("lenet", class_=10)
    assert "network 'lenet' has no option 'class_'" in str(caught.value)
    assert "classes, image_size, channels, dropout, label_smoothing" in str(caught.value)
    assert (caught.value.key, caught.value.nearest) == ("network.class_", "classes")
    with pytest.raises(ConfigError, match="has no option 'name'"):
        build("vgg16", name="vgg19")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("classes", "10", "a whole number, got '10'"),
        ("classes", 10.0, "a whole number, got 10.0"),
        ("classes", True, "a whole number, got True"),
        ("dropout", "0.5", "a number, got '0.5'"),
        ("dropout", False, "a number, got False"),
        ("dropout", None, "a number, got None"),
        ("aux_heads", 1, "true or false, got 1"),
    ],
)
def test_options_of_a_wrong_type(option: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"option '{option}' of network 'googlenet' must be {expected}"):
        build("googlenet", **{option: value})


@pytest.mark.parametrize("value", [10**5 + 1, 10**12, 10**27, -(10**27)])
@pytest.mark.parametrize("option", ["image_size", "channels"])
def test_sizes_that_no_machine_has_are_refused_at_once(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"'{option}' of network 'lenet' must be a whole number up to 100,000"):
        build("lenet", **{option: value})
    with pytest.raises(ConfigError, match="a whole number up to 10,000,000"):
        build("lenet", classes=10**29)


@pytest.mark.parametrize(
    ("name", "chosen", "text"),
    [
        ("alexnet", {"image_size": 32}, "layer 'pool5', tensor 'x': expected at least 3 rows"),
        ("lenet", {"classes": 0}, "expected sizes of 1 or more"),
        ("lenet", {"image_size": -1}, "expected sizes of 1 or more"),
        ("vgg16", {"dropout": 1.0}, "layer 'drop6', tensor 'y': expected p from 0"),
        ("vgg16", {"dropout": -0.5}, "layer 'drop6', tensor 'y': expected p from 0"),
        ("vgg16", {"label_smoothing": 1.0}, "layer 'loss', tensor 'y': expected label_smoothing"),
    ],
)
def test_options_out_of_range(name: str, chosen: dict[str, float], text: str) -> None:
    with pytest.raises(ShapeError) as caught:
        build(name, **chosen)
    assert text in str(caught.value)
    assert caught.value.exit_code == 2
