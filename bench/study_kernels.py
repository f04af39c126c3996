"""Reference kernels of studies: a .cu file of this folder, compiled once for the current GPU.

    kernels = ReferenceKernels("study_pool.cu")
    kernels.launch("caffe_forward", blocks, [x_ptr, y_ptr, ...], stream)

A file is compiled after real.cuh, with float32 as Real, states THREADS of its own, and has kernels as those of
vdnn.runtime.backends.cuda.source have. No training runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.source import OPTIONS, constants, convert, signatures


@cache
def reference_source(name: str) -> str:
    """The text to be compiled of a file, each part after a #line directive."""
    files = {part: resources.files("vdnn.runtime.backends.cuda") / part for part in ("real.cuh",)}
    files[name] = resources.files("vdnn.bench") / name
    text = "".join(f'#line 1 "{part}"\n{file.read_text(encoding="utf-8")}\n' for part, file in files.items())
    return f"#define STORAGE float\n{text}"


class ReferenceKernels:
    """Compiled and loaded at once, as must be before a capture."""

    def __init__(self, name: str) -> None:
        text = reference_source(name)
        self._signatures, self.threads = signatures(text), constants(text)["THREADS"]
        module = load_cupy().RawModule(code=text, options=OPTIONS)
        self._functions = {kernel: module.get_function(kernel) for kernel in self._signatures}
        for function in self._functions.values():
            int(function.num_regs)  # has the driver load it

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
        """Queue kernel `name` in `blocks` blocks on `stream`; args in the order of its signature, addresses as int."""
        if not 0 < blocks < INDEX_LIMIT:
            raise VdnnError(f"kernel '{name}': expected from 1 to {INDEX_LIMIT - 1} blocks, got {blocks}")
        values = convert(name, self._signatures[name], args)
        with stream:
            self._functions[name]((blocks,), (self.threads,), values)
