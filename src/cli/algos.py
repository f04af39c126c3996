"""vdnn algos CONFIG: the convolution algorithms of a network under workspace limits, and what a higher limit would buy.

vdnn algos vgg16 -b 256 --limits 0,64MiB,2GiB,none --picture vgg16.png
vdnn algos vgg16 -b 256 --layer conv1_2 --precision tf32
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from vdnn.cli.options import guarded, read_config, unmet_precision, unmodelled_layout
from vdnn.cli.tables import wide_console
from vdnn.errors import ConfigError
from vdnn.networks import build
from vdnn.runtime import algos
from vdnn.runtime.algorithm_table import load_table, stored_names
from vdnn.runtime.algos import Source, Study, backend_source, make_study, table_source
from vdnn.runtime.config import Config
from vdnn.runtime.devices import DEFAULT_PROFILE, find_driver, open_device
from vdnn.runtime.files import write_output
from vdnn.runtime.prepare import make_recipe
from vdnn.units import format_bytes, parse_bytes

LIMITS = "0,8MiB,64MiB,512MiB,2GiB,none"
NO_LIMIT = ("none", "null")
MICRO_CAPTION = (
    "micro-batched: every batch divided into the slices (halves to eighths) that are fastest within the limit; "
    "what adding up weight gradients costs is left out"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "algos",
        help="convolution algorithms under workspace limits",
        description="Every algorithm of every convolution of CONFIG: time, workspace, determinism, and what limits of "
        "workspace cost. Measured on the GPU if there is one; else from a stored table of another GPU, or modelled.",
        epilog="exit codes: 0 done, 2 bad input",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged one such as vgg16")
    parser.add_argument("-b", "--batch-size", metavar="N", help="images per step")
    parser.add_argument("--layer", metavar="L", help="this convolution alone, with all its algorithms")
    parser.add_argument("--all", action="store_true", help="all algorithms, also those that others beat")
    parser.add_argument("--limits", metavar="LIST", default=LIMITS, help=f"most workspace of each, default {LIMITS}")
    parser.add_argument("--precision", metavar="P", help="fp32, or tf32 for those on tensor cores too")
    parser.add_argument("--device", metavar="D", help="measure, or ask, this one: cuda, cpu or simulated")
    parser.add_argument("--profile", metavar="NAME", help="model the machine of this profile")
    parser.add_argument("--table", metavar="NAME", help="a stored table by name, or the path of one (.json)")
    parser.add_argument("--no-micro-batches", action="store_true", help="leave out slices of the batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--csv", metavar="FILE", help="write the totals at every limit that changes one")
    parser.add_argument("--picture", metavar="FILE", help="draw total time against the limit (.png, .svg, .pdf)")
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override any key of CONFIG"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """What the command does."""
    return guarded("vdnn algos", lambda: show(arguments))


def show(arguments: argparse.Namespace) -> int:
    """Study, and print or write what was asked for."""
    if arguments.picture:
        from vdnn.runtime import algo_plots  # matplotlib takes longer to import than most studies take to make
        from vdnn.runtime.plots import check_picture_path

        check_picture_path(arguments.picture)
    limits = read_limits(arguments.limits)
    config = read_config(arguments)
    study = choose(arguments, config)
    if arguments.csv:
        write_output(arguments.csv, algos.totals_csv(study.curve()).encode())
    if arguments.picture:
        algo_plots.draw_study(study, limits, arguments.picture)
    if arguments.json:
        print(json.dumps(algos.study_json(study, limits), indent=1))
    else:
        print_study(study, limits, wide_console(), everything=arguments.all or arguments.layer is not None)
    return 0


def read_limits(text: str) -> list[int | None]:
    """ "0,8MiB,none" as bytes and None, the lowest first; ConfigError if a part is neither."""
    try:
        parts = [part.strip() for part in text.split(",")]
        return algos.sorted_limits(None if part in NO_LIMIT else parse_bytes(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"--limits: {error}, none, or several of these with commas between") from error


def choose(arguments: argparse.Namespace, config: Config) -> Study:
    """The study from the best source there is, or the one asked for; what was taken instead is said."""
    graph = build(config.network.name, **config.network.options)
    batch = -(-config.train.batch_size // config.train.accumulate)
    if config.train.accumulate > 1:
        say(f"a step is {config.train.accumulate} slices, of which one of {batch} images is studied")
    recipe = make_recipe(config)

    def study(source: Source) -> Study | None:
        return make_study(
            graph, recipe, batch, source, layer=arguments.layer, micro_batches=not arguments.no_micro_batches
        )

    if arguments.table is not None:
        table = load_table(arguments.table)
        if arguments.precision not in (None, table.precision):
            raise ConfigError(f"table '{arguments.table}' is of {table.precision}, --precision is {config.precision}")
        found = study(table_source(table))
        if found is None:
            text = f"table '{arguments.table}' does not hold all convolutions of {graph.name} at batch size {batch}"
            raise ConfigError(f"{text}; choose another batch size, or model them with --profile {DEFAULT_PROFILE}")
        return found
    device, profile = arguments.device, arguments.profile
    if device in (None, "auto") and profile is None:
        driver = find_driver()
        if driver.gpus:
            device = "cuda"
        else:
            for name in stored_names():
                table = load_table(name)
                found = study(table_source(table)) if table.precision == config.precision else None
                if found is not None:
                    say(f"{driver.finding}: times are from the stored table {name}")
                    return found
            say(
                f"{driver.finding}, and no stored table knows {graph.name} at batch size {batch} in "
                f"{config.precision}: times are modelled by profile {DEFAULT_PROFILE}"
            )
    device = "simulated" if device in (None, "auto") else device
    backend, _ = open_device(
        device,
        profile,
        memory_limit=config.memory.limit,
        precision=config.precision,
        candidates=config.memory.candidates,
        layout=recipe.layout,
        progress=say,
    )
    for sentence in (unmet_precision(config, backend.caps), unmodelled_layout(config, backend.caps)):
        if sentence:
            say(sentence)
    made = study(backend_source(backend, recipe.layout))
    assert made is not None  # a backend knows every op
    for conv in made.convs:
        if not conv.candidates:
            raise ConfigError(f"no algorithm for {conv.layer} {conv.direction} fits in the memory that is free")
    return made


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def print_study(study: Study, limits: list[int | None], console: Console, *, everything: bool) -> None:
    """Totals by limit, what higher limits buy, and algorithms by layer."""
    source = study.source
    kind = " (no measurement)" if source.modelled else ""
    head = f"{study.network}, batch size {study.batch}, {source.precision}: times {source.words}{kind}"
    console.print(head, highlight=False)
    console.print(total_table(study, limits))
    for sentence in algos.purchases(study, limits):
        console.print(sentence, highlight=False)
    table, hidden = layer_table(study, everything)
    console.print(table)
    are = "is" if hidden == 1 else "are"
    rest = f"; {hidden} more {are} beaten by these in time and workspace (--all shows all)" if hidden else ""
    console.print(f"*: no other algorithm is faster with as little workspace{rest}", highlight=False)


def layer_table(study: Study, everything: bool) -> tuple[Table, int]:
    """Algorithms by layer, unless `everything` is asked for those on the front alone; how many are left out."""
    table = Table("layer", "direction", "algorithm", "layout", "ms", "workspace", "deterministic", "math", "front")
    for column in table.columns[4:6]:
        column.justify = "right"
    hidden = 0
    for conv in study.convs:
        front = conv.pareto()
        rows = conv.candidates if everything else front
        hidden += len(conv.candidates) - len(rows)
        for candidate in rows:
            table.add_row(
                conv.layer,
                conv.direction,
                candidate.algorithm,
                study.source.layout,
                algos.ms_number(candidate.time_ms),
                format_bytes(candidate.workspace_bytes) if candidate.workspace_bytes else "0",
                "yes" if candidate.deterministic else "no",
                candidate.math,
                "*" if candidate in front else "",
            )
        table.add_section()
    return table, hidden


def total_table(study: Study, limits: list[int | None]) -> Table:
    """Totals by limit."""
    totals = [study.total(limit) for limit in limits]
    divided = any(total.divided_ms is not None for total in totals)
    names = ["limit", "all ms", *(f"{name} ms" for name in algos.DIRECTIONS), "largest workspace", "over the limit"]
    table = Table(*names, caption=MICRO_CAPTION if divided else None, caption_justify="left")
    if divided:
        table.add_column("micro-batched ms")
    for column in table.columns:
        column.justify = "right"
    for total in totals:
        cells = [algos.ms_number(total.time_ms), *(algos.ms_number(ms) for ms in total.by_direction.values())]
        cells += [format_bytes(total.workspace_bytes), str(total.over or "")]
        if divided:
            cells.append("" if total.divided_ms is None else algos.ms_number(total.divided_ms))
        table.add_row(algos.limit_text(total.limit_bytes), *cells)
    return table
