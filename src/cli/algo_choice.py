"""Where `vdnn algos` takes its times from: the table or device asked for, this GPU, a stored table, or a profile.

study = choose(arguments, read_config(arguments))
study.notes         # what was taken instead of what was asked for, and what is left out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vdnn.cli.options import unmet_precision, unmodelled_layout, unread_profile
from vdnn.errors import BackendUnavailable, ConfigError, DataError
from vdnn.layers.graph import Graph
from vdnn.networks import build
from vdnn.runtime.algo_sources import Source, backend_source, restrict, table_source, without_epilogue
from vdnn.runtime.algorithm_table import AlgorithmTable, load_table, stored_names
from vdnn.runtime.algos import Study, make_study
from vdnn.runtime.backend import Backend
from vdnn.runtime.config import LAYOUT_POLICIES, Config
from vdnn.runtime.devices import DEFAULT_PROFILE, open_device
from vdnn.runtime.driver import find_driver
from vdnn.runtime.planset import Recipe
from vdnn.runtime.prepare import make_recipe

UNSET = (None, "auto")
UNAVAILABLE = "auto: "
"""How the reason begins for which open_device("auto") opened the CPU."""


@dataclass(slots=True)
class Wanted:
    """What is to be studied, and what there was to say of it."""

    config: Config
    graph: Graph
    batch: int
    recipe: Recipe
    layer: str | None
    micro_batches: bool
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say it, and keep it for the JSON object."""
        self.notes.append(text)
        say(text)

    def study(self, source: Source, device: str | None = None) -> Study | None:
        """The study by a source, a table or a device; None if it lacks a convolution, ConfigError if all algorithms of
        one are refused."""
        named = self.config.memory.candidates == "named" and device != "cpu"  # which has no algorithms of cuDNN's
        source = restrict(source, deterministic=self.config.deterministic, named=named)
        found = make_study(
            self.graph, self.recipe, self.batch, source, layer=self.layer, micro_batches=self.micro_batches
        )
        for conv in found.convs if found is not None else ():
            if not conv.candidates and source.only:
                text = f"{source.name} has no {source.only} algorithm for {conv.layer} {conv.direction}"
                raise ConfigError(f"{text} (times {source.words}); model them with --profile {DEFAULT_PROFILE}")
            if not conv.candidates:
                raise ConfigError(f"no algorithm for {conv.layer} {conv.direction} fits in the memory that is free")
        return found

    def ended(self, study: Study, asked: str = "") -> Study:
        """The study with all that is to be said of it."""
        made = replace(study, asked=asked)
        first = [made.heading()] if asked else []
        return replace(made, notes=(*first, *self.notes, *self.restrictions(study)))

    def restrictions(self, study: Study) -> list[str]:
        """Why algorithms are left out that the source knows; the heading says that they are."""
        reasons = {"deterministic": "deterministic: true", "named": "memory.candidates: named"}
        only = study.source.only
        keys = " and ".join(key for kind, key in reasons.items() if kind in only.split(" and "))
        return [f"{only} algorithms only, as {keys} asks"] if only else []

    def note_plain_times(self, table: AlgorithmTable) -> None:
        """Say it if times of a table are of less than training does in its convolutions."""
        if without_epilogue(table, self.graph, self.recipe, self.batch):
            self.note("times of forward are of the convolutions alone: the table knows none with bias and activation")


def choose(arguments: argparse.Namespace, config: Config) -> Study:
    """The study from the best source there is, or the one asked for; what was taken instead is said and noted."""
    for name, unset in (("device", UNSET), ("profile", (None,))):
        if arguments.table is not None and getattr(arguments, name) not in unset:
            raise ConfigError(f"--table takes its times from the table; leave out --table or --{name}", key=name)
    table = load_table(arguments.table) if arguments.table is not None else None
    if table is not None:
        config = of_table(arguments, config, table)
    batch = -(-config.train.batch_size // config.train.accumulate)
    graph = build(config.network.name, **config.network.options)
    device = "cpu" if arguments.device == "cpu" else "cuda"
    recipe = make_recipe(config, device=device)
    wanted = Wanted(config, graph, batch, recipe, arguments.layer, not arguments.no_micro_batches)
    policy = config.memory.layout
    if policy in LAYOUT_POLICIES:
        wanted.note(f"memory.layout {policy} chooses layer by layer; {recipe.layout} is shown, --layouts shows others")
    if config.memory.workspace_limit is not None:
        wanted.note("memory.workspace_limit is not applied: --limits says under which limits algorithms are shown")
    if config.train.accumulate > 1:
        wanted.note(f"a step is {config.train.accumulate} slices, of which one of {batch} images is studied")
    if table is not None:
        return by_named_table(arguments.table, table, wanted)
    if arguments.device == "cuda":
        backend, finding = open_gpu(wanted, arguments.profile)
        if backend is None:
            raise BackendUnavailable(
                f"device 'cuda' is not available: {finding}; leave out --device: times then come from a stored table, "
                "or are modelled"
            )
        return by_device(wanted, backend)
    if arguments.device not in UNSET or arguments.profile is not None:
        device = "simulated" if arguments.device in UNSET else arguments.device
        return by_device(wanted, open_for(wanted, device, arguments.profile)[0])
    driver = find_driver()
    finding = driver.finding
    if driver.gpus:
        backend, reason = open_gpu(wanted, None)
        if backend is not None:
            return by_device(wanted, backend)
        wanted.note(f"the GPU is not used: {reason}")
        finding = "no GPU that can be used"
    return without_gpu(wanted, finding)


def by_named_table(name: str, table: AlgorithmTable, wanted: Wanted) -> Study:
    """From the table that was asked for."""
    found = wanted.study(table_source(table))
    if found is None:
        text = f"table '{name}' does not hold all convolutions of {wanted.graph.name} at batch size {wanted.batch}"
        raise ConfigError(f"{text}; choose another batch size, or model them with --profile {DEFAULT_PROFILE}")
    wanted.note_plain_times(table)
    return wanted.ended(found)


def without_gpu(wanted: Wanted, finding: str) -> Study:
    """From the first stored table that knows the network, or modelled; `finding` says why not from a GPU."""
    config, layout = wanted.config, wanted.recipe.layout
    none = "no stored table"
    for name in stored_names():
        try:
            table = load_table(name)
        except DataError as error:  # what is modelled needs no table
            wanted.note(str(error))
            none = "no stored table that can be read"
            continue
        if (table.precision, table.layout) != (config.precision, layout):
            continue
        found = wanted.study(table_source(table))
        if found is not None:
            wanted.note(f"{finding}: times are from the stored table {name}")
            wanted.note_plain_times(table)
            return wanted.ended(found)
    in_layout = "" if layout == "NCHW" else f" and {layout}"
    wanted.note(
        f"{finding}, and {none} knows {wanted.graph.name} at batch size {wanted.batch} in "
        f"{config.precision}{in_layout}: times are modelled by profile {DEFAULT_PROFILE}"
    )
    return by_device(wanted, open_for(wanted, "simulated", None)[0], f" ({none} has it)")


def by_device(wanted: Wanted, backend: Backend, untabled: str = "") -> Study:
    """What a device measures or models; `untabled` says that tables have been looked into."""
    config, caps = wanted.config, backend.caps
    for sentence in (
        unread_profile(config, caps),
        unmet_precision(config, caps, plans=False),
        unmodelled_layout(config, caps),
    ):
        if sentence:
            wanted.note(sentence)
    if config.memory.candidates == "named" and caps.name == "cpu":
        wanted.note("memory.candidates is of cuDNN's algorithms: device cpu has none, and all of its own are shown")
    made = wanted.study(backend_source(backend, wanted.recipe.layout), caps.name)
    assert made is not None  # a backend knows every op
    shown = (made.source.precision, made.source.layout) == (config.precision, wanted.recipe.layout)
    return wanted.ended(made, "" if shown else f"{config.precision}, {wanted.recipe.layout}{untabled}")


def open_gpu(wanted: Wanted, profile: str | None) -> tuple[Backend | None, str]:
    """The GPU, or None and what it lacks."""
    backend, reason = open_for(wanted, "auto", profile)
    return (backend, reason) if backend.caps.name == "cuda" else (None, reason.removeprefix(UNAVAILABLE))


def open_for(wanted: Wanted, device: str, profile: str | None) -> tuple[Backend, str]:
    """A device for the configuration, and why it is this one."""
    config = wanted.config
    return open_device(
        device,
        profile,
        memory_limit=config.memory.limit,
        precision=config.precision,
        candidates=config.memory.candidates,
        layout=wanted.recipe.layout,
        progress=say,
    )


def of_table(arguments: argparse.Namespace, config: Config, table: AlgorithmTable) -> Config:
    """`config` in the precision and layout of a table; ConfigError if others were asked for."""
    name = f"table '{arguments.table}'"
    if config.precision != table.precision and names_precision(arguments.precision, arguments.overrides):
        raise ConfigError(f"{name} is of {table.precision}, the precision asked for is {config.precision}")
    layout = table.layout.lower()
    if config.memory.layout not in ("auto", layout):
        raise ConfigError(f"{name} is of {table.layout}, the layout asked for is {config.memory.layout.upper()}")
    memory = config.memory.model_copy(update={"layout": layout})
    return config.model_copy(update={"precision": table.precision, "memory": memory})


def names_precision(option: str | None, overrides: Sequence[str]) -> bool:
    """Whether the command line says which precision it is to be."""
    return option is not None or any(text.partition("=")[0].strip() == "precision" for text in overrides)


def say(text: str) -> None:
    """A line beside the result."""
    print(f"note: {text}", file=sys.stderr, flush=True)
