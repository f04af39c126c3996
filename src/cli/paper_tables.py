"""vdnn tables [FIGURE ...]: the vDNN paper's figures, with ours simulated on its GPU and measured on this one.

vdnn tables fig11 fig14
vdnn tables all --out runs/tables                       # Markdown, CSV, JSON, pictures and a page
vdnn tables all --device cuda --out runs/tables         # measures here first
vdnn tables compare runs/tables runs/other              # two machines side by side
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from vdnn.bench.paper_figures import ALL, FIGURES, choose_figures
from vdnn.cli.options import guarded
from vdnn.errors import ConfigError
from vdnn.runtime.files import user_path
from vdnn.runtime.profile import load_profile

COMPARE = "compare"
SIMULATED = "simulated"
PROFILE = "titan-x-maxwell"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tables",
        help="the vDNN paper's figures beside ours",
        description="Tables of the vDNN paper's figures: the paper's numbers, ours simulated on the paper's GPU, and "
        "ours measured on this GPU. 'compare RUN1 RUN2' puts two folders that --out has written side by side.",
        epilog=f"figures: {', '.join(FIGURES)}, or {ALL}",
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"which ones; {ALL} if none is named")
    parser.add_argument(
        "--device",
        default=SIMULATED,
        metavar="D",
        help="simulated; or cuda (cpu): measure on this machine too what has not been measured yet; needs --out",
    )
    parser.add_argument("--profile", default=PROFILE, metavar="NAME", help=f"the simulated GPU; by default {PROFILE}")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write Markdown, CSV, JSON, pictures and a page; measured runs are kept there, "
        "and so are tables of figures and networks that are not named",
    )
    parser.add_argument(
        "--networks", metavar="N,N", help="only these, such as alexnet,vgg19@64 (the paper's VGG-16 is vgg19)"
    )
    parser.add_argument("--steps", metavar="N", default="5", help="timed steps of each measured run")
    parser.add_argument("--time-budget", metavar="S", help="seconds after which no further run is measured")
    parser.set_defaults(run=lambda arguments: guarded("vdnn tables", lambda: tables(arguments)))


def tables(arguments: argparse.Namespace) -> int:
    """Make the tables, print them, and write them if asked to."""
    from vdnn.bench.paper_merge import merge
    from vdnn.bench.paper_study import MEASURING, Study, choose_networks, run_study, write_study
    from vdnn.bench.paper_text import markdown

    if COMPARE in arguments.figures:
        return compare_runs(arguments.figures)
    figures = choose_figures(arguments.figures)
    networks = choose_networks(arguments.networks)
    if arguments.device != SIMULATED and arguments.device not in MEASURING:
        expected = f"expected {SIMULATED}, {' or '.join(MEASURING)}"
        raise ConfigError(f"--device: {expected}, got '{arguments.device}'", key=arguments.device, known=MEASURING)
    measuring = arguments.device if arguments.device in MEASURING else None
    if measuring and arguments.out is None:
        raise ConfigError("--device: measured runs are kept in files; give --out DIR")
    study = Study(
        figures=figures,
        networks=networks,
        profile=load_profile(arguments.profile),
        out=None if arguments.out is None else user_path(arguments.out),
        device=measuring,
        steps=_whole("--steps", arguments.steps),
        budget_s=None if arguments.time_budget is None else float(_whole("--time-budget", arguments.time_budget)),
    )
    if study.out is not None:
        make_folder(study.out)
    outcome = run_study(study, lambda text: print(text, file=sys.stderr, flush=True))
    whole, kept = (outcome, ()) if study.out is None else merge(outcome, study.out)
    show("\n".join([*outcome.lines(), "", *(markdown(table) for table in outcome.tables)]))
    if study.out is not None:
        page = write_study(study.out, whole)
        beside = f"; kept what was there of {', '.join(kept)}" if kept else ""
        print(f"wrote {page}{beside}", file=sys.stderr)
    return 0


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
