"""Measures the study's pools: the libraries' ways rebuilt, cuDNN, and every tile of outputs that ours can take.

    bench = Bench(Probe("float32"), Clock(probe))
    measure(recorder, bench, lambda case: ours_of(case, probe.kernels, probe.stream, tiles), deadline, print)

Every result is compared with NumPy in a few planes before it is timed. Operands lie one behind the other in as many
copies as it takes to be rid of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.study_cases import NCHW, NHWC, PoolCase, pools
from vdnn.bench.study_clock import Clock, aligned
from vdnn.bench.study_files import Recorder
from vdnn.bench.study_pool_methods import Method, Places, nbytes_of, sizes
from vdnn.bench.study_pooling import TILE
from vdnn.errors import VdnnError
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, load

Ints = Sequence[int]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Of gradients, sums of up to four numbers; maxima are exact."""


class Bench:
    """The GPU, or what stands for it.

    Args:
        probe: memory, a stream, and vdnn's kernels, for whose dtype operands are made.
    """

    def __init__(self, probe: Any, clock: Clock) -> None:
        self.probe, self.clock, self.dtype = probe, clock, str(probe.kernels.dtype)
        self._runtime = load_cupy().cuda.runtime

    def read(self, address: int, shape: Shape, layout: str, images: Ints, channels: Ints) -> NDArray[np.float32]:
        """Planes of an operand of shape (N, C, H, W): channels of images, each of these with each of those."""
        n, c, height, width = shape
        hw = height * width
        self.probe.stream.synchronize()
        if layout == NCHW:
            found = [self._copy(address, (i * c + j) * hw, hw) for i in images for j in channels]
        elif layout == NHWC:
            whole = [self._copy(address, i * hw * c, hw * c).reshape(hw, c) for i in images]
            found = [image[:, j] for image in whole for j in channels]
        else:
            blocks = [self._copy(address, j * hw * n, hw * n).reshape(hw, n) for j in channels]
            found = [block[:, i] for i in images for block in blocks]
        return np.stack(found).reshape(-1, height, width)

    def _copy(self, address: int, start: int, count: int) -> NDArray[np.float32]:
        bits = np.empty(count, NUMPY_DTYPES[self.dtype])
        source = address + bits.itemsize * start
        self._runtime.memcpy(bits.ctypes.data, source, bits.nbytes, self._runtime.memcpyDeviceToHost)
        return load(bits, self.dtype)

    def poison(self, address: int, nbytes: int) -> None:
        """Fill with NaN, so that what is not written is seen."""
        self._runtime.memsetAsync(address, 0xFF, nbytes, self.probe.stream.ptr)


def pooled(x: NDArray[np.float32], outputs: Shape, window: int, stride: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Maxima of planes (planes, H, W) over windows, shape (planes, P, Q), and the place of each in its plane."""
    height, width = x.shape[1:]
    rows, columns = outputs[2:]
    edge = (
        (0, 0),
        (0, max(0, (rows - 1) * stride + window - height)),
        (0, max(0, (columns - 1) * stride + window - width)),
    )
    padded = np.pad(x, edge, constant_values=-np.inf)
    places = np.pad(np.arange(height * width).reshape(1, height, width), edge)
    parts, where = [], []
    for r in range(window):
        for s in range(window):
            here = (slice(None), slice(r, r + rows * stride, stride), slice(s, s + columns * stride, stride))
            parts.append(padded[here][:, :rows, :columns])
            where.append(np.broadcast_to(places[here][:, :rows, :columns], parts[-1].shape))
    stacked, at = np.stack(parts), np.stack(where)
    first = stacked.argmax(0)[None]
    return np.take_along_axis(stacked, first, 0)[0], np.take_along_axis(at, first, 0)[0]


def spread(places: NDArray[np.int64], dy: NDArray[np.float32], height: int, width: int) -> NDArray[np.float64]:
    """Gradient (planes, H, W): every dy (planes, P, Q) added at its place."""
    dx = np.zeros((len(dy), height * width))
    for plane, where, values in zip(dx, places, dy, strict=True):
        np.add.at(plane, where.ravel(), values.ravel().astype(np.float64))
    return dx.reshape(-1, height, width)


def difference(case: PoolCase, method: Method, bench: Bench, at: Places) -> str:
    """What is wrong with a result in some planes; "" if nothing is."""
    outputs = method.outputs or case.y
    result = method.operands[-1]
    images, channels = (sorted({0, size // 2, size - 1}) for size in (case.n, case.c))
    x = bench.read(at["x"], case.x, method.layout, images, channels)
    y, places = pooled(x, outputs, case.window, case.stride)
    got = bench.read(at[result], case.x if result == "dx" else outputs, method.layout, images, channels)
    if result == "dx":
        dy = bench.read(at["dy"], outputs, method.layout, images, channels)
        wanted, most = spread(places, dy, case.size, case.size), TOLERANCE[bench.dtype]
    else:
        wanted, most = y.astype(np.float64), 0.0
    wrong = np.abs(got - wanted) > most * np.maximum(1, np.abs(wanted))
    wrong |= np.isnan(got)
    return f"{int(wrong.sum())} of {wrong.size} sampled numbers are wrong" if wrong.any() else ""


def place(case: PoolCase, dtype: str, start: int) -> dict[str, int]:
    """Addresses of the operands of one copy that begins at `start`."""
    found, at = {}, start
    for name, nbytes in sizes(case, dtype).items():
        found[name] = at
        at += aligned(nbytes)
    return found


def measure_case(
    case: PoolCase, methods: Sequence[Method], bench: Bench, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for every method; one whose result is wrong has no time."""
    dtype, clock = bench.dtype, bench.clock
    step = sum(aligned(size) for size in sizes(case, dtype).values())
    most = max(clock.count(nbytes_of(case, dtype, method)) for method in methods)
    arena = bench.probe.allocate(most * step)
    rows, copies = [], {}
    try:
        bench.probe.fill(arena, most * step)
        every = [place(case, dtype, arena + i * step) for i in range(most)]
        for method in methods:
            nbytes = nbytes_of(case, dtype, method)
            sets = every[: clock.count(nbytes)]
            row = {
                **{"case": case.name, "direction": method.direction, "layout": method.layout, "dtype": dtype},
                **{"method": method.name, TILE: method.tile, "variant": method.variant, "nbytes": nbytes},
            }
            words = " ".join(
                part for part in (case.name, method.direction, method.layout, dtype, method.name, method.tile) if part
            )
            try:
                for at in sets:
                    if method.prepare is not None:
                        method.prepare(at)
                result = method.operands[-1]
                bench.poison(sets[0][result], sizes(case, dtype)[result])
                method.launch(sets[0])
                wrong = difference(case, method, bench, sets[0]) if method.ties or dtype == "float32" else ""
                if wrong:
                    raise VdnnError(wrong)
                time_us = clock.time_us([lambda at=at, run=method.launch: run(at) for at in sets])  # type: ignore[misc]
            except Exception as error:  # the other methods still count
                rows.append({**row, "time_us": None, "failed": f"{type(error).__name__}: {error}"})
                note(f"FAILED {words}: {error}")
                bench.probe.stream.synchronize()
                bench.probe.fill(arena, most * step)  # or NaN that it has left would come into what others read
                continue
            if nbytes not in copies:
                copies[nbytes] = clock.copy_us([at["x"] for at in sets], nbytes)
            share = copies[nbytes] / time_us
            rows.append(
                {**row, "time_us": time_us, "gbps": nbytes / time_us / 1e3, "share": share, "copy_us": copies[nbytes]}
            )
            note(f"{words:56} {time_us:9.2f} us {nbytes / time_us / 1e3:7.0f} GB/s {share:6.1%}")
    finally:
        bench.probe.stream.synchronize()
        bench.probe.free(arena)
    return rows


MethodsOf = Callable[[PoolCase], Iterable[Method]]


def measure(
    recorder: Recorder, bench: Bench, methods_of: MethodsOf, deadline: float, note: Callable[[str], None] = print
) -> tuple[int, int]:
    """Measure the pools that are missing until `deadline` (time.monotonic); pools left, and methods that failed."""
    left = failed = 0
    for case in pools().values():
        if recorder.has(case=case.name, dtype=bench.dtype):
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        rows = measure_case(case, list(methods_of(case)), bench, note)
        failed += sum(row["time_us"] is None for row in rows)
        recorder.add(*rows)
    return left, failed
