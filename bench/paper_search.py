"""vDNN_dyn as the paper has it (MICRO'16, section III-C): passes tried one after the other on its own count of bytes.

    decisions = paper_dyn(program, costs, 12 * GIB, budget)

A pass is what `vdnn.memory.paper_count` counts, so nothing is postponed to make room as this program's planner would;
this program's own dyn is in `vdnn.memory.policy`.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.layers.op import Program
from vdnn.memory.costs import CostTable
from vdnn.memory.decisions import Decisions
from vdnn.memory.paper_count import PaperCount, paper_count
from vdnn.memory.passes import apply_decisions
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import MEMORY_OPTIMAL, POLICIES, Budget, choose

POOL_SHARE = 0.9
"""Of the device's memory, what the requests of a training step can fill in a pool without foresight, beside the CUDA
context. The paper's own choices say between which bounds: VGG-16 (256) ran with conv(m), 10,195 MiB and 476 of
classifier weights (0.87 of 12 GiB), but dyn did not keep everything of VGG-16 (128), about 11,300 (0.92)."""


def paper_dyn(program: Program, costs: CostTable, device_bytes: int, budget: Budget) -> Decisions:
    """What the paper's search takes on a device of so many bytes; `notes` say what, and what did not run before."""
    weights = sum(spec.nbytes for spec in program.tensors.values() if spec.role == "weight")
    room = int(POOL_SHARE * device_bytes) - weights
    tried: list[str] = []

    def told(decisions: Decisions, words: str) -> Decisions:
        before = f"; did not run: {', '.join(tried)}" if tried else ""
        return replace(decisions, policy="dyn", notes=(f"dyn took {words}{before}",))

    for name in ("none", "conv", "all"):
        decisions, words = POLICIES[name](program, costs, budget), f"'{name}' with the fastest algorithms"
        if max(each.nbytes for each in _count(program, decisions).passes) <= room:
            return told(decisions, words)
        tried.append(words)
    least = replace(budget, algorithms=MEMORY_OPTIMAL)
    for name in ("conv", "all"):
        decisions, words = POLICIES[name](program, costs, least), f"'{name}' with algorithms chosen to fit"
        live = _count(program, decisions).live
        if max(live.values()) <= room:
            picked = {op: costs.fastest(op, room - nbytes) for op, nbytes in live.items()}
            return told(replace(decisions, algorithms=choose(program, picked.__getitem__)), words)
        tried.append(words)
    return told(POLICIES["all"](program, costs, least), "'all' with memory-optimal algorithms")


def _count(program: Program, decisions: Decisions) -> PaperCount:
    return paper_count(plan_program(program, decisions), apply_decisions(program, decisions))
