"""vdnn algos CONFIG: the convolution algorithms of a network under workspace limits, and what a higher limit would buy.

vdnn algos vgg16 -b 256 --limits 0,64MiB,2GiB,none --picture vgg16.png
vdnn algos vgg16 -b 256 --layer conv1_2 --precision tf32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from vdnn.cli.options import guarded, read_config, unmet_precision, unmodelled_layout
from vdnn.cli.tables import wide_console
from vdnn.errors import ConfigError
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.networks import build
from vdnn.runtime import algos
from vdnn.runtime.algorithm_table import AlgorithmTable, load_table, stored_names
from vdnn.runtime.algos import Source, Study, backend_source, make_study, table_source, without_epilogue
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
    parser.add_argument("--precision", metavar="P", help="fp32, tf32 for those on tensor cores too, bf16 or fp16")
    parser.add_argument("--layouts", metavar="LIST", help="NCHW, NHWC, CHWN, or several one after the other: nchw,nhwc")
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
    configs = [read_config(arguments, [f"memory.layout={layout}"]) for layout in read_layouts(arguments.layouts)]
    configs = configs or [read_config(arguments)]
    if len(configs) > 1 and (arguments.csv or arguments.picture):
        raise ConfigError("--csv and --picture show one layout; give one in --layouts")
    studies = [choose(arguments, config) for config in configs]
    if arguments.csv:
        write_output(arguments.csv, algos.totals_csv(studies[0].curve()).encode())
    if arguments.picture:
        algo_plots.draw_study(studies[0], limits, arguments.picture)
    if arguments.json:
        found = [algos.study_json(study, limits) for study in studies]
        print(json.dumps(found[0] if len(found) == 1 else {"studies": found}, indent=1))
        return 0
    for study in studies:
        print_study(study, limits, wide_console(), everything=arguments.all or arguments.layer is not None)
    return 0


def read_layouts(text: str | None) -> list[str]:
    """ "NCHW,NHWC" as values of memory.layout; nothing of None."""
    layouts = [part.strip().lower() for part in text.split(",")] if text is not None else []
    if not set(layouts) <= set(map(str.lower, MEMORY_ORDERS)):
        raise ConfigError(f"--layouts: expected nchw, nhwc, chwn, or several such as nchw,nhwc, got '{text}'")
    return layouts


def read_limits(text: str) -> list[int | None]:
    """ "0,8MiB,none" as bytes and None, the lowest first; ConfigError if a part is neither."""
    try:
        parts = [part.strip() for part in text.split(",")]
        return algos.sorted_limits(None if part in NO_LIMIT else parse_bytes(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"--limits: {error}, none, or several of these with commas between") from error


def choose(arguments: argparse.Namespace, config: Config) -> Study:
    """The study from the best source there is, or the one asked for; what was taken instead is said and noted."""
    for name, unset in (("device", (None, "auto")), ("profile", (None,))):
        if arguments.table is not None and getattr(arguments, name) not in unset:
            raise ConfigError(f"--table takes its times from the table; leave out --table or --{name}", key=name)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    graph = build(config.network.name, **config.network.options)
    batch = -(-config.train.batch_size // config.train.accumulate)
    if config.train.accumulate > 1:
        note(f"a step is {config.train.accumulate} slices, of which one of {batch} images is studied")
    table = load_table(arguments.table) if arguments.table is not None else None
    if table is not None:
        config = of_table(arguments, config, table)
    recipe = make_recipe(config)

    def study(source: Source) -> Study | None:
        return make_study(
            graph, recipe, batch, source, layer=arguments.layer, micro_batches=not arguments.no_micro_batches
        )

    if table is not None:
        found = study(table_source(table))
        if found is None:
            text = f"table '{arguments.table}' does not hold all convolutions of {graph.name} at batch size {batch}"
            raise ConfigError(f"{text}; choose another batch size, or model them with --profile {DEFAULT_PROFILE}")
        note_what_is_left_out(without_epilogue(table, graph, recipe, batch), note)
        return replace(found, notes=tuple(notes))
    device, profile, untabled = arguments.device, arguments.profile, ""
    if device in (None, "auto") and profile is None:
        driver = find_driver()
        if driver.gpus:
            device = "cuda"
        else:
            for name in stored_names():
                stored = load_table(name)
                if (stored.precision, stored.layout) != (config.precision, recipe.layout):
                    continue
                found = study(table_source(stored))
                if found is not None:
                    note(f"{driver.finding}: times are from the stored table {name}")
                    note_what_is_left_out(without_epilogue(stored, graph, recipe, batch), note)
                    return replace(found, notes=tuple(notes))
            layout = "" if recipe.layout == "NCHW" else f" and {recipe.layout}"
            untabled = " (no stored table has it)"
            note(
                f"{driver.finding}, and no stored table knows {graph.name} at batch size {batch} in "
                f"{config.precision}{layout}: times are modelled by profile {DEFAULT_PROFILE}"
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
            note(sentence)
    made = study(backend_source(backend, recipe.layout))
    assert made is not None  # a backend knows every op
    for conv in made.convs:
        if not conv.candidates:
            raise ConfigError(f"no algorithm for {conv.layer} {conv.direction} fits in the memory that is free")
    shown = (made.source.precision, made.source.layout) == (config.precision, recipe.layout)
    asked = "" if shown else f"{config.precision}, {recipe.layout}{untabled}"
    if asked:
        notes.insert(0, replace(made, asked=asked).heading())
    return replace(made, asked=asked, notes=tuple(notes))


def of_table(arguments: argparse.Namespace, config: Config, table: AlgorithmTable) -> Config:
    """`config` in the precision and layout of a table; ConfigError if others were asked for."""
    name = f"table '{arguments.table}'"
    if arguments.precision not in (None, table.precision):
        raise ConfigError(f"{name} is of {table.precision}, --precision is {config.precision}")
    layout = table.layout.lower()
    if config.memory.layout not in ("auto", layout):
        raise ConfigError(f"{name} is of {table.layout}, the layout asked for is {config.memory.layout.upper()}")
    memory = config.memory.model_copy(update={"layout": layout})
    return config.model_copy(update={"precision": table.precision, "memory": memory})


def note_what_is_left_out(without: bool, note: Callable[[str], None]) -> None:
    """Whether times are of less than training does in its convolutions."""
    if without:
        note("times of forward are of the convolutions alone: the table knows none with bias and activation")


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def print_study(study: Study, limits: list[int | None], console: Console, *, everything: bool) -> None:
    """Totals by limit, what higher limits buy, and algorithms by layer."""
    console.print(study.heading(), highlight=False, soft_wrap=True)
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
