"""vdnn tables [FIGURE ...]: the vDNN paper's figures, with ours simulated on its GPU and measured on this one, and the
memory-efficiency study's tables, with ours measured.

vdnn tables fig11 fig14
vdnn tables layouts pooling                             # of the study
vdnn tables all --out runs/tables                       # Markdown, CSV, JSON, pictures and a page
vdnn tables all --device cuda --out runs/tables         # measures here first
vdnn tables compare runs/tables runs/other              # two machines side by side
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown

from vdnn.bench.paper_figures import ALL, FIGURES, choose_figures
from vdnn.bench.study_cases import PARTS, STUDY, choose_parts
from vdnn.cli.study_tables import CUDA, SECONDS, for_the_study, require_gpu
from vdnn.errors import ConfigError
from vdnn.runtime.files import user_path
from vdnn.runtime.guard import guarded
from vdnn.runtime.profile import load_profile

if TYPE_CHECKING:
    from vdnn.bench.paper_study import Study
    from vdnn.bench.paper_tables import Table
    from vdnn.bench.study_table import StudyTable

COMPARE = "compare"
SIMULATED = "simulated"
PROFILE = "titan-x-maxwell"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tables",
        help="both papers' numbers beside ours",
        description="Tables of the vDNN paper's figures: the paper's numbers, ours simulated on the paper's GPU, and "
        "ours measured on this GPU; and of the memory-efficiency study's layers, ours measured. 'compare RUN1 RUN2' "
        "puts two folders that --out has written side by side.",
        epilog=f"figures: {', '.join(FIGURES)}; of the study: {', '.join(PARTS)}, or {STUDY} for these; or {ALL}",
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"which ones; {ALL} if none is named")
    parser.add_argument(
        "--device",
        default=SIMULATED,
        metavar="D",
        help="simulated; or cuda (cpu): measure on this machine too what has not been measured yet; needs --out",
    )
    parser.add_argument("--profile", metavar="NAME", help=f"the simulated GPU of figures; by default {PROFILE}")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write Markdown, CSV, JSON, pictures and a page; measured runs are kept there, "
        "and so are tables of figures and networks that are not named",
    )
    parser.add_argument(
        "--networks",
        metavar="N,N",
        help="only these, such as alexnet,vgg19@64 (the paper's VGG-16 is vgg19); without figures, rows of the study's "
        "table networks, such as lenet,alexnet",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with every number")
    parser.add_argument("--steps", metavar="N", help="timed steps of each measured run of a figure, by default 5")
    parser.add_argument(
        "--time-budget",
        metavar="S",
        help=f"seconds after which no further run is measured; by default {SECONDS} for each table of the study",
    )
    parser.set_defaults(run=lambda arguments: guarded("vdnn tables", lambda: tables(arguments)))


def tables(arguments: argparse.Namespace) -> int:
    """Make the tables, print them, and write them if asked to."""
    if COMPARE in arguments.figures:
        return compare_runs(arguments.figures)
    begin = monotonic()
    of_study, of_paper = choose(arguments.figures)
    only = None
    if of_study and not of_paper:
        only = for_the_study(arguments, of_study)
    wanted = check(arguments, of_paper)
    if of_study and of_paper and (arguments.networks or arguments.profile or arguments.steps):
        say("--networks, --profile and --steps apply to the vDNN paper's figures, not to the study's tables")
    measuring = wanted.device
    if measuring == CUDA:
        require_gpu()
    elif of_study and of_paper and measuring is not None:
        say(f"the study's tables are measured on {CUDA} only; on {measuring} only figures are")
        measuring = None
    elif of_study and measuring is not None:
        raise ConfigError(f"--device: {', '.join(of_study)} are measured on {CUDA} only, not on {measuring}")
    if wanted.out is not None:
        make_folder(wanted.out)
    made = [of_the_paper(wanted)] if of_paper else []
    if of_study:
        left_s = None if wanted.budget_s is None else wanted.budget_s - (monotonic() - begin)
        made.append(of_the_study(replace(wanted, budget_s=left_s, device=measuring), of_study, only))
    if arguments.json:
        print(json.dumps({part.key: [table.to_json() for table in part.tables] for part in made}, indent=1))
    else:
        show("\n".join(part.text for part in made))
    for part in made:
        if part.written:
            say(part.written)
    return 0


@dataclass(frozen=True, slots=True)
class Made:
    """Tables of one paper: their key in JSON, as Markdown, and what was written, in words."""

    key: str
    tables: Sequence[Table | StudyTable]
    text: str
    written: str = ""


def check(arguments: argparse.Namespace, figures: tuple[str, ...]) -> Study:
    """What is asked for; ConfigError if an option makes no sense."""
    from vdnn.bench.paper_study import MEASURING, Study, choose_networks

    networks = choose_networks(arguments.networks) if figures else None
    if arguments.device != SIMULATED and arguments.device not in MEASURING:
        expected = f"expected {SIMULATED}, {' or '.join(MEASURING)}"
        raise ConfigError(f"--device: {expected}, got '{arguments.device}'", key=arguments.device, known=MEASURING)
    measuring = arguments.device if arguments.device in MEASURING else None
    if measuring and arguments.out is None:
        raise ConfigError("--device: measured runs are kept in files; give --out DIR")
    return Study(
        figures=figures,
        networks=networks,
        profile=load_profile(arguments.profile or PROFILE),
        out=None if arguments.out is None else user_path(arguments.out),
        device=measuring,
        steps=_whole("--steps", arguments.steps or "5"),
        budget_s=None if arguments.time_budget is None else float(_whole("--time-budget", arguments.time_budget)),
    )


def of_the_paper(wanted: Study) -> Made:
    """The vDNN paper's figures, simulated, and measured if asked to."""
    from vdnn.bench.paper_merge import merge
    from vdnn.bench.paper_study import run_study, write_study
    from vdnn.bench.paper_text import markdown

    outcome = run_study(wanted, say)
    text = "\n".join([*outcome.lines(), "", *(markdown(table) for table in outcome.tables)])
    if wanted.out is None:
        return Made("figures", outcome.tables, text)
    whole, kept = merge(outcome, wanted.out)
    beside = f"; kept what was there of {', '.join(kept)}" if kept else ""
    return Made("figures", outcome.tables, text, f"wrote {write_study(wanted.out, whole)}{beside}")


def of_the_study(wanted: Study, names: tuple[str, ...], only: tuple[str, ...] | None = None) -> Made:
    """The memory-efficiency study's tables, measured here first if asked to; those asked for are written."""
    from vdnn.bench.study_tables import text_of, write_tables
    from vdnn.cli.study_tables import of_networks, study_tables, with_kept

    made = study_tables(names, wanted.out, wanted.device, wanted.budget_s, say)
    if only is not None:
        made = tuple(of_networks(table, only) if table.key == "networks" else table for table in made)
    if wanted.out is None:
        return Made(STUDY, made, text_of(made))
    return Made(STUDY, made, text_of(made), f"wrote {write_tables(wanted.out, with_kept(made, wanted.out, say))}")


def choose(words: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tables of the study and figures of the vDNN paper that `words` name: all for "all" or nothing.

    ConfigError for a word that is neither.
    """
    known = (ALL, *FIGURES, STUDY, *PARTS)
    for word in words:
        if word not in known:
            raise ConfigError(f"unknown figure '{word}', expected {', '.join(known)}", key=word, known=known)
    if not words or ALL in words:
        return PARTS, FIGURES
    figures = [word for word in words if word not in (*PARTS, STUDY)]
    return choose_parts(words), choose_figures(figures) if figures else ()


def say(text: str) -> None:
    """To standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def compare_runs(words: list[str]) -> int:
    """Print two runs side by side."""
    from vdnn.bench.paper_compare import compare
    from vdnn.bench.paper_files import read_tables

    if len(words) != 3 or words[0] != COMPARE:
        raise ConfigError(f"expected '{COMPARE} RUN1 RUN2', got '{' '.join(words)}'")
    show(compare(*(read_tables(str(user_path(word))) for word in words[1:])))
    return 0


def show(text: str) -> None:
    """Markdown, rendered where there is a terminal and as it is where there is none."""
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(Markdown(text))
    else:
        print(text)


def make_folder(path: Path) -> None:
    """Make the folder before a minute of work; ConfigError if it cannot be or cannot be written to."""
    probe = path / ".vdnn-tables"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out: folder '{path}' cannot be written: {error.strerror}; choose another") from error


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise ConfigError(f"{flag}: expected a whole number from 1 to 10^6, got '{text}'")
    return int(text)
