"""Convolutions in CHWN on a GPU: every kernel against sums written out in float64, the same bits twice and captured.

    python -m pytest -m gpu tests/test_gpu_chwn.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_cuda_chwn_conv import CASES, GAP, LARGER, NAMES, Run

from vdnn.layers import Op
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.chwn_conv import chwn_convolve
from vdnn.runtime.backends.cuda.chwn_tiles import GRADIENT_TILES, TILES, chwn_candidates

pytestmark = pytest.mark.gpu

ALIGN_BYTES, WORKSPACE_BYTES = 256, 2**24


class Gpu:
    """What a Run of test_cuda_chwn_conv takes for kernels: its tensors are copied to the GPU and back."""

    def __init__(self, dtype: str) -> None:
        from vdnn.runtime.backends.cuda.probe import Probe

        self.probe = Probe(dtype)
        self.probe.kernels.load("chwn")

    def run(self, run: Run, algorithm: str | None = None, *, adds: bool = False, captured: bool = False) -> Any:
        """The result of `run`, with a bias if it is a forward one; done twice with equal bits."""
        run.tensors[run.made].own[...] = type(run.tensors[run.made])(run.before, run.tensors[run.made].dtype).own
        places, content = {}, bytearray()
        for name, tensor in run.tensors.items():
            places[name] = len(content)
            content += tensor.room.tobytes()
            content += bytes(-len(content) % ALIGN_BYTES)
        places["b"] = len(content)
        content += run.b.tobytes()
        content += bytes(-len(content) % ALIGN_BYTES)
        places["workspace"] = len(content)
        held = np.concatenate([np.frombuffer(content, np.uint8), np.full(WORKSPACE_BYTES, 0xFF, np.uint8)])
        attrs = run.attrs | ({"algorithm": algorithm} if algorithm else {})
        op = Op("op", f"conv.{run.direction}", "conv", "forward", {}, {}, attrs, (run.made,) if adds else ())

        def work(address: int) -> None:
            arrays = {
                name: _moved(tensor.device, address + places[name] + GAP * tensor.own.itemsize)
                for name, tensor in run.tensors.items()
            }
            arrays["workspace"] = contiguous(address + places["workspace"], (WORKSPACE_BYTES,), "uint8")
            if run.direction == "forward":
                arrays["b"] = contiguous(address + places["b"], run.b.shape)
            self._start(lambda: chwn_convolve(op, arrays, self.probe.kernels, self.probe.stream), captured)

        after = self.probe.run(held, work)
        assert self.probe.unequal == 0
        for name, tensor in run.tensors.items():
            tensor.room[...] = after[places[name] :][: tensor.room.nbytes].view(tensor.room.dtype)
        return run.tensors[run.made].values

    def _start(self, call: Callable[[], None], captured: bool) -> None:
        if not captured:
            call()
            return
        stream = self.probe.stream
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()


def _moved(array: DeviceArray, ptr: int) -> DeviceArray:
    return DeviceArray(ptr, array.shape, array.strides, array.dtype, array.nbytes, array.layout)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(request.param)


def check(gpu: Gpu, run: Run, **options: Any) -> NDArray[Any]:
    found = gpu.run(run, **options)
    run.check(found, run.expected(adds=bool(options.get("adds")), bias=run.direction == "forward"))
    return np.asarray(found)


@pytest.mark.parametrize("case", [*CASES, *LARGER])
@pytest.mark.parametrize("direction", NAMES)
def test_every_direction_agrees_with_float64(gpu: Gpu, direction: str, case: str) -> None:
    check(gpu, Run(direction, case, gpu.probe.kernels.dtype))


@pytest.mark.parametrize("case", ["many channels", "groups", "stride and dilation", *LARGER])
@pytest.mark.parametrize("direction", NAMES)
def test_every_tile_agrees_with_float64(gpu: Gpu, direction: str, case: str) -> None:
    run = Run(direction, case, gpu.probe.kernels.dtype)
    adds, bias = direction != "forward", direction == "forward"
    for tile in GRADIENT_TILES if direction == "wgrad" else TILES:
        expected = run.expected(adds=adds, bias=bias, tensor=tile.startswith("TENSOR"))
        run.check(gpu.run(run, f"DIRECT_{tile}", adds=adds), expected)


@pytest.mark.parametrize("direction", NAMES)
def test_candidates_run_captured(gpu: Gpu, direction: str) -> None:
    run = Run(direction, "several tiles", gpu.probe.kernels.dtype)
    for label, nbytes in chwn_candidates(run.problem):
        assert nbytes <= WORKSPACE_BYTES
        alone = check(gpu, run, algorithm=label)
        np.testing.assert_array_equal(gpu.run(run, label, captured=True), alone)


@pytest.mark.parametrize("direction", NAMES)
def test_images_of_a_larger_batch(gpu: Gpu, direction: str) -> None:
    for pixel in (3, 4):
        check(gpu, Run(direction, "many channels", gpu.probe.kernels.dtype, pixel))
