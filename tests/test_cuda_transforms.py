"""Transforms between layouts on CUDA: which transposition each is, how it is cut up, and that all ways give the same.

More calls are compared with the CPU in test_cuda_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from numpy.typing import NDArray

from vdnn.errors import VdnnError
from vdnn.layers import Op, Program
from vdnn.layers.tensor import MEMORY_ORDERS, TensorSpec
from vdnn.memory.layout import transform_program
from vdnn.networks import build
from vdnn.runtime.backends.cuda.array import DeviceArray, contiguous
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT
from vdnn.runtime.backends.cuda.layout import ALGORITHMS, best_guess, layout_transform, transform_candidates
from vdnn.runtime.backends.cuda.matrices import Matrix, Side
from vdnn.runtime.backends.cuda.source import convert, signatures, source

TYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
PAIRS = tuple(permutations(MEMORY_ORDERS, 2))
FLAT = ("NAIVE", "TILED", "VECTOR", "STRIPS")
"""Ways for any shape, or for any with a short side."""
BRICKS = ((40, 24, 3, 8), (32, 32, 2, 20), (16, 520, 1, 8), (264, 16, 2, 4), (72, 136, 3, 8))
SHAPES = ((9, 5, 6, 7), (24, 16, 2, 4), (3, 40, 13, 13), (33, 3, 13, 13), (2, 17, 40, 51))


def batch(memory: NDArray[Any], shape: Sequence[int], layout: str, offset: int = 0) -> tuple[DeviceArray, NDArray[Any]]:
    """(array, NumPy view) of a batch in `layout` that begins `offset` numbers into `memory`."""
    dtype = {kind: name for name, kind in TYPES.items()}[memory.dtype.type]
    array = contiguous(memory.ctypes.data + offset * memory.itemsize, tuple(shape), dtype, layout)
    order = MEMORY_ORDERS[layout]
    part = memory[offset : offset + array.size].reshape([shape[axis] for axis in order])
    return array, part.transpose(np.argsort(order))


def aligned(size: int, dtype: str) -> NDArray[Any]:
    """Zeros that begin at a multiple of 256 bytes."""
    kind = np.dtype(TYPES[dtype])
    room = np.zeros(size * kind.itemsize + 256, np.uint8)
    start = -room.ctypes.data % 256
    return room[start : start + size * kind.itemsize].view(kind)


def moves(label: str, dtype: str, shape: Sequence[int], pair: tuple[str, str], offsets: tuple[int, int]) -> bool:
    """Whether the way applies; if so, y must be x bit by bit, in falling order too, with nothing beside it."""
    one, two = pair
    size = int(np.prod(shape)) + 16
    memory, result = aligned(size, dtype), aligned(size, dtype)
    memory.view(np.uint8)[...] = np.random.default_rng(5).integers(0, 256, memory.nbytes)  # NaN of all kinds among them
    (x, given), (y, got) = batch(memory, shape, one, offsets[0]), batch(result, shape, two, offsets[1])
    matrix = Matrix.of(x, y)
    assert matrix is not None
    if ALGORITHMS[label](matrix, False) is None:
        return False
    op = Op("move", "layout.transform", "layer", "forward", {}, {}, {"algorithm": label})
    layout_transform(op, {"x": x, "y": y}, HostKernels(dtype=dtype, falling=sum(shape) % 2 == 1), None)
    bits = f"u{memory.itemsize}"
    assert (np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(given).view(bits)).all(), (shape, one, two)
    outside = np.concatenate([result[: offsets[1]], result[offsets[1] + given.size :]])
    assert not outside.view(np.uint8).any()
    return True


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("label", FLAT)
def test_every_way_moves_every_bit_to_its_place_at_any_address(label: str, dtype: str) -> None:
    calls = [(shape, pair) for shape in SHAPES for pair in PAIRS]
    offsets = [(0, 0), (1, 3), (0, 5), (7, 0)] * 9
    applied = sum(moves(label, dtype, *call, offset) for call, offset in zip(calls, offsets, strict=False))
    assert applied >= (12 if label == "STRIPS" else len(calls))


@pytest.mark.parametrize("dtype", TYPES)
def test_bricks_move_every_bit(dtype: str) -> None:
    """Whole ones and parts of one along every side, and those with one pixel or with few images."""
    for shape in BRICKS:
        assert all(moves("BRICKS", dtype, shape, pair, (0, 0)) for pair in PAIRS), shape
    assert not moves("BRICKS", dtype, (12, 16, 3, 8), ("NHWC", "CHWN"), (1, 0))
    assert not moves("BRICKS", dtype, (16, 12 if dtype != "float32" else 6, 2, 8), ("NHWC", "CHWN"), (0, 0))


def test_bricks_of_some_channels_of_a_larger_tensor() -> None:
    """24 of 40 channels in NHWC from and to CHWN; the other channels stay as they are."""
    kernels, shape = HostKernels(dtype="float32"), (32, 24, 5, 3)
    whole, plain = aligned(32 * 15 * 40, "float32"), aligned(32 * 15 * 24, "float32")
    whole[...] = np.arange(whole.size)
    slice_of = DeviceArray(whole.ctypes.data + 4 * 8, shape, (15 * 40, 1, 3 * 40, 40), "float32", plain.nbytes, "NHWC")
    y, got = batch(plain, shape, "CHWN")
    op = Op("move", "layout.transform", "layer", "forward", {}, {}, {"algorithm": "BRICKS"})
    layout_transform(op, {"x": slice_of, "y": y}, kernels, None)
    view = whole.reshape(32, 5, 3, 40)[..., 8:32].transpose(0, 3, 1, 2)
    assert (got == view).all()
    want = whole.reshape(32 * 15, 40).copy()
    plain *= -1
    want[:, 8:32] *= -1
    layout_transform(op, {"x": y, "y": slice_of}, kernels, None)
    assert (whole.reshape(want.shape) == want).all()
    assert kernels.launched == ["transform_bricks", "transform_bricks"]


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_begin_at_any_address(dtype: str) -> None:
    label = "ROWS"
    for shape in ((3, 40, 5, 7), (2, 24, 13, 13), (1, 16, 31, 33), (2, 136, 1, 17), (2, 520, 4, 5), (2, 8, 4, 4)):
        for offset in (0, 1, 2, 3, 5, 7) if shape[1] in (24, 8) else (4, 7):
            applied = moves(label, dtype, shape, ("NCHW", "NHWC"), (offset, 0))
            assert moves(label, dtype, shape, ("NHWC", "NCHW"), (0, offset)) == applied
            assert applied == (shape[2] * shape[3] % 4 > 0 or offset * (4 if dtype == "float32" else 2) % 16 > 0)
    for pair in (("NCHW", "CHWN"), ("CHWN", "NCHW")):
        assert moves(label, dtype, (24, 3, 13, 7), pair, (0, 0))
    assert not moves(label, dtype, (24, 16, 13, 7), ("NHWC", "CHWN"), (0, 1))
    assert not moves(label, dtype, (4, 16, 3, 5), ("NCHW", "NHWC"), (0, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("label", ["BRICKS", "ROWS"])
def test_bricks_and_rows_add_too(label: str, dtype: str) -> None:
    rng, kind = np.random.default_rng(6), TYPES[dtype]
    shape = (16, 24, 5, 7) if label == "ROWS" else BRICKS[0]
    for pair in (("NCHW", "NHWC"), ("NHWC", "NCHW")) if label == "ROWS" else PAIRS:
        memory, result = aligned(int(np.prod(shape)), dtype), aligned(int(np.prod(shape)), dtype)
        (x, given), (y, got) = batch(memory, shape, pair[0]), batch(result, shape, pair[1])
        memory[...], result[...] = (rng.standard_normal(memory.size).astype(kind) for _ in range(2))
        want = (got.astype(np.float32) + given.astype(np.float32)).astype(kind)
        op = Op("add", "layout.transform", "layer", "forward", {}, {"y": "y"}, {"algorithm": label}, ("y",))
        layout_transform(op, {"x": x, "y": y}, HostKernels(dtype=dtype), None)
        assert (got == want).all(), pair


def test_bricks_take_no_gaps_between_channels() -> None:
    """64 images of 32 channels of 6 pixels, to rows with room for 8."""
    sides = Side(0, 0, 6 * 32), Side(0, 0, 64)
    whole, apart = (Matrix(*sides, 1, 64, 6 * 32, 4, 32, pixels, "y") for pixels in (6, 8))
    assert ALGORITHMS["BRICKS"](whole, False) is not None
    assert ALGORITHMS["BRICKS"](apart, False) is None
    assert best_guess(apart) == "VECTOR"


class Noting:
    """Kernels that note what is launched and run nothing."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.launched: list[tuple[str, int]] = []
        self._signatures = signatures(source(dtype))

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
        """Arguments must fit their types."""
        convert(name, self._signatures[name], args)
        assert 0 < blocks < INDEX_LIMIT
        self.launched.append((name, blocks))


def launched(dtype: str, shape: Sequence[int], one: str, two: str, label: str | None = None) -> tuple[str, int]:
    """Kernel and blocks of a transform of tensors at address 0."""
    kernels, attrs = Noting(dtype), {"algorithm": label} if label else {}
    x, y = (contiguous(0, tuple(shape), dtype, layout) for layout in (one, two))
    op = Op("move", "layout.transform", "layer", "forward", {}, {}, attrs)
    CUDA_KERNELS["layout.transform"](op, {"x": x, "y": y}, kernels, None)
    return kernels.launched[0]


def test_sides_that_are_not_aligned_go_number_by_number() -> None:
    assert launched("float32", (126, 64, 9, 9), "NCHW", "CHWN", "VECTOR")[0] == "transform_ragged"
    assert launched("bfloat16", (124, 64, 56, 56), "NHWC", "CHWN", "VECTOR")[0] == "transform_ragged"
    assert launched("float32", (124, 64, 56, 56), "NHWC", "CHWN", "VECTOR")[0] == "transform_blocks"


def test_the_usual_way_is_by_shape() -> None:
    assert launched("float32", (128, 64, 56, 56), "NCHW", "CHWN") == ("transform_blocks", 2 * 64 * 56 * 56 // 64)
    assert launched("bfloat16", (128, 64, 56, 56), "NHWC", "CHWN") == ("transform_blocks", 64 * 56 * 56 // 128)
    assert launched("float32", (64, 3, 224, 224), "NCHW", "NHWC") == ("transform_strips", 64 * 49)  # of 1024 pixels
    assert launched("float32", (64, 256, 13, 13), "NHWC", "NCHW")[0] == "transform_to_rows"
    assert launched("bfloat16", (64, 256, 13, 13), "NCHW", "NHWC")[0] == "transform_from_rows"
    assert launched("float32", (2, 3, 800, 800), "NHWC", "NCHW")[0] == "transform_strips"
    assert launched("bfloat16", (999, 3, 13, 13), "NCHW", "NHWC") == ("transform_images", 63)  # 16 a block
    assert launched("float32", (2, 64, 56, 56), "CHWN", "NHWC")[0] == "transform_naive"
    # a tile of 8 x 32 squares leaves no thread idle where one of 16 x 16 would leave half of them
    assert launched("float32", (32, 64, 56, 56), "NCHW", "CHWN") == ("transform_blocks", 64 * 56 * 56 // 128)


@pytest.mark.parametrize("shape", [(64, 5, 1, 1), (1, 5, 8, 8)])
def test_what_lies_in_one_order_is_copied(shape: tuple[int, ...]) -> None:
    pairs = [("NCHW", "NHWC"), ("NHWC", "NCHW")] if shape[2] == 1 else [("NCHW", "CHWN"), ("CHWN", "NCHW")]
    for one, two in pairs:
        assert launched("float32", shape, one, two)[0] == "copy_rows"
        assert launched("float32", shape, one, two, "VECTOR")[0] == "copy_rows"


def test_four_gibibytes_are_moved_and_naively_refused() -> None:
    shape = (256, 192, 224, 224)  # 2.5 * 10^9 numbers
    for dtype in ("float32", "bfloat16"):
        for one, two in PAIRS:
            assert launched(dtype, shape, one, two)[0] == "transform_blocks"
            launched(dtype, shape, one, two, "TILED")
            assert launched(dtype, shape, one, two, "BRICKS")[0] == "transform_bricks"
    with pytest.raises(VdnnError, match=r"op 'move' .*: 'NAIVE' cannot transpose"):
        launched("float32", shape, "NHWC", "CHWN", "NAIVE")


def test_sizes_must_agree() -> None:
    x, y = contiguous(0, (2, 3, 4, 5)), contiguous(0, (2, 3, 4, 6), "float32", "NHWC")
    with pytest.raises(VdnnError, match=r"op 'move' \(layer 'layer'\): expected as many numbers in y as in x, got "):
        layout_transform(
            Op("move", "layout.transform", "layer", "forward", {}, {}), {"x": x, "y": y}, Noting("float32"), 0
        )


def test_candidates_are_what_may_win() -> None:
    program = transform_program(build("alexnet"), 128, "train", "float32")
    found = {op.name: transform_candidates(op, program) for op in program.ops}
    for op in program.ops:
        x, y = (program.tensors[name] for name in (op.reads["x"], op.writes["y"]))
        matrix = Matrix.of(*(contiguous(0, spec.shape, spec.dtype, spec.layout) for spec in (x, y)))
        assert matrix is not None
        assert found[op.name][0] == best_guess(matrix)
        assert {"VECTOR", "TILED"} <= set(found[op.name]) <= set(ALGORITHMS)
        assert all(ALGORITHMS[label](matrix, False) for label in found[op.name])
    image = program.ops[0].layer
    assert found[f"{image}.NCHW.NHWC"] == ("STRIPS", "VECTOR", "TILED", "NAIVE")  # three channels
    assert found[f"{image}.NCHW.CHWN"] == ("VECTOR", "TILED", "BRICKS")


def test_a_channel_slice_has_its_own_candidates() -> None:
    whole = TensorSpec("whole", "act", (4, 7, 13, 13), layout="NHWC")
    part = TensorSpec("part", "act", (4, 3, 13, 13), layout="NHWC", view_of="whole", channel=2)
    plain = TensorSpec("plain", "act", (4, 3, 13, 13))
    op = Op("move", "layout.transform", "layer", "forward", {"x": "part"}, {"y": "plain"})
    tensors = {spec.name: spec for spec in (whole, part, plain)}
    program = Program("p", 4, "train", tensors, (op,), (), (), (), "", "")
    assert transform_candidates(op, program) == ("NAIVE", "VECTOR", "TILED")  # rows of three in seven are no strip
