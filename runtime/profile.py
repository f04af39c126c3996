"""CostTables from hardware profiles: what an op should take on a machine that is described, not present.

    costs = model_costs(program, load_profile("titan-x-maxwell"))

A convolution takes its operations at the algorithm's share of the peak, or its bytes at memory speed if that is longer;
other ops take their bytes. FFT algorithms take the operations of the complex products and the traffic of the spectra
(vdnn.runtime.spectra). A first convolution takes what it would of plain images (vdnn.runtime.plain_images). Every such
number is a model and says so in `CostTable.source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import yaml

from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.runtime.plain_images import PlainImages
from vdnn.runtime.spectra import WORKSPACES, ConvSize, conv_size, spectra_bytes, spectrum, spectrum_flops
from vdnn.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Method:
    """One convolution algorithm of a profile: how fast on large layers, and what makes it slower on others.

    Args:
        efficiency: share of the profile's peak that the products of a large layer reach.
        workspace: a formula of WORKSPACES.
        depth: at this depth of the filter matrix half of `efficiency` is reached (0: at any depth all of it): C R S in
            forward and wgrad, K R S in dgrad; for an FFT how many products each sum has: C, K in dgrad, N in wgrad.
        tile: output channels (C in dgrad) are computed in tiles of so many; a partly filled one takes as long.
        thin: factor on the efficiency where an image has at most 4 channels.
        passes: how often the spectra of an FFT cross memory, by the largest side of their plane.
    """

    efficiency: float
    workspace: str = "none"
    deterministic: bool = True
    depth: float = 0.0
    tile: int = 1
    thin: float = 1.0
    passes: Mapping[int, float] = field(default_factory=lambda: {256: 3.0})


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine in numbers; see the comments in profiles/*.yaml for their sources.

    Args:
        memory_efficiency: share of `memory_gbps` that a streaming kernel reaches; `kernels` has those of kinds that do
            not stream, such as "pool".
        linear_efficiency: share of the peak in fully connected layers.
    """

    name: str
    description: str
    memory_bytes: int
    peak_gflops: float
    memory_gbps: float
    memory_efficiency: float
    launch_us: float
    copies: CopyRates
    algorithms: Mapping[str, Mapping[str, Method]]
    kernels: Mapping[str, float] = field(default_factory=dict)
    linear_efficiency: float = 0.6


def profile_names() -> list[str]:
    """Names of the packaged profiles."""
    files = resources.files("vdnn.runtime.profiles").iterdir()
    return sorted(Path(f.name).stem for f in files if f.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """A packaged profile by name, or one from a YAML file by path; ConfigError if it cannot be read."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"profile file '{name}' does not exist", file=name)
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        source = resources.files("vdnn.runtime.profiles") / f"{name}.yaml"
        if not source.is_file():
            known = profile_names()
            raise ConfigError(f"unknown profile '{name}', known: {', '.join(known)}", key=name, known=known)
        text = source.read_text(encoding="utf-8")
    try:
        return make_profile(yaml.safe_load(text))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"profile '{name}' cannot be used: {type(error).__name__}: {error}", file=name) from error


def make_profile(data: Mapping[str, Any]) -> Profile:
    """The profile that a YAML file's `data` describes; a KeyError, TypeError or ValueError if it is not one."""
    methods = {
        kind: {label: Method(**fields) for label, fields in rows.items()} for kind, rows in data["algorithms"].items()
    }
    return Profile(
        data["name"],
        data["description"],
        parse_bytes(data["memory"]),
        float(data["peak_gflops"]),
        float(data["memory_gbps"]),
        float(data["memory_efficiency"]),
        float(data["launch_us"]),
        CopyRates(**data["copies"]),
        methods,
        {kind: float(share) for kind, share in data.get("kernels", {}).items()},
        float(data.get("linear_efficiency", 0.6)),
    )


def model_costs(program: Program, profile: Profile) -> CostTable:
    """The CostTable of every op of `program` on `profile`; equal convolutions are computed once."""
    table: dict[str, tuple[Candidate, ...]] = {}
    known: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
    images = PlainImages.of(program)
    for op in program.ops:
        specs = operands(op, program)
        plain, others = images.plain(op, specs)
        shapes = [tuple(spec.shape for spec in group.values()) for group in (specs, others)]
        key = (op.kind, *shapes, str(op.attrs), str(plain.attrs))
        if key not in known:
            known[key] = model_candidates(op, specs, profile, images)
        table[op.name] = known[key]
    return CostTable(table, profile.copies, f"modelled by profile {profile.name}")


def operands(op: Op, program: Program) -> dict[str, TensorSpec]:
    """The tensors of an op by argument name."""
    return {arg: program.tensors[t] for arg, t in (*op.reads.items(), *op.writes.items())}


def model_candidates(
    op: Op, specs: Mapping[str, TensorSpec], profile: Profile, images: PlainImages | None = None
) -> tuple[Candidate, ...]:
    """Candidates of one op on `profile`, fastest first: times of plain images if `images` knows them, actual bytes."""
    stored = conv_size(op, specs) if op.kind in profile.algorithms else None
    op, specs = images.plain(op, specs) if images is not None else (op, specs)
    share = profile.kernels.get(op.kind.split(".")[0], profile.memory_efficiency)
    moved = sum(spec.nbytes for arg, spec in specs.items() if arg != "workspace")
    moved += sum(specs[arg].nbytes for arg in op.accumulate)
    launch_ms = profile.launch_us / 1000
    bytes_ms = moved / (profile.memory_gbps * share * 1e6) + launch_ms
    peak = profile.peak_gflops * 1e6  # operations per ms
    methods = profile.algorithms.get(op.kind)
    if methods is None or stored is None:
        gemm = op.kind.startswith("linear.") and "bgrad" not in op.kind
        flops_ms = _linear_flops(specs) / (profile.linear_efficiency * peak) if gemm else 0.0
        return (Candidate("default", max(bytes_ms, flops_ms)),)
    size = conv_size(op, specs)
    rows = []
    for label, method in methods.items():
        workspace = WORKSPACES[method.workspace](stored)
        if workspace is None or WORKSPACES[method.workspace](size) is None:
            continue
        work_ms = _conv_ms(size, method, profile) + launch_ms
        rows.append(Candidate(label, max(bytes_ms, work_ms), workspace, method.deterministic))
    return tuple(sorted(rows, key=lambda c: (c.time_ms, c.workspace_bytes)))


def _conv_ms(size: ConvSize, method: Method, profile: Profile) -> float:
    """Time of the products of a convolution, and of what an FFT moves besides."""
    reached = method.efficiency * profile.peak_gflops * 1e6
    plane = spectrum(size, method.workspace)
    filled = size.rows / (-(-size.rows // method.tile) * method.tile)
    if plane is None:
        thin = method.thin if size.c // size.groups <= 4 else 1.0
        return size.flops / (reached * thin * filled * size.depth / (size.depth + method.depth))
    side = max(plane.rows, plane.columns)
    passes = next(times for most, times in sorted(method.passes.items()) if side <= most)
    moved = passes * sum(spectra_bytes(size, plane))
    products = size.products * (plane.tiles if size.direction == "wgrad" else 1)
    sums = products / (products + method.depth)
    return spectrum_flops(size, plane) / (reached * filled * sums) + moved / (
        profile.memory_gbps * profile.memory_efficiency * 1e6
    )


def _linear_flops(specs: Mapping[str, TensorSpec]) -> float:
    weight, other = specs.get("w") or specs["dw"], specs.get("x") or specs["dy"]
    return 2.0 * other.shape[0] * prod(weight.shape)
