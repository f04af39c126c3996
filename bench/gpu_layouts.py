"""Training steps of whole networks under every layout on this GPU, measured and predicted.

    python -m vdnn.bench.gpu_layouts                                    # all below; gpu_layouts.json goes to $OUT
    python -m vdnn.bench.gpu_layouts alexnet:128:fp32 lenet:128:bf16    # some
    python -m vdnn.bench.gpu_layouts --minutes 8 --earlier runs/gpu_layouts.json      # go on where that was
    python -m vdnn.bench.gpu_layouts vgg416:32:tf32 --layouts nhwc auto

A row is one network, batch size, precision and layout; each is written as soon as it is known, what an earlier file
has is not measured again, and a row that fails says why. The last table says how auto compares with the best single
layout, by the GPU's clock in a chain of replayed steps; how the time that training predicts compares with its steps,
by the host's clock; and how the sum of its ops' times, all that is known before a step ran, compares with the chain.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from vdnn.bench.command import command, not_negative, reason
from vdnn.bench.harness import Outcome, train, write_results
from vdnn.errors import BackendUnavailable
from vdnn.networks import NETWORKS
from vdnn.runtime.config import PRECISIONS

NAME = "gpu_layouts.json"
STUDY = ("lenet:128", "cifar10:128", "alexnet:128", "zfnet:64", "vgg16:32")
VDNN = ("overfeat:128", "googlenet:128", "vgg19:64", "vgg19:128", "vgg19:256")
DEEP = ("vgg116:32", "vgg216:32", "vgg316:32", "vgg416:32")
CASES = (*STUDY, *VDNN, *DEEP)
"""The study's five networks, and the others of the vDNN paper's ten, whose VGG-16 has 16 convolutions: VGG-19."""
DEFAULT_PRECISIONS = ("fp32", "tf32", "bf16")
SINGLE = ("nchw", "nhwc", "chwn")
SMALL = ("lenet", "cifar10", "zfnet")
"""Whose steps in CHWN are measured beside those on tensor cores, which CHWN has not."""
STEPS = {"lenet": 400, "cifar10": 400, "alexnet": 80, "zfnet": 80}
"""Where steps are short: threads that begin to read images disturb the first ones."""
FEW = 12
Row = dict[str, Any]
Run = Callable[[str, Sequence[str], int], Outcome]


def layouts_of(network: str, precision: str) -> tuple[str, ...]:
    """What is measured: single layouts where they make sense, then auto."""
    sensible = precision == "fp32" or network in SMALL
    return (*(one for one in SINGLE if one != "chwn" or sensible), "auto")


def wanted(cases: Sequence[str], layouts: Sequence[str] = (*SINGLE, "auto")) -> Iterator[Row]:
    """The keys of all rows of "network:batch:precision", in those of `layouts` that are measured."""
    for case in cases:
        network, batch, precision = case.split(":")
        for layout in (one for one in layouts_of(network, precision) if one in layouts):
            yield {"network": network, "batch": int(batch), "precision": precision, "layout": layout}


def measure(key: Row, run: Run) -> Row:
    """One row; with "error" where it cannot be run."""
    batch = key["batch"]
    options = [
        *("device=cuda", "data.source=synthetic", f"data.train_images={2 * batch}", "data.test_images=16"),
        *(f"train.batch_size={batch}", "evaluate.batch_size=16", "optimizer.lr=1e-5"),
        *(f"precision={key['precision']}", f"memory.layout={key['layout']}", "memory.limit=null"),
    ]
    started = monotonic()
    try:
        outcome = run(key["network"], options, STEPS.get(key["network"], FEW))
    except BackendUnavailable:  # and so no row can be measured
        raise
    except Exception as error:  # a row that fails is one row less
        traceback.print_exc()
        return {**key, "error": reason(error)}
    return {
        **key,
        "step_ms": outcome.step_ms,
        "replayed_ms": outcome.replayed_ms,
        "predicted_ms": outcome.predicted_ms,
        "parts_ms": outcome.parts_ms,
        "layouts": outcome.layouts,
        "first_losses": outcome.losses[:3],
        "prepare_s": outcome.prepare_s,
        "slab_bytes": outcome.slab_bytes,
        "whole_s": monotonic() - started,
    }


def gpu_ms(row: Row) -> float:
    """A step by the GPU's clock; by the host's where steps are not replayed."""
    return float(row.get("replayed_ms") or row["step_ms"])


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each network and precision: the best single layout, auto, their ratio, and those of predictions."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if "step_ms" in row:
            cases.setdefault((row["network"], row["batch"], row["precision"]), {})[row["layout"]] = row
    head = f"{'auto ms':>10}{'ratio':>7}{'steps ms':>10}{'predicted':>10}{'parts':>7}"
    lines = [f"{'network':<14}{'precision':<10}{'best single':>20}{head}"]
    for (network, batch, precision), found in cases.items():
        singles = [row for layout, row in found.items() if layout != "auto"]
        if not singles or "auto" not in found:
            continue
        best, auto = min(singles, key=gpu_ms), found["auto"]
        single = f"{best['layout']} {gpu_ms(best):.3f}"
        ratio, told = gpu_ms(auto) / gpu_ms(best), auto["predicted_ms"] / auto["step_ms"]
        parts = (auto.get("parts_ms") or auto["predicted_ms"]) / gpu_ms(auto)
        name = f"{network}:{batch}"
        lines.append(
            f"{name:<14}{precision:<10}{single:>20}{gpu_ms(auto):>10.3f}{ratio:>7.3f}{auto['step_ms']:>10.3f}"
            f"{told:>10.3f}{parts:>7.3f}"
        )
    return lines


def known_rows(*paths: Path) -> list[Row]:
    """Rows without errors of earlier files."""
    found: dict[str, Row] = {}
    for path in paths:
        if path.is_file():
            for row in json.loads(path.read_text(encoding="utf-8"))["results"]["rows"]:
                if "error" not in row:
                    found[key_of(row)] = row
    return list(found.values())


def key_of(row: Mapping[str, Any]) -> str:
    """What tells a row from others."""
    return ":".join(str(row[name]) for name in ("network", "batch", "precision", "layout"))


def case(text: str) -> str:
    """ "network:batch:precision", all known."""
    parts = text.split(":")
    if len(parts) != 3 or parts[0] not in NETWORKS or not parts[1].isdecimal() or parts[2] not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"expected network, batch size and precision as lenet:128:fp32, got '{text}'")
    return text


def main(argv: Sequence[str] | None = None, run: Run = train) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.gpu_layouts", description=__doc__.partition("\n")[0])
    every = [f"{one}:{precision}" for one in CASES for precision in DEFAULT_PRECISIONS]
    text = f"default: {' '.join(CASES)} in {' '.join(DEFAULT_PRECISIONS)}"
    parser.add_argument("cases", nargs="*", type=case, metavar="NETWORK:BATCH:PRECISION", default=every, help=text)
    every_layout = (*SINGLE, "auto")
    words = f"some of {' '.join(every_layout)} (default: all that make sense)"
    parser.add_argument(
        "--layouts", nargs="+", choices=every_layout, default=every_layout, metavar="LAYOUT", help=words
    )
    parser.add_argument("--minutes", type=not_negative, default=9.0, help="no row is begun after so long (default: 9)")
    parser.add_argument("--earlier", metavar="FILE", help="rows that are known")
    arguments = parser.parse_args(argv)
    out = Path(os.environ.get("OUT", ".")) / NAME
    rows = known_rows(*([Path(arguments.earlier)] if arguments.earlier else []), out)
    known = {key_of(row) for row in rows}
    todo = [key for key in wanted(arguments.cases, arguments.layouts) if key_of(key) not in known]
    end = monotonic() + 60 * arguments.minutes
    command = " ".join(["python -m vdnn.bench.gpu_layouts", *(argv if argv is not None else sys.argv[1:])])
    for number, key in enumerate(todo):
        if monotonic() > end:
            print(f"out of time, {len(todo) - number} rows left; run once more to go on", flush=True)
            break
        row = measure(key, run)
        rows.append(row)
        write_results(NAME, command, {"rows": rows})
        words = row.get("error") or f"{row['step_ms']:.3f} ms, predicted {row['predicted_ms']:.3f}, {row['layouts']}"
        print(f"{key_of(key)}: {words}", flush=True)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
