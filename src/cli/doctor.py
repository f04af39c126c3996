"""vdnn doctor: what was found on this machine, and what that means.

vdnn doctor
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from math import ceil

import psutil

from vdnn import __version__
from vdnn.errors import VdnnError
from vdnn.memory.costs import CopyRates
from vdnn.runtime.backend import Caps
from vdnn.runtime.backends.cuda.survey import Piece, Survey, find_pieces, take_survey
from vdnn.runtime.devices import open_device
from vdnn.runtime.driver import Driver, find_driver
from vdnn.runtime.guard import guarded
from vdnn.runtime.machine import blas_name, copy_gbps, gemm_gflops
from vdnn.runtime.profile import load_profile, profile_names
from vdnn.units import GIB, format_bytes

LIBRARIES = ("numpy", "pyyaml", "pydantic", "rich", "safetensors", "psutil", "matplotlib")
GPU_LIBRARIES = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-ml-py")
INSTALL = "pip install 'vdnn[cuda13]' (driver 580 or newer), or 'vdnn[cuda12]' for an older driver"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="say what this machine has", description="Say what was found here.")
    parser.set_defaults(run=lambda arguments: guarded("vdnn doctor", doctor))


def doctor() -> int:
    """Print what was found."""
    memory = psutil.virtual_memory()
    print(f"vdnn {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"installed in: {os.path.dirname(sys.modules['vdnn'].__file__ or '')}")
    print(f"libraries: {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}")
    print(f"CPU: {os.cpu_count()} cores, {gemm_gflops():.0f} GFLOP/s (float32 matrix product, measured)")
    print(f"BLAS: {blas_name()}")
    print(
        f"memory: {format_bytes(memory.total)}, {format_bytes(memory.available)} available, "
        f"copies {copy_gbps():.1f} GB/s (one thread, measured)"
    )
    driver, pieces = find_driver(), find_pieces()
    print(f"GPU: {driver.finding}")
    print(f"GPU libraries: {', '.join(f'{name} {version(name)}' for name in GPU_LIBRARIES)}")
    for line in (*piece_lines(pieces), *verdict_lines(driver, pieces)):
        print(line)
    for line in device_lines():
        print(line, flush=True)
    for name in profile_names():
        profile = load_profile(name)
        print(f"profile {name}: {profile.description}; {offload_words(profile.copies, profile.peak_gflops)}")
    return 0


def version(name: str) -> str:
    """Installed version of a distribution, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def piece_lines(pieces: Sequence[Piece]) -> list[str]:
    """A line for every library of the cuda backend."""
    return [f"{piece.name}: {'' if piece.found else 'not usable: '}{piece.text}" for piece in pieces]


def verdict_lines(driver: Driver, pieces: Sequence[Piece]) -> list[str]:
    """Whether --device cuda can work, else everything that is missing for it and how to get it."""
    missing = [piece.name for piece in pieces if piece.needed and not piece.found]
    steps = []
    if not driver.gpus:
        steps.append("a GPU and its driver (nvidia-smi must list the GPU; in a container start it with --gpus all)")
    if missing:
        steps.append(f"{', '.join(missing)}: {INSTALL}")
    if not steps:
        return ["CUDA: all pieces are here"]
    return [f"CUDA: not usable here; vdnn trains on the CPU and plans for GPUs by profile. Needed: {'; '.join(steps)}"]


def device_lines() -> list[str]:
    """What a run with --device auto gets, and of a GPU what it can do."""
    # whatever a broken installation raises, the doctor's work is to say it
    try:
        backend, reason = open_device("auto")
    except Exception as error:
        return [f"device auto: none, the GPU does not work: {_words(error)}; use --device cpu until it does"]
    lines = [f"device auto: {backend.caps.name} ({reason})"]
    if backend.caps.name != "cuda":
        return lines
    try:
        return lines + survey_lines(take_survey(), backend.caps)
    except Exception as error:
        return [*lines, f"GPU 0: {backend.caps.description}; its rates cannot be measured: {_words(error)}"]


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, VdnnError) else f"{type(error).__name__}: {error}"


def survey_lines(survey: Survey, caps: Caps) -> list[str]:
    """A GPU in words; `caps` are those of the cuda backend on it."""
    rates, assumed = survey.rates, caps.rates
    seconds = 60 * GIB / 1e9 / survey.pinning_gbps
    return [
        f"GPU 0: {survey.gpu}, compute capability {survey.compute_capability}, driver {survey.driver}",
        f"GPU memory: {format_bytes(survey.memory_bytes)}, {format_bytes(survey.free_bytes)} free",
        f"GPU context: {format_bytes(caps.reserve_bytes)} held by CUDA, cuDNN, cuBLAS and kernels before there is any "
        "tensor; they count against memory.limit",
        f"pinned copies: to the host {rates.d2h_gbps:.1f} GB/s, from it {rates.h2d_gbps:.1f} GB/s, both at once "
        f"{rates.both_gbps:.1f} GB/s together ({format_bytes(survey.copy_bytes)} each, measured); plans count on "
        f"{assumed.d2h_gbps:g}, {assumed.h2d_gbps:g} and {assumed.both_gbps:g}",
        f"pinning: {survey.pinning_gbps:.1f} GB/s (measured): 60 GiB on the host take {seconds:.0f} s to get ready",
        f"GPU copies: {survey.device_copy_gbps:,.0f} GB/s within the device (read and write, measured)",
        f"GPU speed: {survey.gemm_gflops:,.0f} GFLOP/s (float32 matrix product without tensor cores, measured)",
        f"offloading: {offload_words(rates, survey.gemm_gflops)}; {filter_words(rates, survey.gemm_gflops)}",
    ]


def offload_words(rates: CopyRates, peak_gflops: float) -> str:
    """What copy rates mean for a convolution whose input is offloaded beside it."""
    flops_per_byte = peak_gflops / rates.d2h_gbps
    return (
        f"copies {rates.d2h_gbps:g} / {rates.h2d_gbps:g} GB/s: an offload is hidden where a layer does at least "
        f"{flops_per_byte:,.0f} operations per byte of its input"
    )


def filter_words(rates: CopyRates, gflops: float) -> str:
    """The same in filters of a 3x3 convolution of stride 1.

    It does 2 * 3 * 3 * K operations per number of its input, whatever N, C, H and W are: 4.5 K per byte of float32.
    Backward is two such convolutions for each map that comes back.
    """
    forward = ceil(gflops / rates.d2h_gbps / 4.5)
    backward = ceil(gflops / rates.h2d_gbps / 9)
    return (
        f"a 3x3 convolution at the speed of a matrix product hides the copy of its input to the host if it has at "
        f"least {forward} filters, and the copy back behind its backward pass with {backward}; with half of them half "
        "of the copy shows"
    )
