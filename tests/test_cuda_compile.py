"""Every CUDA kernel compiles by NVRTC for the GPUs that vdnn supports; this needs no GPU."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import pytest

from vdnn.runtime.backends.cuda.source import MODULES, OPTIONS, STORAGE, signatures, source

COMPILED = (("sm_75", "float16"), ("sm_80", "bfloat16"), *(("sm_90", dtype) for dtype in STORAGE))
"""Every storage of activations, and every path that an architecture takes; but for the integers by which bfloat16 is
rounded before sm_80, which are compiled for the host too. All nine pairs take two minutes."""
FROM_CUPY = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy 14 adds to the options of a RawModule."""
FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
"""Where the wheels nvidia-cuda-nvrtc and nvidia-cuda-nvrtc-cu12 keep their libraries, in a folder of sys.path."""


@cache
def nvrtc() -> ctypes.CDLL:
    for place in sys.path:
        for folder in FOLDERS:
            for library in sorted(Path(place, folder).glob("libnvrtc.so.*")):
                return ctypes.CDLL(str(library))
    pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13)")


def compiled(text: str, *options: str) -> tuple[bytes, str]:
    """The cubin of `text`, empty if it does not compile, and the compiler's words."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"vdnn.cu", 0, None, None) == 0
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), words)
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, log) == 0
    if failed:
        return b"", log.value.decode()
    assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    cubin = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(program, cubin) == 0
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return cubin.raw, log.value.decode()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("architecture", "dtype"), COMPILED)
def test_every_kernel_compiles_without_a_word(architecture: str, dtype: str, module: str) -> None:
    cubin, log = compiled(source(dtype, module), *OPTIONS, *FROM_CUPY, f"-arch={architecture}")
    assert log.strip() == ""
    for name in signatures(source(module=module)):
        assert f".text.{name}\0".encode() in cubin


@pytest.mark.parametrize(("module", "name"), [(m, name) for m in MODULES for name in MODULES[m]])
def test_a_mistake_is_shown_with_its_file(module: str, name: str) -> None:
    wrong = source(module=module).replace(f'#line 1 "{name}"\n', f'#line 1 "{name}"\nint mistake = ;\n')
    cubin, log = compiled(wrong, *OPTIONS, *FROM_CUPY, "-arch=sm_90", "-fdevice-syntax-only")
    assert not cubin
    assert f"{name}(1): error" in log
