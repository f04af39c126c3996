"""Copy rates of this machine, measured once for a GPU, driver and host, and kept on disk.

rates = known_rates({"gpu": name, "driver": version}, cache_folder(), lambda: measure_rates(cupy))
rates.d2h_gbps, rates.both_gbps
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vdnn.memory.costs import CopyRates
from vdnn.runtime.backends.cuda.pinned import PinnedSlab
from vdnn.runtime.backends.cuda.survey import measure_copies

COPY_BYTES = 64 * 2**20
"""Of one measured copy: a large feature map's worth, some 20 ms for all of the measurement."""
LATENCY_US = 8.0
"""To start one copy of a stream: an allowance, not measured."""


def known_rates(key: Mapping[str, Any], folder: Path, measure: Callable[[], CopyRates]) -> CopyRates:
    """The rates kept under `key` and this host's name, measured now if there are none.

    Args:
        measure: makes them, see `measure_rates`.
    """
    whole = {**key, "host": platform.node()}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"copies-{digest}.json"
    try:
        return CopyRates(**json.loads(path.read_text(encoding="utf-8"))["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        rates = measure()  # nothing kept yet, or a damaged file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"key": whole, "rates": asdict(rates)}), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        pass  # a cache that cannot be written costs a moment at the next start, nothing else
    return rates


def measure_rates(cupy: Any) -> CopyRates:
    """Rates of pinned copies, alone and both ways at once; takes and gives back 128 MiB on both sides."""
    runtime = cupy.cuda.runtime
    slab = PinnedSlab(2 * COPY_BYTES)
    try:
        device = int(runtime.malloc(2 * COPY_BYTES))
        try:
            found = measure_copies(cupy, device, slab.address, COPY_BYTES)[0]
        finally:
            runtime.free(device)
    finally:
        slab.close()
    return CopyRates(found.d2h_gbps, found.h2d_gbps, found.both_gbps, LATENCY_US)
