"""Filter gradients in TF32 by matrix products of rows, one for each filter tap, which the search tries beside cuDNN's.

    taps = TapPlans(cublas, kernels, stream, Lanes(stream))
    for plan in taps.plans(problem):                                   # labels TAPS_*
        plan.run(None, x_ptr, dy_ptr, dw_ptr, workspace_ptr, accumulate=False)

Tensor cores take operands of TF32 fastest where the numbers that are summed lie side by side (on Hopper they take them
from shared memory in no other order). In NHWC it is channels that do, not what a filter gradient sums: cuDNN's reach
half the speed of its other convolutions there. Here x and dy are brought to rows of pixels and images first, see
tap_steps.py, which pays where there are many channels.

Labels tell in how many shares each sum is cut: TAPS_32, or TAPS_3x11 where three taps are computed at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.launch import Kernels
from vdnn.runtime.backends.cuda.layout import Launch
from vdnn.runtime.backends.cuda.tap_lanes import LANES, Lanes
from vdnn.runtime.backends.cuda.tap_steps import CUBLAS_BYTES, Form, Product, Step, serves, steps

TAPS = "TAPS_"
"""How their labels begin."""
VERSION = 1
"""Counts changes in how they compute: what was measured of others is not theirs."""
LEAST_CHANNELS = 64
"""With fewer, of x or dy, tiles of products are half empty."""
LEAST_PRODUCTS = 300
"""For each number of x and dy: an H200 does some 500 of them in the time in which it brings one to rows, and cuDNN's
filter gradients take twice as long for theirs."""
TILE = 128
"""Rows and columns of a tile of products that one multiprocessor works on; cuBLAS has larger ones and smaller ones."""
MULTIPROCESSORS = 132
"""Of an H200. Other GPUs have some 80 to 150."""
FULL = 0.95
"""Share of the multiprocessors' time in which they should have a tile."""
LEAST_LENGTH = 512
"""Numbers of a share, or what is stored of it would take longer than its products."""

_LABEL = re.compile(rf"{TAPS}(?:([1-9]\d*)x)?([1-9]\d*)")


def shares_of(problem: ConvProblem, beside: int = 1) -> tuple[int, ...]:
    """In how many shares sums may be cut so that tiles, of `beside` products at a time, fill the multiprocessors: the
    fewest, and twice as many."""
    (n, c, h, w), k = problem.x, problem.w[0]
    tiles = -(-c // TILE) * -(-k // TILE) * beside
    most = max(1, n * h * w // LEAST_LENGTH)

    def busy(shares: int) -> float:
        return tiles * shares / (MULTIPROCESSORS * -(-tiles * shares // MULTIPROCESSORS))

    options = range(1, min(most, MULTIPROCESSORS) + 1)
    fewest = next((shares for shares in options if busy(shares) >= FULL), max(options, key=busy))
    return (fewest, 2 * fewest) if 2 * fewest <= most else (fewest,)


@dataclass(frozen=True, slots=True)
class TapPlan:
    """A ConvPlan of one form; lanes: where it has products beside each other."""

    form: Form
    cublas: Cublas
    kernels: Kernels
    stream: Any
    lanes: Lanes | None = None
    deterministic: bool = True
    notes: tuple[str, ...] = ("TENSOR_CORE",)

    @property
    def algorithm(self) -> str:
        """Its label."""
        beside = f"{self.form.beside}x" if self.form.beside > 1 else ""
        return f"{TAPS}{beside}{self.form.shares}"

    @property
    def workspace_bytes(self) -> int:
        """Rows of x and dy, partial sums, and what cuBLAS gets."""
        return self.form.nbytes

    def run(self, handle: Any, a_ptr: int, b_ptr: int, out_ptr: int, workspace_ptr: int, accumulate: bool) -> None:
        """As ConvPlan.run, on the stream of the plan."""
        self.start(steps(self.form, a_ptr, b_ptr, out_ptr, workspace_ptr, accumulate))

    def start(self, made: Sequence[Step]) -> None:
        """Start some steps of the plan, one after the other."""
        for step in made:
            if isinstance(step, Launch):
                self.kernels.launch(step.kernel, step.blocks, step.args, self.stream)
            elif self.lanes is not None:
                self.lanes.run([partial(self._multiply, product) for product in step])
            else:
                for product in step:
                    self._multiply(product, self.stream)

    def _multiply(self, product: Product, stream: Any) -> None:
        self.cublas.bind(stream.ptr, product.workspace, CUBLAS_BYTES)
        self.cublas.gemm_of_rows(product.shape, product.pointers, product.rows, product.strides, product.count)


@dataclass(frozen=True, slots=True)
class TapPlans:
    """Makes plans that run with `cublas` and `kernels`, of float32, on `stream`; lanes: for products at the same time,
    None for plans without."""

    cublas: Cublas
    kernels: Kernels
    stream: Any
    lanes: Lanes | None = None

    def plans(self, problem: ConvProblem) -> list[TapPlan]:
        """Those that may be the fastest way to compute `problem`; none where this is no way, or never the fastest."""
        k, c, *window = problem.w
        products = prod(window) * k * c / (k + c)
        if not serves(problem) or min(k, c) < LEAST_CHANNELS or products < LEAST_PRODUCTS:
            return []
        kinds = dict.fromkeys((1, min(LANES, problem.w[2]) if self.lanes is not None else 1))
        return [self._plan(problem, shares, beside) for beside in kinds for shares in shares_of(problem, beside)]

    def plan(self, problem: ConvProblem, algorithm: str) -> TapPlan:
        """The plan of a label; ValueError if it is none, or not one for this problem."""
        found = _LABEL.fullmatch(algorithm)
        beside = int(found[1] or 1) if found else 0
        if found is None or beside > (1 if self.lanes is None else LANES) or not serves(problem):
            raise ValueError(f"{problem} has no algorithm '{algorithm}'")
        return self._plan(problem, int(found[2]), beside)

    def _plan(self, problem: ConvProblem, shares: int, beside: int) -> TapPlan:
        lanes = self.lanes if beside > 1 else None
        return TapPlan(Form.of(problem, shares, beside), self.cublas, self.kernels, self.stream, lanes)
