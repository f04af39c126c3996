"""Training on a GPU, checked: against the CPU, under every policy, captured and not, within a memory limit.

    python -m vdnn.bench.gpu_training agree policies
    python -m vdnn.bench.gpu_training vgg19-dyn

Every part goes on after a failure and says what failed; results as JSON.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from vdnn.bench.command import command, reason
from vdnn.bench.harness import Outcome, check_device, train, write_results
from vdnn.errors import BackendUnavailable, ConfigError

AGREEMENT = 1e-5
"""Relative difference of losses that fp32 on two machines may show in the first steps."""
QUICK = ["data.train_images=512", "data.test_images=8", "evaluate.batch_size=8", "train.accumulate=1"]
QUICK += ["memory.layout=nchw"]  # of the papers, and of the CPU; vdnn.bench.gpu_layouts has the others


def agree() -> dict[str, Any]:
    """First losses on cpu and cuda."""
    cases = {
        "lenet": ["train.batch_size=64", "network.dropout=0.5"],
        "alexnet": ["network.dropout=0", "train.batch_size=8"],
        "resnet18": ["train.batch_size=8"],
        "googlenet": ["network.dropout=0", "train.batch_size=4"],
        "vgg16": ["network.dropout=0", "train.batch_size=2", "optimizer.lr=0.000001"],
    }
    found: dict[str, Any] = {}
    for name, overrides in cases.items():
        common = [*QUICK, "optimizer.lr=0.00002", *overrides, "memory.policy=none", "memory.limit=null"]
        cpu = _try(partial(train, name, [*common, "device=cpu"], 5))
        cuda = _try(partial(train, name, [*common, "device=cuda"], 5))
        if isinstance(cpu, str) or isinstance(cuda, str):
            found[name] = {"failed": [x for x in (cpu, cuda) if isinstance(x, str)]}
        else:
            worst = max(abs(a - b) / abs(a) for a, b in zip(cpu.losses, cuda.losses, strict=True))
            found[name] = {"cpu": cpu.losses, "cuda": cuda.losses, "relative": worst, "ok": worst <= AGREEMENT}
        print("agree", name, {k: v for k, v in found[name].items() if k not in ("cpu", "cuda")}, flush=True)
    return found


CASES = {"vgg16": 64, "googlenet": 128, "resnet50": 64}


def policies() -> dict[str, Any]:
    """Losses and weights bit-identical under every policy, captured and not."""
    found: dict[str, Any] = {}
    for name, batch in CASES.items():
        common = [*QUICK, f"train.batch_size={batch}", "deterministic=true", "memory.limit=null", "device=cuda"]
        rows: dict[str, Any] = {}
        reference: Outcome | None = None
        for label, extra, capture in (
            ("none", ["memory.policy=none"], True),
            ("none uncaptured", ["memory.policy=none"], False),
            ("base", ["memory.policy=base"], True),
            ("conv", ["memory.policy=conv"], True),
            ("all", ["memory.policy=all"], True),
            ("all uncaptured", ["memory.policy=all"], False),
            ("dyn", ["memory.policy=dyn"], True),
        ):
            got = _try(partial(train, name, [*common, *extra], 20, capture=capture))
            if isinstance(got, str):
                rows[label] = {"failed": got}
            else:
                reference = reference or got
                same = got.losses == reference.losses and got.digest == reference.digest
                rows[label] = {"same": same, **_numbers(got)}
            print("policies", name, label, {k: v for k, v in rows[label].items() if k != "losses"}, flush=True)
        found[name] = rows
    return found


TEN = {
    "alexnet": 128,
    "overfeat": 128,
    "googlenet": 128,
    "vgg19": 64,
    "vgg19@128": 128,
    "vgg19@256": 256,
    "vgg116": 32,
    "vgg216": 32,
    "vgg316": 32,
    "vgg416": 32,
}
"""The networks of the vDNN paper and their batch sizes."""
LIMITS: Mapping[str, tuple[str, list[str]]] = {
    "vgg19-free": ("vgg19", ["train.batch_size=256", "memory.policy=none", "memory.limit=null"]),
    "vgg19-all-m": (
        "vgg19",
        ["train.batch_size=256", "memory.policy=all", "memory.limit=12GiB", "memory.algorithms=memory-optimal"],
    ),
    "vgg19-dyn": ("vgg19", ["train.batch_size=256", "memory.policy=dyn", "memory.limit=12GiB"]),
    "vgg19-dyn-whole": (
        "vgg19",
        ["train.batch_size=256", "memory.policy=dyn", "memory.limit=12GiB", "memory.slices=false"],
    ),
    "vgg19-dyn-joined": (
        "vgg19",
        ["train.batch_size=256", "memory.policy=dyn", "memory.limit=12GiB", "memory.join=layer"],
    ),
    "vgg19-paper": (
        "vgg19",
        [
            "train.batch_size=256",
            "memory.policy=dyn",
            "memory.limit=12GiB",
            "memory.join=layer",
            "memory.paper_search=true",
            "memory.pool_indices=false",
            "memory.fuse=false",
            "memory.update=layer",
        ],
    ),
    "vgg416-free": ("vgg416", ["train.batch_size=32", "memory.policy=none", "memory.limit=null"]),
    **{
        f"ten-{label}": (
            label.split("@")[0],
            [f"train.batch_size={batch}", "memory.policy=dyn", "memory.limit=12GiB", "memory.candidates=named"],
        )
        for label, batch in TEN.items()
    },
}
"""Cases of a memory limit, one process each, so that what the process holds on the card is that case's alone."""


def limit(label: str) -> dict[str, Any]:
    """A few steps of one case, and what the card then holds."""
    name, overrides = LIMITS[label]
    trace = Path(os.environ.get("OUT", ".")) / f"{label}.trace.json"
    got = _try(partial(train, name, [*QUICK, "device=cuda", *overrides], 6, trace=trace))
    found = {"failed": got} if isinstance(got, str) else _numbers(got)
    print(label, {k: v for k, v in found.items() if k != "digest"}, flush=True)
    return found


def _numbers(outcome: Outcome) -> dict[str, Any]:
    numbers = asdict(outcome)
    numbers["losses"] = numbers["losses"][:5]
    if outcome.bound_ms is not None:
        numbers["bound_ms"], numbers["over_bound"] = outcome.bound_ms, outcome.step_ms / outcome.bound_ms - 1
    return numbers


def _try(run: Callable[[], Outcome]) -> Outcome | str:
    try:
        return run()
    except BackendUnavailable:  # not the case's fault
        raise
    except Exception as error:
        traceback.print_exc()
        return reason(error)


def slow() -> dict[str, Any]:
    """Losses and weights when every copy is done five times, so that the copy streams are late."""
    found: dict[str, Any] = {}
    for name, batch in CASES.items():
        common = [*QUICK, f"train.batch_size={batch}", "deterministic=true", "memory.limit=null", "device=cuda"]
        runs = [
            _try(partial(train, name, [*common, *extra], 20))
            for extra in (["memory.policy=none"], ["memory.policy=all", "debug.copy_repeats=5"])
        ]
        if any(isinstance(run, str) for run in runs):
            found[name] = {"failed": [run for run in runs if isinstance(run, str)]}
        else:
            first, late = (_numbers(run) for run in runs if not isinstance(run, str))
            same = (first["losses"], first["digest"]) == (late["losses"], late["digest"])
            found[name] = {"same": same, "step_ms": first["step_ms"], "slow_step_ms": late["step_ms"]}
        print("slow", name, found[name], flush=True)
    return found


def debug() -> dict[str, Any]:
    """Poison in freed bytes and guards behind every storage, on the GPU: no write where nothing lies."""
    found: dict[str, Any] = {}
    for name, overrides in {
        "lenet": ["train.batch_size=64"],
        "resnet18": ["train.batch_size=8", "network.image_size=64"],
        "googlenet": ["train.batch_size=4"],
    }.items():
        for policy in ("none", "all"):
            common = [
                *QUICK,
                *overrides,
                "deterministic=true",
                "device=cuda",
                "memory.limit=null",
                f"memory.policy={policy}",
            ]
            runs = [_try(partial(train, name, [*common, *extra], 4)) for extra in ([], ["debug.poison=true"])]
            texts = [run for run in runs if isinstance(run, str)]
            same = not texts and len({run.digest for run in runs if not isinstance(run, str)}) == 1
            found[f"{name} {policy}"] = {"failed": texts, "same": same}
            print("debug", name, policy, found[f"{name} {policy}"], flush=True)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "agree": agree,
    "policies": policies,
    "slow": slow,
    "debug": debug,
    **{label: partial(limit, label) for label in LIMITS},
}


def main() -> None:
    """Run the parts named on the command line."""
    names = sys.argv[1:]
    if not names or not set(names) <= set(PARTS):
        raise ConfigError(f"name one or more of: {', '.join(PARTS)}")
    check_device("cuda", "run this on a GPU")
    for name in names:
        write_results(f"gpu_{name}.json", f"python -m vdnn.bench.gpu_training {name}", PARTS[name]())


if __name__ == "__main__":
    sys.exit(command(main))
