"""IDX files, plain or compressed with gzip: a header of type and sizes, then the numbers.

    images = read_idx(Path("train-images-idx3-ubyte.gz"), ranks=(3, 4), dtypes=("uint8",))   # (60000, 28, 28)

Format: two zero bytes, one byte for the type, one for the number of dimensions, each dimension as a 4-byte big-endian
number, then the elements in row order, big-endian (LeCun, "The MNIST database").
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import DataError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
PIECE_BYTES = 2**24


def read_idx(path: Path, ranks: Sequence[int], dtypes: Sequence[str]) -> NDArray[Any]:
    """The array in an IDX file, in the file's byte order; a plain file is mapped, a compressed one is read whole.

    Args:
        ranks: numbers of dimensions that are expected.
        dtypes: NumPy names of the element types that are expected.

    Raises DataError, naming the file, for anything else: another type or rank, an impossible header, a file that is
    longer or shorter than its header says, broken compression.
    """
    compressed = path.suffix == ".gz"
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, a device has no end
            raise DataError(f"data file '{path}': expected a regular file, got a pipe or a device")
        with cast(BinaryIO, gzip.open(path, "rb") if compressed else path.open("rb")) as stream:
            shape, dtype = _header(path, stream, ranks, dtypes)
            nbytes = prod(shape) * dtype.itemsize
            offset = 4 + 4 * len(shape)
            if compressed:
                raw = bytearray()
                # in pieces: what a false header claims must not be allocated
                while len(raw) <= nbytes and (piece := stream.read(min(PIECE_BYTES, nbytes + 1 - len(raw)))):
                    raw += piece
                _check_length(path, nbytes, len(raw), exact=len(raw) <= nbytes)
                return np.frombuffer(raw, dtype).reshape(shape)
            _check_length(path, nbytes, path.stat().st_size - offset)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"data file '{path}': expected intact gzip data, got: {error}") from error
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read: {error.strerror or error}") from error
    return np.memmap(path, dtype, "r", offset, shape)


def _header(path: Path, stream: BinaryIO, ranks: Sequence[int], dtypes: Sequence[str]) -> tuple[Any, np.dtype[Any]]:
    magic = stream.read(4)
    expected = (
        f"an IDX header (two zero bytes, a type of {', '.join(dtypes)}, {' or '.join(map(str, ranks))} dimensions)"
    )
    dtype = np.dtype(TYPES[magic[2]]) if len(magic) == 4 and magic[2] in TYPES else None
    if dtype is None or magic[:2] != b"\0\0" or dtype.name not in dtypes or magic[3] not in ranks:
        raise DataError(f"data file '{path}': expected {expected}, got bytes {magic.hex(' ') or '(none)'}")
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(
            f"data file '{path}': expected {magic[3]} sizes of 4 bytes in the header, got {len(sizes)} bytes"
        )
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise DataError(f"data file '{path}': expected sizes of 1 or more, got {shape}")
    return shape, dtype


def _check_length(path: Path, expected: int, got: int, *, exact: bool = True) -> None:
    if got != expected:
        more = "" if exact else " or more"
        raise DataError(f"data file '{path}': expected {expected:,} bytes after the header, got {got:,}{more}")
