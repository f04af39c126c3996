"""The whole study: runs, tables, files. What `vdnn tables` does, without its options.

outcome = run_study(Study(FIGURES, None, load_profile("titan-x-maxwell")), print)
write_study(Path("runs/tables"), outcome)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vdnn.bench.paper_figures import NO_POWER, PAPER, load_figure
from vdnn.bench.paper_files import TABLES_FILE, Measured, read_runs, write_tables
from vdnn.bench.paper_page import page
from vdnn.bench.paper_runs import NETWORKS
from vdnn.bench.paper_sources import REUSE, KeptRuns, SimulatedRuns
from vdnn.bench.paper_tables import BEST, MEASURED, SIMULATED, UNJOINED, Sources, Table, make_table
from vdnn.bench.paper_tasks import tasks
from vdnn.bench.paper_text import csv_text, markdown
from vdnn.bench.paper_values import Runs
from vdnn.errors import ConfigError
from vdnn.runtime.files import write_file
from vdnn.runtime.profile import Profile

MEASURING = ("cuda", "cpu")
STORED = Path(__file__).parent / "results" / "h200_paper"
"""Runs that come with vdnn, shown where nothing has been measured."""
NOT_MEASURED = "nothing measured yet; 'vdnn tables all --device cuda --out DIR' does"
PAGE = "index.html"


@dataclass(frozen=True, slots=True)
class Study:
    """What is asked for.

    Args:
        figures: keys. networks: the paper's names; None for all.
        profile: of the simulated GPU.
        out: a folder that exists, in which measured runs are kept; None for no files.
        device: where to measure what is not measured yet; None for nowhere.
        steps: timed steps of a measured run. budget_s: seconds after which no further run is begun.
    """

    figures: tuple[str, ...]
    networks: tuple[str, ...] | None
    profile: Profile
    out: Path | None = None
    device: str | None = None
    steps: int = 5
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tables; by column its heading, and what it is of, in words."""

    tables: tuple[Table, ...]
    headings: Mapping[str, str]
    machines: Mapping[str, str]

    def lines(self) -> list[str]:
        """What a reader of all tables should know first."""
        return [f"# {PAPER}", "", *(f"- {name}: {words}" for name, words in self.columns().items()), f"- {NO_POWER}"]

    def columns(self) -> dict[str, str]:
        """What each column is of, by its heading."""
        return {self.headings[column]: words for column, words in self.machines.items()}


def choose_networks(text: str | None) -> tuple[str, ...] | None:
    """The paper's names of "alexnet,vgg19@64"; None for None; ConfigError for one that is not in the paper."""
    if text is None:
        return None
    found: list[str] = []
    known = [f"{name}@{batch}" for name, batch in NETWORKS.values()]
    for word in (part.strip() for part in text.split(",")):
        matches = [shown for shown, (name, batch) in NETWORKS.items() if word in (name, f"{name}@{batch}", shown)]
        if not matches:
            names = [*dict.fromkeys(name for name, _ in NETWORKS.values()), *known]
            raise ConfigError(
                f"--networks: the paper has no network '{word}', expected of {', '.join(known)}", key=word, known=names
            )
        found += matches
    return tuple(shown for shown in NETWORKS if shown in found)


def run_study(study: Study, progress: Callable[[str], None]) -> Outcome:
    """Simulate, measure where asked to, and make the tables."""
    if study.device is not None and study.out is not None:
        from vdnn.bench.paper_processes import Order, measure_apart  # most tables need no device

        wanted = tasks(study.figures, study.networks)
        measure_apart(Order(study.device, study.steps, str(study.out), wanted, study.budget_s), progress)
    measured, place = Measured() if study.out is None else read_runs(study.out), "here"
    stored = read_runs(STORED)
    if not measured.runs and study.device is None and _free_for(study.out, stored.machine):
        measured, place = stored, "on an H200"
    simulated = SimulatedRuns(study.profile)
    runs: dict[str, Runs] = {SIMULATED: simulated, UNJOINED: simulated.joined(REUSE)}
    headings = {
        SIMULATED: f"simulated, {study.profile.name}",
        UNJOINED: "not joined, simulated",
        MEASURED: f"measured {place}",
    }
    machines = {
        SIMULATED: f"simulated, not measured: memory is that of our plans, to the byte; times are modelled by profile "
        f"{study.profile.name} ({study.profile.description})",
        MEASURED: measured.machine or NOT_MEASURED,
    }
    if measured.runs:
        runs[MEASURED] = KeptRuns(measured.runs)
    if measured.best:
        runs[BEST] = KeptRuns(measured.runs, best=measured.best)
        headings[BEST] = f"our best, measured {place}"
        machines[BEST] = f"dyn in this program's own way, the same limit of 12 GiB: {measured.machine}"
    sources = Sources(runs, headings)
    figures = [load_figure(key) for key in study.figures]
    return Outcome(tuple(make_table(figure, sources, study.networks) for figure in figures), headings, machines)


def _free_for(out: Path | None, machine: str) -> bool:
    """Whether no tables in `out` are measured on another machine."""
    if out is None or not (out / TABLES_FILE).is_file():
        return True
    try:
        there = json.loads((out / TABLES_FILE).read_text(encoding="utf-8"))["facts"][MEASURED]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # whoever merges with the file says what is wrong with it
    return there in (machine, NOT_MEASURED)


def write_study(out: Path, outcome: Outcome) -> Path:
    """Write Markdown, CSV, JSON, a picture a figure and a page of all into the folder; returns the page's path."""
    from vdnn.bench.paper_pictures import picture_of  # brings in matplotlib
    from vdnn.runtime.paper_plots import draw_picture

    pictures = {}
    for table in outcome.tables:
        write_file(out / f"{table.key}.md", markdown(table).encode())
        write_file(out / f"{table.key}.csv", csv_text(table).encode())
        if table.rows:
            path = out / f"{table.key}.png"
            draw_picture(picture_of(table), str(path))
            pictures[table.key] = path.read_bytes()
    write_tables(out / TABLES_FILE, outcome.tables, outcome.machines)
    write_file(out / PAGE, page(outcome.tables, pictures, outcome.columns()).encode())
    return out / PAGE
