"""Every op of a training step beside its floor: where the time above it goes, and so what is to be made faster next.

    python -m vdnn.bench.op_floor resnet50:256 --precision bf16
    python -m vdnn.bench.op_floor alexnet:128 --precision tf32 --copy-gbps 4160 --tflops 390 -o memory.layout=nhwc

Ops are timed by events within the replayed step: in their order, on their data, in the state in which they find the
cache; two events add about 1 to 2 µs to each (`mark_ms` says how much). The floor is what an op must move over the
measured copy bandwidth, or its products over the measured rate of a large product, whichever is longer
(vdnn.bench.op_count). op_floor_NETWORK_IMAGES_PRECISION.json and .md go to the folder $OUT or the present one; another
program, device or option, and --uncaptured, are in the name too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from vdnn.bench.command import above_zero, command
from vdnn.bench.harness import check_device, results_path, write_results
from vdnn.bench.op_count import work_of
from vdnn.bench.op_rates import Rates, rates_of
from vdnn.bench.peers_cases import PRECISIONS, Case, parse_network
from vdnn.bench.peers_ours import Running, configuration, running
from vdnn.errors import ConfigError, VdnnError
from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.memory.passes import batch_of
from vdnn.networks import build
from vdnn.runtime.backend import Backend
from vdnn.runtime.executor import Executor
from vdnn.runtime.files import check_output, write_output

STEPS = 12
"""Timed, after two that are not."""
SHOWN = 40
"""Rows of the table of ops; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op, or all of a group: time, least bytes and operations, and the floor that they make.

    Args:
        what: the op's name, or the group's.
        layer: kind of the layer, "conv"; "input" of what makes the images ready, "filter" of all filters, "update" of
            updates.
        bound: "bytes" or "products", of the op; of a group which of both has more of the floor.
        algorithm: with images if it is a slice; of a group empty.
    """

    what: str
    kind: str
    layer: str
    count: int
    time_ms: float
    floor_ms: float
    nbytes: int
    operations: int
    bound: str
    algorithm: str = ""

    @property
    def gap_ms(self) -> float:
        """Time above the floor."""
        return self.time_ms - self.floor_ms


class Watched:
    """A backend whose launches are marked before and after; for Executor, to which it is a Backend.

    Attributes:
        marks: by op, of the latest run or, where they lie in a capture, of its latest replay.
        empty: two marks with nothing between them, before the first op of a run.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self.marks: dict[str, tuple[Any, Any]] = {}
        self.empty: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def launch(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """Launch, between two marks on the op's stream."""
        if self.empty is None or op.name in self.marks:  # the first op of a run, or of another one
            self.marks = {}
            self.empty = (self._backend.mark(stream), self._backend.mark(stream))
        before = self._backend.mark(stream)
        self._backend.launch(op, arrays, stream)
        self.marks[op.name] = (before, self._backend.mark(stream))

    def times_ms(self) -> tuple[dict[str, float], float]:
        """ms by op, and of the empty pair; after a sync."""
        assert self.empty is not None
        between = self._backend.between_ms
        return {op: between(*pair) for op, pair in self.marks.items()}, between(*self.empty)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one step of `program` takes.

    Args:
        times_ms: median by op.
        mark_ms: of an empty pair of marks.
        step_ms: of whole steps without marks, in a chain where steps are captured.
    """

    program: Program
    times_ms: Mapping[str, float]
    mark_ms: float
    step_ms: float
    captured: bool
    machine: str


def measure(case: Case, *, capture: bool = True) -> Measured:
    """Times of every op of the case's step by vdnn."""
    with running(case, capture=capture) as run:
        for _ in range(3):
            run.step()
        chain = run.chain_ms(STEPS)
        (planned,) = run.trainer.prepared.plans.plans.values()
        times, empty, captured = _watch(run, capture)
        machine = run.trainer.backend.caps.description
        step_ms = median(chain) if chain else sum(times.values())
        return Measured(planned.program, times, empty, step_ms, captured, machine)


def _watch(run: Running, capture: bool) -> tuple[dict[str, float], float, bool]:
    trainer = run.trainer
    ((key, planned),) = trainer.prepared.plans.plans.items()
    watched = Watched(trainer.backend)
    executor = Executor(watched, planned.plan, planned.program, capture=capture)
    trainer.use(key, executor)
    seen: list[tuple[dict[str, float], float]] = []
    for number in range(STEPS + 2):
        run.step()
        if number > 1:
            seen.append(watched.times_ms())
    names = seen[0][0]
    by_op = {name: median(times[name] for times, _ in seen) for name in names}
    return by_op, median(empty for _, empty in seen), executor.replay is not None


def rows_of(measured: Measured, graph: Graph, rates: Rates) -> list[Row]:
    """A row for every op, the one with the most time above its floor first."""
    rows = []
    for op in measured.program.ops:
        work, algorithm = work_of(op, measured.program), str(op.attrs.get("algorithm", ""))
        if op.slice_of is not None:
            algorithm = f"{algorithm} ({batch_of(op, measured.program)} images)"
        layer = graph.nodes[op.layer].layer.kind if op.layer in graph.nodes else op.kind.split(".")[0]
        layer = "update" if op.phase == "update" else layer
        numbers = (measured.times_ms[op.name], work.floor_ms(rates), work.nbytes, work.operations)
        rows.append(Row(op.name, op.kind, layer, 1, *numbers, work.bound(rates), algorithm))
    return sorted(rows, key=lambda row: -row.gap_ms)


def totals(rows: Sequence[Row], by: str) -> list[Row]:
    """The rows added up by "kind" or "layer", in the same order as rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by), []).append(row)
    return sorted((_sum(name, group) for name, group in groups.items()), key=lambda row: -row.gap_ms)


def _sum(name: str, rows: Sequence[Row]) -> Row:
    def total(field: str) -> Any:
        return sum(getattr(row, field) for row in rows)

    products = sum(row.floor_ms for row in rows if row.bound == "products")
    bound = "products" if 2 * products > total("floor_ms") else "bytes"
    numbers = (total("time_ms"), total("floor_ms"), total("nbytes"), total("operations"))
    return Row(name, "", "", len(rows), *numbers, bound)


def markdown(title: str, measured: Measured, rates: Rates, rows: Sequence[Row]) -> str:
    """Totals by layer kind and by op kind, then the ops, by the time above the floor."""
    whole = _sum("all", rows)
    how = "replayed" if measured.captured else "uncaptured: what the host takes to launch is in short ops"
    head = [
        f"# {title}",
        "",
        f"{measured.machine}. A step takes {measured.step_ms:.3f} ms; its ops, each between two events, "
        f"{whole.time_ms:.3f} ms ({how}; an empty pair: {1000 * measured.mark_ms:.1f} µs); their floor "
        f"{whole.floor_ms:.3f} ms at {rates.copy_gbps:,.4g} GB/s and {rates.tflops:,.4g} TFLOP/s.",
        "",
    ]
    parts = [
        *head,
        *_table("by layer kind", [*totals(rows, "layer"), whole]),
        *_table("by op kind", totals(rows, "kind")),
        *_table(f"ops, the first {SHOWN}" if len(rows) > SHOWN else "ops", rows[:SHOWN]),
    ]
    return "\n".join(parts)


def _table(name: str, rows: Iterable[Row]) -> list[str]:
    lines = [
        f"## {name}",
        "",
        "| | ops | ms | floor ms | above ms | times floor | GB/s | TFLOP/s | bound | algorithm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        rates = (row.nbytes / max(row.time_ms, 1e-6) / 1e6, row.operations / max(row.time_ms, 1e-6) / 1e9)
        lines.append(
            f"| {row.what} | {row.count} | {row.time_ms:.4f} | {row.floor_ms:.4f} | {row.gap_ms:.4f} "
            f"| {row.time_ms / max(row.floor_ms, 1e-9):.2f} | {rates[0]:,.4g} | {rates[1]:,.3g} | {row.bound} "
            f"| {row.algorithm} |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.op_floor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("network", metavar="NETWORK:IMAGES")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the step (default: bf16)")
    parser.add_argument("--program", default="ours", help="ours, or ours-LIMIT such as ours-12GiB (default: ours)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (default: cuda)")
    text = "copy bandwidth, read and written bytes; measured if not given"
    parser.add_argument("--copy-gbps", type=above_zero, metavar="GBPS", help=text)
    text = "10^12 operations a second of a large product in this precision; measured if not given"
    parser.add_argument("--tflops", type=above_zero, help=text)
    parser.add_argument("--uncaptured", action="store_true", help="time ops as they are launched one by one")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="of the network's configuration")
    given = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        network, batch = parse_network(given.network)
        case = Case(network, batch, given.precision, given.program, device=given.device, options=tuple(given.o))
        graph, name = _checked(case), _name(case, not given.uncaptured)
        stated = {"copy_gbps": given.copy_gbps, "tflops": given.tflops}
        stated = {what: rate for what, rate in stated.items() if rate is not None}
        rates = Rates(**stated) if len(stated) == 2 else replace(rates_of(given.precision, given.device), **stated)
        measured = measure(case, capture=not given.uncaptured)
    except VdnnError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = rows_of(measured, graph, rates)
    more = [given.program] if given.program != "ours" else []
    title = ", ".join([f"{network} ({batch}) in {given.precision}", *more, *given.o])
    text = markdown(title, measured, rates, rows)
    results = {
        "case": case.to_json(),
        "rates": asdict(rates),
        "step_ms": measured.step_ms,
        "mark_ms": measured.mark_ms,
        "captured": measured.captured,
        "machine": measured.machine,
        "by_layer_kind": [asdict(row) | {"gap_ms": row.gap_ms} for row in totals(rows, "layer")],
        "by_op_kind": [asdict(row) | {"gap_ms": row.gap_ms} for row in totals(rows, "kind")],
        "ops": [asdict(row) | {"gap_ms": row.gap_ms} for row in rows],
    }
    write_results(f"{name}.json", " ".join(["python -m vdnn.bench.op_floor", *words]), results)
    write_output(results_path(f"{name}.md"), text.encode())
    print(text)
    return 0


def _checked(case: Case) -> Graph:
    """The case's network, if there is one and the case can be tried here; said before anything is measured."""
    if not case.is_ours or case.parsed.slices > 1:  # whose ops are those of one plan
        raise ConfigError(f"--program: expected ours or ours-LIMIT, got '{case.program}'")
    config = configuration(case)
    check_device(case.device)
    return build(config.network.name, **config.network.options)


def _name(case: Case, capture: bool) -> str:
    """Of the files, without their suffix; ConfigError if such files cannot be written."""
    words = ["op_floor", case.network, str(case.batch), case.precision]
    words += [case.program] if case.program != "ours" else []
    words += [case.device] if case.device != "cuda" else []
    words += [*case.options, *(["uncaptured"] if not capture else [])]
    name = "_".join(re.sub(r"[^A-Za-z0-9_.=-]+", "-", word) for word in words)
    for suffix in ("json", "md"):
        check_output(results_path(f"{name}.{suffix}"))
    return name


if __name__ == "__main__":
    sys.exit(command(main))
