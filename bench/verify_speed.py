"""How long plans take to make and to verify: AlexNet is to be verified in 50 ms, VGG-416 in 1.5 s.

python -m vdnn.bench.verify_speed                # table; exit code 1 if one is slower than it should be
python -m vdnn.bench.verify_speed --json         # and verify_speed.json with machine facts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

from vdnn.bench.command import command
from vdnn.bench.harness import write_results
from vdnn.layers import Update, lower
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import POLICIES, Budget, make_plan
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.profile import load_profile, model_costs

PROFILE = "titan-x-maxwell"
BATCHES: Mapping[str, int] = {"lenet": 64, "alexnet": 128, "googlenet": 128, "resnet50": 64, "vgg19": 64, "vgg416": 32}
LIMITS_MS: Mapping[str, float] = {"alexnet": 50.0, "vgg416": 1500.0}
ROUNDS = 3


def best_ms(task: Callable[[], object]) -> float:
    """The shortest of a few runs, in ms."""
    times = []
    for _ in range(ROUNDS):
        started = perf_counter()
        task()
        times.append((perf_counter() - started) * 1000)
    return min(times)


class Row(NamedTuple):
    """One plan: its number of steps, ms to make it (once), ms to verify it (the best of ROUNDS)."""

    network: str
    policy: str
    steps: int
    plan_ms: float
    verify_ms: float


def measure(network: str) -> list[Row]:
    """One row for each policy."""
    program = lower(build(network), BATCHES[network], update=Update(momentum=0.9))
    costs = model_costs(program, load_profile(PROFILE))
    rows = []
    for policy in POLICIES:
        started = perf_counter()
        decisions, plan = make_plan(program, costs, policy, Budget(join="layer"))
        plan_ms = (perf_counter() - started) * 1000
        planned = apply_decisions(program, decisions)
        rows.append(Row(network, policy, len(plan.steps), plan_ms, best_ms(partial(verify, planned, plan))))
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m vdnn.bench.verify_speed", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="write verify_speed.json with machine facts")
    arguments = parser.parse_args()
    rows = [row for network in BATCHES for row in measure(network)]
    print(f"{'network':12}{'policy':8}{'steps':>8}{'plan ms':>12}{'verify ms':>12}")
    for row in rows:
        print(f"{row.network:12}{row.policy:8}{row.steps:>8}{row.plan_ms:>12.2f}{row.verify_ms:>12.2f}")
    late = [row for row in rows if row.verify_ms > LIMITS_MS.get(row.network, float("inf"))]
    for row in late:
        print(f"too slow: {row.network} {row.policy}, limit {LIMITS_MS[row.network]:g} ms", file=sys.stderr)
    if arguments.json:
        command = "python -m vdnn.bench.verify_speed --json"
        write_results("verify_speed.json", command, {"rows": [row._asdict() for row in rows]})
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(command(main))
