"""The ways to pool on the GPU: which an op has, which is launched, what fits into shared memory; their benchmark."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels, array_of
from test_study_pool import make_bench

from vdnn.bench import gpu_pool
from vdnn.bench.gpu_kernels import window
from vdnn.bench.gpu_pool import PoolCase, cases, measure, summary
from vdnn.errors import VdnnError
from vdnn.layers import Graph, Op, Pool, Program, lower
from vdnn.layers.tensor import DTYPE_BYTES, Shape, TensorSpec
from vdnn.runtime.backends.cuda import probe
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.operands import load, store
from vdnn.runtime.backends.cuda.pool import pool_backward, pool_candidates, pool_forward
from vdnn.runtime.backends.cuda.pool_tiles import PLANE_KIBS, TURN_KIBS, Pooled, _share, inverse, ways
from vdnn.runtime.backends.cuda.source import constants, source

TURNS = {f"TURNS_{kib}" for kib in TURN_KIBS}
PLANES, GRADIENT_PLANES = ({f"PLANES_{kib}" for kib in PLANE_KIBS[backward]} for backward in (False, True))


def quotient(n: int, by: int) -> int:
    """As in pool.cu."""
    return n * (by & 0xFFFFFFFF) >> (by >> 32)


def test_the_multiplication_in_place_of_a_division_is_exact() -> None:
    rng = random.Random(3)
    divisors = [1, 2, 3, 5, 7, 27, 55, 255, 256, 257, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]
    divisors += [rng.randrange(1, 2 ** rng.randint(2, 31)) for _ in range(500)]
    for d in divisors:
        by = inverse(d)
        assert by & 0xFFFFFFFF == by % 2**32
        assert by >> 32 < 64
        for n in (0, 1, d - 1, d, d + 1, 2**31 - 1, 2**31, *(rng.randrange(2**31) for _ in range(20))):
            edge = n - n % d
            for number in {n, edge, max(edge - 1, 0)}:
                assert quotient(number, by) == number // d, (number, d)


def pool_op(direction: str, names: dict[str, str], **attrs: Any) -> Op:
    reads = {a: a for a in names if a not in ("dx",) and not (direction == "forward" and a in ("y", "indices"))}
    writes = {a: a for a in names if a not in reads}
    return Op("pool", f"pool.{direction}", "pool", direction, reads, writes, attrs)


def candidates(
    direction: str, x: Shape, side: int, layout: str, extra: tuple[str, ...] = (), dtype: str = "float32", **how: Any
) -> tuple[str, ...]:
    y = (*x[:2], side, side)
    shapes = {"x": x, "y": y} if direction == "forward" else {"dy": y, "dx": x}
    shapes |= {name: x if name == "x" else y for name in extra}
    op = pool_op(direction, {name: name for name in shapes}, **how)
    specs = {
        name: TensorSpec(name, "act", shape, "uint8" if name == "indices" else dtype, layout)
        for name, shape in shapes.items()
    }
    return pool_candidates(op, Program("p", x[0], "train", specs, (op,), (), (), (), "", ""))


ALEXNET, WIDE = (128, 96, 55, 55), (128, 64, 112, 112)


def test_what_an_op_can_take() -> None:
    third, same, two = window("max", 3, 2), window("max", 3, 1, 1), window("max", 2, 2)
    tiles = {"TILE_1x1", "TILE_2x1", "TILE_2x2", "TILE_4x1"}
    for layout in ("NHWC", "CHWN"):
        for dtype in ("float32", "bfloat16"):
            assert set(candidates("forward", ALEXNET, 27, layout, dtype=dtype, **third)) == tiles
            assert set(candidates("forward", ALEXNET, 27, layout, ("indices",), dtype, **third)) == tiles
            assert set(candidates("backward", ALEXNET, 27, layout, ("indices",), dtype, **third)) == {
                "TILE_1x1",
                "TILE_2x1",
            }
        assert candidates("forward", ALEXNET, 55, layout, **same) == ("TILE_2x2", "TILE_2x1")
        assert candidates("forward", ALEXNET, 27, layout, **two) == ("TILE_2x1", "TILE_1x1")
    assert set(candidates("forward", ALEXNET, 27, "NCHW", **third)) == PLANES
    assert set(candidates("backward", ALEXNET, 27, "NCHW", ("indices", "y"), **third)) == GRADIENT_PLANES | TURNS
    for x, side in ((WIDE, 56), ((64, 64, 28, 28), 14)):  # rows by fours
        found = candidates("forward", x, side, "NCHW", **third)
        assert found[0] == "TILE_1x4"
        assert set(found) == {*PLANES, "TILE_1x4"}
        for extra, dtype in product((("indices",), ("indices", "y")), ("float32", "bfloat16")):
            found = candidates("backward", x, side, "NCHW", extra, dtype, **third)
            assert (found[0] == "TILE_1x4") == (side % 4 == 0 and dtype == "float32")
            assert set(found) == {*GRADIENT_PLANES, *TURNS, "TILE_1x4"}
    assert candidates("forward", WIDE, 112, "NCHW", **same)[0] == "PLANES_16"
    assert candidates("backward", WIDE, 112, "NCHW", ("indices",), **same)[0] == "TILE_1x4"


def test_other_windows_have_one_way() -> None:
    for layout in ("NCHW", "NHWC", "CHWN"):
        for attrs in (window("max", 5, 2), window("max", 3, 3), window("average", 55, 55)):
            assert candidates("forward", ALEXNET, 1, layout, **attrs) == ()
        assert candidates("backward", ALEXNET, 27, layout, ("x", "y"), **window("max", 3, 2)) == ()
    uneven = {**window("max", 3, 2), "kernel": [3, 2]}
    assert candidates("forward", ALEXNET, 27, "NHWC", **uneven) == ()
    assert candidates("forward", (2, 3, 55, 55), 27, "NHWC", **window("max", 3, 2)) == ()  # channels not by 16 bytes
    assert candidates("forward", (6, 16, 55, 55), 27, "CHWN", **window("max", 3, 2)) == ()  # nor images
    assert set(candidates("forward", ALEXNET, 27, "NCHW", **window("average", 3, 2))) == PLANES


def test_few_outputs_take_small_shares_first() -> None:
    third = window("max", 3, 2)
    assert candidates("forward", ALEXNET, 27, "NHWC", **third)[0] == "TILE_2x1"
    assert candidates("forward", (2, 96, 13, 13), 6, "NHWC", **third)[0] == "TILE_1x1"
    assert candidates("forward", ALEXNET, 27, "NCHW", **third)[0] == "PLANES_16"
    assert candidates("forward", (8, 32, 13, 13), 6, "NCHW", **third)[0] == "PLANES_4"
    assert candidates("backward", ALEXNET, 27, "NCHW", ("indices",), **third)[0] == "TURNS_28"
    assert candidates("backward", (8, 32, 13, 13), 6, "NCHW", ("indices",), **third)[0] == "TURNS_7"


def test_a_program_asks_for_channels_of_a_larger_tensor() -> None:
    """The candidates of the pools that a network has, channel slices among them."""
    graph = Graph("net", (8, 16, 16), classes=3)
    x = graph.add("pool", Pool("max", 3, stride=2, padding=1), graph.input)
    assert graph.shape(x) == (8, 8, 8)
    for layout in ("NCHW", "NHWC", "CHWN"):
        program = lower(_closed(graph), 16, "eval", layout=layout)
        op = next(op for op in program.ops if op.kind == "pool.forward")
        assert all(label.startswith(("TILE_", "PLANES_")) for label in pool_candidates(op, program))
        assert pool_candidates(op, program)


def _closed(graph: Graph) -> Graph:
    from vdnn.layers import Flatten, Linear, SoftmaxLoss

    if "loss" not in graph.nodes:
        graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), graph.add("flat", Flatten(), "pool")))
    return graph


@pytest.mark.parametrize("label", ["TILE_2x2", "", "default", "PLANES_8"])
def test_the_op_says_which_is_launched(label: str) -> None:
    kernels = HostKernels()
    x = np.zeros((2, 9, 9, 8), np.float32).transpose(0, 3, 1, 2)
    y = np.zeros((2, 4, 4, 8), np.float32).transpose(0, 3, 1, 2)
    op = pool_op("forward", {"x": "x", "y": "y"}, **window("max", 3, 2), algorithm=label)
    pool_forward(op, {"x": array_of(x, "NHWC"), "y": array_of(y, "NHWC")}, kernels, None)
    assert kernels.launched == ["pool_tile_3_2_2x2" if label == "TILE_2x2" else "pool_tile_3_2_1x1"]


def test_global_averages_have_kernels_of_their_own() -> None:
    kernels = HostKernels()
    x, y = np.ones((2, 3, 3, 8), np.float32).transpose(0, 3, 1, 2), np.zeros((2, 8, 1, 1), np.float32)
    arrays = {"x": array_of(x, "NHWC"), "y": array_of(y, "NHWC")}
    pool_forward(pool_op("forward", {"x": "x", "y": "y"}, **window("average", 3, 3)), arrays, kernels, None)
    arrays = {"dx": array_of(x, "NHWC"), "dy": array_of(y, "NHWC")}
    pool_backward(pool_op("backward", {"dx": "dx", "dy": "dy"}, **window("average", 3, 3)), arrays, kernels, None)
    assert kernels.launched == ["pool_pixels_mean", "pool_pixels_spread"]
    assert (y == 1).all()
    assert x == pytest.approx(1 / 9)


def test_layouts_are_not_mixed() -> None:
    x, y = contiguous(0, (8, 8, 4, 4), layout="CHWN"), contiguous(0, (8, 8, 2, 2), layout="NHWC")
    op = pool_op("forward", {"x": "x", "y": "y"}, **window("max", 2, 2))
    with pytest.raises(VdnnError, match="expected batches of one layout"):
        pool_forward(op, {"x": x, "y": y}, HostKernels(), None)


def test_what_a_block_takes_fits_into_its_shared_memory() -> None:
    """What each block stages, counted from the pixels and windows that it needs: 16 bytes more at each end."""
    rng, found = random.Random(5), constants(source())
    for _ in range(400):
        size, step = rng.choice(((2, 2), (3, 2), (3, 1)))
        pad, dtype = rng.randint(0, size // 2), rng.choice(("float32", "bfloat16"))
        n, c, h, w = rng.randint(1, 40), rng.randint(1, 300), rng.randint(size, 130), rng.randint(size, 1600)
        p, q = ((s + 2 * pad - size) // step + 1 for s in (h, w))
        x, y = contiguous(0, (n, c, h, w), dtype), contiguous(0, (n, c, p, q), dtype)
        backward, masked = rng.random() < 0.5, rng.random() < 0.5
        indices = contiguous(0, y.shape, "uint8")
        pooled = Pooled(x, y, indices, y if backward and masked else None, size, step, pad, True, backward, False)
        each = DTYPE_BYTES[dtype]
        for label, made in ways(pooled).items():
            launch = made()
            if label.startswith("TURNS"):
                planes, group, groups, band, bands, rows = launch.args[-10:-4]
                assert rows == -(-(h + pad) // step)
                assert (groups, bands) == (-(-planes // group), -(-rows // band))
                assert launch.blocks == (n * c // planes) * groups * bands
                assert band == rows or group == 1
                windows = group * p * q if group > 1 else min(band + (size - 1) // step, p) * q
                pixels = group * h * w if group > 1 else min(band * step, h) * w
                assert windows <= 256 * found["TURNS_WINDOWS"]
                assert 4 * pixels <= 1024 * int(label.removeprefix("TURNS_"))
                assert 4 * pixels + 32 + 16 <= found["TURNS_BYTES"]  # up to 7 before the first, and to 16 bytes
                continue
            if not label.startswith("PLANES"):
                continue
            planes, group, groups, band, bands, rows, columns, strip, strips = launch.args[-13:-4]
            assert rows * columns == (-(-(h + pad) // step) * -(-(w + pad) // step) if backward else p * q)
            assert (groups, bands, strips) == (-(-planes // group), -(-rows // band), -(-band // strip))
            assert launch.blocks == (n * c // planes) * groups * bands
            whole = group > 1
            assert band == rows or not whole
            if backward:
                windows = group * p * q if whole else min(band + (size - 1) // step, p) * q
                pixels = group * h * w if whole else min(band * step, h) * w
                parts = [windows * each, windows, windows * each if masked else 0, pixels * each]
                room = found["PLANES_GRADIENT_BYTES"] - 16  # before the first
            else:
                room = found["PLANES_BYTES"]
                parts = [(group * h * w if whole else min((band - 1) * step + size, h) * w) * each]
            assert sum(parts) + 32 * len(parts) <= room, label
            assert sum(parts) <= 1024 * int(label.removeprefix("PLANES_"))
            assert planes in (c, n * c)


# ---- the benchmark

SMALL = (
    PoolCase("third", (16, 8, 9, 9), 4, window("max", 3, 2)),
    PoolCase("same", (8, 8, 6, 6), 6, window("max", 3, 1, 1)),
    PoolCase("mean", (8, 16, 7, 7), 1, window("average", 7, 7)),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_way_is_measured_and_right(case: PoolCase, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, failures = make_bench(monkeypatch, dtype), []
    rows = _measured(case, bench, failures)
    assert failures == []
    directions = {row["direction"] for row in rows}
    assert directions == {call.direction for call in gpu_pool.calls_of(case)}
    assert {row["layout"] for row in rows} == {"NCHW", "NHWC", "CHWN"}
    for row in rows:
        assert {"case", "direction", "layout", "dtype", "method", "time_us", "gbps", "share"} <= set(row)
    if case.name == "third":
        methods = {row["method"] for row in rows if row["layout"] == "CHWN" and row["direction"] == "forward"}
        assert methods == {"ours TILE_1x1", "ours TILE_2x1", "ours TILE_2x2", "ours TILE_4x1"}
    assert len(list(summary(rows))) == 3 * len(directions)


def test_a_wrong_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, failures = make_bench(monkeypatch, "float32"), []
    launch = bench.probe.kernels.launch

    def broken(name: str, blocks: int, args: list[Any], stream: Any) -> None:
        launch(name, blocks, args, stream)
        if name == "pool_tile_3_2_2x2":
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 1).from_address(int(args[2])))[0] += 1

    monkeypatch.setattr(bench.probe.kernels, "launch", broken)
    rows = _measured(SMALL[0], bench, failures)
    assert {row["method"] for row in rows if row["time_us"] is None} == {"ours TILE_2x2"}
    assert all("sampled numbers are wrong" in text for text in failures)


def _measured(case: PoolCase, bench: Any, failures: list[str]) -> list[dict[str, Any]]:
    given, made = (gpu_pool._room(case, bench.dtype, bench.clock, names) for names in (gpu_pool.GIVEN, gpu_pool.MADE))
    arena = bench.probe.allocate(given + made)
    bench.probe.fill(arena, given)
    return measure(case, bench, None, arena, arena + given, failures.append)


def test_the_cases_are_those_of_networks_and_of_the_study() -> None:
    found = {case.name: case for case in cases()}
    assert {f"POOL{i}" for i in range(1, 11)} < set(found)
    assert found["ResNet pool1"].whole == found["ResNet pool1"].y
    assert found["GoogLeNet pool1"].whole[2:] == (55, 55)  # cuDNN rounds down
    assert len(found) == len(list(cases()))


def test_the_whole_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the host, with a cuDNN that does nothing."""
    bench, used = make_bench(monkeypatch, "float32"), []

    def note(*addresses: int) -> None:
        used.append(addresses)

    monkeypatch.setattr(probe, "Probe", lambda dtype: bench.probe)
    monkeypatch.setattr(gpu_pool, "Clock", lambda memory: bench.clock)
    monkeypatch.setattr(gpu_pool, "Handle", lambda: SimpleNamespace(set_stream=lambda ptr: None, close=lambda: None))
    monkeypatch.setattr(gpu_pool, "_cudnn", lambda *how: SimpleNamespace(forward=note, backward=note))
    monkeypatch.setattr(gpu_pool, "cases", lambda: iter(SMALL))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_pool.main(["float32", "third"]) == 0
    results = json.loads((tmp_path / "gpu_pool.json").read_text())["results"]
    assert results["left_out"] == 0
    theirs = [row for row in results["rows"] if row["method"] == "cudnn"]
    assert {(row["layout"], row["direction"]) for row in theirs} == {
        (layout, direction) for layout in ("NCHW", "NHWC") for direction in ("forward", "backward")
    }
    assert {len(addresses) for addresses in used} == {2, 4}
    assert "x cuDNN's best" in capsys.readouterr().out
    assert gpu_pool.main(["float32", "third", "--only", "backward:NCHW"]) == 0
    rows = json.loads((tmp_path / "gpu_pool.json").read_text())["results"]["rows"]
    assert {(row["direction"], row["layout"]) for row in rows} == {("backward", "NCHW"), ("backward masked", "NCHW")}
    assert {row["method"] for row in rows} == {"cudnn", *(f"ours {way}" for way in GRADIENT_PLANES | TURNS)}
    with pytest.raises(VdnnError, match="expected forward or backward"):
        gpu_pool.main(["--only", "NCHW"])
    monkeypatch.setattr(gpu_pool, "SECONDS", -1.0)
    assert gpu_pool.main(["float32", "third"]) == 0
    assert "left out for lack of time: third float32" in capsys.readouterr().out


@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_a_block_stages_fits_into_its_shared_memory(itemsize: int) -> None:
    """A band of all rows of a plane reads fewer rows than the plane has, which may be all that fits."""
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    room = constants(source())["PLANES_BYTES"]
    seen = set()
    for h, w, (size, step) in product((5, 6, 9, 40), (7, 400, 800, 1300, 2000), ((2, 2), (3, 2), (3, 1))):
        p, q = (h - size) // step + 1, (w - size) // step + 1
        for limit in PLANE_KIBS[False]:
            x, y = (contiguous(4, shape, dtype) for shape in ((2, 3, h, w), (2, 3, p, q)))
            share = _share(Pooled(x, y, None, None, size, step, 0, True, False, False), 1024 * limit)
            if share is None:
                continue
            if share.group > 1:
                numbers = share.group * h * w
            else:
                numbers = (
                    max(
                        min((min(first + share.band, p) - 1) * step + size, h) - first * step
                        for first in range(0, p, share.band)
                    )
                    * w
                )
            seen.add(share.band < p)
            assert numbers * itemsize + 30 <= room, (h, w, size, step, limit)
    assert seen == {True, False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_no_window_holds_have_no_gradient(dtype: str) -> None:
    """The last row of an odd height, a band by itself: what the band before has staged is not its own."""
    kernels, (n, c, h, w) = HostKernels(dtype=dtype), (1, 2, 9, 800)
    indices, dy = np.zeros((n, c, h // 2, w // 2), np.uint8), np.ones((n, c, h // 2, w // 2), np.float32)
    dx = np.full((n, c, h, w), np.nan, np.float32)
    held = {"indices": indices, "dy": store(dy, dtype), "dx": store(dx, dtype)}
    for label in sorted(GRADIENT_PLANES | TURNS):
        op = pool_op("backward", {name: name for name in held}, **window("max", 2, 2), algorithm=label)
        pool_backward(op, {name: array_of(array) for name, array in held.items()}, kernels, None)
        found = load(held["dx"], dtype)
        assert (found[:, :, :8:2, ::2] == 1).all(), label
        assert found.sum() == dy.sum(), label
