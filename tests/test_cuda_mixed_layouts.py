"""Training steps in CHWN and in layouts that differ by layer, with the plans and kernels of the GPU, on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from test_cuda_layouts import HostCuda

from vdnn.bench.harness import Silent
from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Linear,
    Op,
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
)
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.memory.decisions import LayoutChoice
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.cuda.chwn_conv import chwn_convolve
from vdnn.runtime.backends.cuda.chwn_plans import ChwnPlans
from vdnn.runtime.backends.cuda.measures import Measures
from vdnn.runtime.backends.cuda.op_costs import OpCosts
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.products import CONV_KINDS
from vdnn.runtime.config import load_config
from vdnn.runtime.planset import build_plans
from vdnn.runtime.prepare import make_recipe, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer


class MixedCuda(HostCuda):
    """Convolutions in CHWN by their kernels, as `CudaBackend.launch` does."""

    def _compute(self, op: Op, arrays: Any) -> None:
        if op.kind in CONV_KINDS and arrays[CONV_KINDS[op.kind][1]].is_images_last:
            chwn_convolve(op, arrays, HostKernels(dtype=self.dtype), None)
        else:
            super()._compute(op, arrays)


class Untimed:
    """A search that names the variants of CHWN."""

    def candidates(self, problem: Any) -> tuple[Any, ...]:
        """The likeliest first, each a bit slower."""
        plans = ChwnPlans(None, None).plans(problem)  # type: ignore[arg-type]
        return tuple(Candidate(plan.algorithm, 1.0 + n, plan.workspace_bytes) for n, plan in enumerate(plans))


class Estimates(OpTimes):
    """Of the bytes of ops, as there is no memory for measurements."""

    def in_step_ms(self, alone_ms: float) -> float:
        """The same."""
        return alone_ms


def costs_on_host(program: Program) -> CostTable:
    """Candidates of the cuda backend; of convolutions in other layouts those of the cpu backend."""
    cuda, cpu = object.__new__(CudaBackend), CpuBackend()
    times = Estimates(cuda.launch, None, 0, SimpleNamespace(ops={}), 1000.0)  # type: ignore[arg-type]
    cuda.costs = OpCosts(lambda layout: Measures(Untimed(), times), "NCHW")  # type: ignore[arg-type]
    table = {}
    for op in program.ops:
        arguments = {**op.reads, **op.writes}
        x = arguments.get(CONV_KINDS[op.kind][1]) if op.kind in CONV_KINDS else None
        by_cpu = x is not None and program.tensors[x].layout != "CHWN"
        table[op.name] = (cpu if by_cpu else cuda).candidates(op, program)
    return CostTable(table, CopyRates(1.0, 1.0, 1.0, 1.0), "made up")


def small() -> Graph:
    """A fork into a concatenation, a sum around a convolution, both kinds of pools, batch normalisation, dropout."""
    graph = Graph("small", (3, 10, 10), 10)
    first = graph.add("relu1", Relu(), graph.add("conv1", Conv(8, 3, stride=2, padding=1), graph.input))
    one = graph.add("relu2", Relu(), graph.add("conv2", Conv(4, 1), first))
    two = graph.add("relu3", Relu(), graph.add("conv3", Conv(4, 3, padding=1), first))
    pooled = graph.add("pool1", Pool("max", 2, ceil_mode=True), graph.add("join", Concat(), (one, two)))
    norm = graph.add("bn1", BatchNorm(), graph.add("conv4", Conv(8, 3, padding=1, bias=False), pooled))
    summed = graph.add("relu4", Relu(), graph.add("sum", Add(), (norm, pooled)))
    mean = graph.add("pool2", Pool("average", 2, stride=1), summed)
    dropped = graph.add("drop", Dropout(0.5), graph.add("flat", Flatten(), mean))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(10), dropped))
    return graph


MIXED = {"data": "NHWC", "conv1": "CHWN", "conv2": "NCHW", "conv3": "CHWN", "join": "NHWC", "pool1": "CHWN"}
MIXED |= {"conv4": "NHWC", "bn1": "CHWN", "sum": "CHWN", "pool2": "CHWN"}


def losses(made: Trainer, config: Any, steps: int = 2) -> list[float]:
    found, size, split = [], config.train.batch_size, made.prepared.source.train
    made.start()
    for step in range(steps):
        images, labels = (f(np.arange(step * size, (step + 1) * size)) for f in (split.images, split.labels))
        found.append(made.train_step(images, labels, config.optimizer.lr, None)[0])
        made.step += 1
    return found


@pytest.mark.parametrize(("layout", "precision"), [("chwn", "fp32"), ("mixed", "fp32"), ("mixed", "bf16")])
def test_a_step_agrees_with_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, precision: str
) -> None:
    base = ("data.source=synthetic", "data.train_images=16", "data.test_images=2", "memory.limit=null", "device=cpu")
    options = (*base, "train.batch_size=4", "memory.policy=all", "evaluate.batch_size=2", f"precision={precision}")
    config = load_config("lenet", (*options, "memory.layout=nchw"))
    prepared = prepare(config, graph=small())
    (tmp_path / "cpu").mkdir()
    plain = Trainer(prepared, RunFolder(tmp_path / "cpu"), Silent())
    wanted, tensors = losses(plain, config), plain.tensors()
    recipe, keys = make_recipe(config, prepared.source), prepared.steps.keys()
    if layout == "chwn":
        recipe = replace(recipe, layout="CHWN")
    else:
        choices = {name: LayoutChoice(one, "to try it") for name, one in MIXED.items()}
        recipe = replace(recipe, layouts=choices)
    plans = build_plans(prepared.graph, keys, costs_on_host, "all", prepared.budget, recipe)
    algorithms = {a for chosen in plans.algorithms().values() for a in chosen.values()}
    assert any(name.startswith("DIRECT_") for name in algorithms)
    backend = MixedCuda(plans, ("compute", "out", "in"), monkeypatch)  # type: ignore[arg-type]
    monkeypatch.setattr(backend._runtime, "deviceSynchronize", lambda: None, raising=False)
    backend.caps, backend.dtype = replace(prepared.backend.caps, measured_costs=True), config.dtype
    (tmp_path / "gpu").mkdir()
    made = Trainer(replace(prepared, backend=backend, plans=plans), RunFolder(tmp_path / "gpu"), Silent())
    close = 1e-5 if precision == "fp32" else 1e-2
    assert losses(made, config) == pytest.approx(wanted, rel=close)
    found = made.tensors()
    for name, value in tensors.items():
        assert np.linalg.norm(found[name] - value) <= 10 * close * np.linalg.norm(value) + 1e-6, name
