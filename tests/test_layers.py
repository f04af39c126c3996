"""The layer kinds and the graph: shape rules, error texts, parameters."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from vdnn.errors import ShapeError
from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Layer,
    Linear,
    Lrn,
    Pool,
    Relu,
    SoftmaxLoss,
    lower,
)

# ---- shapes, worked by hand

SHAPES = [
    (Conv(64, 11, stride=4, padding=2), [(3, 224, 224)], (64, 55, 55)),
    (Conv(8, (3, 5), stride=(2, 1), padding=(1, 0)), [(3, 9, 9)], (8, 5, 5)),
    (Conv(8, 3, dilation=2), [(4, 9, 9)], (8, 5, 5)),
    (Conv(8, 3, groups=4), [(4, 3, 3)], (8, 1, 1)),
    (Pool("max", 2), [(5, 7, 8)], (5, 3, 4)),
    (Pool("max", 3, stride=2, ceil_mode=True), [(64, 112, 112)], (64, 56, 56)),
    (Pool("max", 3, stride=2, padding=1), [(64, 112, 112)], (64, 56, 56)),
    (Pool("average", (3, 2), stride=(1, 2)), [(5, 7, 8)], (5, 5, 4)),
    (Pool("average", "global"), [(5, 7, 8)], (5, 1, 1)),
    (Relu(), [(3, 4, 5)], (3, 4, 5)),
    (Relu(), [(7,)], (7,)),
    (Lrn(), [(3, 4, 5)], (3, 4, 5)),
    (BatchNorm(), [(3, 4, 5)], (3, 4, 5)),
    (Dropout(0.2), [(7,)], (7,)),
    (Flatten(), [(3, 4, 5)], (60,)),
    (Linear(10), [(60,)], (10,)),
    (Concat(), [(3, 4, 5), (1, 4, 5), (2, 4, 5)], (6, 4, 5)),
    (Concat(), [(3,), (4,)], (7,)),
    (Add(), [(3, 4, 5), (3, 4, 5)], (3, 4, 5)),
    (SoftmaxLoss(), [(10,)], ()),
]


@pytest.mark.parametrize(("layer", "inputs", "expected"), SHAPES, ids=str)
def test_output_shapes(layer: Layer, inputs: list[tuple[int, ...]], expected: tuple[int, ...]) -> None:
    assert layer.output_shape("l", tuple(inputs)) == expected


def test_window_counts_against_a_walk() -> None:
    """Windows set down one by one: whole ones, and in ceil mode a last one that starts within image or left padding."""
    for size in range(1, 12):
        for r in range(1, 6):
            for stride in range(1, 5):
                for pad in range(r // 2 + 1):
                    if size + 2 * pad < r:
                        continue
                    end = size + 2 * pad
                    whole = [start for start in range(0, end, stride) if start + r <= end]
                    more = whole[-1] + stride
                    ceil = len(whole) + (whole[-1] + r < end and more < size + pad)
                    for ceil_mode, count in ((False, len(whole)), (True, ceil)):
                        pool = Pool("max", r, stride=stride, padding=pad, ceil_mode=ceil_mode)
                        assert pool.output_shape("p", ((1, size, size),)) == (1, count, count), pool
                    conv = Conv(1, r, stride=stride, padding=pad)
                    assert conv.output_shape("c", ((1, size, size),)) == (1, len(whole), len(whole))


ERRORS = [
    (Conv(8, 3), [(12,)], "x", "an image (C, H, W)", "(12,)"),
    (Conv(8, 3), [(3, 2, 9)], "x", "at least 3 rows and columns after padding", "2x9"),
    (Conv(8, 3, dilation=3, padding=1), [(3, 4, 9)], "x", "at least 7 rows and columns after padding", "4x9"),
    (Conv(8, 3, groups=3), [(4, 9, 9)], "x", "input and output channels divisible by groups=3", "4 and 8 channels"),
    (Conv(8, 3, stride=0), [(3, 9, 9)], "w", "channels, kernel, stride and dilation of 1 or more", "stride=0"),
    (Conv(0, 3), [(3, 9, 9)], "w", "channels, kernel, stride and dilation of 1 or more", "channels=0"),
    (Conv(8, 3, padding=-1), [(3, 9, 9)], "x", "padding of 0 or more", "-1"),
    (Pool("max", 4), [(3, 9, 3)], "x", "at least 4 rows and columns after padding", "9x3"),
    (Pool("max", 3, padding=2), [(3, 9, 9)], "x", "padding of at most half the window (1)", "2"),
    (Pool("max", 0), [(3, 9, 9)], "x", "kernel and stride of 1 or more, padding of 0 or more", "kernel=0"),
    (Pool("mean", 2), [(3, 9, 9)], "y", "mode 'max' or 'average'", "'mean'"),  # type: ignore[arg-type]
    (Pool("average", "global"), [(9,)], "x", "an image (C, H, W)", "(9,)"),
    (Relu(), [(3,), (3,)], "x", "one input", "2 inputs"),
    (Lrn(), [(3,)], "x", "an image (C, H, W)", "(3,)"),
    (Lrn(size=0), [(3, 4, 5)], "y", "size of 1 or more and k above 0", "size=0"),
    (Lrn(k=0.0), [(3, 4, 5)], "y", "size of 1 or more and k above 0", "k=0.0"),
    (BatchNorm(), [(3, 4, 5), (3, 4, 5)], "x", "one input", "2 inputs"),
    (Dropout(1.0), [(3,)], "y", "p from 0 up to, not including, 1", "1.0"),
    (Dropout(-0.1), [(3,)], "y", "p from 0 up to, not including, 1", "-0.1"),
    (Flatten(), [(3,), (3,)], "x", "one input", "2 inputs"),
    (Linear(10), [(3, 4, 5)], "x", "a vector (C,); add a Flatten layer before", "(3, 4, 5)"),
    (Linear(0), [(3,)], "y", "1 feature or more", "0"),
    (Concat(), [(3, 4, 5)], "x", "two inputs or more", "1"),
    (Concat(), [(3, 4, 5), (3, 4, 4)], "x", "equal sizes (4, 5)", "(4, 4)"),
    (Add(), [(3, 4, 5)], "x", "two inputs", "1"),
    (Add(), [(3, 4, 5), (2, 4, 5)], "x", "equal shapes, (3, 4, 5) twice", "(3, 4, 5) and (2, 4, 5)"),
    (SoftmaxLoss(), [(3, 4, 5)], "x", "a vector (K,); add a Flatten layer before", "(3, 4, 5)"),
    (SoftmaxLoss(label_smoothing=1.0), [(3,)], "y", "label_smoothing from 0 to below 1", "1.0"),
]


@pytest.mark.parametrize(("layer", "inputs", "tensor", "expected", "got"), ERRORS, ids=str)
def test_shape_errors_name_layer_tensor_expected_and_got(
    layer: Layer, inputs: list[tuple[int, ...]], tensor: str, expected: str, got: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        layer.output_shape("somewhere", tuple(inputs))
    text = str(caught.value)
    assert text.startswith(f"layer 'somewhere', tensor '{tensor}': expected {expected}, got ")
    assert got in text.split(", got ", 1)[1]
    assert caught.value.exit_code == 2


def test_graph_errors() -> None:
    g = Graph("net", (2, 4, 4), classes=3)
    g.add("conv", Conv(3, 1), g.input)
    for name, inputs, expected, got in (
        ("conv", g.input, "a name not used before", "'conv' again"),
        ("data", g.input, "a name without '.', other than data, images, labels, step", "'data'"),
        ("fc.weight", g.input, "a name without '.', other than data, images, labels, step", "'fc.weight'"),
        ("relu", "missing", "the output of an earlier layer", "unknown 'missing'"),
    ):
        with pytest.raises(ShapeError, match=f"layer '{name}', .*expected {expected}, got {got}"):
            g.add(name, Relu(), inputs)
    with pytest.raises(ShapeError, match="expected a softmax_loss layer at the end, got none"):
        lower(g, 1)
    dangling = Graph("net", (3, 1, 1), classes=3)
    x = dangling.add("flat", Flatten(), dangling.input)
    dangling.add("side", Relu(), x)
    dangling.add("loss", SoftmaxLoss(), x)
    with pytest.raises(ShapeError, match=r"layer 'side', tensor 'y': expected a later layer that reads it.*got none"):
        lower(dangling, 1)
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(4), g.add("flat", Flatten(), "conv")))
    with pytest.raises(ShapeError, match=r"layer 'loss'.*expected one score for each of 3 classes, got 4"):
        lower(g, 1)
    with pytest.raises(ShapeError, match="expected sizes of 1 or more"):
        Graph("net", (0, 4, 4), classes=3)


def test_batchnorm_needs_two_values_to_train() -> None:
    g = Graph("net", (2, 1, 1), classes=2)
    g.add("loss", SoftmaxLoss(), g.add("flat", Flatten(), g.add("bn", BatchNorm(), g.input)))
    with pytest.raises(ShapeError, match=r"layer 'bn'.*expected 2 or more values per channel in training.*got 1"):
        lower(g, 1)
    lower(g, 2)
    lower(g, 1, "eval")


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (Conv(8, (3, 5), groups=2), (4, 9, 9), {"weight": (8, 2, 3, 5), "bias": (8,)}),
        (Conv(8, 3, bias=False), (4, 9, 9), {"weight": (8, 4, 3, 3)}),
        (Linear(8), (60,), {"weight": (8, 60), "bias": (8,)}),
        (
            BatchNorm(),
            (4, 9, 9),
            {"weight": (4,), "bias": (4,), "running_mean": (4,), "running_var": (4,)},
        ),
        (Relu(), (4, 9, 9), {}),
    ],
    ids=str,
)
def test_parameters(layer: Layer, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> None:
    found = layer.parameters((shape,))
    assert {p.suffix: p.shape for p in found} == expected
    assert {p.suffix for p in found if not p.trainable} == {s for s in expected if s.startswith("running")}
    assert {p.suffix for p in found if p.trainable and p.decay} == (
        set() if isinstance(layer, BatchNorm) else {"weight"} & set(expected)
    )
