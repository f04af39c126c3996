"""vdnn layouts explain CONFIG: which layout each layer gets, why, and what it takes.

vdnn layouts explain alexnet --layout study --profile titan-x-maxwell
vdnn layouts explain googlenet -b 32 --layout shortest --device cpu --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.table import Table

from vdnn.cli.options import add_config_options, guarded, read_config, unmodelled_layout, unread_profile
from vdnn.cli.tables import wide_console
from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.networks import build
from vdnn.runtime.config import LAYOUT_POLICIES, Config
from vdnn.runtime.devices import open_device
from vdnn.runtime.layout_times import step_costs
from vdnn.runtime.layouts import LayoutRow, check_layout, choose_layouts, explain_layouts, layout_rule
from vdnn.runtime.planset import step_parts
from vdnn.runtime.prepare import backend_costs, make_recipe
from vdnn.units import format_ms


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "layouts",
        help="the layout of every layer, and why",
        description="'explain' prints the layout of every layer of CONFIG, what it reads, what it takes in a training "
        "step, both directions and update, and why it has that layout. memory.layout (--layout) says how layouts are "
        "chosen: nchw, nhwc or chwn for all layers; study: CHWN by numbers of channels and images; shortest: the least "
        "time of layers and transforms.",
    )
    parser.add_argument("action", choices=["explain"], help="what to do")
    add_config_options(parser, "of the simulated machine whose times are taken; with --device cpu not read")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """What the command does."""
    return guarded("vdnn layouts", lambda: explain(arguments))


def explain(arguments: argparse.Namespace) -> int:
    """Choose as training would, and print the table."""
    extra = ["device=simulated"] if arguments.profile and not arguments.device else []
    config = read_config(arguments, extra)
    check_layout(config, config.device)
    graph = build(config.network.name, **config.network.options)
    backend, _ = open_device(
        config.device, config.profile, precision=config.precision, layout=config.layout_on("cuda"), progress=say
    )
    for words in (unread_profile, unmodelled_layout):
        if sentence := words(config, backend.caps):
            say(sentence)

    def costs_of(program: Program) -> CostTable:
        return backend_costs(backend, program, config.deterministic)

    key = step_parts(config.train.batch_size, -(-config.train.batch_size // config.train.accumulate))[0]
    recipe = make_recipe(config, device=backend.caps.name)
    layouts = choose_layouts(config, graph, [key], costs_of, recipe, backend, progress=say)
    program = replace(recipe, layouts=layouts).lower(graph, key)
    costs = step_costs(backend, program, costs_of(program), say)
    how = how_chosen(config, recipe.layout)
    rows = explain_layouts(program, costs, layouts, f"memory.layout is {config.memory.layout}")
    if arguments.json:
        data = {"network": graph.name, "batch_size": program.batch, "layout": config.memory.layout, "chosen": how}
        print(json.dumps({**data, "source": costs.source, "layers": [asdict(row) for row in rows]}, indent=1))
    else:
        print_rows(f"{graph.name}, batch size {program.batch}: {how}; times {costs.source}", rows)
    return 0


def how_chosen(config: Config, layout: str) -> str:
    """The way in which layouts were chosen, in words."""
    if config.memory.layout == "study":
        return str(layout_rule(config))
    if config.memory.layout in LAYOUT_POLICIES:
        return "the least time of layers and transforms"
    return f"{layout} everywhere"


def print_rows(title: str, rows: Sequence[LayoutRow]) -> None:
    """The table, and a line that sums it up."""
    console = wide_console()
    console.print(title, highlight=False)
    table = Table("layer", "kind", "C", "N", "layout", "ms", "reason")
    for column in (2, 3, 5):
        table.columns[column].justify = "right"
    for row in rows:
        numbers = (str(row.channels), str(row.images))
        table.add_row(row.layer, row.kind, *numbers, row.layout, f"{row.time_ms:.3f}", row.reason)
    console.print(table)
    moves = [row for row in rows if row.transform]
    count = f"{len(moves)} transform{'' if len(moves) == 1 else 's'}"
    moved_ms, total_ms = (sum(row.time_ms for row in some) for some in (moves, rows))
    total = format_ms(total_ms)
    console.print(f"{count}, {format_ms(moved_ms)} of the {total} of layers of images", highlight=False)


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)
