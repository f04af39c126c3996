"""Where the candidates of a study of algorithms come from: a machine at hand, a stored table, a profile's model.

source = restrict(table_source(load_table("nvidia-h200-fp32")), deterministic=True)
source.find(op, program)        # its candidates, or None if the table does not know the op
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vdnn.layers.graph import Graph
from vdnn.layers.op import Op, Program
from vdnn.memory.costs import Candidate
from vdnn.runtime.algorithm_table import AlgorithmTable
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cuda.cudnn_graph import FUSED
from vdnn.runtime.backends.cuda.products import CONV_KINDS, GRAPH_LABEL, unplaced_problem
from vdnn.runtime.planset import Recipe


@dataclass(frozen=True, slots=True)
class Source:
    """Where candidates come from.

    Args:
        find: candidates of a conv op of a program; None if the source does not know it.
        words: for people, such as "measured on NVIDIA H200, cuDNN 9.19.0".
        modelled: whether the times are of no measurement.
        precision: of the products.
        layout: of the tensors that times are of.
        name: what has them, in a word or two.
        only: which algorithms are left, "deterministic"; "" for all.
    """

    find: Callable[[Op, Program], tuple[Candidate, ...] | None]
    words: str
    modelled: bool
    precision: str
    layout: str = "NCHW"
    name: str = "the device"
    only: str = ""


def backend_source(backend: Backend, layout: str = "NCHW") -> Source:
    """What the machine at hand measures for programs in `layout`, or the simulated one models, which knows NCHW."""
    caps = backend.caps
    modelled = not caps.measured_costs
    layout = "NCHW" if caps.simulated else layout
    return Source(backend.candidates, caps.cost_source.partition(";")[0], modelled, caps.precision, layout)


def table_source(table: AlgorithmTable) -> Source:
    """What was measured elsewhere; of a convolution with an epilogue that it does not know, the convolution alone."""

    def find(op: Op, program: Program) -> tuple[Candidate, ...] | None:
        problem = unplaced_problem(op, program)
        measured = table.problems.get(str(problem)) or table.problems.get(str(problem.plain))
        return measured.candidates if measured is not None and measured.candidates else None

    return Source(find, table.source, False, table.precision, table.layout, "the table")


def restrict(source: Source, *, deterministic: bool = False, named: bool = False) -> Source:
    """`source` without what a configuration refuses: algorithms that are not deterministic, or not named by cuDNN."""
    kinds = [kind for kind, wanted in (("deterministic", deterministic), ("named", named)) if wanted]

    def fits(candidate: Candidate) -> bool:
        by_graph = candidate.algorithm.startswith((GRAPH_LABEL, FUSED))
        return (candidate.deterministic or not deterministic) and not (named and by_graph)

    def find(op: Op, program: Program) -> tuple[Candidate, ...] | None:
        found = source.find(op, program)
        return None if found is None else tuple(filter(fits, found))

    return replace(source, find=find, only=" and ".join(kinds)) if kinds else source


def without_epilogue(table: AlgorithmTable, graph: Graph, recipe: Recipe, batch: int) -> bool:
    """Whether convolutions of `graph` apply an activation with which the table does not know them."""
    program = recipe.lower(graph, ("train", batch))
    problems = (unplaced_problem(op, program) for op in program.ops if op.kind in CONV_KINDS)
    return any(problem.epilogue and str(problem) not in table.problems for problem in problems)
