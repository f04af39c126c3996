"""vdnn-train CONFIG: plan, verify, train.

vdnn-train lenet
vdnn-train configs/vgg19.yaml --policy dyn --memory-limit 12GiB --plan-only
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from vdnn import __version__
from vdnn.cli.display import make_display
from vdnn.cli.options import Parser, add_config_options, guarded, read_config
from vdnn.cli.tables import plan_summary
from vdnn.errors import CheckpointError
from vdnn.runtime.checkpoint import State, load_state
from vdnn.runtime.config import Config, DebugConfig
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.run_folder import CONFIG, PLAN, RunFolder
from vdnn.runtime.simulate import simulated_run
from vdnn.runtime.trainer import Result, Trainer
from vdnn.units import format_bytes

FIXED = ("batch_size", "drop_last", "seed")
"""Keys of `train` on which the place within an epoch depends, and which a resumed run must keep."""
SLOW_STEP_MS = 2000.0
"""A step expected to take longer on the CPU is said to be slow before it starts."""


def make_parser() -> argparse.ArgumentParser:
    """The options of vdnn-train."""
    parser = Parser(
        prog="vdnn-train",
        description="Train a convolutional network on a byte budget.",
        epilog="exit codes: 0 done, 2 bad configuration or arguments, 3 does not fit, 4 not a number, "
        "130 / 143 interrupted (checkpoint written)",
    )
    add_config_options(parser)
    parser.add_argument("--epochs", metavar="N", help="passes over the training images")
    parser.add_argument("--iterations", metavar="N", help="steps, if that is sooner than the epochs")
    parser.add_argument("--lr", metavar="RATE", help="learning rate")
    parser.add_argument("--output", metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="go on from a checkpoint or a run folder; without PATH from the newest checkpoint of this output",
    )
    parser.add_argument("--plan-only", action="store_true", help="plan and verify, then stop")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    return guarded("vdnn-train", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """What the command does."""
    # what is not finite stops the run with its step and layer; NumPy need not say it first
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"vdnn\.runtime\.backends")
    config = read_config(arguments)
    if arguments.print_config:
        print(config.dump(), end="")
        return 0
    for sentence in config.unused():
        say(f"note: {sentence}")
    checkpoint: Path | None = None
    state: State | None = None
    if arguments.resume is not None:
        checkpoint = RunFolder.find_checkpoint(arguments.resume, config.output)
        state = load_state(checkpoint)
        say(f"resuming from {checkpoint} (step {state['step']})")
        for sentence in differences(config, state):
            say(f"note: {sentence}")
    prepared = prepare(config, state["algorithms"] if state else None, say)
    announce(prepared)
    if arguments.plan_only:
        return 0
    if not prepared.backend.caps.has_data:
        say(simulated_run(prepared))
        return 0
    folder = RunFolder.of_checkpoint(checkpoint) if checkpoint else RunFolder.create(config.output)
    say(f"output: {folder.path}")
    title = f"{prepared.graph.name} on {prepared.backend.caps.name}, {prepared.source.description}"
    try:
        with make_display(sys.stdout, folder.metrics, prepared.steps.per_epoch, title) as display:
            trainer = Trainer(prepared, folder, display)
            if checkpoint is None:
                trainer.start()
            else:
                trainer.resume(checkpoint)
            folder.write(CONFIG, config.dump())
            folder.write_json(PLAN, prepared.plans[prepared.steps.full[0]].plan.to_json())
            display.note(f"predicted: {trainer.predicted_step_ms:,.1f} ms per step ({trainer.predicted_from})")
            result = trainer.run()
    finally:
        prepared.backend.close()
    say(closing(prepared, result))
    return 0


def say(text: str) -> None:
    """A line on standard output, at once."""
    print(text, flush=True)


def announce(prepared: Prepared) -> None:
    """Device, data and plan in words, before anything runs."""
    caps = prepared.backend.caps
    say(f"device: {caps.description} ({prepared.device_reason})")
    say(f"data: {prepared.source.description}")
    for sentence in unexpected(prepared):
        say(f"note: {sentence}")
    for sentence in prepared.plans.notes:
        say(f"note: {sentence}")
    plans, step_ms = prepared.plans, prepared.predicted_step_ms()
    limit = prepared.budget.device_bytes
    say(plan_summary(plans.slab_bytes, plans.host_bytes, step_ms, prepared.report(), limit))
    if caps.has_data and not caps.simulated and step_ms > SLOW_STEP_MS:
        whole = step_ms * prepared.steps.total / 3.6e6
        say(
            f"note: on this {caps.name} a step will take about {step_ms / 1000:,.1f} s "
            f"({caps.cost_source}), the whole run about {whole:,.1f} hours; try --iterations 1, or --device simulated"
        )


def unexpected(prepared: Prepared) -> list[str]:
    """What of the configuration this device or this data does not follow."""
    config, caps, images = prepared.config, prepared.backend.caps, len(prepared.source.train)
    found = []
    if config.train.batch_size > images:
        found.append(
            f"train.batch_size is {config.train.batch_size:,}, but a step has only the {images:,} images there are"
        )
    if config.profile is not None and not caps.simulated:
        found.append(f"profile '{config.profile}' is not read by device {caps.name}, only by --device simulated")
    if caps.simulated and config.debug != DebugConfig():
        found.append(f"debug is not read by device {caps.name}, only by --device cpu")
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
        elif before != after:
            found.append(f"{section} was {before}, now {after}")
    return found


def closing(prepared: Prepared, result: Result) -> str:
    """The last lines: what was reached, and whether what was said before came true."""
    slab = prepared.plans.slab_bytes
    limit = prepared.budget.device_bytes
    step_ms = result.measured_step_ms
    measured = f"{step_ms:,.1f} ms (median)" if isfinite(step_ms) else "no step of full size"
    lines = [
        f"done: {result.steps} steps, test accuracy {result.accuracy:.2%}, test loss {result.loss:.4f} "
        f"({prepared.source.description})",
        f"memory: planned {format_bytes(slab)}, used at most {format_bytes(result.used_bytes)}"
        + (f", limit {format_bytes(limit)}" if limit is not None else ""),
        f"time: predicted {result.predicted_step_ms:,.1f} ms per step, measured {measured}",
    ]
    return "\n".join(lines)
