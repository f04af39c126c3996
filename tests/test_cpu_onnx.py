"""Forward values equal those of the ONNX reference implementation, operator by operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.helper as make
import pytest
from interpreter import Array
from kernel_calls import call, channel_slice
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

RNG = np.random.default_rng(11)


def onnx(kind: str, inputs: dict[str, Array], outputs: int = 1, **attrs: Any) -> list[Array]:
    """Outputs of one ONNX node of opset 18."""
    types = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "int64": TensorProto.INT64}
    names = [f"out{i}" for i in range(outputs)]
    node = make.make_node(kind, list(inputs), names, **attrs)
    values = [make.make_tensor_value_info(name, types[str(v.dtype)], v.shape) for name, v in inputs.items()]
    results = [make.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    graph = make.make_graph([node], "one", values, results)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)])
    return list(ReferenceEvaluator(model).run(None, inputs))


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def agree(got: Array, expected: Array) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


CONVOLUTIONS = {
    "plain": ((2, 3, 9, 8), (4, 3, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    "ragged stride": ((1, 3, 11, 13), (5, 3, 3, 2), (3, 2), (1, 0), (1, 1), 1),
    "asymmetric": ((2, 2, 7, 9), (3, 2, 1, 5), (1, 1), (0, 2), (1, 1), 1),
    "dilated": ((2, 2, 12, 11), (3, 2, 3, 3), (1, 2), (2, 3), (2, 3), 1),
    "grouped": ((2, 6, 8, 7), (4, 3, 3, 3), (2, 1), (1, 1), (1, 1), 2),
    "depthwise, dilated": ((2, 4, 9, 9), (8, 1, 3, 3), (1, 1), (2, 2), (2, 2), 4),
    "1x1": ((3, 5, 4, 6), (7, 5, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 strided": ((3, 5, 7, 6), (7, 5, 1, 1), (2, 2), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("sliced", [False, True], ids=["plain", "channels of a larger tensor"])
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv(case: tuple[Any, ...], sliced: bool) -> None:
    image, filters, stride, padding, dilation, groups = case
    x, w, b = normal(*image), normal(*filters), normal(filters[0])
    pads = [*padding, *padding]
    (expected,) = onnx("Conv", {"x": x, "w": w, "b": b}, strides=stride, pads=pads, dilations=dilation, group=groups)
    free = (filters[2:], stride, padding) == ((1, 1), (1, 1), (0, 0))
    wrap = channel_slice if sliced else np.array
    for algorithm in ("GEMM",) if free else ("GEMM_BATCH", "GEMM_TILE"):
        attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "algorithm": algorithm}
        y = wrap(np.full(expected.shape, np.nan, np.float32))
        agree(call("conv.forward", {"x": wrap(x), "w": w, "b": b}, {"y": y}, **attrs)["y"], expected)


POOLS = {
    "2x2": ((2, 3, 6, 8), (2, 2), (2, 2), (0, 0)),
    "overlapping": ((2, 3, 9, 7), (3, 3), (2, 2), (0, 0)),
    "padded": ((2, 3, 8, 9), (3, 2), (2, 1), (1, 1)),
    "ragged": ((1, 2, 11, 10), (2, 5), (3, 2), (0, 2)),
}


@pytest.mark.parametrize("case", POOLS.values(), ids=POOLS)
def test_max_pool(case: tuple[Any, ...]) -> None:
    image, kernel, stride, padding = case
    x = normal(*image)
    (expected,) = onnx("MaxPool", {"x": x}, kernel_shape=kernel, strides=stride, pads=[*padding, *padding])
    attrs = {"mode": "max", "kernel": kernel, "stride": stride, "padding": padding, "count_include_pad": True}
    assert (call("pool.forward", {"x": x}, {"y": expected.shape}, **attrs)["y"] == expected).all()


@pytest.mark.parametrize("count", [False, True], ids=["padding left out", "padding counted"])
@pytest.mark.parametrize("case", POOLS.values(), ids=POOLS)
def test_average_pool(case: tuple[Any, ...], count: bool) -> None:
    image, kernel, stride, padding = case
    x, pads = normal(*image), [*padding, *padding]
    options = {"kernel_shape": kernel, "strides": stride, "pads": pads, "count_include_pad": int(count)}
    (expected,) = onnx("AveragePool", {"x": x}, **options)
    attrs = {"mode": "average", "kernel": kernel, "stride": stride, "padding": padding, "count_include_pad": count}
    agree(call("pool.forward", {"x": x}, {"y": expected.shape}, **attrs)["y"], expected)


@pytest.mark.parametrize(("mode", "kind"), [("max", "GlobalMaxPool"), ("average", "GlobalAveragePool")])
def test_global_pool(mode: str, kind: str) -> None:
    x = normal(2, 3, 5, 7)
    (expected,) = onnx(kind, {"x": x})
    attrs = {"mode": mode, "kernel": (5, 7), "stride": (5, 7), "padding": (0, 0), "count_include_pad": True}
    agree(call("pool.forward", {"x": x}, {"y": (2, 3, 1, 1)}, **attrs)["y"], expected)


@pytest.mark.parametrize(("size", "alpha", "beta", "k"), [(5, 0.5, 0.75, 2.0), (3, 1.0, 0.5, 1.0), (4, 2.0, 1.0, 0.5)])
@pytest.mark.parametrize("channels", [2, 9])
def test_lrn(channels: int, size: int, alpha: float, beta: float, k: float) -> None:
    x = normal(channels, channels, 4, 3)  # the reference takes as many channels as there are images
    (expected,) = onnx("LRN", {"x": x}, size=size, alpha=alpha, beta=beta, bias=k)
    y = channel_slice(np.full(x.shape, np.nan, np.float32))
    attrs = {"size": size, "alpha": alpha, "beta": beta, "k": k}
    agree(call("lrn.forward", {"x": channel_slice(x)}, {"y": y}, **attrs)["y"], expected)


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (8, 5)])
def test_batchnorm_inference_over_its_input(shape: tuple[int, ...]) -> None:
    c = shape[1]
    names = ("weight", "bias", "running_mean", "running_var")
    x, vectors = normal(*shape), [normal(c), normal(c), normal(c), RNG.uniform(0.5, 2, c).astype(np.float32)]
    reads = {"x": x, **dict(zip(names, vectors, strict=True))}
    (expected,) = onnx("BatchNormalization", reads, epsilon=1e-3)
    agree(call("batchnorm.inference", reads, {"y": x}, eps=1e-3)["y"], expected)


def test_batchnorm_training() -> None:
    x, weight, bias, mean = normal(4, 3, 5, 6) * 2 + 3, normal(3), normal(3), normal(3)
    var = RNG.uniform(0.5, 2, 3).astype(np.float32)
    inputs = {"x": x, "weight": weight, "bias": bias, "mean": mean, "var": var}
    y, new_mean, _ = onnx("BatchNormalization", inputs, 3, epsilon=1e-5, momentum=0.9, training_mode=1)
    reads = {"x": x, "weight": weight, "bias": bias}
    got = call("batchnorm.forward", reads, {"y": x.shape, "mean": (3,), "invstd": (3,)}, eps=1e-5)
    agree(got["y"], y)
    saved = {"mean": got["mean"], "invstd": got["invstd"]}
    running = {"running_mean": mean.copy(), "running_var": var.copy()}
    attrs = {"eps": 1e-5, "momentum": 0.1, "count": 4 * 5 * 6}
    call("batchnorm.update_stats", saved, running, tuple(running), **attrs)
    agree(running["running_mean"], new_mean)
    # ONNX moves by the biased variance, torch and vdnn by the unbiased one
    agree(running["running_var"], 0.9 * var + 0.1 * x.astype(np.float64).var(axis=(0, 2, 3), ddof=1))


def test_linear() -> None:
    x, w, b = normal(4, 10), normal(6, 10), normal(6)
    (expected,) = onnx("Gemm", {"x": x, "w": w, "b": b}, transB=1)
    agree(call("linear.forward", {"x": x, "w": w, "b": b}, {"y": (4, 6)})["y"], expected)
    images = channel_slice(x.reshape(4, 5, 1, 2))  # in place of vectors, and channels of a larger tensor
    agree(call("linear.forward", {"x": images, "w": w, "b": b}, {"y": (4, 6)})["y"], expected)


@pytest.mark.parametrize("large", [1, 40])
def test_softmax_and_cross_entropy(large: int) -> None:
    x, labels = normal(6, 5) * large, RNG.integers(0, 5, 6)
    (probs,) = onnx("Softmax", {"x": x}, axis=1)
    inputs = {"x": x.astype(np.float64), "labels": labels}
    (loss,) = onnx("SoftmaxCrossEntropyLoss", inputs, reduction="none")
    writes = {"probs": (6, 5), "loss": (6,), "correct": np.full(6, 255, np.uint8)}
    reads = {"x": x, "labels": labels.astype(np.int32)}
    got = call("softmax_loss.forward", reads, writes, label_smoothing=0.0)
    agree(got["probs"], probs)
    agree(got["loss"], loss)
    assert got["correct"].tolist() == [int(row.argmax() == label) for row, label in zip(x, labels, strict=True)]


def test_relu_over_its_input() -> None:
    x = normal(3, 4, 5, 2)
    (expected,) = onnx("Relu", {"x": x.copy()})
    assert (call("relu.forward", {"x": x}, {"y": x})["y"] == expected).all()


def test_sum_over_its_first_term() -> None:
    a, b = normal(3, 4, 5, 2), normal(3, 4, 5, 2)
    (expected,) = onnx("Add", {"a": a.copy(), "b": b})
    assert (call("add.forward", {"a": a, "b": b}, {"y": a})["y"] == expected).all()
