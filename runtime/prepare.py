"""From a Config to everything a run needs before its first step: graph, data, machine, costs, verified plans.

    prepared = prepare(load_config("lenet"))
    prepared.plans.slab_bytes

Nothing is allocated and nothing is written here; a budget that cannot be kept is a BudgetError from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from vdnn.errors import BudgetError, ConfigError
from vdnn.layers.graph import Graph
from vdnn.layers.lower import Update
from vdnn.layers.op import Program
from vdnn.memory.clock import simulate
from vdnn.memory.costs import Candidate, CostTable, Options
from vdnn.memory.passes import batch_of, slice_op
from vdnn.memory.policy import Budget
from vdnn.memory.report import Report, make_report
from vdnn.memory.slices import step_of
from vdnn.networks import build
from vdnn.runtime.backend import Backend
from vdnn.runtime.config import Config
from vdnn.runtime.data import Source, open_source, steps_per_epoch
from vdnn.runtime.devices import open_device
from vdnn.runtime.layouts import plan_layouts
from vdnn.runtime.optim import total_steps
from vdnn.runtime.planset import Algorithms, Key, PlanSet, Recipe, slice_sizes, step_parts
from vdnn.units import format_bytes

GUARD_BYTES = 256
"""Behind every storage while freed bytes are poisoned."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How a run is cut: parts of a full step, parts of an epoch's last step if it is smaller, evaluation batches."""

    per_epoch: int
    total: int
    full: list[Key]
    ragged: list[Key]
    evaluation: list[Key]

    def parts(self, images: int) -> list[Key]:
        """The parts of a step of `images` images: a full one, or the last of an epoch."""
        return self.full if images == sum(n for _, n in self.full) else self.ragged

    def keys(self) -> list[Key]:
        """Every plan that the run needs, the full step's first."""
        return list(dict.fromkeys((*self.full, *self.ragged, *self.evaluation)))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start."""

    config: Config
    graph: Graph
    source: Source
    backend: Backend
    device_reason: str
    budget: Budget
    steps: Steps
    plans: PlanSet

    @property
    def limit_bytes(self) -> int:
        """Most bytes of the device slab."""
        return stated_bytes(self.budget)

    def report(self) -> Report:
        """The report of the training step; of an accumulated one, of the part that needs most."""
        planned = max((self.plans[key] for key in self.steps.full), key=lambda planned: planned.plan.slab_bytes)
        return make_report(planned.plan, planned.program, planned.decisions, planned.costs)

    def predicted_step_ms(self) -> float:
        """Time of a whole step, all parts of it, by the clock and the cost tables."""
        parts = [self.plans[key] for key in self.steps.full]
        return sum(simulate(p.plan, p.program, p.costs).total_ms for p in parts)


def backend_costs(backend: Backend, program: Program, deterministic: bool = False) -> CostTable:
    """Every op's candidates as `backend` tells them; with `deterministic` only those that give equal bits every run."""

    def wanted(options: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        return tuple(c for c in options if c.deterministic) if deterministic else options

    ops = {op.name: op for op in program.ops}

    @cache
    def slices(name: str, images: int) -> Options:
        op, tensors = ops[name], dict(program.tensors)
        batch = batch_of(op, program)
        if images < batch:
            # not the first slice: those after it add to sums, and lie where loads may have to be narrower
            op = slice_op(op, tensors, step_of(batch), images)
        part = replace(program, tensors=tensors)
        return Options(wanted(backend.candidates(op, part)), backend.knows_all(op, part))

    table = {name: wanted(backend.candidates(op, program)) for name, op in ops.items()}
    for name, options in table.items():
        if not options:
            kind = "deterministic algorithm" if deterministic else "algorithm"
            raise ConfigError(f"op '{name}': no {kind} on {backend.caps.name} within the memory limit", key="limit")
    return CostTable(table, backend.caps.rates, backend.caps.cost_source, slices)


def make_budget(config: Config, backend: Backend, reserve_bytes: int | None = None) -> Budget:
    """The limits of `config`; without one, what the device has. What is held besides the slab is taken off."""
    memory = config.memory
    reserve = backend.caps.reserve_bytes if reserve_bytes is None else reserve_bytes
    limit = memory.limit if memory.limit is not None else backend.caps.memory_bytes
    if limit <= reserve:
        held = (
            f"but CUDA and its libraries alone hold {format_bytes(reserve)} of this GPU for the process; state more "
            "than that, or use --device cpu, where it limits the slab alone"
        )
        none = "expected more than 0 bytes; state an amount such as 12GiB, or leave it out for all that the device has"
        raise BudgetError(
            f"memory.limit is {format_bytes(limit)}, {held if reserve else none}",
            layer="context" if reserve else "slab",
            needed_bytes=reserve,
            budget_bytes=limit,
            smallest_bytes=None,
        )
    return Budget(
        device_bytes=limit - reserve,
        host_bytes=memory.host_limit,
        workspace_bytes=memory.workspace_limit,
        algorithms=memory.algorithms,
        join=memory.join,
        prefetch_bytes=memory.prefetch_limit,
        guard_bytes=GUARD_BYTES if config.debug.poison else 0,
        paper=memory.paper_search,
        slices=memory.slices if memory.slices is not None else memory.policy == "dyn" and not memory.paper_search,
    )


def stated_bytes(budget: Budget) -> int:
    """The device limit of a budget from `make_budget`, which always has one."""
    assert budget.device_bytes is not None
    return budget.device_bytes


def make_recipe(config: Config, source: Source | None = None, device: str = "cuda") -> Recipe:
    """How `config` says that programs for `device` are lowered, with the normalisation that `source` asks for.

    Layouts of single layers are not in it yet (see vdnn.runtime.layouts).
    """
    optimizer = config.optimizer
    update = Update(optimizer.momentum, optimizer.nesterov, optimizer.weight_decay, optimizer.decay_bias_and_norm)
    mean, std = (source.mean, source.std) if source is not None else (None, None)
    return Recipe(
        update,
        mean,
        std,
        pool_indices=config.memory.pool_indices,
        fuse=config.memory.fuse,
        update_together=config.update_together,
        layout=config.layout_on(device),
        dtype=config.dtype,
        pad_channels=config.pad_channels_on(device),
    )


def make_steps(config: Config, source: Source) -> Steps:
    """Cut the run that `config` describes over `source`."""
    train = config.train
    images, batch = len(source.train), train.batch_size
    per_epoch = steps_per_epoch(images, batch, train.drop_last)
    micro = -(-batch // train.accumulate)
    rest = 0 if train.drop_last else images % batch
    evaluation = config.evaluate.batch_size or micro
    return Steps(
        per_epoch=per_epoch,
        total=total_steps(train, per_epoch),
        full=step_parts(min(batch, images), micro),
        ragged=step_parts(rest, micro) if rest else [],
        evaluation=[("eval", n) for n in dict.fromkeys(slice_sizes(len(source.test), evaluation))],
    )


def prepare(
    config: Config,
    recorded: Algorithms | None = None,
    progress: Callable[[str], None] | None = None,
    reserve_bytes: int | None = None,
    *,
    graph: Graph | None = None,
    evaluates: bool = True,
) -> Prepared:
    """Everything before the first step.

    Args:
        recorded: algorithms chosen by the run that is being resumed.
        progress: told in words what takes long.
        reserve_bytes: what the process was seen to hold besides the slab, where that is more than expected.
        graph: the network, where it is not the one that `config` names.
        evaluates: whether plans for evaluation are needed.
    """
    graph = graph or build(config.network.name, **config.network.options)
    source = open_source(config.data, graph.input_shape, graph.classes, config.train.seed)
    order = tuple(config.debug.stream_order) if config.debug.stream_order else None
    backend, reason = open_device(
        config.device,
        config.profile,
        memory_limit=config.memory.limit,
        poison=config.debug.poison,
        copy_repeats=config.debug.copy_repeats,
        order=order,
        precision=config.precision,
        candidates=config.memory.candidates,
        layout=config.layout_on("cuda"),
        progress=progress,
    )
    budget = make_budget(config, backend, reserve_bytes)
    steps = make_steps(config, source)
    if not evaluates:
        steps = replace(steps, evaluation=[])
    images = len(source.train)
    if config.train.batch_size > images and progress is not None:  # said first: the plan may be refused for its size
        progress(
            f"note: train.batch_size is {config.train.batch_size:,}, but there are only {images:,} training images: "
            f"a step trains {images:,}"
        )

    def costs_of(program: Program) -> CostTable:
        return backend_costs(backend, program, config.deterministic)

    recipe = make_recipe(config, source, backend.caps.name)
    plans = plan_layouts(config, graph, steps.keys(), costs_of, recipe, backend, budget, recorded, progress=progress)
    return Prepared(config, graph, source, backend, reason, budget, steps, plans)
