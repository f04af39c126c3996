"""Every convolution algorithm of given networks measured on this GPU, as tables that `vdnn algos` shows without one.

    python -m vdnn.bench.gpu_algos                                 # the networks below, fp32 and tf32
    python -m vdnn.bench.gpu_algos vgg16:256 alexnet:128 --precisions tf32 --minutes 4 --tables DIR
    python -m vdnn.bench.gpu_algos --precisions tf32,bf16 --layouts nhwc

Tables go to $OUT (or the present folder), one a precision and layout, named after the GPU. What the tables in --tables
(by default those of the package) already know is not measured again: copy what came out there, and run it once more to
go on. First every network at its batch size, then slices of the batch for micro-batching.

Convolutions are those that training has: but for fp32 in NCHW, the table that there has been first, with the bias and
activation that are fused with them.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from time import monotonic

from vdnn.bench.command import above_zero, command
from vdnn.bench.harness import check_device, results_path
from vdnn.errors import VdnnError
from vdnn.layers.lower import Update, lower
from vdnn.memory.slices import sizes_of
from vdnn.networks import NETWORKS as KNOWN
from vdnn.networks import build
from vdnn.runtime.algorithm_table import STORED, AlgorithmTable, read_table
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.products import CONV_KINDS, unplaced_problem
from vdnn.runtime.backends.cuda.search import Search
from vdnn.runtime.config import PRECISIONS
from vdnn.runtime.files import check_output

CASES = (
    "alexnet:128",
    "vgg16:256",
    "vgg19:256",
    "resnet50:256",
    "googlenet:128",
    "overfeat:128",
    "vgg16:64",
    "resnet18:128",
    "googlenet_bn:128",
)
DIVIDED = ("alexnet:128", "vgg16:256")
"""Networks whose slices are measured too."""
DEFAULT_PRECISIONS = ("fp32", "tf32")
LAYOUTS = ("NCHW", "NHWC", "CHWN")
SAVE_EVERY_S = 20.0

Kind = tuple[str, str]
"""Precision and layout of a table."""
OpenSearch = Callable[[str, str], Search]
"""Precision and layout → a search on this machine."""


def problems(network: str, divided: bool, kind: Kind) -> Iterator[tuple[str, ConvProblem]]:
    """What to call a convolution, and the convolution, of "vgg16:256"; with `divided` of slices of the batch alone."""
    name, _, batch = network.partition(":")
    (dtype, multiple), layout = PRECISIONS[kind[0]], kind[1]
    graph = build(name)
    for images in sizes_of(int(batch))[1:] if divided else (int(batch),):
        program = lower(
            *(graph, images, "train"),
            update=Update(momentum=0.9),
            dtype=dtype,
            layout=layout,
            pad_channels=multiple if layout == "NHWC" else 1,
            fuse=kind != ("fp32", "NCHW"),
        )
        for op in program.ops:
            if op.kind in CONV_KINDS:
                yield f"{name}:{images} {op.name}", unplaced_problem(op, program)


def worklist(cases: Sequence[str], divided: Sequence[str], kind: Kind) -> Iterator[tuple[str, ConvProblem]]:
    """Every problem once: whole batches first, in the order of the networks."""
    seen = set()
    whole, parts = [(name, False) for name in cases], [(name, True) for name in cases if name in divided]
    for network, slices in [*whole, *parts]:
        for name, problem in problems(network, slices, kind):
            if str(problem) not in seen:
                seen.add(str(problem))
                yield name, problem


class Tables:
    """The tables to be written, one a precision and layout, with what earlier ones know."""

    def __init__(self, folder: Path, earlier: Path | None):
        self.folder, self.earlier = folder, earlier
        self.made: dict[Kind, tuple[Path, AlgorithmTable]] = {}

    def begin(self, search: Search, kind: Kind) -> AlgorithmTable:
        """The table of this precision and layout; the search will not measure what it holds."""
        name = f"{slug(str(search.key['gpu']))}-{table_name(kind)}.json"
        table = AlgorithmTable(search.key)
        for place in (self.earlier, self.folder):
            file = place / name if place is not None else None
            if file is None or not file.is_file():
                continue
            known = read_table(file.read_text(encoding="utf-8"), str(file))
            if {key: known.facts.get(key) for key in search.key} == search.key:
                table.problems |= known.problems
            else:
                print(f"{file}: of another driver, cuDNN or method; measured anew", flush=True)
        search.known |= table.problems
        self.made[kind] = (self.folder / name, table)
        return table

    def save(self) -> None:
        """Write all of them."""
        for path, table in self.made.values():
            facts = {**table.facts, "date": datetime.now(UTC).isoformat(timespec="seconds")}
            AlgorithmTable(facts, table.problems).save(path)


def measure(
    cases: Sequence[str], kinds: Sequence[Kind], open_search: OpenSearch, tables: Tables, seconds: float
) -> dict[Kind, tuple[int, int]]:
    """Measure until done or out of time; problems known and wanted by table. Tables are saved on the way.

    A problem that fails is named and left out; the next is measured.
    """
    started = saved = monotonic()
    done: dict[Kind, tuple[int, int]] = {}
    for kind in kinds:
        words = table_name(kind)
        search = open_search(*kind)
        wanted = list(worklist(cases, DIVIDED, kind))
        table = tables.begin(search, kind)
        missing = [(name, problem) for name, problem in wanted if str(problem) not in table.problems]
        print(f"{words}: {len(wanted) - len(missing)} of {len(wanted)} problems known", flush=True)
        # what is left of the time is shared, so that every table has its most important networks
        share = (seconds - (monotonic() - started)) / (len(kinds) - len(done))
        end = monotonic() + share
        for number, (name, problem) in enumerate(missing, start=1):
            if monotonic() > end:
                print(f"{words}: out of time before {name}, {len(missing) - number + 1} left", flush=True)
                break
            print(f"{words} {number}/{len(missing)} {monotonic() - started:5.0f} s {name}", flush=True)
            try:
                search.candidates(problem)
            except Exception:  # a convolution that cannot be measured is one row less
                traceback.print_exc()
                continue
            table.problems[str(problem)] = search.known[str(problem)]
            if monotonic() - saved > SAVE_EVERY_S:
                tables.save()
                saved = monotonic()
        tables.save()
        done[kind] = (sum(str(problem) in table.problems for _, problem in wanted), len(wanted))
    return done


def table_name(kind: Kind) -> str:
    """What a table is called behind the GPU: "fp32", "bf16-nhwc"."""
    precision, layout = kind
    return precision if layout == "NCHW" else f"{precision}-{layout.lower()}"


def case(text: str) -> str:
    """ "vgg16:256", if it is a network that there is and a number of images."""
    name, _, batch = text.partition(":")
    if name not in KNOWN or not batch.isdecimal() or int(batch) < 1:
        raise argparse.ArgumentTypeError(f"expected a network and a batch size such as vgg16:256, got '{text}'")
    return text


def slug(name: str) -> str:
    """ "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def on_gpu(precision: str, layout: str) -> Search:
    """The search of the GPU, on all memory that is free."""
    check_device("cuda", "run this on the GPU that the tables are to be of")
    from vdnn.runtime.backends.cuda.backend import CudaBackend

    def say(text: str) -> None:
        print(f"  {text}", flush=True)

    return CudaBackend(precision=precision, layout=layout, progress=say).search


def parts(text: str, known: Collection[str]) -> list[str]:
    """A list with commas, if all of it is known."""
    found = text.split(",")
    if not set(found) <= set(known):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got '{text}'")
    return found


def main(argv: Sequence[str] | None = None, open_search: OpenSearch = on_gpu) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.gpu_algos", description=__doc__.partition("\n")[0])
    text = f"default: {' '.join(CASES)}"
    parser.add_argument("cases", nargs="*", type=case, metavar="NETWORK:BATCH", default=list(CASES), help=text)
    precisions, layouts = (lambda text: parts(text, PRECISIONS)), (lambda text: parts(text.upper(), LAYOUTS))
    words = f"of {','.join(PRECISIONS)} (default: {','.join(DEFAULT_PRECISIONS)})"
    parser.add_argument("--precisions", type=precisions, default=list(DEFAULT_PRECISIONS), metavar="LIST", help=words)
    words = "of nchw,nhwc,chwn (default: nchw)"
    parser.add_argument("--layouts", type=layouts, default=["NCHW"], metavar="LIST", help=words)
    parser.add_argument("--minutes", type=above_zero, default=9.0, help="time for all of it (default: 9)")
    parser.add_argument("--tables", metavar="DIR", help="folder of earlier tables (default: that of the package)")
    arguments = parser.parse_args(argv)
    kinds = [(precision, layout) for layout in arguments.layouts for precision in arguments.precisions]
    folder = results_path("")
    earlier = Path(arguments.tables) if arguments.tables else Path(str(resources.files(STORED)))
    tables = Tables(folder, earlier)
    try:
        check_output(folder / "tables.json")  # before minutes of work
        done = measure(arguments.cases, kinds, open_search, tables, 60 * arguments.minutes)
    except VdnnError as error:
        print(f"gpu_algos: {error}", file=sys.stderr)
        return error.exit_code
    for kind, (known, wanted) in done.items():
        print(f"{table_name(kind)}: {known} of {wanted} problems in {tables.made[kind][0].name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
