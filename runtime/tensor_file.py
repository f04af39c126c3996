"""Files of named arrays in the safetensors format, written one array at a time and hashed on the way.

    digest, nbytes = write_tensors(Path("weights.safetensors"), {"conv1.weight": w})
    tensors = read_tensors(Path("weights.safetensors"))

Format: the length of the header as 8 little-endian bytes, the header as JSON {name: {dtype, shape, data_offsets}}, the
bytes of all arrays without gaps (https://huggingface.co/docs/safetensors). Writing is done here because the library
first copies all arrays into one dictionary of bytes, which doubles the memory of a large network.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from vdnn.errors import CheckpointError

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> tuple[str, int]:
    """Write `tensors` and force them to disk; returns the SHA-256 of the file, hexadecimal, and its length in bytes.

    Raises ValueError for a dtype that is not in DTYPES, OSError as the system does.
    """
    header: dict[str, Any] = {}
    # the widest elements first, so that every array starts at a multiple of its element size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        array = tensors[name]
        if array.dtype.name not in DTYPES:
            raise ValueError(f"tensor '{name}': expected a dtype of {', '.join(DTYPES)}, got {array.dtype}")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, nbytes = hashlib.sha256(), 0
    with path.open("wb") as stream:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for data in chain([head], (_bytes(tensors[name]) for name in names)):
            stream.write(data)
            digest.update(data)
            nbytes += len(data)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest(), nbytes


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, each in memory of its own; CheckpointError if the file is not one."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"file '{path}': expected tensors in the safetensors format, got: {error}") from error


def _bytes(array: NDArray[Any]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).data.cast("B")
