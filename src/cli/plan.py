"""vdnn plan CONFIG: does it fit, what will it take, how long is a step; on this machine or on that of a profile.

vdnn plan vgg19 --batch-size 256 --policy all --algorithms memory-optimal --profile titan-x-maxwell --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vdnn.cli.options import add_config_options, guarded, limit_words, read_config, unread_profile
from vdnn.cli.tables import print_report, wide_console
from vdnn.errors import BudgetError
from vdnn.layers.op import Program
from vdnn.memory.clock import simulate
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.passes import apply_decisions
from vdnn.memory.plan import Plan
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, make_plan, smallest_plan
from vdnn.memory.report import make_report
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.devices import open_device
from vdnn.runtime.files import write_file
from vdnn.runtime.planset import step_parts
from vdnn.runtime.prepare import backend_costs, make_budget, make_recipe
from vdnn.runtime.trace import plan_trace
from vdnn.units import format_bytes

SMALLEST: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "dyn": ("all", {"algorithms": MEMORY_OPTIMAL}, "all with memory-optimal algorithms"),
}
"""Policy that searches → what it takes last: a policy, what it changes of the budget, and both in words."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="plan a run without running it",
        description="Plan the training step of CONFIG: memory to the byte, time from a cost table. "
        "With --profile for the machine it describes, else for this one.",
        epilog="exit codes: 0 planned (`fits` says whether it fits), 2 bad input, "
        "3 does not fit a limit given on the command line",
    )
    add_config_options(parser, "plan for the simulated machine of this profile; with --device cpu or cuda not read")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layers", action="store_true", help="add the table of layers")
    parser.add_argument("--paper", action="store_true", help="count bytes as the vDNN paper does")
    parser.add_argument("--picture", metavar="FILE", help="draw live bytes over the step (.png, .svg, .pdf)")
    parser.add_argument("--trace", metavar="FILE", help="write the modelled step as a trace for ui.perfetto.dev")
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan itself as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """What the command does."""
    return guarded("vdnn plan", lambda: plan(arguments))


def plan(arguments: argparse.Namespace) -> int:
    """Plan, report, and say by the exit code whether a stated limit is kept."""
    if arguments.picture:
        from vdnn.runtime import plots  # matplotlib takes longer to import than most plans take to make

        plots.check_picture_path(arguments.picture)
    extra = ["device=simulated"] if arguments.profile and not arguments.device else []
    config = read_config(arguments, extra)
    graph = build(config.network.name, **config.network.options)
    backend, _ = open_device(config.device, config.profile, memory_limit=config.memory.limit)
    sentence = unread_profile(config, backend.caps)
    if sentence:
        print(f"note: {sentence}", file=sys.stderr)
    budget = make_budget(config, backend)
    micro = -(-config.train.batch_size // config.train.accumulate)
    key = step_parts(config.train.batch_size, micro)[-1]
    program = make_recipe(config).lower(graph, key)
    costs = backend_costs(backend, program, config.deterministic)
    limit = None
    if budget.device_bytes is not None:
        source = limit_words(arguments, config, backend.caps, budget.device_bytes)
        limit = f"{format_bytes(budget.device_bytes)} ({source})"
    refusal: BudgetError | None = None
    try:
        decisions, made = make_plan(program, costs, config.memory.policy, budget)
    except BudgetError as error:
        refusal = error
        decisions, made = refused_plan(program, costs, config.memory.policy, budget)
    planned = apply_decisions(program, decisions)
    verify(planned, made)
    report = make_report(made, planned, decisions, costs, paper=arguments.paper)
    fits = refusal is None
    if arguments.save_plan:
        write_file(arguments.save_plan, json.dumps(made.to_json()).encode())
    if arguments.picture:
        plots.draw_plan(made, planned, decisions, costs, arguments.picture)
    if arguments.trace:
        timing = simulate(made, planned, costs)
        plan_trace(made, planned, timing, f"modelled by the clock, not run; times {costs.source}").write(
            arguments.trace
        )
    if arguments.json:
        data = report.to_json()
        layers = data.pop("layers")
        smallest = None if fits else made.slab_bytes
        data |= {"fits": fits, "memory_limit_bytes": budget.device_bytes, "smallest_budget_bytes": smallest}
        data["layers"] = layers
        print(json.dumps(data, indent=1))
    else:
        print_report(report, fits, limit, wide_console(), layers=arguments.layers)
    if refusal is not None and limit_given(arguments):
        raise refusal
    return 0


def refused_plan(program: Program, costs: CostTable, policy: str, budget: Budget) -> tuple[Decisions, Plan]:
    """The plan of `policy` that takes least of the device, for a budget in which none of its plans fits."""
    slabs = (("device", budget.device_bytes), ("host", budget.host_bytes))
    limits = " and ".join(f"{format_bytes(n)} of the {slab}" for slab, n in slabs if n is not None)
    used, changes, words = SMALLEST.get(policy, (policy, {}, ""))
    free = replace(budget, device_bytes=None, host_bytes=None)
    decisions = POLICIES[used](program, costs, replace(free, **changes))
    how = [words] * bool(words) + ["nothing fetched early"] * bool(decisions.offload)
    note = f"nothing fits in {limits} with policy '{policy}'; this is its smallest plan"
    note += f": {', '.join(how)}" if how else ""
    decisions = replace(decisions, policy=policy, prefetch_bytes=0, notes=(*decisions.notes, note))
    return decisions, smallest_plan(program, decisions, free)


def limit_given(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for a limit to be kept, rather than what the plan would need."""
    overridden = any(text.startswith(("memory.limit=", "memory.host_limit=")) for text in arguments.overrides)
    return overridden or arguments.memory_limit is not None or arguments.host_limit is not None
