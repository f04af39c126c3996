"""The vDNN paper's cases trained for a few steps on this machine, each timed and kept in a file.

    measure_missing(Bench("cuda"), tasks(FIGURES, None), out, read_runs(out), print)

Like with like: the paper's networks, NCHW, fp32, streams joined at the end of layers, prefetches as the paper's
search finds them, cuDNN's named algorithms, no pool indices, no momentum, at most 12 GiB of the card; base without a
limit. Beside it our best: the same network and limit, and dyn in our own way. Each run is the trainer's, its steps
replayed as captured; one more step, uncaptured, tells the times of layers. The time of feature extraction is a step's
less that of the classifier, which is trained alone for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import numpy as np

from vdnn.bench.command import reason
from vdnn.bench.harness import Silent, facts
from vdnn.bench.paper_files import RUNS_FOLDER, Measured, write_run
from vdnn.bench.paper_runs import UNBOUNDED, Case, Run, layers_of, paper_graph
from vdnn.bench.paper_tasks import Task
from vdnn.errors import BackendUnavailable, BudgetError, VdnnError
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph
from vdnn.memory.clock import Timing
from vdnn.memory.plan import Launch
from vdnn.memory.report import make_report
from vdnn.runtime.config import Config, load_config
from vdnn.runtime.planset import Planned
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.rehearsal import LimitExceeded
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trace import Marks
from vdnn.runtime.trainer import Trainer
from vdnn.units import GIB, format_bytes, format_ms

LIMIT_BYTES = 12 * GIB
"""The memory of the paper's GPU."""
WARM_UP = 1
"""Steps before those that are timed; the trainer has captured every plan by then."""
LONG_MS, FEWEST = 6000.0, 2
"""No further step is timed once these have taken so long, if there are so many."""
RATE = 1e-7
"""Learning rate: numbers stay finite, and what is learned does not matter here."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A few steps: their median, and one of them kernel by kernel.

    Args:
        outside_bytes: what the process holds on the device besides the slab.
    """

    step_ms: float
    planned: Planned
    timing: Timing
    outside_bytes: int
    machine: str


class Bench:
    """A machine that runs cases.

    Args:
        device: "cuda" or "cpu". steps: to time. limit_bytes: of the device, for policies that keep one.
        graph_of: the network of a name.
    """

    def __init__(
        self,
        device: str,
        steps: int = 5,
        limit_bytes: int = LIMIT_BYTES,
        graph_of: Callable[[str], Graph] = paper_graph,
    ):
        self.device, self.steps, self.limit_bytes, self.graph_of = device, steps, limit_bytes, graph_of
        self.machine = ""
        self._classifiers: dict[tuple[str, int], float] = {}

    def run(self, task: Task) -> Run:
        """Measure one case; where it does not fit in the limit, as the paper shows such bars, without one."""
        case = task.case
        limit = None if case.policy == "base" else self.limit_bytes
        fits = True
        try:
            timed = self._timed(task, limit)
        except BudgetError:
            if limit is None:
                raise
            timed, fits = self._timed(task, None), False
        planned = timed.planned
        if limit is None:
            fits = planned.plan.slab_bytes + timed.outside_bytes <= self.limit_bytes
        self.machine = timed.machine
        feature_ms = timed.step_ms - self._classifier_ms(case, timed)
        if feature_ms <= 0:
            raise VdnnError("the classifier alone took longer than the whole step: the machine is too busy to measure")
        report = make_report(planned.plan, planned.program, planned.decisions, planned.costs, paper=True)
        return Run(
            case=case,
            peak_bytes=report.device_peak_bytes,
            average_bytes=report.device_average_passes_bytes,
            offloaded_bytes=report.offloaded_bytes,
            by_category=dict(report.by_category),
            feature_ms=feature_ms,
            step_ms=timed.step_ms,
            fits=fits,
            choice="; ".join(planned.decisions.notes),
            layers=layers_of(planned.plan, planned.program, timed.timing),
            host_bytes=planned.plan.host_bytes,
        )

    def _classifier_ms(self, case: Case, timed: Timed) -> float:
        """What a step takes besides feature extraction.

        The classifier trained alone computes no gradient of its input, so that kernel's time is added.
        """
        key = case.network, case.batch
        if key not in self._classifiers:
            config = self._config(Task(case), None)
            self._classifiers[key] = self._train(
                prepare(config, graph=classifier_of(self.graph_of(case.network)), evaluates=False)
            ).step_ms
        return self._classifiers[key] + input_gradient_ms(timed)

    def _timed(self, task: Task, limit: int | None) -> Timed:
        config, graph = self._config(task, limit), self.graph_of(task.case.network)
        try:
            return self._train(prepare(config, graph=graph, evaluates=False))
        except LimitExceeded as error:  # the process holds more besides the slab than was expected: plan once more
            return self._train(prepare(config, reserve_bytes=error.reserve_bytes, graph=graph, evaluates=False))

    def _config(self, task: Task, limit: int | None) -> Config:
        case, stated = task.case, "null" if limit is None else str(limit)
        like = [f"memory.join={case.join}", f"memory.prefetch_limit={UNBOUNDED}", "memory.pool_indices=false"]
        like += ["memory.candidates=named", "memory.paper_search=true", "memory.fuse=false", "memory.update=layer"]
        overrides = [
            f"train.batch_size={case.batch}",
            f"data={{source: synthetic, train_images: {case.batch}, test_images: {case.batch}}}",
            f"evaluate.batch_size={case.batch}",
            "train.accumulate=1",
            f"optimizer={{lr: {RATE}, momentum: 0.0}}",
            "schedule={name: constant}",
            f"memory={{policy: {case.policy}, algorithms: {case.algorithms}, limit: {stated}}}",
            *([] if task.best else like),
            f"device={self.device}",
        ]
        return load_config(case.network, overrides)

    def _train(self, prepared: Prepared) -> Timed:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(prepared, RunFolder(Path(folder)), Silent())
            try:
                trainer.start()
                indices = np.arange(prepared.config.train.batch_size)
                split = prepared.source.train
                images, labels = split.images(indices), split.labels(indices)
                images.setflags(write=False)  # so that the next step's upload can go on beside this step

                def step() -> float:
                    began = perf_counter()
                    trainer.train_step(images, labels, RATE, images)
                    return (perf_counter() - began) * 1000

                for _ in range(WARM_UP):
                    step()
                times: list[float] = []
                while len(times) < self.steps and (len(times) < FEWEST or sum(times) < LONG_MS):
                    times.append(step())
                trainer.observer = marks = Marks(prepared.backend)
                step()
                _, _, timing = marks.timings()[0]
                planned = prepared.plans[prepared.steps.full[0]]
                caps = prepared.backend.caps
                return Timed(median(times), planned, timing, caps.reserve_bytes, caps.description)
            finally:
                prepared.backend.close()


def input_gradient_ms(timed: Timed) -> float:
    """Time of the kernel that gives the first fully connected layer's input its gradient."""
    name = [op.name for op in timed.planned.program.ops if op.kind == "linear.dgrad"][-1]
    steps = zip(timed.planned.plan.steps, timed.timing.spans, strict=True)
    return sum(span[1] - span[0] for step, span in steps if isinstance(step, Launch) and step.op == name and span)


def classifier_of(graph: Graph) -> Graph:
    """What follows the feature extraction of `graph`, as a network of its own on images of its input's shape."""
    nodes = list(graph.nodes.values())
    first = next(i for i, node in enumerate(nodes) if isinstance(node.layer, Flatten))
    channels, height, width = graph.shape(nodes[first].inputs[0])
    alone = Graph(f"{graph.name}_classifier", (channels, height, width), graph.classes)
    for i, node in enumerate(nodes[first:]):
        alone.add(node.name, node.layer, node.inputs if i else alone.input)
    return alone


def measure_missing(
    bench: Bench,
    wanted: Sequence[Task],
    out: Path,
    measured: Measured,
    progress: Callable[[str], None],
    budget_s: float | None = None,
) -> None:
    """Measure those of `wanted` that are not in `measured`, keep each under `out` and add it; go on after a failure.

    Args:
        budget_s: once so many seconds are over, no further run is begun.
    """
    todo = [task for task in wanted if not measured.has(task.case, task.best)]
    if not todo:
        return
    (out / RUNS_FOLDER).mkdir(exist_ok=True)
    machine_facts = facts("vdnn tables")
    started = monotonic()
    for i, task in enumerate(todo):
        if budget_s is not None and monotonic() - started > budget_s:
            progress(
                f"{budget_s:g} s are over: {len(todo) - i} run(s) not measured; the same command goes on with them"
            )
            return
        case = task.case
        how = "our best" if task.best else f"{case.policy}, {case.algorithms}"
        label = f"[{i + 1}/{len(todo)}] {case.network} ({case.batch}) {how}"
        try:
            run = bench.run(task)
        except BackendUnavailable:
            raise
        except Exception as error:  # one case less must not cost the others their time on the machine
            progress(f"{label}: not measured: {reason(error)}")
            continue
        write_run(out, run, task.best, {**machine_facts, "machine": bench.machine})
        measured.add(run, task.best, bench.machine)
        progress(
            f"{label}: {format_ms(run.step_ms)} a step, {format_ms(run.feature_ms)} of it feature extraction, "
            f"{format_bytes(run.peak_bytes)} at most, {format_bytes(run.host_bytes)} on the host"
        )
