"""The layout of every layer of a run, chosen before its programs are made, and the table that says why.

    choices = choose_layouts(config, graph, keys, costs_of, recipe, backend)     # empty for one layout everywhere
    program = replace(recipe, layouts=choices).lower(graph, keys[0])
    explain_layouts(program, costs_of(program), choices, "NCHW everywhere")

One choice serves every plan of a run, for they share the weights: it is made for the largest part of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vdnn.errors import ConfigError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Program
from vdnn.layers.rewrite import rewritten
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import LayoutChoice
from vdnn.memory.layout import Rule, layer_times, quickest_layouts, study_layouts
from vdnn.runtime.backend import Backend
from vdnn.runtime.config import LAYOUT_POLICIES, Config
from vdnn.runtime.layout_times import Costs, layout_times
from vdnn.runtime.planset import LAYOUTS_OF_RUN, Algorithms, Key, Recipe

VECTORS = "vectors"
"""What stands for the layout of a layer that makes no images."""


def choose_layouts(
    config: Config,
    graph: Graph,
    keys: Iterable[Key],
    costs_of: Costs,
    recipe: Recipe,
    backend: Backend,
    recorded: Algorithms | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, LayoutChoice]:
    """By layer, and graph.input, under a policy that gives each its own; else nothing.

    Args:
        keys: of the plans to come; the choice is made for the largest that is no evaluation.
        costs_of: the CostTable of a program.
        backend: closed; it may be opened to measure, and is closed again.
        recorded: what an earlier run of the same plans has chosen, which is kept.
        progress: told in words what takes long.
    """
    if config.memory.layout not in LAYOUT_POLICIES:
        return {}
    kept = (recorded or {}).get(LAYOUTS_OF_RUN)
    if kept:
        return {name: LayoutChoice(layout, "as in the run that goes on") for name, layout in kept.items()}
    key = max(keys, key=lambda key: (key[0] != "eval", key[1]))
    graph = rewritten(graph, key[0], pool_indices=recipe.pool_indices, fuse=recipe.fuse)
    if config.memory.layout == "study":
        return study_layouts(graph, key[1], layout_rule(config))
    return quickest_layouts(graph, layout_times(backend, graph, key, costs_of, recipe, progress))


def layout_rule(config: Config) -> Rule:
    """The study's rule with the thresholds of `config`, where it has some."""
    memory, study = config.memory, Rule()
    given = {"layout_channels": memory.layout_channels, "layout_images": memory.layout_images}
    if all(value is None for value in given.values()):
        return study
    named = " and ".join(f"memory.{key}" for key, value in given.items() if value is not None)
    source = f"{named} of the configuration" + ("" if None not in given.values() else f", the other {study.source}")
    return Rule(memory.layout_channels or study.channels, memory.layout_images or study.images, source)


def check_layout(config: Config, device: str) -> None:
    """ConfigError if `device` does not run layers in layouts of their own."""
    if config.memory.layout in LAYOUT_POLICIES and device == "cuda":
        raise ConfigError(
            f"memory.layout {config.memory.layout} gives each layer its own layout, which device cuda does not run yet;"
            " use --layout nchw or nhwc there, or --device cpu or simulated"
        )


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layer in the table: C of what it reads and N; `transform` where it only moves images to its layout."""

    layer: str
    kind: str
    channels: int
    images: int
    layout: str
    time_ms: float
    reason: str
    transform: bool


def explain_layouts(
    program: Program, costs: CostTable, choices: Mapping[str, LayoutChoice], usual: str
) -> list[LayoutRow]:
    """A row for each layer of `program` that reads or makes images, in the order of forward.

    Args:
        costs: of `program`.
        choices: why layers have their layout; `usual` is why the others have.
    """
    times, rows = layer_times(program, costs), {}
    for op in program.ops:
        read = [program.tensors[name] for name in op.reads.values()]
        images = [spec for spec in read if len(spec.shape) == 4 and spec.role in ("act", "input")]
        if op.phase != "forward" or op.layer in rows or not images:
            continue
        made = [program.tensors[name] for name in op.writes.values()]
        layout = next((spec.layout for spec in made if len(spec.shape) == 4), VECTORS)
        transform = op.kind == "layout.transform"
        choice = choices.get(op.layer)
        reason = choice.reason if choice is not None else usual if layout != VECTORS else "in logical order"
        reason = f"from {images[0].layout}" if transform else reason
        shape = images[0].shape
        kind = "transform" if transform else op.kind.split(".")[0]
        rows[op.layer] = LayoutRow(op.layer, kind, shape[1], shape[0], layout, times[op.layer], reason, transform)
    return list(rows.values())
