"""vdnn beside PyTorch on one GPU, both in fp32: first losses from the same weights and images, then time per step.

    python -m vdnn.bench.gpu_torch                     # the four networks
    python -m vdnn.bench.gpu_torch resnet50 alexnet    # gpu_torch.json goes to the folder $OUT

How losses are compared is in vdnn.bench.torch_losses. A part that fails says so and the others go on.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from statistics import quantiles
from time import perf_counter
from typing import Any

from vdnn.bench.command import command
from vdnn.bench.harness import Outcome, train, write_results
from vdnn.bench.torch_losses import CASES, Case, attempt, compare_losses, open_first, peer, torch_facts
from vdnn.bench.torch_reference import load_torch

WARM_UP, TIMED = 5, 20
"""Steps: run before the clock, timed by it."""
RATE = 1e-7
"""Of the timed steps, which start from the first weights: small, so that none of them meets a NaN."""


def compare(case: Case) -> dict[str, Any]:
    """Losses and times of one case; what failed is in "failed", by part."""
    found = compare_losses(case)
    failed: dict[str, str] = found["failed"]
    settings = [*case.settings(), f"optimizer.lr={RATE!r}", "device=cuda"]
    ours: Outcome | None = attempt(failed, "vdnn times", partial(train, case.network, settings, WARM_UP + TIMED))
    times: dict[str, Any] | None = attempt(failed, "torch times", partial(torch_times, case))
    if ours is not None:
        found |= {"vdnn_device": ours.device, "vdnn_step_ms": ours.step_ms, "vdnn_slab_bytes": ours.slab_bytes}
    if times is not None:
        found |= times
    if ours is not None and times is not None:
        found["vdnn_over_torch"] = ours.step_ms / times["torch_step_ms"]
        found["vdnn_over_torch_wall"] = ours.step_ms / times["torch_wall_ms"]
    return found


def torch_times(case: Case) -> dict[str, Any]:
    """Time of a step by PyTorch with the fastest algorithms it finds, and the most bytes its tensors took.

    A step is upload of the images, forward, backward and update. "torch_step_ms" is the median between CUDA events,
    steps queued one after the other, beside its quartiles; "torch_wall_ms" is by the host's clock with the loss read
    after every step, as vdnn's step time is.
    """
    torch = load_torch()
    trainer, feed = peer(case, "cuda", lr=RATE, fast=True)
    torch.cuda.reset_peak_memory_stats()
    images, labels = (array.copy() for array in next(feed(1)))  # arrays of its own, which PyTorch takes as they are
    for _ in range(WARM_UP):
        trainer.step(images, labels)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        trainer.step(images, labels)
        mark.record()
    torch.cuda.synchronize()
    low, middle, high = quantiles(a.elapsed_time(b) for a, b in pairwise(marks))
    walls = []
    for _ in range(TIMED):
        begin = perf_counter()
        float(trainer.step(images, labels))
        walls.append((perf_counter() - begin) * 1000)
    return {
        "torch_step_ms": middle,
        "torch_step_quartiles_ms": [low, high],
        "torch_wall_ms": quantiles(walls)[1],
        "torch_peak_bytes": torch.cuda.max_memory_allocated(),
        "timed_steps": TIMED,
    }


def main() -> None:
    """Compare the networks named on the command line, or all."""
    names = sys.argv[1:] or list(CASES)
    if not set(names) <= set(CASES):
        sys.exit(f"name one or more of: {', '.join(CASES)}")
    open_first("cuda")
    found: dict[str, Any] = {}
    for name in names:
        found[name] = compare(CASES[name])
        print(name, {k: v for k, v in found[name].items() if not k.endswith("losses")}, flush=True)
    found["torch"] = torch_facts()
    write_results("gpu_torch.json", " ".join(["python -m vdnn.bench.gpu_torch", *sys.argv[1:]]), found)


if __name__ == "__main__":
    sys.exit(command(main))
