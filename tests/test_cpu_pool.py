"""Pooling kernels against loops over windows as vdnn.layers.pool defines them, ties and slices included."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from interpreter import Array
from kernel_calls import call, channel_slice

from vdnn.layers import Pool


class Case(NamedTuple):
    """Images (H, W) and the layer."""

    size: tuple[int, int]
    layer: Pool


CASES = {
    "2x2": Case((6, 8), Pool("max", 2)),
    "3x3 stride 2": Case((7, 9), Pool("max", 3, stride=2)),
    "ceil": Case((6, 8), Pool("max", 3, stride=2, ceil_mode=True)),
    "ceil drops a window in the padding": Case((5, 5), Pool("max", 2, stride=3, padding=1, ceil_mode=True)),
    "padded": Case((5, 4), Pool("max", (3, 2), stride=(2, 1), padding=(1, 1))),
    "padded, ceil": Case((6, 7), Pool("max", 3, stride=2, padding=1, ceil_mode=True)),
    "gaps between windows": Case((9, 7), Pool("max", (2, 1), stride=(4, 3))),
    "window of one pixel": Case((3, 4), Pool("max", 1)),
    "global": Case((5, 7), Pool("max", "global")),
    "one pixel": Case((1, 1), Pool("max", 1)),
}
AVERAGES = {
    f"{name}, padding {'counted' if count else 'left out'}": Case(
        size, Pool("average", layer.kernel, layer.stride, layer.padding, layer.ceil_mode, count)
    )
    for name, (size, layer) in CASES.items()
    for count in (True, False)
}


def windows(case: Case) -> dict[tuple[int, int], tuple[list[tuple[int, int]], int]]:
    """Output (p, q) → its pixels in row order, and what an average divides by."""
    layer, (height, width) = case.layer, case.size
    attrs = attributes(case)
    (r, s), (down, right), (top, left) = attrs["kernel"], attrs["stride"], attrs["padding"]
    _, rows, columns = layer.output_shape("pool", ((1, height, width),))
    found = {}
    for p, q in np.ndindex(rows, columns):
        everywhere = [(p * down - top + i, q * right - left + j) for i in range(r) for j in range(s)]
        inside = [(h, w) for h, w in everywhere if 0 <= h < height and 0 <= w < width]
        padded = [(h, w) for h, w in everywhere if h < height + top and w < width + left]
        found[p, q] = inside, len(padded if layer.count_include_pad else inside)
    return found


def attributes(case: Case) -> dict[str, Any]:
    layer = case.layer
    kernel = case.size if layer.kernel == "global" else layer.kernel
    stride = kernel if layer.kernel == "global" or layer.stride is None else layer.stride
    pairs = {"kernel": kernel, "stride": stride, "padding": layer.padding}
    listed = {key: [value, value] if isinstance(value, int) else list(value) for key, value in pairs.items()}
    return {"mode": layer.mode, "count_include_pad": layer.count_include_pad, **listed}


def reference(case: Case, x: Array, dy: Array) -> tuple[Array, Array, Array]:
    """y, dx and the places of maxima, window by window."""
    y, dx, indices = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(dy.shape, np.uint8)
    (_, s), (down, right), (top, left) = (attributes(case)[key] for key in ("kernel", "stride", "padding"))
    for n, c in np.ndindex(x.shape[:2]):
        for (p, q), (pixels, divisor) in windows(case).items():
            values = [x[n, c, h, w] for h, w in pixels]
            if case.layer.mode == "max":
                y[n, c, p, q] = max(values)
                h, w = pixels[values.index(max(values))]
                dx[n, c, h, w] += dy[n, c, p, q]
                indices[n, c, p, q] = (h + top - p * down) * s + w + left - q * right
            else:
                y[n, c, p, q] = sum(values) / divisor
                for h, w in pixels:
                    dx[n, c, h, w] += dy[n, c, p, q] / divisor
    return y, dx, indices


def check(case: Case, x: Array, *, sliced: bool, accumulate: bool) -> None:
    shape = (*x.shape[:2], *case.layer.output_shape("pool", (x.shape[1:],))[1:])
    dy = np.random.default_rng(2).normal(size=shape).astype(x.dtype)
    y, dx, indices = reference(case, x, dy)
    wrap = channel_slice if sliced else np.array
    attrs, tolerance = attributes(case), 1e-12 if x.dtype == np.float64 else 1e-5
    got_y = call("pool.forward", {"x": wrap(x)}, {"y": wrap(np.full_like(dy, np.nan))}, **attrs)["y"]
    np.testing.assert_allclose(got_y, y, rtol=tolerance, atol=tolerance)
    reads = {"dy": wrap(dy)} | ({"x": wrap(x), "y": wrap(got_y)} if case.layer.mode == "max" else {})
    held = wrap(np.full_like(x, 10 if accumulate else np.nan))
    adds = ("dx",) if accumulate else ()
    got_dx = call("pool.backward", reads, {"dx": held}, adds, **attrs)["dx"]
    np.testing.assert_allclose(got_dx, dx + 10 * accumulate, rtol=tolerance, atol=tolerance)
    if case.layer.mode == "average":
        return
    writes = {"y": wrap(np.full_like(dy, np.nan)), "indices": np.full(dy.shape, 7, np.uint8)}
    indexed = call("pool.forward", {"x": wrap(x)}, writes, **attrs)
    assert (indexed["indices"] == indices).all()
    assert (indexed["y"] == got_y).all()
    told = {"dy": wrap(dy), "indices": indexed["indices"]}
    for reads, want in ((told, got_dx), ({**told, "y": got_y}, np.where(x > 0, dx, 0) + 10 * accumulate)):
        held = wrap(np.full_like(x, 10 if accumulate else np.nan))
        got = call("pool.backward", reads, {"dx": held}, adds, **attrs)["dx"]
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


ALL = {**{f"max {name}": case for name, case in CASES.items()}, **{f"average {n}": c for n, c in AVERAGES.items()}}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_pool_equals_loops(case: Case) -> None:
    check(case, np.random.default_rng(3).normal(size=(2, 3, *case.size)), sliced=False, accumulate=False)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_pool_on_channels_of_larger_tensors_accumulates(case: Case) -> None:
    x = np.random.default_rng(4).normal(size=(2, 3, *case.size)).astype(np.float32)
    check(case, x, sliced=True, accumulate=True)


@pytest.mark.parametrize("name", CASES)
def test_of_equal_largest_pixels_the_first_in_row_order_takes_the_gradient(name: str) -> None:
    x = np.random.default_rng(5).integers(0, 2, size=(3, 4, *CASES[name].size)).astype(np.float64)
    check(CASES[name], x, sliced=False, accumulate=False)


def test_padding_never_wins_a_maximum() -> None:
    case = CASES["padded"]
    check(case, -1 - np.random.default_rng(6).random((2, 2, *case.size)), sliced=False, accumulate=False)


def test_a_nan_pixel_makes_its_windows_nan() -> None:
    x = np.zeros((1, 1, 4, 4))
    x[0, 0, 1, 2] = np.nan
    y = call("pool.forward", {"x": x}, {"y": (1, 1, 2, 2)}, **attributes(Case((4, 4), Pool("max", 2))))["y"]
    assert np.isnan(y).tolist() == [[[[False, True], [False, False]]]]


def test_a_window_with_a_nan_has_no_winner_and_passes_nothing_on() -> None:
    x = np.zeros((1, 1, 4, 4))
    x[0, 0, 1, 2], x[0, 0, 2:, 2:] = np.nan, -np.inf
    attrs, writes = (
        attributes(Case((4, 4), Pool("max", 2))),
        {"y": (1, 1, 2, 2), "indices": np.zeros((1, 1, 2, 2), "u1")},
    )
    found = call("pool.forward", {"x": x}, writes, **attrs)
    assert found["indices"].tolist() == [[[[0, 255], [0, 0]]]]
    dy = np.ones((1, 1, 2, 2))
    for reads in ({"x": x, "y": found["y"]}, {"indices": found["indices"]}):
        dx = call("pool.backward", {"dy": dy, **reads}, {"dx": x.shape}, **attrs)["dx"]
        assert dx.tolist() == [[[[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]]]
