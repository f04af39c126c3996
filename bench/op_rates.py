"""The two ceilings of a machine: copy bandwidth, and products a second in a precision, both by PyTorch's libraries.

    python -m vdnn.bench.op_rates bf16                   # {"copy_gbps": ..., "tflops": ...} on one line, of the GPU
    python -m vdnn.bench.op_rates fp32 --device cpu

In a process of its own, so that its libraries are not those of what is measured against it. GB are 10^9 bytes, those
read and those written counted; operations are two for each multiplication and sum. Data are random.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from vdnn.bench.command import command, tied
from vdnn.bench.torch_reference import load_torch
from vdnn.errors import BackendUnavailable

SIZES = {"cuda": (2**30, 8192), "cpu": (2**26, 512)}
"""Bytes of the copy, and edge of the square matrices."""
ROUNDS, CALLS = 9, 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Copy bandwidth in GB/s, and 10^12 operations of matrix products a second."""

    copy_gbps: float
    tflops: float


def rates_of(precision: str, device: str) -> Rates:
    """Measured by a process of its own; BackendUnavailable where that cannot be done."""
    words = [sys.executable, "-m", "vdnn.bench.op_rates", precision, "--device", device]
    ended = subprocess.run(words, capture_output=True, text=True, **tied())
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        last = re.sub(r"^(op_rates|[A-Za-z_.]*Error): ", "", last)  # of the command, or of an error of PyTorch's
        raise BackendUnavailable(f"the machine's rates could not be measured ({last}); state --copy-gbps and --tflops")
    return Rates(**json.loads(ended.stdout.splitlines()[-1]))


def measure(precision: str, device: str) -> Rates:
    """By torch, in this process."""
    torch = load_torch()
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    nbytes, edge = SIZES[device]
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copy_ms = _time_ms(torch, device, lambda: target.copy_(source))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    a, b = (torch.randn(edge, edge, device=device).to(kinds.get(precision, torch.float32)) for _ in range(2))
    c = torch.empty_like(a)
    product_ms = _time_ms(torch, device, lambda: torch.mm(a, b, out=c))
    return Rates(2 * nbytes / copy_ms / 1e6, 2 * edge**3 / product_ms / 1e9)


def _time_ms(torch: Any, device: str, work: Callable[[], object]) -> float:
    """Median time of one call, of rounds of a few."""
    times = []
    work()
    for _ in range(ROUNDS):
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(CALLS):
                work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / CALLS)
        else:
            begin = perf_counter()
            for _ in range(CALLS):
                work()
            times.append((perf_counter() - begin) * 1000 / CALLS)
    return float(median(times))


def main(arguments: Sequence[str] | None = None) -> None:
    """PRECISION [--device DEVICE]."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.op_rates", description="copy bandwidth, products")
    parser.add_argument("precision", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda", help="where (default: cuda)")
    given = parser.parse_args(arguments)
    found = measure(given.precision, given.device)
    print(json.dumps({"copy_gbps": found.copy_gbps, "tflops": found.tflops}))


if __name__ == "__main__":
    sys.exit(command(main))
