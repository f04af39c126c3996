"""What there is for training on a GPU: the libraries, each found or missing with a next step, and measured rates.

    for piece in find_pieces():
        print(piece.name, piece.text)
    survey = take_survey()                  # a few seconds; needs a GPU and all pieces that are needed

Rates are medians over CUDA events, of copies between pinned memory and the device as an offload makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from vdnn.errors import BackendUnavailable
from vdnn.memory.costs import CopyRates
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.libraries import CUDNN_SONAME, load_cudnn, load_cupy, require_one_copy
from vdnn.runtime.backends.cuda.pinned import PinnedSlab
from vdnn.units import GIB, MIB

COPY_BYTES = GIB
"""Bytes of one measured copy."""
ROUNDS = 5
GEMM_SIDE = 4096
"""Of the matrices of the measured product, 64 MiB each."""
GEMM_WORKSPACE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Piece:
    """A library: what was found in words, or why it is not usable and what to do; `needed` if nothing goes without."""

    name: str
    found: bool
    text: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Survey:
    """One GPU in numbers.

    Args:
        gpu, compute_capability, driver: in words.
        memory_bytes, free_bytes: of the card, as the driver tells them now.
        rates: of pinned copies of `copy_bytes`, measured.
        pinning_gbps: 10^9 bytes of host memory pinned per second.
        device_copy_gbps: of a copy within the device, read and write counted.
        gemm_gflops: 10^9 operations per second of a float32 matrix product without tensor cores.
    """

    gpu: str
    compute_capability: str
    driver: str
    memory_bytes: int
    free_bytes: int
    copy_bytes: int
    rates: CopyRates
    pinning_gbps: float
    device_copy_gbps: float
    gemm_gflops: float


def find_pieces() -> list[Piece]:
    """Every library that the cuda backend uses; needs no GPU and raises nothing.

    What is found through cuDNN is not listed where cuDNN is missing.
    """
    cupy, cudnn, nvml = _piece("CuPy", _cupy), _piece("cuDNN", _cudnn), _piece("NVML", _nvml, needed=False)
    through = [_piece("cuBLAS", _cublas), _piece("NVRTC", _nvrtc)] if cudnn.found else []
    both = [_piece("CUDA version", _one_cuda)] if cupy.found and cudnn.found else []
    return [cupy, cudnn, *through, *both, nvml]


def _piece(name: str, look: Callable[[], str], *, needed: bool = True) -> Piece:
    try:
        return Piece(name, True, look(), needed)
    except Exception as error:  # a broken installation raises anything, and to say so is the purpose
        text = str(error) if isinstance(error, BackendUnavailable) else f"{type(error).__name__}: {error}"
        return Piece(name, False, text, needed)


def _cupy() -> str:
    cupy = load_cupy()
    return f"{cupy.__version__} for CUDA {_version(cupy.cuda.runtime.runtimeGetVersion())}"


def _cudnn() -> str:
    library = load_cudnn()
    require_one_copy(CUDNN_SONAME)
    return f"{library.version_text} for CUDA {library.cuda_major}, {library.path} (the only copy)"


def _cublas() -> str:
    library = load_cudnn().cublas
    return f"{library.version_text}, {library.path}"


def _nvrtc() -> str:
    path = load_cudnn().nvrtc_path
    if path is None:
        raise BackendUnavailable(
            "libnvrtc, which compiles vdnn's kernels, is not installed; pip install 'vdnn[cuda13]' or 'vdnn[cuda12]'"
        )
    return path


def _one_cuda() -> str:
    cupy, cudnn = load_cupy().cuda.runtime.runtimeGetVersion() // 1000, load_cudnn().cuda_major
    if cupy != cudnn:
        raise BackendUnavailable(
            f"CuPy is for CUDA {cupy}, cuDNN for CUDA {cudnn}; uninstall the packages of one of them (names that end "
            f"in cuda{cudnn}x, cu{cudnn}), then pip install 'vdnn[cuda{cupy}]'"
        )
    return f"CuPy and cuDNN are both for CUDA {cupy}"


def _nvml() -> str:
    try:
        import pynvml
    except ImportError as error:
        raise BackendUnavailable(
            "not installed: the limit is checked against what all processes hold together; pip install nvidia-ml-py"
        ) from error
    pynvml.nvmlInit()
    return f"found, driver {_text(pynvml.nvmlSystemGetDriverVersion())}"


def take_survey(copy_bytes: int = COPY_BYTES) -> Survey:
    """Measure the current GPU.

    Takes 2 `copy_bytes` (at least 128 MiB each, for the product) on the device and as many pinned on the host, and
    gives them back. BudgetError if the system refuses to pin them; what CuPy raises if the GPU has no room.
    """
    cupy = load_cupy()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    free, total = runtime.memGetInfo()
    slab = PinnedSlab(2 * copy_bytes)
    try:
        device = int(runtime.malloc(2 * copy_bytes))
        try:
            rates, device_copy_gbps = measure_copies(cupy, device, slab.address, copy_bytes)
            gflops = measure_gemm(cupy, device)
        finally:
            runtime.free(device)
        pinning_gbps = slab.nbytes / slab.pinning_s / 1e9
    finally:
        slab.close()
    return Survey(
        gpu=_text(properties["name"]),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        driver=_driver(runtime),
        memory_bytes=int(total),
        free_bytes=int(free),
        copy_bytes=copy_bytes,
        rates=rates,
        pinning_gbps=pinning_gbps,
        device_copy_gbps=device_copy_gbps,
        gemm_gflops=gflops,
    )


def measure_copies(cupy: Any, device: int, host: int, nbytes: int) -> tuple[CopyRates, float]:
    """Rates between 2 `nbytes` on the device and as many pinned, and of a copy from one device half to the other."""
    runtime = cupy.cuda.runtime
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def copy(which: int, target: int, source: int, kind: int) -> Callable[[], None]:
        return lambda: runtime.memcpyAsync(target, source, nbytes, kind, streams[which].ptr)

    to_host = copy(0, host, device, runtime.memcpyDeviceToHost)
    from_host = copy(1, device + nbytes, host + nbytes, runtime.memcpyHostToDevice)
    within = copy(0, device + nbytes, device, runtime.memcpyDeviceToDevice)

    def gbps(moved: int, *copies: Callable[[], None]) -> float:
        return moved / _time_ms(cupy, streams, copies) / 1e6

    rates = CopyRates(gbps(nbytes, to_host), gbps(nbytes, from_host), gbps(2 * nbytes, to_host, from_host))
    return rates, gbps(2 * nbytes, within)


def measure_gemm(cupy: Any, device: int) -> float:
    """10^9 operations per second of a square float32 product of GEMM_SIDE in the memory at `device`."""
    runtime, side = cupy.cuda.runtime, GEMM_SIDE
    stream = cupy.cuda.Stream(non_blocking=True)
    matrix = np.random.default_rng(0).standard_normal((side, side), np.float32)
    a, b, c, workspace = (device + place * matrix.nbytes for place in range(4))
    for address in (a, b):
        runtime.memcpy(address, matrix.ctypes.data, matrix.nbytes, runtime.memcpyHostToDevice)
    runtime.deviceSynchronize()  # else another stream may read what has not arrived yet
    cublas = Cublas()
    try:
        cublas.bind(stream.ptr, workspace, GEMM_WORKSPACE_BYTES)
        time_ms = _time_ms(cupy, [stream], [lambda: cublas.gemm(side, side, side, a, b, c)])
    finally:
        cublas.close()
    return 2 * side**3 / time_ms / 1e6


def _time_ms(cupy: Any, streams: Sequence[Any], works: Sequence[Callable[[], None]]) -> float:
    """Median time of `works`, started together, until all streams are done; after one round to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        start = cupy.cuda.Event()
        start.record(streams[0])
        for stream in streams[1:]:
            stream.wait_event(start)
        for work in works:
            work()
        ends = []
        for stream in streams:
            end = cupy.cuda.Event()
            end.record(stream)
            ends.append(end)
        for stream in streams:
            stream.synchronize()
        times.append(max(float(cupy.cuda.get_elapsed_time(start, end)) for end in ends))
    return median(times[1:])


def _driver(runtime: Any) -> str:
    cuda = f"up to CUDA {_version(runtime.driverGetVersion())}"
    try:
        import pynvml

        pynvml.nvmlInit()
        return f"{_text(pynvml.nvmlSystemGetDriverVersion())}, {cuda}"
    except Exception:  # without NVML nobody tells the driver's own number
        return cuda


def _version(number: int) -> str:
    """13020 → "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
