"""Runs a Program op by op on plain arrays, every storage in an array of its own: no plan, no slab, no streams.

run = Run(program, seed=3)
run.values["fc.weight"][...] = w
run.run("forward"); run.loss(); run.run("backward"); run.values["fc.weight.grad"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vdnn.layers import Op, Program, TensorSpec
from vdnn.runtime.backends.cpu.geometry import OPERANDS, algorithms, workspace_bytes
from vdnn.runtime.backends.cpu.half import run_rounded
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.bfloat16 import host_dtype
from vdnn.runtime.step import new_step

Array = NDArray[Any]


def garbage(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array of bytes 0xFF: NaN, and never a right answer."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


class Run:
    """One Program over its own arrays.

    Args:
        seed: of the images, labels and first weights.
        shared: storages of another run to be used in place of own ones (weights, gradients).
        algorithm: index of the convolution algorithm among those of an op; the last if there are fewer.
        images_in_step: images of the whole step, for the gradient scale; the batch if None.
        sample: place of the first image in the step.
        place: where a storage lies: bytes → that many uint8; anywhere if None.
    """

    def __init__(
        self,
        program: Program,
        seed: int = 0,
        *,
        shared: Mapping[str, Array] | None = None,
        algorithm: int = 0,
        images_in_step: int | None = None,
        sample: int = 0,
        place: Callable[[int], Array] | None = None,
    ) -> None:
        self.program, rng = program, np.random.default_rng(seed)
        self.storages: dict[str, Array] = {}
        for name, spec in program.tensors.items():
            if spec.view_of is not None:
                continue
            dtype = host_dtype(spec.dtype)
            memory = garbage(spec.shape, dtype) if place is None else place(spec.nbytes).view(dtype)
            self.storages[name] = laid_out(memory, spec)
            if name in program.persistent:
                self.storages[name][...] = initial(name, spec.shape, rng)
        self.storages.update(shared or {})
        images, labels = self.storages["images"], self.storages["labels"]
        classes = max(prod(program.tensors[op.reads["x"]].shape[1:]) for op in self._heads())
        images[...] = rng.integers(0, 256, images.shape)
        labels[...] = rng.integers(0, classes, labels.shape)
        self.storages["step"][...] = new_step(0.125, 1 / (images_in_step or program.batch), 5, 2**40 + 77, sample)
        self.values = {name: self._view(name) for name in program.tensors}
        self.ops = [self._bind(op, algorithm) for op in program.ops]

    def run(self, phase: str, before: Callable[[Op, Mapping[str, Array]], None] | None = None) -> None:
        """Run the ops of one phase in program order; `before` sees each op and its arrays before it runs."""
        for op, arrays in self.ops:
            if op.phase == phase:
                if before is not None:
                    before(op, arrays)
                self.launch(op, arrays)

    @staticmethod
    def launch(op: Op, arrays: Mapping[str, Array]) -> None:
        """Run one op."""
        run_rounded(KERNELS[op.kind], op, arrays)

    def run_heads(self) -> None:
        """The losses of fused heads, which are ops of the backward pass; nothing else changes."""
        for op, arrays in self.ops:
            if op.kind == "softmax_loss.train":
                self.launch(op, {**arrays, "dx": arrays["dx"].copy()})

    def loss(self) -> float:
        """Mean over images of the sum of all heads, each by its weight; `run_heads` first where they are fused."""
        weights = {op.layer: op.attrs["weight"] for op in self.program.ops if "weight" in op.attrs}
        return float(sum(weights.get(op.layer, 1.0) * self.values[op.writes["loss"]].mean() for op in self._heads()))

    def _heads(self) -> list[Op]:
        found = [op for op in self.program.ops if op.kind in ("softmax_loss.forward", "softmax_loss.train")]
        return sorted(found, key=lambda op: op.layer)  # so that their losses are added in one order

    def _view(self, name: str) -> Array:
        spec = self.program.tensors[name]
        root = self.storages[spec.storage]
        if root.size == prod(spec.shape):
            view = root.reshape(spec.shape)
            assert np.shares_memory(view, root), f"{name} is no view of {spec.storage}"
            return view
        if root.ndim == len(spec.shape):
            return root[:, spec.channel : spec.channel + spec.shape[1]]
        return root[:, spec.channel : spec.channel + prod(spec.shape[1:])].reshape(spec.shape)

    def _bind(self, op: Op, algorithm: int) -> tuple[Op, dict[str, Array]]:
        arrays = {argument: self.values[name] for argument, name in {**op.reads, **op.writes}.items()}
        if op.kind in OPERANDS:
            options = algorithms(op, self.program)
            chosen = options[min(algorithm, len(options) - 1)]
            arrays["workspace"] = garbage((workspace_bytes(op, self.program, chosen),), "uint8")
            op = replace(op, attrs={**op.attrs, "algorithm": chosen})
        return op, arrays


def laid_out(memory: Array, spec: TensorSpec) -> Array:
    """`memory` in the logical shape of a storage, whose numbers lie there as its layout says."""
    if spec.layout == "NCHW":
        return memory.reshape(spec.shape)
    n, c, h, w = spec.shape
    if spec.layout == "CHWN":
        return memory.reshape(c, h, w, n).transpose(3, 0, 1, 2)
    return memory.reshape(n, h, w, c).transpose(0, 3, 1, 2)


def initial(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """First values: filters about as large as training makes them, scales around 1, variances above 0."""
    suffix = name.split(".", 1)[-1]
    if suffix in ("running_var",):
        return rng.uniform(0.5, 2, shape)
    if suffix == "weight" and len(shape) > 1:
        return rng.normal(0, (2 / prod(shape[1:])) ** 0.5, shape)
    if suffix == "weight":
        return rng.uniform(0.5, 1.5, shape)
    if suffix.endswith("momentum"):
        return np.zeros(shape)
    return rng.normal(0, 0.3, shape)
