"""Predicted and measured step times on this GPU, a line for each case, and what the prediction is made of.

    python -m vdnn.bench.gpu_predict alexnet:128 vgg19:256:dyn:12GiB:fp32 resnet50:256:none:null:bf16
    python -m vdnn.bench.gpu_predict googlenet:128:conv:8GiB:tf32 -o memory.layout=nhwc

A case is NETWORK[:BATCH[:POLICY[:LIMIT[:PRECISION]]]]. Predictions are what training says before its first step. On a
GPU they come from whole steps, rehearsed then or seen by an earlier run; beside them stands what parts alone, ops that
were measured one by one, add up to.

gpu_predict.json, in the folder $OUT or the present one, has every case by its name, with -o and a --device that is not
cuda; it is written after each, earlier cases are kept, and one that fails replaces none that was measured. Exit code 0
if every prediction is within 10%, 1 if not, 2 for what cannot be tried at all, and then nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from vdnn.bench.command import command, reason, whole_from
from vdnn.bench.harness import Silent, check_device, facts, results_path, save_results
from vdnn.errors import ConfigError, DataError, VdnnError
from vdnn.memory.clock import op_times, simulate
from vdnn.runtime.calibration import counted
from vdnn.runtime.config import Config, load_config
from vdnn.runtime.data import batches, epoch_order, with_next
from vdnn.runtime.files import check_output
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.rehearsal import LimitExceeded
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer
from vdnn.units import format_ms

MOST_STEPS = 1000
TOLERANCE = 0.10
FILE = "gpu_predict.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One training step; limit "null" is all that the GPU has."""

    network: str
    batch_size: int | None = None
    policy: str = "none"
    limit: str = "null"
    precision: str = "fp32"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `text` names, see the module; ConfigError if it names none."""
        network, batch, *rest = (*text.split(":"), "")
        if (batch and not batch.isdecimal()) or text.count(":") > 1 + len(DEFAULTS):
            raise ConfigError(f"case '{text}': expected NETWORK:BATCH:POLICY:LIMIT:PRECISION, the batch a number")
        chosen = (part or default for part, default in zip(rest, DEFAULTS, strict=False))
        return cls(network, int(batch) if batch else None, *chosen)

    def overrides(self) -> list[str]:
        """What it changes in the packaged configuration."""
        images = [] if self.batch_size is None else [f"train.batch_size={self.batch_size}"]
        choice = [f"memory.policy={self.policy}", f"memory.limit={self.limit}", f"precision={self.precision}"]
        return [*images, *choice, "data.source=synthetic", "data.test_images=8", "evaluate.batch_size=8"]


DEFAULTS = ("none", "null", "fp32")


def configuration(case: Case, device: str, options: Sequence[str] = (), *more: str) -> Config:
    """The case's; ConfigError if there is none, or if options make another case of it.

    Args:
        options: further overrides, KEY=VALUE.
        more: and some that these do not change.
    """
    overrides = [*case.overrides(), f"device={device}"]
    named, config = load_config(case.network, overrides), load_config(case.network, [*overrides, *options])
    for key in ("device", "precision", "train.batch_size", "memory.policy", "memory.limit"):
        says, got = (attrgetter(key)(each) for each in (named, config))
        if got != says:  # else results would bear the name of a case that was not measured
            place = "--device" if key == "device" else "the case"
            raise ConfigError(f"{key}: {place} says {says}, -o {got}; leave it out of -o")
    images = f"data.train_images={config.train.batch_size}"
    return load_config(case.network, [*overrides, *options, images, *more])


def measure(case: Case, steps: int | None, device: str, verbose: bool, options: Sequence[str] = ()) -> dict[str, Any]:
    """Train a few steps of `case`; times in ms, and the predicted ones by kind of op.

    Args:
        steps: that are timed; None for as many as a run counts.
        options: further overrides, KEY=VALUE.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = (f"train.iterations={MOST_STEPS}", f"output={folder}/run")
        config = configuration(case, device, options, *fixed)
        try:
            return _measure(config, steps, Path(folder), verbose)
        except LimitExceeded as error:  # as the trainer does: plan once more for what lies outside the slab
            return _measure(config, steps, Path(folder), verbose, error.reserve_bytes)


def _measure(
    config: Config, steps: int | None, folder: Path, verbose: bool, reserve_bytes: int | None = None
) -> dict[str, Any]:
    started = perf_counter()
    prepared = prepare(config, progress=_say if verbose else None, reserve_bytes=reserve_bytes, evaluates=False)
    prepare_s = perf_counter() - started
    trainer = Trainer(prepared, RunFolder(folder), Silent())
    try:
        trainer.start()
        split, batch = prepared.source.train, config.train.batch_size
        skipped, count = counted(trainer.predicted_step_ms)
        count = count if steps is None else steps
        order = np.resize(epoch_order(0, 0, len(split)), (skipped + count) * batch)
        times = []
        for (images, labels), later in with_next(batches(split, order, 0, batch)):
            begin = perf_counter()
            trainer.train_step(images, labels, 1e-6, later and later[0])
            times.append((perf_counter() - begin) * 1000)
            trainer.step += 1
    finally:
        prepared.backend.close()
    predicted = trainer.predicted_step_ms
    measured = median(times[skipped:])
    return {
        "predicted_ms": predicted,
        "parts_ms": prepared.predicted_step_ms(),
        "measured_ms": measured,
        "ratio": measured / predicted,
        "steps": count,
        "spread_ms": [min(times[skipped:]), max(times[skipped:])],
        "prepare_s": prepare_s,
        "slab_bytes": prepared.plans.slab_bytes,
        **_parts(prepared),
        "source": trainer.predicted_from,
    }


def _parts(prepared: Prepared) -> dict[str, Any]:
    """Predicted ms by kind of op, of all kernels with what copies cost them, and of copies."""
    kinds: Counter[str] = Counter()
    sums = {"compute_ms": 0.0, "out_ms": 0.0, "in_ms": 0.0, "idle_ms": 0.0}
    for key in prepared.steps.full:
        planned = prepared.plans[key]
        times, timing = op_times(planned.program, planned.costs), simulate(planned.plan, planned.program, planned.costs)
        for op in planned.program.ops:
            kinds[op.kind] += times[op.name]  # type: ignore[assignment]
        found = {"compute_ms": timing.compute_ms, "out_ms": timing.out_ms, "in_ms": timing.in_ms}
        for name, time_ms in {**found, "idle_ms": timing.compute_idle_ms}.items():
            sums[name] += time_ms
    return {**sums, "ops": sum(len(prepared.plans[key].program.ops) for key in prepared.steps.full), "kinds": kinds}


def line(text: str, found: dict[str, Any]) -> str:
    """One case for people."""
    if "failed" in found:
        return f"{text}: failed: {found['failed']}"
    return (
        f"{text}: predicted {format_ms(found['predicted_ms'])}, measured {format_ms(found['measured_ms'])}, "
        f"ratio {found['ratio']:.3f}; parts add up to {format_ms(found['parts_ms'])}"
    )


def within(found: dict[str, Any]) -> bool:
    """Whether the prediction is within TOLERANCE of what was measured."""
    return "failed" not in found and abs(found["predicted_ms"] / found["measured_ms"] - 1) <= TOLERANCE


class Kept:
    """Cases of gpu_predict.json by name: those of earlier commands on this machine too.

    Raises: DataError if what lies there is no such file, or of another GPU; ConfigError if it cannot be written.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        path = results_path(FILE)
        self.facts, self.rows = about, dict[str, dict[str, Any]]()
        check_output(path)
        if not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            gpu, self.rows = data["facts"].get("gpu"), {name: dict(row) for name, row in data["results"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"'{path}' holds no predictions ({error}); move it away or set OUT to a folder") from error
        if gpu != about.get("gpu"):
            raise DataError(f"'{path}' is of {gpu}, this is {about.get('gpu')}; set OUT to another folder")

    def add(self, name: str, row: Mapping[str, Any]) -> bool:
        """Write a case beside the others; False if it has failed and was measured earlier, which is kept then."""
        if "failed" in row and "measured_ms" in self.rows.get(name, ()):
            return False
        self.rows[name] = {**row, "commit": self.facts.get("commit"), "date": self.facts.get("date")}
        save_results(FILE, {"facts": self.facts, "results": self.rows})
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 0 if every prediction is within TOLERANCE."""
    kept_as_it_is = argparse.RawDescriptionHelpFormatter
    program = "python -m vdnn.bench.gpu_predict"
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=kept_as_it_is)
    parser.add_argument("cases", nargs="+", metavar="NETWORK:BATCH:POLICY:LIMIT:PRECISION")
    words = "that are timed (default: 10, or as many as a run counts where they are short)"
    parser.add_argument("--steps", type=whole_from(1), metavar="N", help=words)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (default: cuda)")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="of the networks' configurations")
    parser.add_argument("--verbose", action="store_true", help="say what is measured before the prediction")
    given = parser.parse_args(arguments)
    try:
        cases = {text: Case.parse(text) for text in given.cases}
        for case in cases.values():
            configuration(case, given.device, given.o)
        check_device(given.device)
        kept = Kept(facts(" ".join([program, *(sys.argv[1:] if arguments is None else arguments)])))
    except VdnnError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    more = [*([f"--device {given.device}"] if given.device != "cuda" else []), *(f"-o {text}" for text in given.o)]
    good = 0
    for text, case in cases.items():
        try:
            row = {**asdict(case), **measure(case, given.steps, given.device, given.verbose, given.o)}
        except (VdnnError, ValueError, MemoryError, RuntimeError) as error:  # the other cases are still worth running
            row = {**asdict(case), "failed": reason(error)}
        earlier = "" if kept.add(" ".join([text, *more]), row) else f"; {FILE} keeps what was measured earlier"
        print(line(text, row) + earlier, flush=True)
        good += within(row)
    print(f"within {TOLERANCE:.0%}: {good} of {len(cases)}")
    print(f"wrote {FILE}", file=sys.stderr)
    return int(good < len(cases))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(command(main))
