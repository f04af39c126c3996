"""Tables of many small tensors, each table one argument of a kernel, whose blocks are shared out among its rows.

for blocks, count, table in tables("Updates", [(3, (dw, w, v, 9000, 1e-4)), (1, (dw2, w2, v2, 64, 0.0))]):
    kernels.launch("sgd_update_all", blocks, [table, count, ...], stream)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda.source import STRUCTS, constants, source


@cache
def table_type(kind: str) -> np.dtype[Any]:
    """Struct `kind` of a kernel. CuPy passes an array of one such element by value."""
    rows, fields = STRUCTS[kind]
    row = np.dtype([(name, kind) for name, kind in (field.split(":") for field in fields.split())], align=True)
    return np.dtype([("of", row, constants(source())[rows])])


def tables(kind: str, rows: Iterable[tuple[int, tuple[Any, ...]]]) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Blocks of a launch, how many rows it has, and the struct `kind` of them, until all rows are in one.

    rows: blocks of each, and its fields but for the last one, `first`: the number of its first block.
    """
    left, most = iter(rows), constants(source())[STRUCTS[kind][0]]
    while part := list(islice(left, most)):
        table, blocks = np.zeros((), table_type(kind)), 0
        for i, (own, fields) in enumerate(part):
            table["of"][i] = (*fields, blocks)
            blocks += own
        yield blocks, len(part), table
