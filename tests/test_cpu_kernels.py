"""Kernels that no ONNX operator describes: pixels, dropout, loss gradients, updates, copies; equal bits anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from interpreter import Array, Run
from kernel_calls import call, channel_slice

from vdnn.errors import DataError
from vdnn.layers import Conv, Dropout, Flatten, Graph, Linear, Lrn, Pool, Relu, SoftmaxLoss, lower
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cpu.philox import philox
from vdnn.runtime.backends.cpu.select import select
from vdnn.runtime.step import STEP_DTYPE, new_step

RNG = np.random.default_rng(21)

# published with Random123 for philox4x32, 10 rounds: counter, key, words
KNOWN_WORDS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Salmon et al. 2011, in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_WORDS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    got = philox(tuple(np.array([c], np.uint64) for c in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in got) == words
    assert philox_of_integers(counter, key) == words


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.999])
def test_dropout_keeps_what_the_counters_say(p: float) -> None:
    """Seven values an image (no multiple of four), a 64-bit seed and step, images that are not the step's first."""
    seed, step, sample, key = 2**45 + 12345, 2**33 + 9, 6, 0xDEADBEEF
    record = new_step(0.1, 1.0, step, seed, sample)
    x = RNG.normal(size=(3, 7, 1, 1)).astype(np.float32)
    expected = np.zeros_like(x)
    for n, c in np.ndindex(3, 7):
        counter = (c // 4, sample + n, step & 0xFFFFFFFF, key)
        word = philox_of_integers(counter, (seed & 0xFFFFFFFF, seed >> 32))[c % 4]
        if word >= p * 2**32:
            expected[n, c] = x[n, c] * np.float32(1 / (1 - p))
    attrs = {"p": p, "key": key}
    assert (call("dropout.forward", {"x": x, "step": record}, {"y": x.shape}, **attrs)["y"] == expected).all()
    in_place = x.copy()
    call("dropout.forward", {"x": in_place, "step": record}, {"y": in_place}, **attrs)
    assert (in_place == expected).all()
    assert (call("dropout.backward", {"dy": x, "step": record}, {"dx": x.shape}, **attrs)["dx"] == expected).all()
    held = channel_slice(np.full_like(x, 10))
    call("dropout.backward", {"dy": x, "step": record}, {"dx": held}, ("dx",), **attrs)
    np.testing.assert_allclose(held, expected + 10, rtol=1e-6)


def test_a_word_equal_to_the_threshold_keeps_its_value() -> None:
    word = philox_of_integers((0, 0, 0, 9), (0, 0))[0]
    x, step = np.ones((1, 1)), new_step(0.1, 1.0, 0, 0)
    for threshold, kept in ((word, True), (word + 1, False)):
        y = call("dropout.forward", {"x": x, "step": step}, {"y": (1, 1)}, p=threshold / 2**32, key=9)["y"]
        assert (y[0, 0] > 0) == kept


def test_dropout_drops_a_share_p() -> None:
    x = np.ones((64, 50, 10, 10), np.float32)
    y = call("dropout.forward", {"x": x, "step": new_step(0.1, 1.0, 0, 0)}, {"y": x.shape}, p=0.3, key=1)["y"]
    assert abs((y == 0).mean() - 0.3) < 0.003  # 320,000 draws: 3 standard deviations are 0.0024
    assert abs(y.mean() - 1) < 0.004


def test_pixels_become_numbers_channel_by_channel() -> None:
    x = RNG.integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)
    mean, std = np.array([0.1, 0.5, 0.9]), np.array([0.2, 1.0, 3.0])
    y = call("input.normalize", {"x": x}, {"y": np.full(x.shape, np.nan, np.float32)}, mean=list(mean), std=list(std))[
        "y"
    ]
    for c in range(3):
        np.testing.assert_allclose(y[:, c], (x[:, c] / 255 - mean[c]) / std[c], rtol=1e-5, atol=1e-6)


def test_copy_into_channels_and_sum() -> None:
    x = RNG.normal(size=(2, 12)).astype(np.float32)
    whole = np.zeros((2, 6, 2, 2), np.float32)
    call("copy.forward", {"x": x}, {"y": whole[:, 1:4]})
    assert (whole[:, 1:4] == x.reshape(2, 3, 2, 2)).all()
    assert (whole[:, [0, 4, 5]] == 0).all()
    call("copy.forward", {"x": x}, {"y": whole[:, 1:4]}, ("y",))
    assert (whole[:, 1:4] == 2 * x.reshape(2, 3, 2, 2)).all()


def test_a_masked_value_leaves_nothing_behind() -> None:
    """Neither a NaN nor an infinity, as a product with 0 would."""
    values = np.array([np.nan, np.inf, -np.inf, 3.0, -4.0, 5.0], np.float32)
    mask = np.array([False, False, False, True, True, False])
    assert select(values, mask, out=np.empty_like(values)).tolist() == [0, 0, 0, 3, -4, 0]


def test_relu_backward_over_dy_and_added() -> None:
    y, dy = np.array([[0.0, 2.0, 0.0, 1.0]]), np.array([[5.0, 6.0, np.inf, 8.0]])
    held = np.full((1, 4), 10.0)
    call("relu.backward", {"y": y, "dy": dy}, {"dx": held}, ("dx",))
    assert held.tolist() == [[10, 16, 10, 18]]
    call("relu.backward", {"y": y, "dy": dy}, {"dx": dy})
    assert dy.tolist() == [[0, 6, 0, 8]]


def loss_of(x: Array, labels: Array, smoothing: float) -> float:
    """Sum over images of -sum t log softmax(x), written out."""
    total = 0.0
    for row, label in zip(x, labels, strict=True):
        for k, score in enumerate(row):
            t = smoothing / len(row) + (1 - smoothing) * (k == label)
            total -= t * (score - np.log(np.exp(row).sum()))
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_its_gradient(smoothing: float) -> None:
    x, labels = RNG.normal(size=(4, 5)), np.array([0, 4, 2, 2], np.int32)
    writes: dict[str, Any] = {"probs": (4, 5), "loss": (4,), "correct": np.zeros(4, np.uint8)}
    got = call("softmax_loss.forward", {"x": x, "labels": labels}, writes, label_smoothing=smoothing)
    np.testing.assert_allclose(got["loss"].sum(), loss_of(x, labels, smoothing), rtol=1e-12)
    reads = {"probs": got["probs"], "labels": labels, "step": new_step(0.1, 0.25, 0, 0)}
    held = np.full((4, 5, 1, 1), 10.0)
    attrs = {"label_smoothing": smoothing, "weight": 0.5}
    dx = call("softmax_loss.backward", reads, {"dx": held}, ("dx",), **attrs)["dx"].reshape(4, 5) - 10
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index], down[index] = x[index] + 1e-5, x[index] - 1e-5
        slope = (loss_of(up, labels, smoothing) - loss_of(down, labels, smoothing)) / 2e-5
        assert dx[index] == pytest.approx(0.25 * 0.5 * slope, abs=1e-9)


def test_the_first_of_equal_scores_is_the_choice() -> None:
    x, labels = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]), np.array([2, 0], np.int32)
    writes: dict[str, Any] = {"probs": (2, 3), "loss": (2,), "correct": np.full(2, 9, np.uint8)}
    assert call("softmax_loss.forward", {"x": x, "labels": labels}, writes, label_smoothing=0.0)[
        "correct"
    ].tolist() == [0, 1]


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_without_a_score_is_an_error(label: int) -> None:
    reads = {"x": np.zeros((2, 3)), "labels": np.array([0, label], np.int32)}
    writes: dict[str, Any] = {"probs": (2, 3), "loss": (2,), "correct": np.zeros(2, np.uint8)}
    with pytest.raises(DataError, match=rf"layer 'layer'.*label from 0 to 2, got {label} for image 1"):
        call("softmax_loss.forward", reads, writes, label_smoothing=0.0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_update_is_sgd(momentum: float, nesterov: bool) -> None:
    """Two steps, number by number, of a weight that takes several pieces."""
    shape, decay, rate = (3, 200_001), 0.01, 0.125
    w, v, expected = RNG.normal(size=shape), np.zeros(shape), np.zeros(3)
    places = ([0, 1, 2], [0, 100_000, 200_000])
    expected, velocity = w[places].copy(), np.zeros(3)
    step = new_step(rate, 1.0, 0, 0)
    for _ in range(2):
        dw = RNG.normal(size=shape)
        kept = dw.copy()
        writes = {"w": w, "status": step} | ({"v": v} if momentum else {})
        attrs = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": decay}
        call("sgd.update", {"dw": dw, "step": step}, writes, tuple(writes), **attrs)
        for i, place in enumerate(zip(*places, strict=True)):
            g = kept[place] + decay * expected[i]
            velocity[i] = momentum * velocity[i] + g
            expected[i] -= rate * (g + momentum * velocity[i] if nesterov and momentum else velocity[i])
        np.testing.assert_allclose(w[places], expected, rtol=1e-12)
        assert (dw == kept).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_update_does_nothing_from_the_first_gradient_that_is_not_finite(bad: float) -> None:
    step = new_step(0.1, 1.0, 0, 0)
    attrs = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    for dw in (np.array([1.0, bad, 1.0]), np.ones(3)):
        w, v = np.ones(3), np.ones(3)
        writes = {"w": w, "v": v, "status": step}
        call("sgd.update", {"dw": dw, "step": step}, writes, tuple(writes), **attrs)
        assert (w == 1).all()
        assert (v == 1).all()
        assert step.view(STEP_DTYPE)["not_finite"] == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_update_of_all_is_that_of_each(momentum: float) -> None:
    shapes, decays = ((3, 200_001), (5,), (2, 3, 2, 2)), [0.01, 0.0, 0.5]
    step = new_step(0.125, 1.0, 0, 0, unscale=0.25)
    gradients = [RNG.normal(size=shape) for shape in shapes]
    apart, together = ([{"w": np.ones(s), "v": np.full(s, 0.5)} for s in shapes] for _ in range(2))
    attrs = {"momentum": momentum, "nesterov": False}
    used = ("w", "v") if momentum else ("w",)
    for dw, arrays, decay in zip(gradients, apart, decays, strict=True):
        writes = {name: arrays[name] for name in used} | {"status": step}
        call("sgd.update", {"dw": dw, "step": step}, writes, tuple(writes), **attrs, weight_decay=decay)
    reads = {f"dw{i}": dw for i, dw in enumerate(gradients)} | {"step": step}
    writes = {f"{name}{i}": together[i][name] for i in range(3) for name in used} | {"status": step}
    call("sgd.update_all", reads, writes, tuple(writes), **attrs, weight_decay=decays)
    for one, other in zip(apart, together, strict=True):
        assert (one["w"] == other["w"]).all()
        assert (one["v"] == other["v"]).all()
    assert not (together[1]["w"] == 1).any()
    assert step.view(STEP_DTYPE)["not_finite"] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_update_of_all_changes_nothing_where_one_gradient_is_not_finite(bad: float) -> None:
    step = new_step(0.1, 1.0, 0, 0)
    writes: dict[str, Any] = {f"{name}{i}": np.ones(3) for i in range(3) for name in "wv"} | {"status": step}
    attrs = {"momentum": 0.9, "nesterov": False, "weight_decay": [0.0] * 3}
    for last in (np.array([1.0, bad, 1.0]), np.ones(3)):  # the second step is held by the first
        reads = {"dw0": np.ones(3), "dw1": np.ones(3), "dw2": last, "step": step}
        call("sgd.update_all", reads, writes, tuple(writes), **attrs)
        assert all((array == 1).all() for name, array in writes.items() if name != "status")
        assert step.view(STEP_DTYPE)["not_finite"] == 1


def test_batch_statistics_survive_a_large_mean() -> None:
    """Variance 1 about 1000: what sums of squares in float32 would lose."""
    x = (RNG.normal(size=(64, 2, 16, 16)) + 1000).astype(np.float32)
    ones = np.ones(2, np.float32)
    reads = {"x": x, "weight": ones, "bias": 0 * ones}
    got = call("batchnorm.forward", reads, {"y": x.shape, "mean": (2,), "invstd": (2,)}, eps=1e-5)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got["mean"], wide.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(got["invstd"], 1 / np.sqrt(wide.var(axis=(0, 2, 3)) + 1e-5), rtol=1e-4)


def small_net() -> Graph:
    g = Graph("small", (3, 13, 11), classes=5)
    x = g.add("conv1", Conv(6, 3, padding=1), g.input)
    x = g.add("lrn1", Lrn(), g.add("relu1", Relu(), x))
    x = g.add("pool1", Pool("max", 3, stride=2, ceil_mode=True), x)
    x = g.add("pool2", Pool("average", 2), g.add("conv2", Conv(10, 3), x))
    x = g.add("drop", Dropout(0.5), g.add("fc1", Linear(7), g.add("flat", Flatten(), x)))
    g.add("loss", SoftmaxLoss(), g.add("fc2", Linear(5), x))
    return g


@pytest.mark.parametrize("algorithm", [0, 1])
def test_equal_bits_wherever_the_arrays_lie(algorithm: int) -> None:
    """Every storage of a float32 step moved by 256 bytes, and by 5 times that."""
    results = []
    for shift in (0, 256, 1280):
        run = Run(lower(small_net(), 7), seed=4, algorithm=algorithm, place=partial(placed, shift))
        run.run("forward")
        run.run("backward")
        run.run("update")
        results.append({name: array.tobytes() for name, array in run.storages.items()})
    assert results[0] == results[1] == results[2]


def placed(shift: int, nbytes: int) -> Array:
    """`nbytes` bytes that begin `shift` after a multiple of 4096."""
    room = np.full(nbytes + 8192, 0xFF, np.uint8)
    start = -room.ctypes.data % 4096 + shift
    return room[start : start + nbytes]


def test_every_kind_of_a_program_has_a_kernel() -> None:
    assert {op.kind for mode in ("train", "eval") for op in lower(small_net(), 2, mode).ops} <= set(KERNELS)
