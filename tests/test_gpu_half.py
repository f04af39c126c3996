"""Products on a GPU in bf16, fp16 and TF32, with and without bias and ReLU in one plan, against float64; training.

    python -m pytest -m gpu tests/test_gpu_half.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_gpu import train, trainer

from vdnn.layers.op import Op
from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.cuda.cudnn_graph import FUSED
from vdnn.runtime.backends.cuda.operands import NUMPY_DTYPES, load, store
from vdnn.runtime.backends.cuda.products import conv_problem

pytestmark = pytest.mark.gpu

DTYPES = {"tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE = {"tf32": 4e-3, "bf16": 4e-3, "fp16": 5e-4}
"""Of a result, relative to the root of the mean square of results: TF32 cuts operands off to 10 bits, the others round
what they store to 8 and 11 bits."""
TRAINING_AGREEMENT = 0.01
"""Relative difference of losses that 8 and 11 bits of activations may make in the first steps."""
MOST = 4
"""Candidates run of each kind, fused and not, the fastest first."""


@dataclass(frozen=True)
class Case:
    """One convolution: images of `channels`, of which the first `stored` are in dw, `filters` among `all_filters`."""

    channels: int
    filters: int
    kernel: int
    size: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    stored: int | None = None
    all_filters: int | None = None
    images: int = 4

    @property
    def out(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1


CASES = {
    "1x1": Case(64, 128, 1, 14),
    "3x3": Case(64, 64, 3, 28, padding=1),
    "strided": Case(64, 96, 3, 28, stride=2, padding=1),
    "groups": Case(96, 64, 5, 13, padding=2, groups=2),
    "padded images": Case(8, 64, 7, 56, stride=2, padding=3, stored=3),
    "some channels of a concatenation": Case(48, 32, 3, 14, padding=1, all_filters=96),
    "odd channels": Case(10, 6, 3, 9, padding=1),
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured algorithms of these tests are theirs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=DTYPES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    made = Lab(request.param)
    yield made
    made.close()


class Lab:
    """A backend of one precision in NHWC, and memory of its own beside it."""

    def __init__(self, precision: str) -> None:
        self.precision, self.dtype = precision, DTYPES[precision]
        self.backend = CudaBackend(precision=precision, layout="NHWC")
        self._runtime, self._taken = self.backend._runtime, []

    def put(self, values: NDArray[Any], dtype: str, all_channels: int | None = None) -> DeviceArray:
        """Four dimensions as (N, H, W, C), the first of `all_channels`; the rest of them hold 7."""
        if values.ndim == 4:
            room = np.full((values.shape[0], *values.shape[2:], all_channels or values.shape[1]), 7, np.float32)
            room[..., : values.shape[1]] = values.transpose(0, 2, 3, 1)
            whole = contiguous(0, (values.shape[0], room.shape[3], *values.shape[2:]), dtype, "NHWC")
        else:
            room, whole = values.astype(np.float32), contiguous(0, values.shape, dtype)
        bits = np.ascontiguousarray(store(room, dtype))
        address = self.take(bits.nbytes)
        self._runtime.memcpy(address, bits.ctypes.data, bits.nbytes, self._runtime.memcpyHostToDevice)
        self._runtime.deviceSynchronize()
        return replace(whole, ptr=address, shape=values.shape, nbytes=prod(values.shape) * bits.itemsize)

    def take(self, nbytes: int) -> int:
        self._taken.append(self._runtime.malloc(max(nbytes, 256)))
        return int(self._taken[-1])

    def get(self, array: DeviceArray) -> NDArray[np.float64]:
        """The numbers in the order of the shape; what lies between must still be 7."""
        self.backend._streams["compute"].synchronize()
        step = array.pixel_stride if array.layout == "NHWC" and len(array.shape) == 4 else 0
        count = prod(array.shape) // array.shape[1] * step if step else array.size
        bits = np.empty(count, NUMPY_DTYPES[array.dtype])
        self._runtime.memcpy(bits.ctypes.data, array.ptr, bits.nbytes, self._runtime.memcpyDeviceToHost)
        numbers = load(bits, array.dtype).astype(np.float64)
        if not step:
            return numbers.reshape(array.shape)
        n, c, h, w = array.shape
        pixels = numbers.reshape(n, h, w, step)
        assert (pixels[..., c:] == 7).all()
        return pixels[..., :c].transpose(0, 3, 1, 2)

    def candidates(self, op: Op, arrays: dict[str, DeviceArray]) -> list[Candidate]:
        """Some of what the search admits, fused and not."""
        found = self.backend.search.candidates(conv_problem(op, arrays))
        fused = [c for c in found if c.algorithm.startswith(FUSED)]
        return [*fused[:MOST], *[c for c in found if c not in fused][:MOST]]

    def run(self, op: Op, arrays: dict[str, DeviceArray], chosen: Candidate) -> None:
        """As the executor would."""
        op = replace(op, attrs={**op.attrs, "algorithm": chosen.algorithm})
        if chosen.workspace_bytes:
            workspace = contiguous(self.take(chosen.workspace_bytes), (chosen.workspace_bytes,), "uint8")
            arrays = {**arrays, "workspace": workspace}
        self.backend.launch(op, arrays, "compute")

    def rounded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return load(store(values.astype(np.float32), self.dtype), self.dtype).astype(np.float64)

    def free(self) -> None:
        self.backend._streams["compute"].synchronize()
        while self._taken:
            self._runtime.free(self._taken.pop())

    def close(self) -> None:
        self.free()
        self.backend.close()


def convolved(case: Case, x: NDArray[Any], w: NDArray[Any]) -> NDArray[np.float64]:
    """y by its definition, one filter tap at a time."""
    pad, step, out = case.padding, case.stride, case.out
    images = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    y = np.zeros((case.images, case.filters, out, out))
    inner, share = case.channels // case.groups, case.filters // case.groups
    for g in range(case.groups):
        part, filters = images[:, g * inner : (g + 1) * inner], w[g * share : (g + 1) * share]
        for r in range(case.kernel):
            for s in range(case.kernel):
                met = part[:, :, r : r + step * (out - 1) + 1 : step, s : s + step * (out - 1) + 1 : step]
                y[:, g * share : (g + 1) * share] += np.einsum("nchw,kc->nkhw", met, filters[:, :, r, s])
    return y


def gradients(case: Case, x: NDArray[Any], w: NDArray[Any], dy: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """dx and dw: what multiplies each element of x and w in the sum of y * dy."""
    pad, step, out = case.padding, case.stride, case.out
    images = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    dx, dw = np.zeros_like(images), np.zeros_like(w)
    inner, share = case.channels // case.groups, case.filters // case.groups
    for g in range(case.groups):
        channels, filters = slice(g * inner, (g + 1) * inner), slice(g * share, (g + 1) * share)
        for r in range(case.kernel):
            for s in range(case.kernel):
                rows, columns = (slice(t, t + step * (out - 1) + 1, step) for t in (r, s))
                dx[:, channels, rows, columns] += np.einsum("nkhw,kc->nchw", dy[:, filters], w[filters, :, r, s])
                dw[filters, :, r, s] = np.einsum("nkhw,nchw->kc", dy[:, filters], images[:, channels, rows, columns])
    return {"dx": dx[:, :, pad : pad + case.size, pad : pad + case.size], "dw": dw}


def made_up(lab: Lab, case: Case) -> dict[str, NDArray[np.float64]]:
    """x, w, dy, b as they are stored."""
    rng = np.random.default_rng(11)
    shapes = {
        "x": (case.images, case.channels, case.size, case.size),
        "w": (case.filters, case.channels // case.groups, case.kernel, case.kernel),
        "dy": (case.images, case.filters, case.out, case.out),
    }
    found = {name: lab.rounded(rng.standard_normal(shape)) for name, shape in shapes.items()}
    if case.stored is not None:
        found["x"][:, case.stored :] = 0
        found["w"][:, case.stored :] = 0
    found["b"] = rng.standard_normal(case.filters).astype(np.float32) * np.sqrt(prod(shapes["w"][1:]))
    return found


def error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2)))


def conv(case: Case, kind: str, accumulate: tuple[str, ...] = (), **attrs: object) -> Op:
    sizes = {"stride": [case.stride] * 2, "padding": [case.padding] * 2, "dilation": [1, 1], "groups": case.groups}
    return Op(f"conv.{kind}", f"conv.{kind}", "conv", "forward", {}, {}, {**sizes, **attrs}, accumulate)


@pytest.mark.parametrize("name", CASES)
def test_forward_with_bias_and_relu_fused_and_not(lab: Lab, name: str) -> None:
    case = CASES[name]
    values = made_up(lab, case)
    sums = convolved(case, values["x"], values["w"]) + values["b"][:, None, None]
    arrays = {key: lab.put(values[key], lab.dtype) for key in ("x", "w")} | {"b": lab.put(values["b"], "float32")}
    for activation, expected in (("relu", np.maximum(sums, 0)), (None, sums)):
        op = conv(case, "forward", **({"activation": activation} if activation else {}))
        results = {}
        y = lab.put(np.full(sums.shape, np.nan), lab.dtype, case.all_filters)
        for chosen in lab.candidates(op, {**arrays, "y": y}):
            y = lab.put(np.full(sums.shape, np.nan), lab.dtype, case.all_filters)
            lab.run(op, {**arrays, "y": y}, chosen)
            results[chosen.algorithm] = lab.get(y)
            # the convolution is rounded before a kernel of ours adds the bias, and once more after it
            assert error(results[chosen.algorithm], expected) < 1.5 * TOLERANCE[lab.precision], chosen
        fused = [result for label, result in results.items() if label.startswith(FUSED)]
        apart = [result for label, result in results.items() if not label.startswith(FUSED)]
        assert apart
        assert bool(fused) == (activation == "relu")
        for one in fused:
            assert error(one, apart[0]) < 2 * TOLERANCE[lab.precision]
    lab.free()


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_their_sums(lab: Lab, name: str) -> None:
    case = CASES[name]
    values = made_up(lab, case)
    expected = gradients(case, values["x"], values["w"], values["dy"])
    x, w = lab.put(values["x"], lab.dtype), lab.put(values["w"], lab.dtype)
    dy = lab.put(values["dy"], lab.dtype, case.all_filters)
    dw_of = expected["dw"][:, : case.stored]
    for accumulate in (False, True):
        op = conv(case, "wgrad", ("dw",) if accumulate else ())
        start = np.ones(dw_of.shape) if accumulate else np.full(dw_of.shape, np.nan)
        arrays = {"x": x, "dw": lab.put(start, "float32"), "dy": dy}
        for chosen in lab.candidates(op, arrays):
            arrays["dw"] = lab.put(start, "float32")
            lab.run(op, arrays, chosen)
            assert error(lab.get(arrays["dw"]) - accumulate, dw_of) < TOLERANCE[lab.precision], chosen
        if case.stored is not None:
            continue  # images need no gradient
        op = conv(case, "dgrad", ("dx",) if accumulate else ())
        start = np.ones(values["x"].shape) if accumulate else np.full(values["x"].shape, np.nan)
        arrays = {"w": w, "dx": lab.put(start, lab.dtype), "dy": dy}
        for chosen in lab.candidates(op, arrays):
            arrays["dx"] = lab.put(start, lab.dtype)
            lab.run(op, arrays, chosen)
            assert error(lab.get(arrays["dx"]), expected["dx"] + accumulate) < TOLERANCE[lab.precision], chosen
    lab.free()


@pytest.mark.parametrize("accumulate", [False, True])
def test_fully_connected_layers(lab: Lab, accumulate: bool) -> None:
    rng = np.random.default_rng(12)
    n, c, k = 64, 256, 120
    values = {"x": (n, c), "w": (k, c), "dy": (n, k)}
    stored = {name: lab.rounded(rng.standard_normal(shape)) for name, shape in values.items()}
    arrays = {name: lab.put(value, lab.dtype) for name, value in stored.items()}
    products = {
        "forward": ("y", lab.dtype, stored["x"] @ stored["w"].T),
        "dgrad": ("dx", lab.dtype, stored["dy"] @ stored["w"]),
        "wgrad": ("dw", "float32", stored["dy"].T @ stored["x"]),
    }
    for direction, (name, dtype, expected) in products.items():
        out = lab.put(np.full(expected.shape, 3.0 if accumulate else np.nan), dtype)
        op = Op("fc", f"linear.{direction}", "fc", "forward", {}, {}, {}, (name,) if accumulate else ())
        lab.run(op, {**arrays, name: out}, Candidate("CUBLAS", 1.0, 4 * 2**20))
        limit = TOLERANCE[lab.precision] if dtype != "float32" or lab.precision == "tf32" else 1e-5
        assert error(lab.get(out), expected + 3 * accumulate) < limit, direction
    lab.free()


def test_filters_prepared_for_products_and_their_gradients_cost_no_precision(lab: Lab) -> None:
    """What is kept of a wgrad result is float32 of the 16-bit sums, and twice the same is exactly twice as much."""
    case = CASES["3x3"]
    values = made_up(lab, case)
    op, again = conv(case, "wgrad"), conv(case, "wgrad", ("dw",))
    arrays = {name: lab.put(values[name], lab.dtype) for name in ("x", "dy")}
    arrays["dw"] = lab.put(np.full(values["w"].shape, np.nan), "float32")
    chosen = next(c for c in lab.candidates(op, arrays) if c.deterministic)
    lab.run(op, arrays, chosen)
    once = lab.get(arrays["dw"])
    lab.run(again, arrays, chosen)
    if lab.dtype != "float32":  # TF32 sums go on in cuDNN, in another order
        assert (lab.get(arrays["dw"]) == 2 * once).all()
        assert (lab.rounded(once) == once).all()
    lab.free()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("network", ["lenet", "resnet18"])
def test_three_steps_agree_with_what_the_cpu_emulates(tmp_path: Path, network: str, precision: str) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        with trainer(tmp_path / device, network, device, f"precision={precision}", "memory.layout=nhwc") as made:
            losses[device] = train(made, 3)
            assert made.backend.caps.precision == precision
    # activations are rounded at the same places, but sums before them differ in their last bits
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=TRAINING_AGREEMENT)
    assert len(set(losses["cuda"])) == 3


def test_plans_are_few_enough_for_the_time(lab: Lab) -> None:
    """Of a large layer: VGG-16's conv2_2 at 64 images, one of some thirty problems that have 3 minutes."""
    shapes = {"x": (64, 128, 112, 112), "w": (128, 128, 3, 3), "y": (64, 128, 112, 112)}
    arrays = {name: contiguous(0, shape, lab.dtype, "NHWC") for name, shape in shapes.items()}
    op = conv(Case(128, 128, 3, 112, padding=1), "forward", activation="relu")
    started = perf_counter()
    found = lab.backend.search.candidates(conv_problem(op, {**arrays, "b": contiguous(0, (128,))}))
    assert perf_counter() - started < 6
    assert any(c.algorithm.startswith(FUSED) for c in found)
