"""cuDNN 9 and cuBLAS, found in installed wheels or on the system and loaded once, exactly one copy of each.

    cudnn = load_cudnn()
    print(cudnn.path, cudnn.version_text, cudnn.cublas.path)

Nothing is loaded at import. A wheel (nvidia-cudnn-cu12 or -cu13) puts libcudnn.so.9 in nvidia/cudnn/lib of a folder on
sys.path; cuBLAS and NVRTC lie in nvidia/cu13/lib, or in nvidia/cublas/lib and nvidia/cuda_nvrtc/lib for CUDA 12.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vdnn.errors import BackendUnavailable
from vdnn.runtime.driver import find_driver

INSTALL = "install the libraries with: pip install 'vdnn[cuda13]' (or 'vdnn[cuda12]' for a driver older than 580)"
CUDNN_SONAME = "libcudnn.so.9"
CUDNN_FOLDERS = ("nvidia/cudnn/lib",)
MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class CublasLibrary:
    """The loaded cuBLAS: where its file lies, and its version as (major, minor, patch)."""

    path: str
    version: tuple[int, int, int]
    dll: ctypes.CDLL

    @property
    def version_text(self) -> str:
        """The version as people write it, "13.1.0"."""
        return ".".join(str(part) for part in self.version)


@dataclass(frozen=True, slots=True)
class CudnnLibrary:
    """The loaded cuDNN and what it stands on.

    Args:
        path: the file that is mapped into this process.
        version: cudnnGetVersion, 91901 for 9.19.1.
        cuda_major: CUDA version that this build is for, 12 or 13.
        cublas: the cuBLAS that cuDNN will find.
        nvrtc_path: the runtime compiler; None if there is none (cuDNN then offers no runtime-compiled plans).
    """

    path: str
    version: int
    cuda_major: int
    dll: ctypes.CDLL
    cublas: CublasLibrary
    nvrtc_path: str | None

    @property
    def version_text(self) -> str:
        """The version as people write it, "9.19.1"."""
        return f"{self.version // 10000}.{self.version % 10000 // 100}.{self.version % 100}"


def wheel_copies(soname: str, folders: Sequence[str], roots: Sequence[str] | None = None) -> list[str]:
    """Files called `soname` in `folders` below each of `roots` (sys.path if None), in that order, each once."""
    found: dict[Path, str] = {}
    for root in sys.path if roots is None else roots:
        for place in (Path(root) / folder / soname for folder in folders if root):
            # the path as it is listed, not where a link leads: the loader looks for the other libraries beside it
            if place.is_file():
                found.setdefault(place.resolve(), str(place))
    return list(found.values())


def mapped_copies(soname: str, maps: Path = MAPS) -> list[str]:
    """Files of this library that the process has mapped already: `soname`, or it with more version numbers."""
    if not maps.is_file():
        return []
    # a line is: addresses, permissions, offset, device, inode, path
    rows = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines())
    paths = dict.fromkeys(row[5].strip() for row in rows if len(row) == 6)
    return [path for path in paths if Path(path).name == soname or Path(path).name.startswith(f"{soname}.")]


def require_one_copy(soname: str, maps: Path = MAPS) -> str | None:
    """The path of the only mapped copy, None if none is mapped; BackendUnavailable names the copies if several are."""
    copies = mapped_copies(soname, maps)
    if len(copies) > 1:
        raise BackendUnavailable(
            f"this process has loaded {len(copies)} copies of {soname}: {' and '.join(copies)}; expected one, because "
            "two keep separate states on one GPU. Remove one of them, or unset LD_LIBRARY_PATH if it names one"
        )
    return copies[0] if copies else None


def open_library(soname: str, folders: Sequence[str], roots: Sequence[str] | None = None) -> tuple[ctypes.CDLL, str]:
    """Load one library and say where it lies.

    A copy that the process has already is used first, then the wheels below `roots` (sys.path if None), then the
    system loader with LD_LIBRARY_PATH. BackendUnavailable lists what was tried.
    """
    present = require_one_copy(soname)
    tried = []
    for name in [present] if present else [*wheel_copies(soname, folders, roots), soname]:
        try:
            dll = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name} ({error})")
            continue
        return dll, require_one_copy(soname) or name
    searched = ", ".join(folders)
    raise BackendUnavailable(
        f"{soname} cannot be loaded; looked into {searched} on sys.path; tried {'; '.join(tried)}; {INSTALL}"
    )


@cache
def load_cublas(cuda_major: int) -> CublasLibrary:
    """cuBLAS of CUDA 12 or 13 with its cublasLt; BackendUnavailable says what was tried."""
    folders = (f"nvidia/cu{cuda_major}/lib", "nvidia/cublas/lib")
    # libcublas needs libcublasLt: loading it first keeps both from the same folder
    open_library(f"libcublasLt.so.{cuda_major}", folders)
    dll, path = open_library(f"libcublas.so.{cuda_major}", folders)
    version = []
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
        value = ctypes.c_int()
        dll.cublasGetProperty(ctypes.c_int(part), ctypes.byref(value))
        version.append(value.value)
    return CublasLibrary(path, (version[0], version[1], version[2]), dll)


@cache
def load_cudnn() -> CudnnLibrary:
    """cuDNN 9 with cuBLAS and, if there is one, NVRTC, all of one CUDA version; needs no GPU.

    BackendUnavailable if cuDNN or cuBLAS is missing (cuDNN ends the process if it cannot find cuBLAS), or if two copies
    of cuDNN are loaded.
    """
    dll, path = open_library(CUDNN_SONAME, CUDNN_FOLDERS)
    dll.cudnnGetVersion.restype = ctypes.c_size_t
    dll.cudnnGetCudartVersion.restype = ctypes.c_size_t
    cuda_major = dll.cudnnGetCudartVersion() // 1000
    cublas = load_cublas(cuda_major)
    try:
        nvrtc: str | None = open_library(
            f"libnvrtc.so.{cuda_major}", (f"nvidia/cu{cuda_major}/lib", "nvidia/cuda_nvrtc/lib")
        )[1]
    except BackendUnavailable:
        nvrtc = None
    return CudnnLibrary(path, dll.cudnnGetVersion(), cuda_major, dll, cublas, nvrtc)


def load_cupy() -> Any:
    """CuPy; BackendUnavailable says how to get it, or that it would not help."""
    try:
        import cupy
    except ImportError as error:
        driver = find_driver()
        if not driver.gpus:
            raise BackendUnavailable(f"device 'cuda' is not available: {driver.finding}; run this on a GPU") from error
        raise BackendUnavailable(f"CuPy cannot be imported ({error}); pip install 'vdnn[cuda13]'") from error
    return cupy
