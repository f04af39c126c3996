"""First convolutions like those of AlexNet and ResNet on a backend, whatever form their images have there, against the
definition in float64 on the CPU: outputs and gradients of every algorithm.

    python -m pytest -m gpu tests/test_gpu_fold.py

Without a GPU the CPU backend alone is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from interpreter import Array, Run, laid_out

from vdnn.layers import Conv, Flatten, Graph, Linear, Op, Pool, Program, Relu, SoftmaxLoss, TensorSpec, lower
from vdnn.layers.op import PHASES
from vdnn.memory.costs import Candidate
from vdnn.memory.plan import align
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16
from vdnn.runtime.step import new_step

LAYERS = {
    "alexnet": (Conv(64, 11, stride=4, padding=2), (3, 224, 224), 48),
    "resnet": (Conv(64, 7, stride=2, padding=3, bias=False), (3, 224, 224), {"tf32": 12}),
    "odd": (Conv(24, 5, stride=3, padding=1), (4, 61, 58), {"tf32": 36, "bf16": 40, "fp16": 40}),
    "not folded": (Conv(32, 3, padding=1), (3, 56, 56), {"tf32": 4, "bf16": 8, "fp16": 8}),
}
"""Layer, image, and the channels that images get, in 16 bits 16 if nothing is said."""
PRECISIONS = {"tf32": ("float32", 4), "bf16": ("bfloat16", 8), "fp16": ("float16", 8)}
ROUNDING = {"tf32": 1e-3, "bf16": 6e-3, "fp16": 8e-4}
"""Of results, relative to the root of their mean square: images, filters and results are rounded to 8 or 11 bits."""
MOST = 6
"""Candidates tried of an op."""
DEVICES: dict[str, Callable[[str], Backend]] = {
    "cpu": lambda precision: CpuBackend(precision=precision),
    "cuda": lambda precision: CudaBackend(precision=precision, layout="NHWC"),
}
ROWS = [pytest.param(device, marks=[pytest.mark.gpu] if device == "cuda" else []) for device in DEVICES]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured algorithms of these tests are theirs alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def network(conv: Conv, image: tuple[int, int, int]) -> Graph:
    graph = Graph("first", image, 5)
    x = graph.add("relu1", Relu(), graph.add("conv1", conv, graph.input))
    flat = graph.add("flat", Flatten(), graph.add("pool1", Pool("average", 3, stride=2), x))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(5), flat))
    return graph


class Slab:
    """All storages of a program on an open backend, one after another, and room for the workspace of any op."""

    def __init__(self, backend: Backend, program: Program) -> None:
        self.backend, self.program = backend, program
        self.candidates = {op.name: backend.candidates(op, program)[:MOST] for op in program.ops}
        offsets, end = {}, 0
        for name, spec in program.tensors.items():
            if spec.view_of is None:
                offsets[name] = end
                end += align(spec.nbytes)
        most = max(c.workspace_bytes for found in self.candidates.values() for c in found)
        backend.open(end + align(most), 0, 0)
        specs = program.tensors
        self.views = {
            name: backend.view(spec, specs[spec.storage], offsets[spec.storage]) for name, spec in specs.items()
        }
        self._end = end

    def launch(self, op: Op, chosen: Candidate) -> None:
        arrays = {argument: self.views[name] for argument, name in (*op.reads.items(), *op.writes.items())}
        if chosen.workspace_bytes:
            spec = TensorSpec("workspace", "aux", (chosen.workspace_bytes,), "uint8")
            arrays["workspace"] = self.backend.view(spec, spec, self._end)
        self.backend.launch(replace(op, attrs={**op.attrs, "algorithm": chosen.algorithm}), arrays, "compute")
        self.backend.sync()

    def write(self, values: Mapping[str, Array]) -> None:
        for name, value in values.items():
            self.backend.write(self.views[name], value)

    def read(self, name: str) -> Array:
        return self.backend.read(self.views[name]).astype(np.float64)


def error(found: Array, expected: Array) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2)))


def rounded(values: Array, dtype: str) -> Array:
    narrow = values.astype(np.float32)
    return from_bfloat16(to_bfloat16(narrow)) if dtype == "bfloat16" else narrow.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("device", ROWS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_first_layer_is_that_of_the_definition(layer: str, precision: str, device: str) -> None:
    (conv, image, channels), (dtype, multiple) = LAYERS[layer], PRECISIONS[precision]
    graph, batch = network(conv, image), 2 if device == "cpu" else 32
    reference = Run(lower(graph, batch, dtype="float64"), seed=6)
    program = lower(graph, batch, dtype=dtype, layout="NHWC", pad_channels=multiple, fuse=True)
    wanted = channels if isinstance(channels, int) else channels.get(precision, 16)
    assert program.tensors["data"].shape[1] == wanted
    for phase in PHASES[:2]:
        reference.run(phase)
    backend = DEVICES[device](precision)
    try:
        slab = Slab(backend, program)
        fed = {name: laid_out(array_for(spec), spec) for name, spec in given(program).items()}
        for name, array in fed.items():
            array[...] = reference.values[name]
        fed["step"][...] = new_step(0.1, 64.0, 0, 0)  # gradients that float16 can hold
        slab.write(fed)
        check(slab, reference, precision, dtype)
    finally:
        backend.close()


def given(program: Program) -> dict[str, TensorSpec]:
    """What a program does not make itself."""
    made = {name for op in program.ops for argument, name in op.writes.items() if argument not in op.accumulate}
    return {name: spec for name, spec in program.tensors.items() if name not in made and spec.view_of is None}


def array_for(spec: TensorSpec) -> Array:
    return np.empty(spec.shape, spec.dtype)


def check(slab: Slab, reference: Run, precision: str, dtype: str) -> None:
    """Every op in order, those of the first layer with several algorithms, and its results."""
    tried = {"conv1.forward": 0, "conv1.wgrad": 0}
    for op in slab.program.ops:
        if op.phase == "update":
            continue
        expected = gradient(reference, slab.read(op.reads["dy"])) if op.name == "conv1.wgrad" else None
        for chosen in slab.candidates[op.name] if op.name in tried else slab.candidates[op.name][:1]:
            slab.launch(op, chosen)
            if op.name in tried:
                found = slab.read(*op.writes.values())
                off = error(found, reference.values["relu1"] if expected is None else expected)
                assert off < ROUNDING[precision], (op.name, chosen, off)
                tried[op.name] += 1
    assert all(tried.values())
    images = slab.read("data")
    if "fold" not in slab.program.ops[0].attrs:
        unit = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        count = reference.values["data"].shape[1]
        np.testing.assert_allclose(images[:, :count], reference.values["data"], rtol=unit, atol=1e-6)
        assert (images[:, count:] == 0).all()
    used = slab.read("conv1.weight.used")
    kept = np.sort(used[used != 0])
    np.testing.assert_array_equal(kept, np.sort(rounded(reference.values["conv1.weight"], dtype).reshape(-1)))


def gradient(reference: Run, dy: Array) -> Array:
    """dw by its definition, one filter tap at a time, of this dy."""
    conv = next(op for op in reference.program.ops if op.name == "conv1.wgrad")
    (step, _), (pad, _), (p, q) = conv.attrs["stride"], conv.attrs["padding"], dy.shape[2:]
    images = np.pad(reference.values["data"], ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    dw = np.empty_like(reference.values["conv1.weight"])
    for r, s in np.ndindex(dw.shape[2:]):
        met = images[:, :, r : r + step * (p - 1) + 1 : step, s : s + step * (q - 1) + 1 : step]
        dw[:, :, r, s] = np.tensordot(dy, met, ((0, 2, 3), (0, 2, 3)))
    return dw
