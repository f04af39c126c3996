"""The ways to pool over the usual windows: tiles of outputs a thread in NHWC and CHWN, and in NCHW planes in shared
memory; see pool.py.

    ways(pooled)                     # {"TILE_2x1": <arguments of a launch>, ...}, that for shapes not measured first
    inverse(27)                      # what `quotient` of pool.cu multiplies by

TILE_<rows>x<columns>: outputs a thread; in backward blocks of stride x stride pixels. PLANES_<KiB>: bytes of planes
that a block takes. TURNS_<KiB>: bytes of them as float32 in backward, to which windows add in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, POOL_GROUP, POOL_ROWS, THREADS, by, wide
from vdnn.runtime.backends.cuda.source import constants, source

PLANES_STRIP, TURNS_WINDOWS = (constants(source())[name] for name in ("PLANES_STRIP", "TURNS_WINDOWS"))
PIXELS, OUTPUTS = 1, 2
"""enum Aligned of pool_fixed.cu."""
FIXED = frozenset(((2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 1, 1)))
"""Size, stride and padding of the square windows of pool_fixed.cu."""
TILES: Mapping[tuple[int, int], tuple[str, ...]] = {
    (2, 2): ("2x1", "1x1"),
    (3, 2): ("2x1", "2x2", "4x1", "1x1"),
    (3, 1): ("2x2", "2x1"),
}
"""Size and stride of windows → tiles of the kernels in pool_tiles.cu, that which is best for many outputs first."""
GRADIENT_TILES: Mapping[tuple[int, int], tuple[str, ...]] = {
    (2, 2): ("2x1", "1x1"),
    (3, 2): ("1x1", "2x1"),
    (3, 1): ("2x2", "2x1"),
}
TURN_KIBS = (28, 14, 7)
"""A block's share of the planes in backward by turns, as float32, that which is best for large batches first."""
PLANE_KIBS = {False: (16, 8, 4), True: (32, 16, 8)}
"""A block's share of the planes in forward, and in backward (True), that which is best for large batches first."""
MANY_BLOCKS = 1024
"""That keep a GPU busy: with fewer a smaller share may be better."""
MANY_SHARES = {False: 400, True: 800}
"""As MANY_BLOCKS, of planes: three for each multiprocessor of the largest GPUs, or as many as it holds at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its blocks, and its arguments but for `mode` or `accumulate`, which come last."""

    kernel: str
    blocks: int
    args: list[int]


@dataclass(frozen=True, slots=True)
class Pooled:
    """What an op pools over square windows, all in NCHW or all in NHWC, which CHWN has become.

    Args:
        pixels: x, or in backward dx. outputs: y, or in backward dy.
        others: the other arrays that the op has; of them `indices`, and in backward `mask`, y.
        size, step, pad: of windows. is_maximum: else an average.
        by_pixels: whether in NHWC.
    """

    pixels: DeviceArray
    outputs: DeviceArray
    indices: DeviceArray | None
    mask: DeviceArray | None
    size: int
    step: int
    pad: int
    is_maximum: bool
    is_backward: bool
    by_pixels: bool

    @property
    def arrays(self) -> list[DeviceArray | None]:
        """What kernels take, in order."""
        if self.is_backward:
            return [self.indices, self.mask, self.outputs, self.pixels]
        return [self.pixels, self.outputs, self.indices]

    @property
    def given(self) -> list[DeviceArray]:
        """Those that the op has."""
        return [array for array in self.arrays if array is not None]


def ways(pooled: Pooled) -> dict[str, Callable[[], Launch]]:
    """Label → what to launch, the label for a shape that was not measured first; empty if the kernels for any windows
    remain. Backward has them by indices alone."""
    if (pooled.size, pooled.step) not in TILES or (pooled.is_backward and pooled.indices is None):
        return {}
    return _tiles(pooled) if pooled.by_pixels else _planes(pooled)


def inverse(divisor: int) -> int:
    """See `quotient` of pool.cu: exact for up to 2^31."""
    power = (divisor - 1).bit_length()
    return (31 + power) << 32 | -(-(1 << (31 + power)) // divisor)


# ---- NHWC


def _tiles(pooled: Pooled) -> dict[str, Callable[[], Launch]]:
    width = wide(*pooled.given)
    if not pooled.is_maximum or pooled.pixels.shape[1] % width or not all(_by(width, a) for a in pooled.given):
        return {}
    if any(array.image_size // array.shape[1] * pixel_step(array) >= INDEX_LIMIT for array in pooled.given):
        return {}
    labels = (GRADIENT_TILES if pooled.is_backward else TILES)[pooled.size, pooled.step]
    threads = {label: _tile_threads(pooled, label, width) for label in labels}
    if max(threads.values()) >= INDEX_LIMIT:
        return {}
    enough = [label for label in labels if threads[label] >= MANY_BLOCKS * THREADS]
    first = enough[0] if enough else max(labels, key=lambda label: threads[label])
    ordered = [first, *(label for label in labels if label != first)]
    return {f"TILE_{label}": _tile_launch(pooled, label, width, threads[label]) for label in ordered}


def pixel_step(array: DeviceArray) -> int:
    """Elements from one pixel to the next; of images of one pixel, between these."""
    return array.pixel_stride if array.is_channels_last else array.image_stride


def _by(width: int, array: DeviceArray) -> bool:
    return array.ptr % (width * array.itemsize) == 0 and pixel_step(array) % width == 0


def _grid(pooled: Pooled, label: str) -> tuple[int, int]:
    """Tiles in a column and in a row of an image."""
    down, right = (int(size) for size in label.split("x"))
    height, width = _blocks_of_pixels(pooled) if pooled.is_backward else pooled.outputs.shape[2:]
    return -(-height // down), -(-width // right)


def _blocks_of_pixels(pooled: Pooled) -> tuple[int, int]:
    """Of step x step pixels in a column and in a row, the first of which begin `pad` pixels before the image."""
    height, width = (-(-(size + pooled.pad) // pooled.step) for size in pooled.pixels.shape[2:])
    return height, width


def _tile_threads(pooled: Pooled, label: str, width: int) -> int:
    along, across = _grid(pooled, label)
    return pooled.pixels.shape[0] * along * across * (pooled.pixels.shape[1] // width)


def _tile_launch(pooled: Pooled, label: str, width: int, threads: int) -> Callable[[], Launch]:
    def launch() -> Launch:
        (along, across), (n, channels) = _grid(pooled, label), pooled.pixels.shape[:2]
        groups = channels // width
        args = [value for array in pooled.arrays for value in ((array.ptr, pixel_step(array)) if array else (0, 0))]
        args += [*pooled.pixels.shape[2:], *pooled.outputs.shape[2:], pooled.pad, n, groups]
        args += [inverse(groups), inverse(across), inverse(along)]
        kernel = f"pool_tile{'_gradient' if pooled.is_backward else ''}_{pooled.size}_{pooled.step}_{label}"
        return Launch(kernel, -(-threads // THREADS), args)

    return launch


# ---- NCHW


def _planes(pooled: Pooled) -> dict[str, Callable[[], Launch]]:
    found: dict[str, Callable[[], Launch]] = {}
    kibs = PLANE_KIBS[pooled.is_backward]
    shares = {kib: share for kib in kibs if (share := _share(pooled, 1024 * kib)) is not None}
    for kib in _likeliest_first(shares, MANY_SHARES[pooled.is_backward]):
        found[f"PLANES_{kib}"] = _planes_launch(pooled, shares[kib])
    if pooled.is_backward and pooled.step == 2:
        found = {**_turns(pooled), **found}
    rows_by_fours = aligned([pooled.pixels], [array for array in pooled.given if array is not pooled.pixels])
    if (pooled.size, pooled.step, pooled.pad) in FIXED and rows_by_fours & PIXELS:
        direct = {f"TILE_1x{POOL_GROUP}": _direct_launch(pooled)}
        is_first = pooled.step > 1
        if pooled.is_backward:  # 16-bit numbers take it as many instructions as others
            is_first = pooled.pixels.itemsize == 4 and bool(rows_by_fours & OUTPUTS)
        found = {**direct, **found} if is_first or not found else {**found, **direct}
    return found


def _turns(pooled: Pooled) -> dict[str, Callable[[], Launch]]:
    shares = {kib: share for kib in TURN_KIBS if (share := _turn_share(pooled, 256 * kib)) is not None}
    ordered = _likeliest_first(shares, MANY_SHARES[True])
    return {f"TURNS_{kib}": _turns_launch(pooled, shares[kib]) for kib in ordered}


def _likeliest_first(shares: Mapping[int, _Share], many: int) -> list[int]:
    """The sizes: of those that make `many` blocks the first, or else the smallest, then the others as they grow."""
    enough = [kib for kib, share in shares.items() if share.blocks >= many]
    first = enough[0] if enough else min(shares, default=0)
    return sorted(shares, key=lambda kib: (kib != first, kib))


@dataclass(frozen=True, slots=True)
class _Share:
    """Of a block: `group` whole planes, or `band` of `rows` rows of one; a row has `columns` strips, each of `strip`
    rows of the band."""

    images: int
    planes: int
    group: int
    band: int
    rows: int
    columns: int
    strip: int

    @property
    def groups(self) -> int:
        """Of planes of an image."""
        return -(-self.planes // self.group)

    @property
    def bands(self) -> int:
        """Of a plane."""
        return -(-self.rows // self.band)

    @property
    def strips(self) -> int:
        """Of a column of a band."""
        return -(-self.band // self.strip)

    @property
    def blocks(self) -> int:
        return self.images * self.groups * self.bands


def _share(pooled: Pooled, limit_bytes: int) -> _Share | None:
    """As much as `limit_bytes` hold; None if not even one row fits."""
    h, w = pooled.pixels.shape[2:]
    p, q = pooled.outputs.shape[2:]
    each = pooled.pixels.itemsize
    images, planes = _images(pooled)
    if pooled.is_backward:
        (rows, columns), output_bytes = _blocks_of_pixels(pooled), each + 1 + (each if pooled.mask else 0)
        before = (pooled.size - 1) // pooled.step
        plane_bytes = h * w * each + p * q * output_bytes
        row_bytes = pooled.step * w * each + q * output_bytes
        more_bytes = before * q * output_bytes
    else:
        rows, columns, plane_bytes, row_bytes = p, q, h * w * each, pooled.step * w * each
        more_bytes = (pooled.size - pooled.step) * w * each
    group, band = 1, rows
    if plane_bytes <= limit_bytes:
        group = min(planes, limit_bytes // plane_bytes)
        at_once = THREADS // columns  # planes of which threads have a column each
        if pooled.is_backward and group > at_once > 0:
            group = group // at_once * at_once
        group = _evened(planes, group)
    else:
        band = (limit_bytes - more_bytes) // row_bytes
        if band <= 0:
            return None
        band = _evened(rows, band)
    strip = PLANES_STRIP
    if pooled.is_backward:  # as long as leaves no thread idle, in whole turns of its loop
        turn = (pooled.size - 1) // pooled.step + 1
        strip = -(-band // max(THREADS // (group * columns), 1) // turn) * turn
    return _Share(images, planes, group, band, rows, columns, strip)


def _turn_share(pooled: Pooled, most_pixels: int) -> _Share | None:
    """So many pixels, as far as the threads can hold their windows; None if not even one row fits."""
    h, w = pooled.pixels.shape[2:]
    p, q = pooled.outputs.shape[2:]
    images, planes = _images(pooled)
    rows, most_windows = _blocks_of_pixels(pooled)[0], THREADS * TURNS_WINDOWS
    group, band = min(planes, most_pixels // (h * w), most_windows // (p * q)), rows
    if group == 0:
        band = min(most_pixels // (pooled.step * w), most_windows // q - (pooled.size - 1) // pooled.step)
        if band <= 0:
            return None
    return _Share(images, planes, _evened(planes, max(group, 1)), _evened(rows, band), rows, q, band)


def _images(pooled: Pooled) -> tuple[int, int]:
    """Images, and planes of each; one image if all lie without gaps."""
    n, c, h, w = pooled.pixels.shape
    is_one = all(array.is_contiguous for array in pooled.given) and n * c * h * w < INDEX_LIMIT
    return (1, n * c) if is_one else (n, c)


def _evened(count: int, most: int) -> int:
    """Of each of as few parts as `count` can be cut into."""
    return -(-count // -(-count // most))


def _planes_launch(pooled: Pooled, share: _Share) -> Callable[[], Launch]:
    def launch() -> Launch:
        args = [value for array in pooled.arrays for value in ((array.ptr, array.image_stride) if array else (0, 0))]
        args += [*pooled.pixels.shape[2:], *pooled.outputs.shape[2:], pooled.pad]
        args += [share.planes, share.group, share.groups, share.band, share.bands, share.rows, share.columns]
        args += [share.strip, share.strips, *map(inverse, (share.columns, share.strips, share.bands, share.groups))]
        kernel = f"pool_planes_{'gradient' if pooled.is_backward else 'forward'}_{pooled.size}_{pooled.step}"
        return Launch(kernel, share.blocks, args)

    return launch


def _turns_launch(pooled: Pooled, share: _Share) -> Callable[[], Launch]:
    def launch() -> Launch:
        p, q = pooled.outputs.shape[2:]
        args = [value for array in pooled.arrays for value in ((array.ptr, array.image_stride) if array else (0, 0))]
        args += [*pooled.pixels.shape[2:], p, q, pooled.pad]
        args += [share.planes, share.group, share.groups, share.band, share.bands, share.rows]
        args += map(inverse, (q, p, share.bands, share.groups))
        return Launch(f"pool_turns_{pooled.size}_{pooled.step}", share.blocks, args)

    return launch


def _direct_launch(pooled: Pooled) -> Callable[[], Launch]:
    def launch() -> Launch:
        pixels, step, tall = pooled.pixels, pooled.step, POOL_ROWS * (2 if pooled.step == 1 else 1)
        flags = aligned([pixels], [array for array in pooled.given if array is not pixels])
        made, rows, columns = (
            (pixels, tall, step * POOL_GROUP) if pooled.is_backward else (pooled.outputs, 1, POOL_GROUP)
        )
        blocks, chunks = cut(made, rows, columns)
        args = [value for array in pooled.arrays for value in ((array.ptr, array.image_stride) if array else (0, 0))]
        args += [*pixels.shape[2:], *pooled.outputs.shape[2:], blocks, chunks, flags]
        kernel = f"pool_{'indexed' if pooled.is_backward else 'forward'}_{pooled.size}_{step}_{pooled.pad}"
        return Launch(kernel, pixels.shape[0] * chunks, args)

    return launch


def cut(array: DeviceArray, rows: int, columns: int) -> tuple[int, int]:
    """Threads for an image of `array` if each has so many rows and columns of a plane, and blocks for these."""
    _, planes, height, width = array.shape
    threads = planes * -(-height // rows) * -(-width // columns)
    return threads, -(-threads // THREADS)


def aligned(pixels: list[DeviceArray], outputs: list[DeviceArray]) -> int:
    """Which rows begin where four numbers can be loaded at once, as bits; outputs only if pixels do."""
    if not _rows_by_fours(pixels):
        return 0
    return PIXELS | (OUTPUTS if _rows_by_fours(outputs) else 0)


def _rows_by_fours(arrays: list[DeviceArray]) -> bool:
    return all(array.shape[3] % 4 == 0 and by(4, array, rows=array.shape[0]) for array in arrays)
