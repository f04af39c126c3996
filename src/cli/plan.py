"""vdnn plan CONFIG: does it fit, what will it take, how long is a step; on this machine or on that of a profile.

vdnn plan vgg19 --batch-size 256 --policy all --algorithms memory-optimal --profile titan-x-maxwell --json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from vdnn.cli.options import (
    add_config_options,
    limit_words,
    read_config,
    unmet_precision,
    unmodelled_layout,
    unread_profile,
)
from vdnn.cli.tables import print_report, wide_console
from vdnn.layers.op import Program
from vdnn.memory.clock import simulate
from vdnn.memory.report import make_report
from vdnn.networks import build
from vdnn.runtime.calibration import calibration_key, known_factor
from vdnn.runtime.config import LAYOUT_POLICIES
from vdnn.runtime.devices import open_device
from vdnn.runtime.dry_plan import plan_run, whole_step
from vdnn.runtime.files import write_output
from vdnn.runtime.guard import guarded
from vdnn.runtime.prepare import make_budget, stated_bytes
from vdnn.runtime.trace import plan_trace
from vdnn.units import format_bytes


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="plan a run without running it",
        description="Plan the training step of CONFIG: memory to the byte, time from a cost table; whether it fits, "
        "evaluation batches too. "
        "With --profile for the machine it describes, else for this one.",
        epilog="exit codes: 0 planned (`fits` says whether it fits), 2 bad input, "
        "3 does not fit a limit given on the command line. "
        "smallest_budget_bytes (--json): the smallest limit in which this policy with these algorithms fits (of dyn: "
        "any policy); null if the plan fits",
    )
    add_config_options(parser, "plan for the simulated machine of this profile; with --device cpu or cuda not read")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; its key smallest_budget_bytes: see below"
    )
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
    if arguments.paper:  # its pools keep x and y, its dyn is a search alone; what -o says comes after
        plain = ["memory.pool_indices=false", "memory.fuse=false", "memory.update=layer"]
        arguments.overrides = [*plain, "memory.paper_search=true", *arguments.overrides]
    config = read_config(arguments, extra)
    graph = build(config.network.name, **config.network.options)
    backend, _ = open_device(
        config.device,
        config.profile,
        memory_limit=config.memory.limit,
        precision=config.precision,
        candidates=config.memory.candidates,
        layout=config.layout_on("cuda"),
        progress=say,
    )
    found = (explain(config, backend.caps) for explain in (unread_profile, unmet_precision, unmodelled_layout))
    caveats = [sentence for sentence in found if sentence]
    for sentence in caveats:
        say(sentence)
    budget = make_budget(config, backend)
    limit_bytes = stated_bytes(budget)
    limit = f"{format_bytes(limit_bytes)} ({limit_words(arguments, config, backend.caps, limit_bytes)})"
    dry = plan_run(config, graph, backend, budget, say)
    worst = max(dry.parts, key=lambda part: part.plan.slab_bytes)
    made, planned, decisions, costs = worst.plan, worst.program, worst.decisions, worst.costs
    refusal = dry.plans.refusal
    report = whole_step(
        make_report(made, planned, decisions, costs, paper=arguments.paper),
        [make_report(p.plan, p.program, p.decisions, p.costs) for p in dry.parts],
        config.train.batch_size,
    )
    key = calibration_key(backend.caps, graph.name, config.memory.policy, [part.program for part in dry.parts])
    factor = known_factor(key) if backend.caps.measured_costs else None
    earlier = () if factor is None else (f"the step of an earlier run took {factor:.2f} times its predicted time",)
    report = replace(report, notes=(*report.notes, *dry.notes(), *earlier))
    fits = refusal is None
    if arguments.save_plan:
        write_output(arguments.save_plan, json.dumps(made.to_json()).encode())
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
        smallest = None if fits else dry.plans.slab_bytes
        layout = config.memory.layout if config.memory.layout in LAYOUT_POLICIES else made_in(worst.program)
        data |= {"precision": config.precision, "layout": layout}
        data["notes"] = [*caveats, *report.notes]
        data |= {"fits": fits, "memory_limit_bytes": limit_bytes, "smallest_budget_bytes": smallest}
        data["layers"] = layers
        print(json.dumps(data, indent=1))
    else:
        print_report(report, fits, limit, wide_console(), modelled=backend.caps.simulated, layers=arguments.layers)
    if refusal is not None and limit_given(arguments):
        raise refusal
    return 0


def made_in(program: Program) -> str:
    """The layouts of images in a program, such as "nhwc", or "nchw and chwn"."""
    specs = (spec for spec in program.tensors.values() if len(spec.shape) == 4 and spec.role in ("act", "grad"))
    return " and ".join(dict.fromkeys(spec.layout.lower() for spec in specs))


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def limit_given(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for a limit to be kept, rather than what the plan would need."""
    overridden = any(text.startswith(("memory.limit=", "memory.host_limit=")) for text in arguments.overrides)
    return overridden or arguments.memory_limit is not None or arguments.host_limit is not None
