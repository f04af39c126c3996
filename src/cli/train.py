"""vdnn-train CONFIG: plan, verify, train.

vdnn-train lenet
vdnn-train configs/vgg19.yaml --policy dyn --memory-limit 12GiB --plan-only
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from vdnn import __version__
from vdnn.cli.display import make_display
from vdnn.cli.options import (
    Parser,
    add_config_options,
    limit_words,
    read_config,
    unmet_precision,
    unmodelled_layout,
    unread_profile,
)
from vdnn.cli.tables import plan_summary
from vdnn.errors import BudgetError, CheckpointError, ConfigError
from vdnn.layers import Dropout, Graph, SoftmaxLoss
from vdnn.runtime.checkpoint import State, load, load_state
from vdnn.runtime.config import Config, DebugConfig
from vdnn.runtime.dry_plan import evaluation_words
from vdnn.runtime.forecast import expected_step, run_ms
from vdnn.runtime.guard import guarded
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.rehearsal import LimitExceeded
from vdnn.runtime.run_folder import CONFIG, PLAN, RunFolder, belongs, run_of
from vdnn.runtime.simulate import simulated_run
from vdnn.runtime.step_tracer import StepTracer
from vdnn.runtime.streams import run_program
from vdnn.runtime.trace import Marks, check_trace_path
from vdnn.runtime.trainer import Result, Trainer
from vdnn.units import exact_bytes, format_bytes, format_ms

FIXED = ("batch_size", "drop_last", "seed")
"""Keys of `train` on which the place within an epoch depends, and which a resumed run must keep."""
ONLY_READ_BY = {"cuda": {"stream_order": "cpu"}, "cpu": {"copy_repeats": "cuda"}}
"""Device → keys of `debug` that it does not read, with the device that does."""
SLOW_STEP_MS, SLOW_RUN_MS = 2000.0, 600e3
"""A step or a run expected to take longer on the CPU is said to be slow before it starts."""


def make_parser() -> argparse.ArgumentParser:
    """The options of vdnn-train."""
    parser = Parser(
        prog="vdnn-train",
        description="Train a convolutional network on a byte budget.",
        epilog="exit codes: 0 done, 2 bad configuration or arguments, 3 does not fit, 4 not a number, "
        "130 / 143 interrupted (checkpoint written)",
    )
    add_config_options(parser, "hardware profile of the simulated device; other devices do not read it")
    parser.add_argument("--epochs", metavar="N", help="passes over the training images")
    parser.add_argument("--iterations", metavar="N", help="steps, if that is sooner than the epochs")
    parser.add_argument("--lr", metavar="RATE", help="learning rate")
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the run; with --resume PATH of another run, a branch of that one"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="go on from a checkpoint or a run folder; without PATH from the newest checkpoint of this output",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the times of the fourth step as a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--plan-only", action="store_true", help="plan, verify and report, then stop; nothing is written"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def command() -> int:
        arguments = make_parser().parse_args(argv)
        return guarded("vdnn-train", lambda: run(arguments))

    return run_program("vdnn-train", command)


def run(arguments: argparse.Namespace) -> int:
    """What the command does."""
    # what is not finite stops the run with its step and layer; NumPy need not say it first
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"vdnn\.runtime\.backends")
    config = read_config(arguments)
    if arguments.print_config:
        print(config.dump(), end="")
        return 0
    if arguments.trace:
        if arguments.plan_only:
            raise ConfigError("--trace measures a step, and --plan-only runs none; `vdnn plan --trace` models one")
        check_trace_path(arguments.trace)
    for sentence in config.unused():
        say(f"note: {sentence}")
    checkpoint: Path | None = None
    state: State | None = None
    if arguments.resume is not None:
        checkpoint = RunFolder.find_checkpoint(arguments.resume, config.output, lambda text: say(f"note: {text}"))
        state = load_state(checkpoint)
        say(f"resuming from {checkpoint} (step {state['step']})")
        for sentence in differences(config, state):
            say(f"note: {sentence}")
    try:
        return session(arguments, config, checkpoint, state)
    except LimitExceeded as error:
        say(f"note: {error}")
        say(f"note: planning once more with {format_bytes(error.reserve_bytes)} set aside for what is outside the slab")
        return session(arguments, config, checkpoint, state, error.reserve_bytes)


def session(
    arguments: argparse.Namespace,
    config: Config,
    checkpoint: Path | None,
    state: State | None,
    reserve_bytes: int | None = None,
) -> int:
    """Plan, and train unless only the plan was asked for."""
    prepared = prepare_run(config, state, reserve_bytes)
    source = limit_words(arguments, config, prepared.backend.caps, prepared.limit_bytes)
    warned = announce(prepared, source)
    if arguments.plan_only:
        return 0
    if not prepared.backend.caps.has_data:
        simulate_steps(prepared, arguments.trace)
        return 0
    origin = branched_from(arguments, config, checkpoint)
    if origin and state and state["step"] >= prepared.steps.total:
        raise ConfigError(
            f"no step is left for a branch of '{origin}' in '{config.output}': its checkpoint is of step "
            f"{state['step']}, the run is to end at step {prepared.steps.total}; raise --epochs or --iterations"
        )
    with choose_folder(checkpoint, config.output, origin) as folder:
        return train(arguments, prepared, folder, checkpoint, state, warned)


def branched_from(arguments: argparse.Namespace, config: Config, checkpoint: Path | None) -> Path | None:
    """The run of the checkpoint, if --resume names it and the command line another output; else None."""
    given = arguments.output is not None or any(o.partition("=")[0].strip() == "output" for o in arguments.overrides)
    if checkpoint is None or arguments.resume == "auto" or not given:
        return None
    run = run_of(checkpoint)
    return None if run is None or belongs(run, config.output) else run


def choose_folder(checkpoint: Path | None, output: str, origin: Path | None) -> RunFolder:
    """The run of the checkpoint that is resumed; a new one for a new run, for a branch of the run in `origin`, or if
    the checkpoint lies in none."""
    folder = RunFolder.of_checkpoint(checkpoint) if checkpoint and not origin else None
    if origin:
        say(f"note: this run branches from the one in '{origin}', which is only read")
    elif checkpoint and folder is None:
        say(f"note: '{checkpoint}' lies in no run's folder: what is beside it is left alone, this run gets its own")
    folder = folder or RunFolder.create(output)
    if folder.reused:
        say(f"note: the run before in '{folder.path}' left no checkpoint and no row of metrics: this one replaces it")
    return folder


def train(
    arguments: argparse.Namespace,
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Path | None,
    state: State | None,
    warned: bool,
) -> int:
    """Train in `folder`; `warned` says whether the run was said to be slow."""
    config = prepared.config
    if checkpoint and state and complete(folder, state, prepared):
        load(checkpoint)  # which says so if it is damaged
        say(f"already complete at step {state['step']}; raise --epochs or --iterations to go on")
        if arguments.trace:
            say(f"no trace: no step is left to run, so '{arguments.trace}' is not written")
        return 0
    taken = not folder.continued and folder.path.name != Path(config.output).name
    say(f"output: {f'{config.output} is taken, writing to ' if taken else ''}{folder.path}")
    for sentence in () if checkpoint else training_words(prepared.graph):
        say(f"note: {sentence}")
    title = f"{prepared.graph.name} on {prepared.backend.caps.name}, {prepared.source.description}"
    memory = f"planned {format_bytes(prepared.plans.slab_bytes)}, limit {format_bytes(prepared.limit_bytes)}"
    try:
        with make_display(sys.stdout, folder.metrics, prepared.steps.per_epoch, title, memory) as display:
            trainer = Trainer(prepared, folder, display)
            if checkpoint is None:
                trainer.start()
            else:
                trainer.resume(checkpoint)
            folder.write(CONFIG, config.dump())
            folder.write_json(PLAN, prepared.plans[prepared.steps.full[0]].plan.to_json())
            step_ms, whole_ms = trainer.predicted_step_ms, run_ms(prepared, trainer.predicted_step_ms)
            display.note(
                f"predicted: {format_ms(step_ms)} per step ({trainer.predicted_from}), "
                f"{prepared.steps.total:,} steps with their evaluations {format_ms(whole_ms)}"
            )
            slow = slow_words(prepared, step_ms, trainer.predicted_from)
            if slow and not warned:
                display.note(f"note: {slow}")
            if arguments.trace:
                trainer.listener = StepTracer(trainer, arguments.trace)
            result = trainer.run()
    finally:
        prepared.backend.close()
    say(closing(prepared, result))
    return 0


def simulate_steps(prepared: Prepared, trace_path: str | None) -> None:
    """What a run would take, and a trace of its step if asked for."""
    marks = Marks(prepared.backend)
    say(simulated_run(prepared, marks))
    if trace_path:
        marks.trace(f"simulated, {prepared.backend.caps.cost_source}").write(trace_path)
        say(f"trace of the simulated step: '{trace_path}'; open it at ui.perfetto.dev")


def say(text: str) -> None:
    """A line on standard output, at once."""
    print(text, flush=True)


def complete(folder: RunFolder, state: State, prepared: Prepared) -> bool:
    """Whether a checkpoint is at the end of the run that is asked for, and its weights have been evaluated."""
    return state["step"] >= prepared.steps.total and folder.metrics.on_disk(state["step"], "test")


def prepare_run(config: Config, state: State | None, reserve_bytes: int | None) -> Prepared:
    """Prepare, with the algorithms of a checkpoint if there is one; the error of what does not fit says whose they are,
    and whether it is evaluation."""
    try:
        return prepare(config, state["algorithms"] if state else None, say, reserve_bytes)
    except BudgetError as error:
        words = str(error)
        if error.evaluated_images is not None:
            needed_bytes = error.smallest_bytes or error.needed_bytes
            words = f"{evaluation_words(error.evaluated_images, needed_bytes, fits=False)}: {words}"
        if state:
            words += (
                f"; the algorithms are those recorded in the checkpoint of step {state['step']}, which a resumed run "
                "keeps: raise the limit, or start anew without --resume to have them chosen for it"
            )
        raise BudgetError(
            words,
            layer=error.layer,
            needed_bytes=error.needed_bytes,
            budget_bytes=error.budget_bytes,
            smallest_bytes=error.smallest_bytes,
        ) from error


def announce(prepared: Prepared, limit_source: str) -> bool:
    """Device, data and plan in words, before anything runs; whether that says that the run will be slow."""
    caps = prepared.backend.caps
    say(f"device: {caps.description} ({prepared.device_reason})")
    say(f"data: {prepared.source.description}")
    for sentence in unexpected(prepared):
        say(f"note: {sentence}")
    for sentence in prepared.plans.notes:
        say(f"note: {sentence}")
    plans, (step_ms, source) = prepared.plans, expected_step(prepared)
    limited = f"{format_bytes(prepared.limit_bytes)} ({limit_source})"
    report = replace(prepared.report(), cost_source=source)
    say(plan_summary(plans.slab_bytes, plans.host_bytes, step_ms, report, limited))
    slow = slow_words(prepared, step_ms, caps.cost_source)
    if slow:
        say(f"note: {slow}")
    return bool(slow)


def slow_words(prepared: Prepared, step_ms: float, source: str) -> str | None:
    """A sentence if the CPU will be long about it, with steps of `step_ms` as known from `source`."""
    whole_ms = run_ms(prepared, step_ms)
    if prepared.backend.caps.name != "cpu" or (step_ms <= SLOW_STEP_MS and whole_ms <= SLOW_RUN_MS):
        return None
    return (
        f"on this cpu a step will take about {format_ms(step_ms)} ({source}), the whole run with its evaluations about "
        f"{format_ms(whole_ms)}; try --iterations 1, or --device simulated"
    )


def training_words(graph: Graph) -> list[str]:
    """What makes the loss and accuracy of training differ in kind from those of the test images."""
    layers = [node.layer for node in graph.nodes.values()]
    found = []
    if any(layer.label_smoothing for layer in layers if isinstance(layer, SoftmaxLoss)):
        found.append("train loss is that of smoothed labels, test loss that of the labels themselves")
    if any(layer.p for layer in layers if isinstance(layer, Dropout)):
        found.append("train loss and accuracy are measured with dropout on, those of test without")
    return found


def unexpected(prepared: Prepared) -> list[str]:
    """What of the configuration this device does not follow."""
    config, caps = prepared.config, prepared.backend.caps
    sentences = (explain(config, caps) for explain in (unread_profile, unmet_precision, unmodelled_layout))
    found = [sentence for sentence in sentences if sentence]
    if caps.simulated and config.debug != DebugConfig():
        found.append(f"debug is not read by device {caps.name}")
    for key, reader in ONLY_READ_BY.get(caps.name, {}).items():
        if getattr(config.debug, key) != getattr(DebugConfig(), key):
            found.append(f"debug.{key} is not read by device {caps.name}, only by --device {reader}")
    return found


def differences(config: Config, state: State) -> list[str]:
    """What differs between the configuration now and the one of the checkpoint; CheckpointError if the network does."""
    then, now = state["config"], config.model_dump(mode="json")
    if then.get("network") != now["network"]:
        raise CheckpointError(
            f"the checkpoint is of network {then.get('network')}, the configuration says {now['network']}"
        )
    for key in FIXED:
        before, after = then.get("train", {}).get(key), now["train"][key]
        if before != after:
            raise CheckpointError(
                f"the checkpoint was trained with train.{key} = {before}, the configuration says {after}: images would "
                f"be skipped or seen twice; give {before}, or start anew without --resume"
            )
    found = []
    for section in ("data", "train", "optimizer", "schedule", "memory", "precision"):
        before, after = then.get(section), now[section]
        if isinstance(before, dict) and isinstance(after, dict):
            keys = [key for key in after if before.get(key) != after[key]]
            found += [f"{section}.{key} was {before.get(key)}, now {after[key]}" for key in keys]
        elif before != after:  # the precision
            words = "it goes on from the same float32 weights and momentum"
            found.append(f"{section} was {before}, now {after}: {words}")
    return found


def closing(prepared: Prepared, result: Result) -> str:
    """The last lines: what was reached, and whether what was said before came true."""
    step_ms = result.measured_step_ms
    measured = "no step of full size"
    if isfinite(step_ms):
        measured = f"{format_ms(step_ms)} (median), {step_ms / result.predicted_step_ms:.2f} times that"
    lines = [
        f"done: {result.steps} steps, test accuracy {result.accuracy:.2%}, test loss {result.loss:.4f} "
        f"({prepared.source.description})",
        f"memory: planned {exact_bytes(prepared.plans.slab_bytes)}, used at most {exact_bytes(result.used_bytes)}, "
        f"limit {format_bytes(prepared.limit_bytes)}",
        f"time: predicted {format_ms(result.predicted_step_ms)} per step, measured {measured}",
    ]
    return "\n".join(lines)
