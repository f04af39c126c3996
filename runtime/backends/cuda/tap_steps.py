"""Filter gradients by products of rows, step by step: where their numbers lie in a workspace, and what is launched.

    form = Form.of(problem, shares=8)                              # form.nbytes of workspace
    steps(form, x_ptr, dy_ptr, dw_ptr, workspace_ptr, adds)        # launches and products, in their order

x and dy (N, C or K, H, W), of equal H and W, are brought to rows [pixel][image], one a channel. Then dw[k][r][s][c] is
the sum over i of dy[k][i] x[c][i + d], d = ((r - pad) W + s - pad) N: a product of rows of dy with rows of x for each
tap (r, s), over those i whose pixel and its neighbour lie in the image. Rows above or below it are left out of i;
columns of dy whose neighbour lies beside it are 0 when their tap comes. A sum is cut in shares, so that there are
enough tiles for a GPU; zeros behind every row make shares of one length of it. Taps one above the other read the same
rows: where memory is the limit, they come at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.cudnn_conv import ConvProblem
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, THREADS, WIDE_BYTES
from vdnn.runtime.backends.cuda.layout import ALGORITHMS, Launch, best_guess
from vdnn.runtime.backends.cuda.matrices import Matrix, Side

FLOAT_BYTES = DTYPE_BYTES["float32"]
WIDE = WIDE_BYTES // FLOAT_BYTES
GRAIN = 32
"""Numbers, of which a share is a multiple: a line of memory, and as many as tiles of products go on at once."""
PARTIAL_BYTES = 24 * 2**20
"""Most of the partial sums of several taps, which then are still in the L2 cache when they are added up."""
CUBLAS_BYTES = 4 * 2**20
"""What cuBLAS gets; as much as for a layer of matrix products."""
ALIGN = 256


@dataclass(frozen=True, slots=True)
class Product:
    """One call of Cublas.gemm_of_rows, whose arguments these are, with the CUBLAS_BYTES at `workspace`."""

    workspace: int
    shape: tuple[int, int, int]
    pointers: tuple[int, int, int]
    rows: tuple[int, int, int]
    strides: tuple[int, int, int]
    count: int


Step = Launch | tuple[Product, ...]
"""What follows what; products of one step may run at the same time."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one filter gradient is cut, and what lies where in its workspace.

    Attributes:
        shares: of each sum.
        beside: most products at the same time.
        images: N, rounded up so that every pixel begins on 16 bytes; those that are not there are 0.
        row: numbers from channel to channel of x and of dy.
        taps: most taps, one above the other, whose partial sums are kept at a time.
        x, dy, columns, partial, cublas: byte offsets, the third of columns of dy while they are 0, the last of
            CUBLAS_BYTES for each product at a time.
        nbytes: of all.
    """

    problem: ConvProblem
    shares: int
    beside: int
    images: int
    row: int
    taps: int
    x: int
    dy: int
    columns: int
    partial: int
    cublas: int
    nbytes: int

    @classmethod
    def of(cls, problem: ConvProblem, shares: int, beside: int = 1) -> Form:
        """The form of a problem that `serves`."""
        (n, c, h, w), (k, _, taps_down, _) = problem.x, problem.w
        images = -(-n // WIDE) * WIDE
        # shares of a multiple of GRAIN are up to GRAIN numbers too long each
        row = (h * w + -(-GRAIN * shares // images)) * images
        of_tap = shares * k * c
        taps = beside if beside > 1 else max(1, min(taps_down, PARTIAL_BYTES // (FLOAT_BYTES * of_tap)))
        numbers = (c * row, k * row, problem.padding[1] * k * h * images, taps * of_tap)
        x, dy, columns, partial, cublas = accumulate((_aligned(FLOAT_BYTES * count) for count in numbers), initial=0)
        offsets = (x, dy, columns, partial, cublas)
        return cls(problem, shares, beside, images, row, taps, *offsets, cublas + beside * CUBLAS_BYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def serves(problem: ConvProblem) -> bool:
    """Whether `problem` is one of these: a filter gradient of float32 in NHWC, of one group and stride 1, whose x and
    dy have as many pixels, and not too many for indices of 32 bits."""
    (_, c, h, w), (k, _, *window) = problem.x, problem.w
    plain = (problem.stride, problem.dilation, problem.groups) == ((1, 1), (1, 1), 1)
    if (problem.direction, problem.dtype, problem.layout) != ("wgrad", "float32", "NHWC") or not plain:
        return False
    same = problem.y[2:] == (h, w) and all(2 * pad + 1 == r for pad, r in zip(problem.padding, window, strict=True))
    inside = problem.padding[0] < h and problem.padding[1] < w
    return (
        same
        and inside
        and all(_given(problem, role, 0).has_whole_pixels for role in "xy")
        and max(c, k) * Form.of(problem, 1).row < INDEX_LIMIT
    )


@lru_cache(maxsize=64)
def steps(form: Form, x_ptr: int, dy_ptr: int, dw_ptr: int, workspace_ptr: int, adds: bool) -> tuple[Step, ...]:
    """What computes dw, (K, C, R, S) in NHWC without gaps, from x and dy, or adds to it; addresses of the device."""
    return tuple(_steps(_Places(form, x_ptr, dy_ptr, dw_ptr, workspace_ptr, adds)))


@dataclass(frozen=True, slots=True)
class _Places:
    """A form with addresses."""

    form: Form
    x_ptr: int
    dy_ptr: int
    dw_ptr: int
    workspace_ptr: int
    adds: bool

    @property
    def rows_of_x(self) -> int:
        return self.workspace_ptr + self.form.x

    @property
    def rows_of_dy(self) -> int:
        return self.workspace_ptr + self.form.dy

    @property
    def partial(self) -> int:
        return self.workspace_ptr + self.form.partial


def _steps(places: _Places) -> Iterator[Step]:
    problem = places.form.problem
    width, pad = problem.x[3], problem.padding[1]
    yield from _brought(places.form, _given(problem, "x", places.x_ptr), places.rows_of_x)
    yield from _brought(places.form, _given(problem, "y", places.dy_ptr), places.rows_of_dy)
    yield from _taps(places, pad)
    if pad:
        yield _kept(places, back=False)
        for right in range(1, pad + 1):
            yield _columns(places, width - right)
            yield from _taps(places, pad + right)
        yield _kept(places, back=True)
        for left in range(1, pad + 1):
            yield _columns(places, left - 1)
            yield from _taps(places, pad - left)


def _given(problem: ConvProblem, role: str, ptr: int) -> DeviceArray:
    """x or dy as they come."""
    shape = {"x": problem.x, "y": problem.y}[role]
    return DeviceArray(ptr, shape, problem.strides()[role], problem.dtype, 0, problem.layout)


def _brought(form: Form, given: DeviceArray, target: int) -> Iterator[Launch]:
    """The rows of one operand from NHWC, and the zeros behind them and in images that are not there."""
    n, c, h, w = given.shape
    hw, images, row = h * w, form.images, form.row
    yield _rows(c, 1, row - hw * images, 0, (0, 0), target + FLOAT_BYTES * hw * images, (row, 0))
    if images > n:
        yield _rows(c, hw, images - n, 0, (0, 0), target + FLOAT_BYTES * n, (row, images))
    if given.pixel_stride == c:
        sides = Side(given.ptr, 0, hw * c), Side(target, 0, images)
        matrix = Matrix(*sides, 1, n, hw * c, FLOAT_BYTES, c, row // images, "y")
    else:
        sides = Side(given.ptr, given.pixel_stride, hw * given.pixel_stride), Side(target, images, row)
        matrix = Matrix(*sides, hw, n, c, FLOAT_BYTES)
    launch = ALGORITHMS[best_guess(matrix)](matrix, False)
    assert launch is not None, "a guess applies"
    yield Launch(launch.kernel, launch.blocks, [*launch.args, 0, *launch.last])


def _columns(places: _Places, column: int) -> Launch:
    """A column of dy becomes 0."""
    (_, k, h, w), images, row = places.form.problem.y, places.form.images, places.form.row
    return _rows(k, h, images, 0, (0, 0), places.rows_of_dy + FLOAT_BYTES * column * images, (row, w * images))


def _kept(places: _Places, *, back: bool) -> Launch:
    """The columns of dy that become 0 for taps on the right are kept, or put back."""
    (_, k, h, w), images, pad = places.form.problem.y, places.form.images, places.form.problem.padding[1]
    length = pad * images
    own = places.rows_of_dy + FLOAT_BYTES * (w - pad) * images, (places.form.row, w * images)
    kept = places.workspace_ptr + places.form.columns, (h * length, length)
    source, target = (kept, own) if back else (own, kept)
    return _rows(k, h, length, *source, *target)


def _rows(
    blocks: int, rows: int, length: int, x: int, x_steps: tuple[int, int], y: int, y_steps: tuple[int, int]
) -> Launch:
    """y = x, or 0 without x, of `blocks` blocks of rows; steps in numbers from block to block, and from row to row."""
    wide = all(value % WIDE == 0 for value in (length, *x_steps, *y_steps)) and (x | y) % WIDE_BYTES == 0
    size = blocks * rows * length
    args = [x, *x_steps, y, *y_steps, rows, length, size, wide]
    return Launch("tap_rows", -(-size // (THREADS * (WIDE if wide else 1))), args)


def _taps(places: _Places, s: int) -> Iterator[Step]:
    """The gradients of the taps of column `s` of the filters, a few at a time."""
    form = places.form
    (k, c, taps_down, taps_across), most = form.problem.w, form.taps
    for first in range(0, taps_down, most):
        taps = range(first, min(taps_down, first + most))
        products = tuple(_product(places, r, s, number, len(taps)) for number, r in enumerate(taps))
        yield from [products] if form.beside > 1 else [(product,) for product in products]
        dw = places.dw_ptr + FLOAT_BYTES * c * (first * taps_across + s)
        size = len(taps) * k * c
        wide = c % WIDE == 0 and dw % WIDE_BYTES == 0
        args = [places.partial, dw, form.shares, k, c, size, taps_down * taps_across * c, taps_across * c]
        blocks = -(-size // (THREADS * (WIDE if wide else 1)))
        yield Launch("tap_sums", blocks, [*args, wide, places.adds])


def _product(places: _Places, r: int, s: int, number: int, taps: int) -> Product:
    """The shares of tap (r, s), whose partial sums are those of tap `number` of `taps`."""
    form = places.form
    (_, c, h, w), k, images = form.problem.x, form.problem.w[0], form.images
    down, across = r - form.problem.padding[0], s - form.problem.padding[1]
    # rows of the image in which both dy and its neighbour lie, without the columns at both ends that have none
    first, end = max(0, -down) * w + max(0, -across), (h - max(0, down)) * w - max(0, across)
    length = -(-(end - first) * images // (form.shares * GRAIN)) * GRAIN
    at = FLOAT_BYTES * first * images
    pointers = (
        places.rows_of_dy + at,
        places.rows_of_x + at + FLOAT_BYTES * (down * w + across) * images,
        places.partial + FLOAT_BYTES * number * k * c,
    )
    workspace = places.workspace_ptr + form.cublas + (number * CUBLAS_BYTES if form.beside > 1 else 0)
    rows, strides = (form.row, form.row, c), (length, length, taps * k * c)
    return Product(workspace, (k, c, length), pointers, rows, strides, form.shares)
