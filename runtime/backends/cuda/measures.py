"""What measures ops on this GPU, and the table that keeps it: one for each layout of images, opened when it is needed.

    measures = MeasuresByLayout(products, kernels, launch, stream, key, limit_bytes, precision="tf32")
    measures.of("NHWC").search.candidates(problem)
    measures.of("CHWN").times.time_ms(op, program, 0)

The file of a table is named by its key, of which the layout is a part; so each serves runs that mix layouts too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vdnn.runtime.backends.cuda import taps
from vdnn.runtime.backends.cuda.chwn_plans import MODULE, ChwnPlans
from vdnn.runtime.backends.cuda.kernels import KernelSet
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.op_trial import Launch
from vdnn.runtime.backends.cuda.products import Products
from vdnn.runtime.backends.cuda.search import PlanMaker, Search


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one layout: `search` times convolutions, `times` all other ops and what follows a convolution.

    load: makes the kernels of convolutions ready, as a step that is captured cannot.
    """

    search: Search
    times: OpTimes
    load: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class MeasuresByLayout:
    """Makes and keeps the Measures of each layout.

    Args:
        products: cuDNN's convolutions. kernels: vdnn's own, which compute those in CHWN.
        launch, stream: of the backend, see OpTimes.
        key: what measured times depend on besides layout and problem: gpu, driver, cudnn.
        limit_bytes: most device memory that a measurement may take.
        precision, candidates, stream_gbps, note: see Search.
    """

    products: Products
    kernels: KernelSet
    launch: Launch
    stream: Any
    key: Mapping[str, Any]
    limit_bytes: int
    precision: str = "fp32"
    candidates: str = "all"
    stream_gbps: float = float("inf")
    note: Callable[[str], None] | None = None
    _opened: dict[str, Measures] = field(default_factory=dict)

    def of(self, layout: str) -> Measures:
        """Those of a layout, a key of vdnn.layers.tensor.MEMORY_ORDERS."""
        if layout not in self._opened:
            self._opened[layout] = self._open(layout)
        return self._opened[layout]

    def flush(self) -> None:
        """Write what is not on disk yet."""
        for measures in self._opened.values():
            measures.search.flush()

    def _open(self, layout: str) -> Measures:
        own = layout == "CHWN"
        products: PlanMaker = self.products
        key = {**self.key, "layout": layout}
        if own:
            products = plans = ChwnPlans(self.kernels, self.stream)
            key |= {"kernels": plans.kernels_digest()}
        elif (layout, self.precision, self.candidates) == ("NHWC", "tf32", "all"):
            key |= {"taps": taps.VERSION}
        search = Search(
            products,
            key,
            self.limit_bytes,
            self.stream,
            precision=self.precision,
            candidates="all" if own else self.candidates,
            stream_gbps=self.stream_gbps,
            note=self.note,
        )
        times = OpTimes(self.launch, self.stream, self.limit_bytes, search, self.stream_gbps, self.note)
        return Measures(search, times, (lambda: self.kernels.load(MODULE)) if own else lambda: None)
