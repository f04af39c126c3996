"""Where in a plan the first NaN or infinity comes from.

    first_not_finite(executor, feeds, graph)       # "first in layer 'conv1' (op 'conv1.forward')"

The largest float16 is 65,504; bfloat16 has the exponents of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.graph import Graph
from vdnn.layers.op import Op
from vdnn.runtime.executor import Executor

RANGE = "beyond the range of fp16; bf16 has a larger one"
"""Why maps that are not finite in fp16 say nothing about weights that are."""


def first_not_finite(executor: Executor, feeds: Mapping[str, NDArray[Any]], graph: Graph) -> str:
    """Run the plan of `executor` again, op by op, to name the first layer whose output is not finite, and its op."""
    backend, program = executor.backend, executor.program
    found: list[str] = []

    def look(op: Op, arrays: Mapping[str, Any]) -> None:
        for arg, tensor in op.writes.items() if not found else ():
            if not np.isfinite(backend.read(arrays[arg])).all():
                mapped = program.tensors[tensor].role in ("act", "grad")
                layer = op.layer if mapped else owner(graph, tensor, op.layer)  # some ops write for many layers
                found.append(f"first in layer '{layer}' (op '{op.name}')")
                return

    Executor(backend, executor.plan, program, inspect=look).run(feeds)
    return found[0] if found else "in a weight gradient"


def owner(graph: Graph, tensor: str, default: str = "") -> str:
    """The layer of a parameter or of what is made from it; `default` if it has none."""
    owners = (n for n in graph.nodes if tensor.startswith(f"{n}."))
    return max(owners, key=len, default=default)  # a name may begin another
