"""vdnn layouts explain CONFIG: which layout each layer gets, why, and what it takes. vdnn layouts calibrate: from which
numbers of channels and images on CHWN is better on this GPU.

vdnn layouts explain alexnet --layout study --profile titan-x-maxwell
vdnn layouts explain googlenet -b 32 --layout shortest --device cpu --json
vdnn layouts calibrate --precision tf32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from vdnn.cli.options import add_config_options, read_config, unmet_precision, unmodelled_layout, unread_profile
from vdnn.cli.tables import wide_console
from vdnn.errors import ConfigError
from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.memory.report import count_transforms
from vdnn.networks import build
from vdnn.runtime.backend import Caps
from vdnn.runtime.config import AUTO_LAYOUT, PRECISIONS, Config
from vdnn.runtime.devices import open_device
from vdnn.runtime.guard import guarded
from vdnn.runtime.layout_sweep import CHANNELS, IMAGES, keep, sweep
from vdnn.runtime.layout_times import step_costs
from vdnn.runtime.layouts import (
    LayoutRow,
    choose_layouts,
    conditions_of,
    explain_layouts,
    layout_rule,
    with_choices,
)
from vdnn.runtime.planset import step_parts
from vdnn.runtime.prepare import backend_costs, make_recipe
from vdnn.units import format_ms

BY_HAND = "without a GPU set memory.layout_channels and memory.layout_images"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "layouts",
        help="the layout of every layer, and why",
        description="The layouts of layers: 'explain' says which each layer of a network gets, and why; 'calibrate' "
        "finds the thresholds of --layout study for the GPU at hand.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="explain|calibrate")
    one = actions.add_parser(
        "explain",
        help="the layout of every layer, and why",
        description="Prints the layout of every layer of CONFIG, what it reads, what it takes in a training step, both "
        "directions and update, and why it has that layout. memory.layout (--layout) says how layouts are chosen: "
        "nchw, nhwc or chwn for all layers; study: CHWN by numbers of channels and images; shortest: the least time of "
        f"layers and transforms, one layout for all unless a mix gains clearly more; auto: {AUTO_LAYOUT}.",
        epilog="exit codes: 0 done, 2 bad input",
    )
    add_config_options(one, "of the simulated machine whose times are taken; with --device cpu not read")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.set_defaults(run=lambda arguments: guarded("vdnn layouts", lambda: explain(arguments)))
    other = actions.add_parser(
        "calibrate",
        help="measure from which sizes on CHWN is better, once for a GPU",
        description="The study's sweep: one convolution (its CONV7: 384 filters 3x3 on 13x13) in CHWN and NCHW, by "
        "numbers of channels and of images. Where the curves cross is kept beside the tables of algorithms, and "
        "--layout study goes by it from then on, in this precision.",
        epilog="exit codes: 0 done, 2 bad input or no GPU",
    )
    other.add_argument("--device", metavar="D", default="auto", help="auto or cuda")
    other.add_argument("--precision", metavar="P", default="fp32", help="fp32, tf32, bf16 or fp16")
    other.add_argument("--json", action="store_true", help="print one JSON object")
    other.set_defaults(run=lambda arguments: guarded("vdnn layouts", lambda: calibrate(arguments)))


def calibrate(arguments: argparse.Namespace) -> int:
    """Sweep, print what was found, and keep it."""
    if arguments.precision not in PRECISIONS:
        raise ConfigError(f"--precision: expected {', '.join(PRECISIONS)}, got {arguments.precision}")
    backend, reason = open_device(arguments.device, precision=arguments.precision, advice=BY_HAND)
    if not backend.caps.measured_costs:
        raise ConfigError(
            f"vdnn layouts calibrate measures convolutions on a GPU, and this would be device {backend.caps.name} "
            f"({reason}); {BY_HAND}"
        )
    found = sweep(backend, say)
    backend.close()
    keep(found)
    rule = found.rule()
    if arguments.json:
        points = {"by_channels": found.by_channels, "by_images": found.by_images}
        rows = {name: [asdict(point) | {"faster": point.faster} for point in some] for name, some in points.items()}
        thresholds = {"channels": rule.channels, "images": rule.images}
        print(json.dumps({"facts": found.facts, **thresholds, "source": rule.source, **rows}, indent=1))
        return 0
    console = wide_console()
    tables = {f"by channels, N = {IMAGES}": found.by_channels, f"by images, C = {CHANNELS}": found.by_images}
    for name, swept in tables.items():
        table = Table("C", "N", "NCHW ms", "CHWN ms", "faster", title=name, title_justify="left")
        for column in table.columns[:4]:
            column.justify = "right"
        for point in swept:
            sizes = (str(point.channels), str(point.images))
            table.add_row(*sizes, f"{point.nchw_ms:.3f}", f"{point.chwn_ms:.3f}", point.faster)
        console.print(table)
    console.print(f"{rule}; kept for --layout study", highlight=False)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Choose as training would, and print the table."""
    extra = ["device=simulated"] if arguments.profile and not arguments.device else []
    config = read_config(arguments, extra)
    graph = build(config.network.name, **config.network.options)
    backend, _ = open_device(
        config.device, config.profile, precision=config.precision, layout=config.layout_on("cuda"), progress=say
    )
    for sentence in (
        unread_profile(config, backend.caps),
        unmet_precision(config, backend.caps, plans=False),
        unmodelled_layout(config, backend.caps),
    ):
        if sentence:
            say(sentence)

    def costs_of(program: Program) -> CostTable:
        return backend_costs(backend, program, config.deterministic)

    key = step_parts(config.train.batch_size, -(-config.train.batch_size // config.train.accumulate))[0]
    recipe = make_recipe(config, device=backend.caps.name)
    rule_in_title = config.layout_policy_on(backend.caps.name) == "study"
    progress = None if rule_in_title else say
    found = choose_layouts(config, graph, [key], costs_of, recipe, backend, progress=progress)
    program = with_choices(recipe, config, found.choices).lower(graph, key)
    costs = costs_of(program)
    if found.times is None:  # else a second measurement would only be another number for the same thing
        costs = step_costs(backend, program, costs, conditions_of(config, backend.caps), say)
    source = costs.source if found.times is None else found.times.source or costs.source
    how = how_chosen(config, backend.caps, recipe.layout)
    rows = explain_layouts(program, costs, found, f"memory.layout is {config.memory.layout}")
    moves = count_transforms(program)
    if arguments.json:
        asked = {"precision": config.precision, "layout": config.memory.layout}
        data = {"network": graph.name, "batch_size": program.batch, **asked, "chosen": how}
        print(json.dumps({**data, "source": source, "layers": [asdict(row) for row in rows]}, indent=1))
    else:
        print_rows(f"{graph.name}, batch size {program.batch}, {config.precision}: {how}; times {source}", rows, moves)
    return 0


def how_chosen(config: Config, caps: Caps, layout: str) -> str:
    """The way in which layouts were chosen, in words."""
    policy = config.layout_policy_on(caps.name)
    if policy == "study":
        return str(layout_rule(config, caps))
    if policy is not None:
        return "the least time of layers and transforms"
    return f"{layout} everywhere"


def print_rows(title: str, rows: Sequence[LayoutRow], count: str) -> None:
    """The table, and a line that sums it up; `count` says how many transforms there are."""
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
    moved_ms, total_ms = (sum(row.time_ms for row in some) for some in (moves, rows))
    total = format_ms(total_ms)
    console.print(f"{count}, {format_ms(moved_ms)} of the {total} of layers of images", highlight=False)


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)
