"""The first convolution as it is of images in no other form than their own: what a profile knows the time of.

    known = PlainImages.of(program)
    op, specs = known.plain(op, operands(op, program))     # stride, padding, channels and filters of the network

Images may be stored with channels of zeros, or with the stride of their convolution in channels (vdnn.layers.images):
forms for tensor cores, of which profiles know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import Shape, TensorSpec

NORMALIZE, FILTER = "input.normalize", "filter.prepare"


class PlainImages:
    """What the ops that make images and filters say of them, in a program or as they are launched."""

    def __init__(self) -> None:
        self._shapes: dict[str, Shape] = {}  # storage → shape without its first dimension
        self._windows: dict[str, dict[str, Any]] = {}  # storage of images → attributes of who reads them

    @classmethod
    def of(cls, program: Program) -> PlainImages:
        """Of all images and filters of a program."""
        found = cls()
        for op in program.ops:
            if op.kind in (NORMALIZE, FILTER):
                found.note(op, {arg: program.tensors[t] for arg, t in (*op.reads.items(), *op.writes.items())})
        return found

    def note(self, op: Op, specs: Mapping[str, TensorSpec]) -> None:
        """What `op` makes, if that is images or filters of another form than what it makes them of."""
        source = {NORMALIZE: "x", FILTER: "w"}.get(op.kind)
        if source is None or specs[source].shape[1:] == specs["y"].shape[1:]:
            return
        self._shapes[specs["y"].storage] = specs[source].shape[1:]
        fold = op.attrs.get("fold", 1)
        if op.kind == NORMALIZE and fold > 1:
            self._windows[specs["y"].storage] = {"stride": [fold, fold], "padding": list(op.attrs["padding"])}

    def plain(self, op: Op, specs: Mapping[str, TensorSpec]) -> tuple[Op, Mapping[str, TensorSpec]]:
        """`op` and its operands with plain images and filters; unchanged if it has no others."""
        if not any(spec.storage in self._shapes for spec in specs.values()):
            return op, specs
        changed = {
            arg: replace(spec, shape=(spec.shape[0], *self._shapes.get(spec.storage, spec.shape[1:])))
            for arg, spec in specs.items()
        }
        window = next((self._windows[s.storage] for s in specs.values() if s.storage in self._windows), None)
        if window is None or not op.kind.startswith("conv."):
            return op, changed
        attrs = {name: value for name, value in op.attrs.items() if name != "fold"}
        return replace(op, attrs={**attrs, **window}), changed
