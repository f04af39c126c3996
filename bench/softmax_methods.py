"""The ways to compute a softmax, and one with loss and gradient, each as a launch on operands at given addresses.

    for method in (*references_of(case, kernels, copy, stream), *ours_of(case, probe.kernels, stream)):
        method.launch({"x": x_ptr, "y": y_ptr, ...})

Operands: x, y, dx, dy of one dtype, [N][K] or [K][N]; labels (N,) int32; loss (N,) float32; correct (N,) uint8; found
(N,) float32 and workspace are for what lies between; step the 64-byte record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vdnn.bench.cudnn_softmax import CudnnSoftmax
from vdnn.layers.lower import STEP_BYTES
from vdnn.layers.op import Op
from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, workspace_bytes

OURS = ("ours", "ours, loss and gradient", "fused train")
"""Names of our methods; every other is a library's, or done as one does it."""
ROWS, COLUMNS = "NK", "KN"
"""Orders in memory, the second the faster."""
Places = Mapping[str, int]
"""Addresses by operand."""
Launch = Callable[[Places], None]
Copy = Callable[[int, int, int], None]
"""Queues a copy within the device: target, source, bytes."""
RULE = {"label_smoothing": 0.0, "weight": 1.0}


@dataclass(frozen=True)
class SoftmaxCase:
    """Softmax of N images over K categories that lie in `order`, of `dtype`."""

    name: str
    n: int
    k: int
    order: str = ROWS
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the scores."""
        return self.n * self.k * DTYPE_BYTES[self.dtype]

    @property
    def operands(self) -> dict[str, int]:
        """Bytes of every operand but x."""
        scratch = workspace_bytes("softmax.forward", {"x": (self.n, self.k)})
        small = {"labels": 4 * self.n, "loss": 4 * self.n, "correct": self.n, "found": 4 * self.n, "step": STEP_BYTES}
        return {"y": self.nbytes, "dx": self.nbytes, **small, "workspace": max(scratch, 1)}

    @property
    def words(self) -> str:
        """ "CLASS3 128x1000 NK float32"."""
        return f"{self.name} {self.n}x{self.k} {self.order} {self.dtype}"


@dataclass(frozen=True)
class Method:
    """One way.

    Args:
        whole: whether it is softmax with loss and gradient, dx; else its result is the probabilities, y.
    """

    name: str
    launch: Launch
    whole: bool = False


def references_of(case: SoftmaxCase, kernels: Any, copy: Copy, stream: Any) -> Iterator[Method]:
    """Five kernels as in Caffe, with a copy before, or in place of calls of cuda-convnet's matrices; float32.

    kernels: ReferenceKernels of study_softmax.cu.
    """
    n, k, count = case.n, case.k, case.n * case.k
    threads = int(kernels.threads)
    image, step, apart = (k, 1, k) if case.order == ROWS else (1, n, 1)

    def per_image(kernel: str, x: int, found: int) -> None:
        kernels.launch(kernel, -(-n // threads), [x, found, n, k, image, step], stream)

    def per_number(kernel: str, *addresses: int, rest: tuple[int, ...] = ()) -> None:
        kernels.launch(kernel, -(-count // threads), [*addresses, count, *rest], stream)

    def five(at: Places) -> None:
        x, y, found = at["x"], at["y"], at["found"]
        if case.order == ROWS:
            copy(y, x, case.nbytes)
            x = y
        per_image("largest", x, found)
        per_number("subtract", x, found, y, rest=(apart, n))
        per_number("exponential", y, y)
        per_image("total", y, found)
        per_number("divide", y, found, y, rest=(apart, n))

    yield Method("caffe" if case.order == ROWS else "convnet", five)


def cudnn_of(case: SoftmaxCase, handle: Any, kernels: Any | None, stream: Any) -> Iterator[Method]:
    """cuDNN's softmax, and with `kernels` (those of `references_of`, for float32) two sequences of training."""
    softmax = CudnnSoftmax(handle, case.n, case.k, by_columns=case.order == COLUMNS, dtype=case.dtype)
    yield Method("cudnn", lambda at: softmax.forward(at["x"], at["y"]))
    if kernels is None or case.order == COLUMNS:
        return
    n, k, count, threads = case.n, case.k, case.n * case.k, int(kernels.threads)
    images, numbers = -(-n // threads), -(-count // threads)

    def loss(at: Places) -> None:
        softmax.forward(at["x"], at["y"])
        kernels.launch("loss_of", images, [at["y"], at["labels"], at["loss"], n, k], stream)

    def short(at: Places) -> None:
        loss(at)
        kernels.launch("gradient", numbers, [at["y"], at["labels"], at["dx"], count, k, 1 / n], stream)

    def backward(at: Places) -> None:
        loss(at)
        kernels.launch("gradient_of_probs", numbers, [at["y"], at["labels"], at["dx"], count, k, 1 / n], stream)
        softmax.backward(at["y"], at["dx"], at["dx"])

    yield Method("cudnn sequence", short, whole=True)
    yield Method("cudnn sequence, its backward", backward, whole=True)


def ours_of(case: SoftmaxCase, kernels: Any, stream: Any) -> Iterator[Method]:
    """Plain softmax, and of rows loss and gradient: two ops in float32, and the fused one."""
    n, k = case.n, case.k

    def arrays(at: Places) -> dict[str, DeviceArray]:
        strides = (k, 1) if case.order == ROWS else (1, n)
        scores = {name: DeviceArray(at[name], (n, k), strides, case.dtype, case.nbytes) for name in ("x", "y", "dx")}
        scratch = contiguous(at["workspace"], (case.operands["workspace"],), "uint8")
        found = {name: contiguous(at[name], (n,), kind) for name, kind in SMALL.items()}
        return {**scores, **found, "step": contiguous(at["step"], (STEP_BYTES,), "uint8"), "workspace": scratch}

    def run(kind: str, at: Places, **attrs: Any) -> None:
        CUDA_KERNELS[kind](Op(kind, kind, "loss", "forward", {}, {}, attrs), given(arrays(at)), kernels, stream)

    def given(found: dict[str, DeviceArray]) -> dict[str, DeviceArray]:
        return {**found, "probs": found["y"]}

    def apart(at: Places) -> None:
        run("softmax_loss.forward", at, label_smoothing=0.0)
        run("softmax_loss.backward", at, **RULE)

    plain, two_ops, fused = OURS
    yield Method(plain, lambda at: run("softmax.forward", at))
    if case.order == COLUMNS:
        return
    if case.dtype == "float32":
        yield Method(two_ops, apart, whole=True)
    yield Method(fused, lambda at: run("softmax_loss.train", at, **RULE), whole=True)


SMALL = {"labels": "int32", "loss": "float32", "correct": "uint8"}
"""Operands of one number an image, and their dtypes."""
