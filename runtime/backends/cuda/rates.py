"""Copy rates of this machine, and what copies cost kernels: measured once for a GPU, driver and host, kept on disk.

rates = known_rates({"gpu": name, "driver": version}, cache_folder(), lambda: measure_rates(cupy, cublas))
rates.d2h_gbps, rates.both_gbps, rates.stream_slowdown
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from vdnn.memory.costs import CopyRates
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.pinned import PinnedSlab
from vdnn.runtime.backends.cuda.survey import measure_copies

COPY_BYTES = 64 * 2**20
"""Of one measured copy: a large feature map's worth, some 20 ms for all of the measurement."""
LATENCY_US = 8.0
"""To start one copy of a stream: an allowance, not measured."""
LOAD_COPIES = 10
"""Copies each way beside which kernels are timed: some 15 ms of them."""
ROUNDS = 3
STREAM_CALLS, PRODUCT_CALLS = 40, 10
"""Kernels timed beside the copies: about 1.5 ms of copies within the device, 4 ms of products in fp32 on an H200."""
SIDE = 2048
"""Of the square matrices of a product, which is bound by arithmetic: three of them take 48 MiB."""
WORKSPACE_BYTES = 4 * 2**20
LANES = 128
"""Of fp32 in a multiprocessor; compute capabilities 7.5 and 8.0 have half of that."""


def known_rates(key: Mapping[str, Any], folder: Path, measure: Callable[[], CopyRates]) -> CopyRates:
    """The rates kept under `key` and this host's name, measured now if there are none.

    Args:
        measure: makes them, see `measure_rates`.
    """
    whole = {**key, "host": platform.node()}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"copies-{digest}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["rates"]
        return CopyRates(**{field.name: float(kept[field.name]) for field in fields(CopyRates)})
    except (OSError, ValueError, KeyError, TypeError):
        rates = measure()  # nothing kept yet, a damaged file, or one from before something else was measured
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"key": whole, "rates": asdict(rates)}), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        pass  # a cache that cannot be written costs a moment at the next start, nothing else
    return rates


def rates_words(rates: CopyRates) -> str:
    """They in words, for people who look at a prediction."""
    return (
        f"copies measured: {rates.d2h_gbps:.0f} GB/s out, {rates.h2d_gbps:.0f} in, {rates.both_gbps:.0f} both; beside "
        f"them products take {rates.product_slowdown:.2f} times as long, other ops {rates.stream_slowdown:.2f}"
    )


def peak_gflops(properties: Mapping[str, Any]) -> float:
    """10^9 fp32 operations a second that a GPU cannot exceed without tensor cores, by its properties; 0 if they do not
    say: LANES a multiprocessor, each a multiplication and an addition a clock."""
    return 2e-6 * LANES * float(properties.get("multiProcessorCount", 0)) * float(properties.get("clockRate", 0))


def measure_rates(cupy: Any, cublas: Cublas) -> CopyRates:
    """Rates of pinned copies, alone and both ways at once, and how much longer kernels take beside them.

    Takes and gives back 256 MiB on the device and 128 MiB pinned; products run through `cublas`.
    """
    runtime = cupy.cuda.runtime
    slab = PinnedSlab(2 * COPY_BYTES)
    try:
        device = int(runtime.malloc(4 * COPY_BYTES))
        try:
            found = measure_copies(cupy, device, slab.address, COPY_BYTES)[0]
            products, streams = measure_slowdowns(cupy, cublas, device, slab.address, COPY_BYTES)
        finally:
            runtime.free(device)
    finally:
        slab.close()
    return replace(found, latency_us=LATENCY_US, product_slowdown=products, stream_slowdown=streams)


def measure_slowdowns(cupy: Any, cublas: Cublas, device: int, host: int, nbytes: int) -> tuple[float, float]:
    """How many times as long products, and copies within the device, take while copies run both ways.

    Args:
        device, host: addresses of 4 `nbytes` on the device and 2 `nbytes` of pinned memory.
    """
    runtime = cupy.cuda.runtime
    out, back, compute = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    source, target = device + 2 * nbytes, device + 3 * nbytes
    matrix = 4 * SIDE**2
    runtime.memset(source, 0x3C, nbytes)  # about 0.01 in float32
    runtime.deviceSynchronize()
    cublas.bind(compute.ptr, target, WORKSPACE_BYTES)

    def product() -> None:
        cublas.gemm(SIDE, SIDE, SIDE, source, source + matrix, source + 2 * matrix)

    def stream() -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, compute.ptr)

    def copies() -> None:
        for number in range(LOAD_COPIES):
            runtime.memcpyAsync(host, device, nbytes, runtime.memcpyDeviceToHost, out.ptr)
            runtime.memcpyAsync(host + nbytes, device + nbytes, nbytes, runtime.memcpyHostToDevice, back.ptr)
            if number == 0:  # both links are busy once the first copies are over
                for other in (out, back):
                    begun = cupy.cuda.Event()
                    begun.record(other)
                    compute.wait_event(begun)

    def time_ms(work: Callable[[], None], calls: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(compute)
        for _ in range(calls):
            work()
        end.record(compute)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))

    def slowdown(work: Callable[[], None], calls: int) -> float:
        time_ms(work, calls)
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(time_ms(work, calls))
            copies()
            beside.append(time_ms(work, calls))
            for other in (out, back):
                other.synchronize()
        return max(1.0, median(beside) / median(alone))

    return slowdown(product, PRODUCT_CALLS), slowdown(stream, STREAM_CALLS)
