"""Softmax on the GPU: how rows and columns are cut, parts that meet, edges, and a fused head as two ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from interpreter import Array

from vdnn.bench.kernel_cases import normal, unknown
from vdnn.errors import VdnnError
from vdnn.layers import Op
from vdnn.runtime.backends.cpu.half import narrow, widen
from vdnn.runtime.backends.cuda import softmax as softmax_rows
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes
from vdnn.runtime.backends.cuda.softmax import MIDDLE, PART, ROW, SHORT
from vdnn.runtime.bfloat16 import host_dtype
from vdnn.runtime.step import new_step

DTYPES = ("float32", "bfloat16", "float16")
AHEAD = 3
"""Parts by which finding is ahead here, so that few rows are enough to have both at once."""
LENGTHS = (1, 2, *(end + more for end in (SHORT, MIDDLE, ROW, PART) for more in (0, 1, 8)), 2 * PART, 2 * PART + 8)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def stored(array: Array, dtype: str) -> Array:
    """`array` as activations of `dtype` are."""
    out = np.empty(array.shape, host_dtype(dtype))
    if dtype == "float32":
        out[...] = array
    else:
        narrow(array, out)
    return out


def known(array: Array) -> Array:
    """Its numbers in float64."""
    return (array if array.dtype == np.float32 else widen(array)).astype(np.float64)


def softmax(x: Array) -> Array:
    """By definition, in float64."""
    wide = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(wide / wide.sum(axis=1, keepdims=True))


def launch(
    kind: str, values: dict[str, Array], kernels: HostKernels, accumulate: tuple[str, ...] = (), **attrs: Any
) -> None:
    """A kind on whole arrays, with a workspace full of NaN."""
    arrays = {name: array_of(array) for name, array in values.items()}
    nbytes = workspace_bytes(kind, {name: array.shape for name, array in values.items()})
    scratch = np.full(max(1, nbytes), 0xFF, np.uint8)
    arrays["workspace"] = array_of(scratch)
    CUDA_KERNELS[kind](Op("the-op", kind, "the-layer", "forward", {}, {}, attrs, accumulate), arrays, kernels, None)


# ---- rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", LENGTHS)
def test_rows_of_every_length(k: int, dtype: str) -> None:
    n = 3 if k > MIDDLE else 35
    x, y = stored(4 * normal(n, k), dtype), stored(unknown(n, k), dtype)
    launch("softmax.forward", {"x": x, "y": y}, HostKernels(dtype=dtype))
    np.testing.assert_allclose(known(y), softmax(known(x)), rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize(("n", "k"), [(2, 5 * PART + 96), (3, 5 * PART + 97), (AHEAD + 2, 4 * PART + 16)])
def test_parts_of_a_row_meet(n: int, k: int, falling: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding is ahead of storing, ends before it, and blocks are numbered by their start, not by their place."""
    monkeypatch.setattr(softmax_rows, "AHEAD", AHEAD)
    x, y = stored(3 * normal(n, k), dtype), stored(unknown(n, k), dtype)
    kernels = HostKernels(falling=falling, dtype=dtype)
    launch("softmax.forward", {"x": x, "y": y}, kernels)
    assert kernels.launched == ["fill_bytes", "softmax_parts"]
    np.testing.assert_allclose(known(y), softmax(known(x)), rtol=TOLERANCE[dtype], atol=1e-7)


def test_what_is_found_of_a_row_never_waits_for_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block t stores part t - ahead after parts up to t of all rows have been told by blocks that started before it."""
    launched: list[tuple[str, int, list[Any]]] = []
    kernels = HostKernels()
    monkeypatch.setattr(kernels, "launch", lambda name, blocks, args, stream: launched.append((name, blocks, args)))
    for n, k in ((1, 2_000_001), (32, 2_097_152), (4096, 16_401), (1, PART + 1), (7, 100 * PART)):
        x = contiguous(0, (n, k))
        workspace = contiguous(0, (workspace_bytes("softmax.forward", {"x": (n, k)}),), "uint8")
        op = Op("softmax", "softmax.forward", "head", "forward", {}, {}, {})
        CUDA_KERNELS["softmax.forward"](op, {"x": x, "y": x, "workspace": workspace}, kernels, None)
        name, blocks, args = launched.pop()
        assert name == "softmax_parts"
        splits, ahead, part = args[6:9]
        assert blocks == n * splits + ahead
        assert splits <= ahead <= n * splits
        assert (splits - 1) * part < k <= splits * part


@pytest.mark.parametrize("kind", ["softmax.forward", "softmax_loss.train"])
@pytest.mark.parametrize("k", [1000, 3000, PART + 100, 5 * PART + 96])
def test_a_result_may_lie_over_its_scores(k: int, kind: str) -> None:
    n = 3
    x, labels = 3 * normal(n, k), np.array([0, k // 2, k - 1], np.int32)
    over, apart = x.copy(), unknown(n, k)
    for source, result in ((over, over), (x, apart)):
        rest = {
            "labels": labels,
            "step": new_step(0.1, 0.5, 0, 0),
            "loss": unknown(n),
            "correct": np.zeros(n, np.uint8),
        }
        values = {"x": source, **({"y": result} if kind == "softmax.forward" else {"dx": result, **rest})}
        launch(kind, values, HostKernels(), label_smoothing=0.1, weight=2.0)
    assert np.isfinite(apart).all()
    assert over.tobytes() == apart.tobytes()


@pytest.mark.parametrize("k", [10, 200, 1000, 2000, 8192, PART + 8, 16_384, 3 * PART])
def test_sums_are_exact_to_a_millionth(k: int) -> None:
    x, y = 4 * normal(4, k), unknown(4, k)
    launch("softmax.forward", {"x": x, "y": y}, HostKernels())
    total = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(1 / y.max(axis=1), total, rtol=1e-6)


def test_a_part_is_stored_once_where_it_is_added() -> None:
    n, k = 2, PART + 77
    x, held, labels = normal(n, k), normal(n, k), np.array([5, k - 1], np.int32)
    dx, losses = held.copy(), {"loss": unknown(n), "correct": np.full(n, 9, np.uint8)}
    step = new_step(0.1, 0.5, 0, 0)
    values = {"x": x, "labels": labels, "step": step, "dx": dx, **losses}
    launch("softmax_loss.train", values, HostKernels(), ("dx",), label_smoothing=0.0, weight=2.0)
    expected = softmax(x.astype(np.float64))
    expected[np.arange(n), labels] -= 1
    np.testing.assert_allclose(dx, held + expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [10, 200, 1000, 3000, PART + 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_head_gives_the_bits_of_two_ops(k: int, smoothing: float, dtype: str) -> None:
    n, kernels = 5, HostKernels(dtype=dtype)
    x, labels, step = stored(3 * normal(n, k), dtype), np.arange(n, dtype=np.int32), new_step(0.1, 0.3, 0, 0)
    held = stored(normal(n, k), dtype)
    for accumulate in ((), ("dx",)):
        apart, fused = ({"loss": unknown(n), "correct": np.full(n, 9, np.uint8)} for _ in range(2))
        probs, dx, other = unknown(n, k), held.copy(), held.copy()
        values = {"x": x, "labels": labels, "probs": probs, **apart}
        launch("softmax_loss.forward", values, kernels, label_smoothing=smoothing)
        rule = {"label_smoothing": smoothing, "weight": 0.7}
        reads = {"probs": probs, "labels": labels, "step": step}
        launch("softmax_loss.backward", {**reads, "dx": dx}, kernels, accumulate, **rule)
        reads = {"x": x, "labels": labels, "step": step}
        launch("softmax_loss.train", {**reads, "dx": other, **fused}, kernels, accumulate, **rule)
        assert dx.tobytes() == other.tobytes()
        for name in ("loss", "correct"):
            assert apart[name].tobytes() == fused[name].tobytes()
        assert np.isfinite(apart["loss"]).all()


@pytest.mark.parametrize("k", [10, 100, 1000, 3000, PART + 9])
def test_scores_without_a_number(k: int) -> None:
    """NaN, infinities, a row without any finite score: as NumPy has it, and in no other row."""
    x = normal(6, k)
    x[0, 3], x[1, 4], x[2, 5], x[3] = np.nan, np.inf, -np.inf, -np.inf
    x[4, 1:] = -np.inf
    y = unknown(6, k)
    launch("softmax.forward", {"x": x, "y": y}, HostKernels())
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(y, softmax(x.astype(np.float64)), rtol=5e-6, atol=1e-9)
    assert np.isnan(y).all(axis=1).tolist() == [True, True, False, True, False, False]
    assert y[4, 0] == 1


@pytest.mark.parametrize("k", [7, 40, 1000, 2500, PART + 9])
def test_the_first_of_the_largest_scores_is_the_choice(k: int) -> None:
    x = np.zeros((6, k), np.float32)
    x[1, [2, k - 1]], x[2, [2, k - 1]], x[3, k - 1], x[4, [3, k - 1]] = 5, 5, 1, np.nan
    x[5] = -np.inf
    labels = np.array([0, 2, k - 1, k - 1, 3, 0], np.int32)
    correct = np.full(6, 9, np.uint8)
    values = {"x": x, "labels": labels, "probs": unknown(6, k), "loss": unknown(6), "correct": correct}
    launch("softmax_loss.forward", values, HostKernels(), label_smoothing=0.0)
    assert correct.tolist() == [1, 1, 0, 1, 1, 1]
    assert correct.tolist() == (x.argmax(axis=1) == labels).astype(int).tolist()


def test_long_rows_need_a_workspace_and_images_in_chwn_must_be_vectors() -> None:
    x, y = normal(2, PART + 1), unknown(2, PART + 1)
    op = Op("head.softmax", "softmax.forward", "head", "forward", {}, {}, {})
    with pytest.raises(VdnnError, match="tensor 'workspace': expected 96 bytes or more, got 0"):
        CUDA_KERNELS["softmax.forward"](op, {"x": array_of(x), "y": array_of(y)}, HostKernels(), None)
    images = contiguous(x.ctypes.data, (3, 5, 1, 1), layout="CHWN")
    with pytest.raises(VdnnError, match=r"layer 'head'.*expected vectors in the order of NCHW"):
        CUDA_KERNELS["softmax.forward"](op, {"x": images, "y": images}, HostKernels(), None)


# ---- columns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize(("n", "k"), [(32, 10), (128, 1000), (33, 70), (2, 2), (70, 2500), (5, 9000)])
def test_columns(n: int, k: int, falling: bool, dtype: str) -> None:
    x, y = (stored(value, dtype) for value in (4 * normal(k, n), unknown(k, n)))
    launch("softmax.forward", {"x": x.T, "y": y.T}, HostKernels(dtype=dtype, falling=falling))
    np.testing.assert_allclose(known(y).T, softmax(known(x).T), rtol=3 * TOLERANCE[dtype], atol=1e-7)


def test_columns_without_a_number() -> None:
    x, y = normal(500, 6), unknown(500, 6)
    x[3, 0], x[4, 1], x[5, 2], x[:, 3], x[1:, 4] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
    launch("softmax.forward", {"x": x.T, "y": y.T}, HostKernels())
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(y.T, softmax(x.T.astype(np.float64)), rtol=5e-6, atol=1e-9)


def test_columns_of_another_precision_are_refused() -> None:
    x, y = normal(9, 3), unknown(9, 3)
    with pytest.raises(VdnnError, match="expected x and y of bfloat16, got float32 and float32"):
        launch("softmax.forward", {"x": x.T, "y": y.T}, HostKernels(dtype="bfloat16"))
