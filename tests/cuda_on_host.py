"""vdnn's CUDA kernels compiled as host C++ and run thread by thread, behind the interface of KernelSet.

    kernels = HostKernels(falling=True, dtype="bfloat16")
    CUDA_KERNELS["relu.forward"](op, {"x": array_of(x), "y": array_of(y)}, kernels, None)

Addresses are those of NumPy arrays; those of uint16 hold bfloat16. What a GPU would do at once happens in order, rising
or falling. A launch fails that writes beside a __shared__ array, or touches a page before or after what `Host` holds.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vdnn.bench.kernel_check import dtype_name
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.source import MODULES, SCALARS, STRUCTS, convert, signatures, source
from vdnn.runtime.backends.cuda.tables import table_type

HEADER = Path(__file__).with_name("cuda_on_host.h")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w")
ERRORS = ("", "missed a barrier", "wrote beside a __shared__ array", "touched memory that is not there")
"""What cuda_on_host.h returns."""
SHARED = re.compile(r"__shared__ (\w+) ([^;]+);")
# kernels are C functions here: each gets an entry that runs it on a range of blocks
ENTRY = """
extern "C" int run_{name}(u32 first, u32 end, int falling, {arguments}) {{
    return host::run(first, end, THREADS, falling, [=] {{ {name}({names}); }});
}}
"""


@cache
def compile_text(code: str) -> ctypes.CDLL:
    """The kernels of a CUDA source; skips the test if there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: the CUDA kernels cannot be run on the host")
    text = f'#include "{HEADER}"\n{SHARED.sub(_guarded, code)}'
    for name, signature in signatures(code).items():
        arguments = ", ".join(f"{kind} {argument}" for argument, kind in signature)
        text += ENTRY.format(name=name, arguments=arguments, names=", ".join(argument for argument, _ in signature))
    with TemporaryDirectory() as folder:
        file, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        file.write_text(text)
        command = [compiler, *FLAGS, str(file), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(library))


def _guarded(declaration: re.Match[str]) -> str:
    """`float a[2][3], b;` as variables between guards, which code calls a and b as before."""
    kind, variables = declaration.groups()
    made = []
    for variable in variables.split(", "):
        name, bracket, sizes = variable.partition("[")
        made.append(f"static host::Shared<{kind}{bracket}{sizes}> {name}_guarded; auto& {name} = {name}_guarded.value;")
    return " ".join(made)


class HostKernels:
    """Kernels by name.

    Args:
        falling: threads and blocks from the last to the first.
        blocks: number of blocks → the range of blocks to run; all of them if None.
        dtype: of activations and their gradients.
        text: another source than vdnn's own.
    """

    def __init__(
        self,
        *,
        falling: bool = False,
        blocks: Callable[[int], tuple[int, int]] | None = None,
        dtype: str = "float32",
        text: str = "",
    ) -> None:
        text = text or source(dtype)
        self._library, self._falling, self._blocks, self.dtype = compile_text(text), falling, blocks, dtype
        self._signatures = signatures(text)
        self.launched: list[str] = []

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
        """Run the kernel; AssertionError for what ERRORS says."""
        library, signature = self._library, self._signatures.get(name)
        if signature is None:  # of a module that is compiled where it is needed
            code = next(text for text in (source(self.dtype, m) for m in MODULES) if name in signatures(text))
            library, signature = compile_text(code), signatures(code)[name]
        entry = library[f"run_{name}"]
        entry.argtypes = [ctypes.c_uint32] * 2 + [ctypes.c_int] + [_ctype(kind) for _, kind in signature]
        first, end = self._blocks(blocks) if self._blocks else (0, blocks)
        values = [_plain(value) for value in convert(name, signature, args)]
        error = entry(first, end, self._falling, *values)
        assert error == 0, f"threads of '{name}' {ERRORS[error]}"
        self.launched.append(name)


@cache
def _table(nbytes: int) -> type[ctypes.Structure]:
    """A table of so many bytes, passed by value."""
    return type("Table", (ctypes.Structure,), {"_fields_": [("words", ctypes.c_uint64 * (nbytes // 8))]})


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _table(value.nbytes).from_buffer_copy(value.tobytes())
    return value.item()


def _ctype(kind: str) -> Any:
    if kind in STRUCTS:
        return _table(table_type(kind).itemsize)
    if kind not in SCALARS:
        return ctypes.c_void_p
    return np.ctypeslib.as_ctypes_type(SCALARS[kind])


class Host:
    """A machine of vdnn.bench.kernel_check: the memory of NumPy."""

    stream = None

    def __init__(self, *, falling: bool = False, dtype: str = "float32") -> None:
        self.kernels = HostKernels(falling=falling, dtype=dtype)

    def run(self, content: NDArray[np.uint8], work: Callable[[int], None]) -> NDArray[np.uint8]:
        """`content` at a multiple of 256, `work` done on it, what lies there then."""
        memory = fenced(content.size)
        memory[...] = content
        work(memory.ctypes.data)
        return memory


def fenced(nbytes: int) -> NDArray[np.uint8]:
    """So many bytes, 0xff, from a multiple of 256 on; the page that begins less than 256 bytes after them is not there,
    nor is one before them."""
    page = mmap.PAGESIZE
    pages = -(-nbytes // page) + 2
    room = np.frombuffer(mmap.mmap(-1, pages * page), np.uint8)
    room[page:-page] = 0xFF
    for first in (0, (pages - 1) * page):
        done = ctypes.CDLL(None).mprotect(ctypes.c_void_p(room.ctypes.data + first), ctypes.c_size_t(page), 0)
        assert done == 0, "mprotect failed"
    start = ((pages - 1) * page - nbytes) // 256 * 256
    return room[start : start + nbytes]


def array_of(array: NDArray[Any], layout: str = "NCHW") -> DeviceArray:
    """`array` as the cuda backend sees it."""
    strides = tuple(step // array.itemsize for step in array.strides)
    return DeviceArray(array.ctypes.data, array.shape, strides, dtype_name(array.dtype), array.nbytes, layout)
