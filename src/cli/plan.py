"""vdnn plan CONFIG: does it fit, what will it take, how long is a step; on this machine or on that of a profile.

vdnn plan vgg19 --batch-size 256 --policy all --algorithms memory-optimal --profile titan-x-maxwell --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from vdnn.cli.options import add_config_options, guarded, read_config
from vdnn.cli.tables import print_report, wide_console
from vdnn.errors import BudgetError
from vdnn.memory.passes import apply_decisions
from vdnn.memory.policy import make_plan
from vdnn.memory.report import make_report
from vdnn.memory.verify import verify
from vdnn.networks import build
from vdnn.runtime.devices import open_device
from vdnn.runtime.files import write_file
from vdnn.runtime.planset import step_parts
from vdnn.runtime.prepare import backend_costs, make_budget, make_recipe


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
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layers", action="store_true", help="add the table of layers")
    parser.add_argument("--paper", action="store_true", help="count bytes as the vDNN paper does")
    parser.add_argument("--picture", metavar="FILE", help="draw live bytes over the step (.png, .svg, .pdf)")
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
    budget = make_budget(config, backend)
    micro = -(-config.train.batch_size // config.train.accumulate)
    key = step_parts(config.train.batch_size, micro)[-1]
    program = make_recipe(config).lower(graph, key)
    costs = backend_costs(backend, program, config.deterministic)
    refusal: BudgetError | None = None
    try:
        decisions, made = make_plan(program, costs, config.memory.policy, budget)
    except BudgetError as error:
        refusal = error
        decisions, made = make_plan(
            program, costs, config.memory.policy, replace(budget, device_bytes=None, host_bytes=None)
        )
    planned = apply_decisions(program, decisions)
    verify(planned, made)
    report = make_report(made, planned, decisions, costs, paper=arguments.paper)
    fits = refusal is None
    if arguments.save_plan:
        write_file(arguments.save_plan, json.dumps(made.to_json()).encode())
    if arguments.picture:
        plots.draw_plan(made, planned, decisions, costs, arguments.picture)
    if arguments.json:
        data = report.to_json()
        layers = data.pop("layers")
        data |= {"fits": fits, "memory_limit_bytes": budget.device_bytes, "layers": layers}
        print(json.dumps(data, indent=1))
    else:
        print_report(report, fits, budget.device_bytes, wide_console(), layers=arguments.layers)
    if refusal is not None and limit_given(arguments):
        raise refusal
    return 0


def limit_given(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for a limit to be kept, rather than what the plan would need."""
    overridden = any(text.startswith(("memory.limit=", "memory.host_limit=")) for text in arguments.overrides)
    return overridden or arguments.memory_limit is not None or arguments.host_limit is not None
