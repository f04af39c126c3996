"""vdnn doctor: what was found on this machine, and what that means.

vdnn doctor
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata

import psutil

from vdnn import __version__
from vdnn.cli.options import guarded
from vdnn.memory.costs import CopyRates
from vdnn.runtime.devices import find_driver, open_device
from vdnn.runtime.machine import blas_name, copy_gbps, gemm_gflops
from vdnn.runtime.profile import load_profile, profile_names
from vdnn.units import format_bytes

LIBRARIES = ("numpy", "pyyaml", "pydantic", "rich", "safetensors", "psutil", "matplotlib")
GPU_LIBRARIES = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-ml-py")


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
    driver = find_driver()
    print(f"GPU: {driver.finding}")
    print(f"GPU libraries: {', '.join(f'{name} {version(name)}' for name in GPU_LIBRARIES)}")
    print("CUDA: this version of vdnn trains on the CPU and plans for GPUs by profile; it has no CUDA backend yet")
    backend, reason = open_device("auto")
    print(f"device auto: {backend.caps.name} ({reason})")
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


def offload_words(rates: CopyRates, peak_gflops: float) -> str:
    """What copy rates mean for a convolution whose input is offloaded beside it."""
    flops_per_byte = peak_gflops / rates.d2h_gbps
    return (
        f"copies {rates.d2h_gbps:g} / {rates.h2d_gbps:g} GB/s: an offload is hidden where a layer does at least "
        f"{flops_per_byte:,.0f} operations per byte of its input"
    )
