"""vdnn algos CONFIG: the convolution algorithms of a network under workspace limits, and what a higher limit would buy.

vdnn algos vgg16 -b 256 --limits 0,64MiB,2GiB,none --picture vgg16.png
vdnn algos vgg16 -b 256 --layer conv1_2 --precision tf32
"""

from __future__ import annotations

import argparse
import json
import re

from rich.console import Console
from rich.table import Table

from vdnn.cli.algo_choice import choose
from vdnn.cli.options import read_config
from vdnn.cli.tables import wide_console
from vdnn.errors import ConfigError
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.runtime import algos
from vdnn.runtime.algos import Study
from vdnn.runtime.files import write_output
from vdnn.runtime.guard import guarded
from vdnn.units import format_bytes, parse_bytes

LIMITS = "0,8MiB,64MiB,512MiB,2GiB,none"
NO_LIMIT = ("none", "null")
MICRO_CAPTION = (
    "micro-batched: batches divided into the slices (halves to eighths) that are fastest within the limit; "
    "what adding up weight gradients costs is left out"
)
_BYTES = re.compile(r"([0-9.]+(?:[eE][+]?[0-9]+)?)\s*[bB]?")
""""512", "1e3", "0.5 B": an amount without a larger unit, of which fractions are no bytes."""


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
    layouts = list(dict.fromkeys(part.strip().lower() for part in text.split(","))) if text is not None else []
    if not set(layouts) <= set(map(str.lower, MEMORY_ORDERS)):
        raise ConfigError(f"--layouts: expected nchw, nhwc, chwn, or several such as nchw,nhwc, got '{text}'")
    return layouts


def read_limits(text: str) -> list[int | None]:
    """ "0,8MiB,none" as bytes and None, each once, the lowest first; ConfigError if a part is neither."""
    try:
        parts = [part.strip() for part in text.split(",")]
        return algos.sorted_limits(None if part.lower() in NO_LIMIT else read_bytes(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"--limits: {error}, none, or several of these with commas between") from error


def read_bytes(text: str) -> int:
    """`parse_bytes` without amounts that would be cut to whole bytes, or to none: ValueError for "0.5"."""
    nbytes = parse_bytes(text)
    plain = _BYTES.fullmatch(text)
    if (plain and not float(plain[1]).is_integer()) or (not nbytes and re.search("[1-9]", text)):
        raise ValueError(f"'{text}' is no whole number of bytes (write 12GiB, 12 GB or 12000000000)")
    return nbytes


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
    words = [*([MICRO_CAPTION] if divided else []), *filter(None, [study.slice_words()])]
    table = Table(*names, caption="; ".join(words) or None, caption_justify="left")
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
