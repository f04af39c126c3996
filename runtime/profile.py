"""CostTables from hardware profiles: what an op should take on a machine that is described, not present.

    costs = model_costs(program, load_profile("titan-x-maxwell"))

A convolution takes its operations at the algorithm's share of the peak, or its bytes at memory speed if that is longer;
other ops take their bytes. FFT algorithms take the operations of the complex products and the traffic of the
transforms. Every such number is a model and says so in `CostTable.source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from math import prod
from pathlib import Path

import yaml

from vdnn.errors import ConfigError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import TensorSpec
from vdnn.memory.costs import Candidate, CopyRates, CostTable
from vdnn.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Method:
    """One convolution algorithm of a profile: share of peak, workspace formula, determinism."""

    efficiency: float
    workspace: str = "none"
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine in numbers; see the comments in profiles/*.yaml for their sources."""

    name: str
    description: str
    memory_bytes: int
    peak_gflops: float
    memory_gbps: float
    memory_efficiency: float
    launch_us: float
    copies: CopyRates
    algorithms: Mapping[str, Mapping[str, Method]]


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
        data = yaml.safe_load(text)
        methods = {
            kind: {label: Method(**fields) for label, fields in rows.items()}
            for kind, rows in data["algorithms"].items()
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
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"profile '{name}' cannot be used: {type(error).__name__}: {error}", file=name) from error


def model_costs(program: Program, profile: Profile) -> CostTable:
    """The CostTable of every op of `program` on `profile`; equal convolutions are computed once."""
    table: dict[str, tuple[Candidate, ...]] = {}
    known: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
    for op in program.ops:
        specs = operands(op, program)
        key = (op.kind, tuple(spec.shape for spec in specs.values()), str(op.attrs))
        if key not in known:
            known[key] = model_candidates(op, specs, profile)
        table[op.name] = known[key]
    return CostTable(table, profile.copies, f"modelled by profile {profile.name}")


@dataclass(frozen=True, slots=True)
class ConvSize:
    """A convolution in numbers, whichever direction: N, C, H, W, K, R, S, P, Q, groups, and its attributes."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    p: int
    q: int
    groups: int
    stride: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def flops(self) -> float:
        """Operations of any of the three directions: 2 N K P Q (C / groups) R S."""
        return 2.0 * self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s


def operands(op: Op, program: Program) -> dict[str, TensorSpec]:
    """The tensors of an op by argument name."""
    return {arg: program.tensors[t] for arg, t in (*op.reads.items(), *op.writes.items())}


def conv_size(op: Op, specs: Mapping[str, TensorSpec]) -> ConvSize:
    """Sizes of a conv.forward, conv.dgrad or conv.wgrad op from its operands."""
    shape = {arg: spec.shape for arg, spec in specs.items()}
    x, y = shape.get("x") or shape["dx"], shape.get("y") or shape["dy"]
    k, _, r, s = shape.get("w") or shape["dw"]
    attrs = op.attrs
    stride, dilation = tuple(attrs["stride"]), tuple(attrs["dilation"])
    return ConvSize(x[0], x[1], x[2], x[3], k, r, s, y[2], y[3], attrs["groups"], stride, dilation)


def model_candidates(op: Op, specs: Mapping[str, TensorSpec], profile: Profile) -> tuple[Candidate, ...]:
    """Candidates of one op on `profile`, fastest first."""
    moved = sum(spec.nbytes for arg, spec in specs.items() if arg != "workspace")
    moved += sum(specs[arg].nbytes for arg in op.accumulate)
    bytes_ms = moved / (profile.memory_gbps * profile.memory_efficiency * 1e6) + profile.launch_us / 1000
    peak = profile.peak_gflops * 1e6  # operations per ms
    methods = profile.algorithms.get(op.kind)
    if methods is None:
        gemm = op.kind.startswith("linear.") and "bgrad" not in op.kind
        flops_ms = _linear_flops(specs) / (0.6 * peak) if gemm else 0.0
        return (Candidate("default", max(bytes_ms, flops_ms)),)
    size = conv_size(op, specs)
    rows = []
    for label, method in methods.items():
        workspace = WORKSPACES[method.workspace](size)
        if workspace is None:
            continue
        flops, extra = size.flops, 0
        if method.workspace.startswith("fft"):
            flops, extra = _fft_flops(size, method.workspace), 3 * workspace
        extra_ms = extra / (profile.memory_gbps * profile.memory_efficiency * 1e6)
        rows.append(
            Candidate(
                label, max(bytes_ms, flops / (method.efficiency * peak) + extra_ms), workspace, method.deterministic
            )
        )
    return tuple(sorted(rows, key=lambda c: (c.time_ms, c.workspace_bytes)))


def _linear_flops(specs: Mapping[str, TensorSpec]) -> float:
    weight, other = specs.get("w") or specs["dw"], specs.get("x") or specs["dy"]
    return 2.0 * other.shape[0] * prod(weight.shape)


def _spectrum(size: ConvSize, workspace: str) -> tuple[int, int, int] | None:
    """Rows, half columns and number of tiles of the transformed planes; None where FFT does not apply."""
    if size.stride != (1, 1) or size.dilation != (1, 1) or max(size.r, size.s) > 32 or size.groups != 1:
        return None
    if workspace == "fft_tiling":
        tiles = -(-size.p // (32 - size.r + 1)) * -(-size.q // (32 - size.s + 1))
        return 32, 17, tiles
    rows, columns = (1 << (n - 1).bit_length() for n in (size.h + size.r - 1, size.w + size.s - 1))
    return (rows, columns // 2 + 1, 1) if max(rows, columns) <= 256 else None


def _fft_bytes(size: ConvSize, workspace: str) -> int | None:
    plane = _spectrum(size, workspace)
    if plane is None:
        return None
    rows, columns, tiles = plane
    if workspace == "fft_tiling":  # one image's tiles at a time
        return 8 * rows * columns * (tiles * (size.c + size.k) + size.c * size.k)
    return 8 * rows * columns * (size.n * (size.c + size.k) + size.c * size.k)


def _fft_flops(size: ConvSize, workspace: str) -> float:
    """Complex products (8 operations each) over the spectrum; the transforms are counted as traffic."""
    rows, columns, tiles = _spectrum(size, workspace) or (0, 0, 0)
    return 8.0 * rows * columns * tiles * size.n * size.c * size.k


def _winograd_bytes(size: ConvSize) -> int | None:
    """Non-fused F(4x4, 3x3): 6x6 transforms of x, w and y (Lavin and Gray 2016)."""
    if (size.r, size.s) != (3, 3) or size.stride != (1, 1) or size.dilation != (1, 1) or size.groups != 1:
        return None
    tiles = size.n * -(-size.p // 4) * -(-size.q // 4)
    return 4 * 36 * (tiles * (size.c + size.k) + size.c * size.k)


WORKSPACES: Mapping[str, Callable[[ConvSize], int | None]] = {
    "none": lambda size: 0,
    "indices": lambda size: 4 * (size.c // size.groups) * size.r * size.s,
    "columns": lambda size: 4 * size.n * size.c * size.r * size.s * size.p * size.q,
    "fft": lambda size: _fft_bytes(size, "fft"),
    "fft_tiling": lambda size: _fft_bytes(size, "fft_tiling"),
    "winograd": _winograd_bytes,
}
"""Workspace in bytes by formula name; None where the algorithm does not apply."""
