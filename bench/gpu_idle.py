"""How busy the GPU is inside a replayed step, seen through torch.profiler, which sees every kernel of the process.

    python -m vdnn.bench.gpu_idle alexnet 128

Busy is the union of kernels, copies and fills on all streams; idle is what is left between the first and the last of a
step. torch is not needed by vdnn itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from vdnn.bench.command import command
from vdnn.bench.harness import Silent, check_device, write_results
from vdnn.errors import BackendUnavailable
from vdnn.runtime.config import load_config
from vdnn.runtime.data import batches, epoch_order
from vdnn.runtime.prepare import prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

STEPS = 10
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def measure(network: str, batch: int, overrides: list[str]) -> dict[str, Any]:
    """Busy and idle time of captured training steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"train.batch_size={batch}", f"data.train_images={batch * 2}", "data.test_images=8", "device=cuda"]
        config = load_config(network, [*fixed, "evaluate.batch_size=8", f"output={folder}/run", *overrides])
        prepared = prepare(config)
        trainer = Trainer(prepared, RunFolder(Path(folder)), Silent())
        trainer.start()
        split = prepared.source.train
        images, labels = next(batches(split, epoch_order(0, 0, len(split)), 0, batch))
        for _ in range(3):
            trainer.train_step(images, labels, 0.001)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(STEPS):
                trainer.train_step(images, labels, 0.001)
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ON_GPU]
        prepared.backend.close()
    return summary(events)


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Per step: span, busy and idle share; and where kernel time goes."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    gaps = sorted(range(1, len(merged)), key=lambda i: merged[i - 1][1] - merged[i][0])
    # between two steps lie the longest gaps: the host looks at the loss and takes the next images
    cuts = [0, *sorted(gaps[: STEPS - 1]), len(merged)]
    steps = []
    for low, high in pairwise(cuts):
        part = merged[low:high]
        whole, busy = part[-1][1] - part[0][0], sum(end - start for start, end in part)
        steps.append({"ms": whole / 1000, "busy_ms": busy / 1000, "idle_share": 1 - busy / whole})
    steps.sort(key=lambda step: step["ms"])
    by_name: Counter[str] = Counter()
    for event in events:
        by_name[event["name"][:90]] += float(event["dur"]) / 1000 / STEPS  # type: ignore[assignment]
    return {"median": steps[len(steps) // 2], "steps": steps, "ms_per_step_by_kernel": dict(by_name.most_common(25))}


def main() -> None:
    """NETWORK BATCH [overrides]."""
    network, batch, *overrides = sys.argv[1:]
    check_device("cuda", "run this on a GPU")
    if find_spec("torch") is None:
        raise BackendUnavailable("PyTorch is not installed, whose profiler this takes: install it beside vdnn")
    found = measure(network, int(batch), overrides)
    print(json.dumps(found["median"]), json.dumps(found["ms_per_step_by_kernel"], indent=1))
    write_results(f"gpu_idle_{network}.json", " ".join(["python -m vdnn.bench.gpu_idle", *sys.argv[1:]]), found)


if __name__ == "__main__":
    sys.exit(command(main))
