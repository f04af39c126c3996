"""The ways to compute a pool that the study compares, each as a launch on operands at given addresses.

    for method in (*references_of(case, kernels, stream), *ours_of(case, kernels, stream, tiles)):
        method.launch({"x": x_ptr, "y": y_ptr, ...})

Operands: x, dx (N, C, H, W) and y, dy (N, C, P, Q) of one dtype in the method's layout; indices (N, C, P, Q) uint8, as
ours writes down the place of a maximum in its window, and places, int32, as Caffe does in its plane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vdnn.bench.cudnn_pool import CudnnPool
from vdnn.bench.study_cases import CHWN, LAYOUTS, NCHW, NHWC, PoolCase
from vdnn.bench.study_pooling import CAFFE, CONVNET, CUDNN, OURS
from vdnn.layers.op import Op
from vdnn.layers.tensor import DTYPE_BYTES, Shape
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.pool import pool_backward, pool_forward

Places = Mapping[str, int]
"""Addresses by operand."""
Launch = Callable[[Places], None]
ONE_BYTE = ("indices",)
"""Operands of uint8."""


@dataclass(frozen=True)
class Method:
    """One way to compute one direction of a pool.

    Args:
        operands: that must move, each once; the last is the result.
        launch: queues it. prepare: queues what makes its other operands from x; None for nothing.
        outputs: shape of y, where it is not the case's.
        ties: whether its gradient is defined where a window has several maxima.
    """

    name: str
    layout: str
    direction: str
    operands: tuple[str, ...]
    launch: Launch
    prepare: Launch | None = None
    outputs: Shape | None = None
    tile: str = ""
    variant: str = ""
    ties: bool = True


def sizes(case: PoolCase, dtype: str) -> dict[str, int]:
    """Bytes of every operand."""
    x, y, each = prod(case.x), prod(case.y), DTYPE_BYTES[dtype]
    return {"x": each * x, "y": each * y, "dy": each * y, "dx": each * x, "places": 4 * y, "indices": y}


def nbytes_of(case: PoolCase, dtype: str, method: Method) -> int:
    """Bytes that must move: every operand once."""
    found = sizes(case, dtype)
    if method.outputs is not None:
        share = prod(method.outputs) / prod(case.y)
        found = {name: size if name in ("x", "dx") else int(size * share) for name, size in found.items()}
    return sum(found[operand] for operand in method.operands)


def references_of(case: PoolCase, kernels: Any, stream: Any) -> Iterator[Method]:
    """The ways of Caffe and cuda-convnet, by the ReferenceKernels of study_pool.cu."""
    n, c, height, width = case.x
    rows, columns = case.y[2:]
    window = [height, width, rows, columns, case.window, case.stride]
    threads = int(kernels.threads)

    def caffe(kernel: str, names: Sequence[str], count: int, at: Places) -> None:
        args = [at.get(name, 0) for name in names]
        kernels.launch(kernel, -(-count // threads), [*args, *window, count], stream)

    outputs, inputs = prod(case.y), prod(case.x)
    yield Method(
        *(CAFFE, NCHW, "forward", ("x", "y")),
        lambda at: caffe("caffe_forward", ("x", "y", ""), outputs, at),
    )
    yield Method(
        *(CAFFE, NCHW, "backward", ("dy", "places", "dx")),
        lambda at: caffe("caffe_backward", ("dy", "places", "dx"), inputs, at),
        lambda at: caffe("caffe_forward", ("x", "y", "places"), outputs, at),
    )
    images = 4 if n % 128 == 0 else 2 if n % 64 == 0 else 1

    def convnet(direction: str, names: Sequence[str], positions: int, at: Places) -> None:
        blocks = -(-n // (32 * images)) * -(-c // 16) * positions
        args = [*(at[name] for name in names), n, c, *window]
        kernels.launch(f"convnet_{direction}_{images}", blocks, args, stream)

    def forward(at: Places) -> None:
        convnet("forward", ("x", "y"), rows * columns, at)

    yield Method(CONVNET, CHWN, "forward", ("x", "y"), forward)
    yield Method(
        *(CONVNET, CHWN, "backward", ("x", "y", "dy", "dx")),
        lambda at: convnet("backward", ("x", "y", "dy", "dx"), height * width, at),
        forward,
        ties=False,
    )


def cudnn_of(case: PoolCase, handle: Handle, dtype: str) -> Iterator[Method]:
    """cuDNN's in both layouts that it knows; its gradient as it is by default, and deterministic."""
    outputs = case.whole_windows
    for layout in (NCHW, NHWC):
        pools = {
            mode: CudnnPool(
                handle, case.x, outputs, window=case.window, stride=case.stride, mode=mode, layout=layout, dtype=dtype
            )
            for mode in ("max", "deterministic max")
        }

        def forward(at: Places, pool: CudnnPool = pools["max"]) -> None:
            pool.forward(at["x"], at["y"])

        yield Method(CUDNN, layout, "forward", ("x", "y"), forward, outputs=outputs, variant="max")
        for mode, pool in pools.items():

            def backward(at: Places, pool: CudnnPool = pool) -> None:
                pool.backward(at["y"], at["dy"], at["x"], at["dx"])

            yield Method(
                *(CUDNN, layout, "backward", ("x", "y", "dy", "dx"), backward, forward),
                outputs=outputs,
                variant=mode,
                ties=False,
            )


Tiles = Callable[[Op, Mapping[str, DeviceArray]], Sequence[str]]
"""Of an op on arrays, the labels of the tiles that it can take."""


def ours_of(case: PoolCase, kernels: Any, stream: Any, tiles: Tiles) -> Iterator[Method]:
    """Our kernels in every layout, with every tile; backward by indices and by values."""
    dtype = str(kernels.dtype)
    pairs = {"kernel": [case.window] * 2, "stride": [case.stride] * 2, "padding": [0, 0]}
    shapes = {"x": case.x, "dx": case.x, "y": case.y, "dy": case.y, "indices": case.y}

    def arrays(names: Sequence[str], layout: str, at: Places) -> dict[str, DeviceArray]:
        kinds = {name: "uint8" if name in ONE_BYTE else dtype for name in names}
        return {name: contiguous(at[name], shapes[name], kinds[name], layout) for name in names}

    def op_of(direction: str, names: Sequence[str], attrs: Mapping[str, Any]) -> Op:
        reads = {name: name for name in names if name not in written(direction)}
        writes = {name: name for name in names if name in written(direction)}
        attrs = {"mode": "max", "count_include_pad": True, **pairs, **attrs}
        return Op(f"pool.{direction}", f"pool.{direction}", "pool", direction, reads, writes, attrs)

    def launcher(direction: str, names: Sequence[str], layout: str, attrs: Mapping[str, Any]) -> Launch:
        op, run = op_of(direction, names, attrs), pool_forward if direction == "forward" else pool_backward
        return lambda at: run(op, arrays(names, layout, at), kernels, stream)

    for layout in LAYOUTS:
        for direction, variant, names in VARIANTS:
            unplaced = arrays(names, layout, dict.fromkeys(names, 0))
            labels = tiles(op_of(direction, names, {}), unplaced) or [""]
            makes = ("x", "y", "indices") if "indices" in names else ("x", "y")
            prepare = launcher("forward", makes, layout, {}) if direction == "backward" else None
            for label in labels:
                attrs = {"algorithm": label} if label else {}
                launch = launcher(direction, names, layout, attrs)
                yield Method(OURS, layout, direction, names, launch, prepare, tile=label, variant=variant)


VARIANTS = (
    ("forward", "values", ("x", "y")),
    ("forward", "indices", ("x", "indices", "y")),
    ("backward", "indices", ("dy", "indices", "dx")),
    ("backward", "values", ("x", "y", "dy", "dx")),
)
"""Direction, how backward learns where the maximum was, and the operands."""


def written(direction: str) -> tuple[str, ...]:
    """Operands that an op of ours writes."""
    return ("y", "indices") if direction == "forward" else ("dx",)
