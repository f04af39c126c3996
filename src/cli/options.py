"""What the commands share: options that override a configuration, and errors that become one line and an exit code.

parser = Parser(prog="vdnn-train")
add_config_options(parser, "hardware profile of the simulated device")
config = read_config(parser.parse_args())
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from vdnn.errors import ConfigError
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL, POLICIES
from vdnn.runtime.backend import Caps
from vdnn.runtime.config import AUTO_LAYOUT, Config, load_config
from vdnn.runtime.config_file import place_of, read
from vdnn.runtime.devices import DEFAULT_PROFILE
from vdnn.runtime.yaml_lines import shorten
from vdnn.units import format_bytes

OVERRIDES = {
    "-b/--batch-size": "train.batch_size",
    "--epochs": "train.epochs",
    "--iterations": "train.iterations",
    "--lr": "optimizer.lr",
    "--seed": "train.seed",
    "--output": "output",
    "--device": "device",
    "--profile": "profile",
    "--precision": "precision",
    "--policy": "memory.policy",
    "--algorithms": "memory.algorithms",
    "--layout": "memory.layout",
    "--memory-limit": "memory.limit",
    "--host-limit": "memory.host_limit",
    "--workspace-limit": "memory.workspace_limit",
}
"""Option → key of the configuration; values are checked there, once."""
TEXTS = frozenset(("--output", "--device", "--profile", "--precision", "--policy", "--algorithms", "--layout"))
"""Options whose value is text as it stands, whatever YAML would make of it."""


EMULATION = {
    name: f"precision {name} is emulated on device cpu: stored in {name}, computed in fp32, slower than fp32"
    for name in ("bf16", "fp16")
}
"""What to say of precisions that the cpu emulates."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says what there is)\n")


def add_config_options(parser: argparse.ArgumentParser, profile_help: str) -> None:
    """CONFIG and the options that plan and train have in common."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged one such as lenet")
    parser.add_argument("-b", "--batch-size", metavar="N", help="images per step")
    parser.add_argument("--policy", metavar="P", help=f"what leaves the device: {', '.join(POLICIES)}")
    parser.add_argument("--algorithms", metavar="A", help=f"{MEMORY_OPTIMAL} or {PERFORMANCE_OPTIMAL}")
    parser.add_argument(
        "--layout",
        metavar="L",
        help="of images and filters in memory: nchw, nhwc, chwn; study: of each layer, by channels and images; "
        "shortest: of each layer, by measured times, so that equal commands may choose other layouts (on cpu with "
        f"deterministic: true by estimates: always the same); auto: {AUTO_LAYOUT}",
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="device bytes, such as 12GiB")
    parser.add_argument("--host-limit", metavar="BYTES", help="host bytes for offloaded maps")
    parser.add_argument("--workspace-limit", metavar="BYTES", help="most workspace of one convolution")
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda or simulated")
    parser.add_argument("--profile", metavar="NAME", help=profile_help)
    parser.add_argument("--precision", metavar="P", help="fp32, tf32, bf16 or fp16; weights are kept in fp32 in any")
    parser.add_argument("--seed", metavar="N", help="of weights, order and dropout")
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override any key of CONFIG"
    )


def read_config(arguments: argparse.Namespace, extra: Sequence[str] = ()) -> Config:
    """The configuration with -o and then the named options applied; an error in one of these names the option."""
    named = _named(arguments)
    texts = {OVERRIDES[flag]: value for flag, value in named.items() if flag in TEXTS}
    written = {f"-o {shorten(f'{OVERRIDES[flag]}={value}')}": flag for flag, value in named.items()}
    values = [f"{OVERRIDES[flag]}={value}" for flag, value in named.items() if flag not in TEXTS]
    try:
        return load_config(arguments.config, [*arguments.overrides, *extra, *values], texts)
    except ConfigError as error:
        flag = written.get(error.file or "")
        if flag is None:
            raise
        text = str(error).removeprefix(f"{error.file}: ").removeprefix(f"{OVERRIDES[flag]}: ")
        raise ConfigError(f"{flag}: {text}") from error


def _named(arguments: argparse.Namespace) -> dict[str, str]:
    """Named options that were given, with their values."""
    found = {flag: getattr(arguments, flag.rpartition("--")[2].replace("-", "_"), None) for flag in OVERRIDES}
    return {flag: value for flag, value in found.items() if value is not None}


def limit_words(arguments: argparse.Namespace, config: Config, caps: Caps, budget_bytes: int) -> str:
    """Where the device limit comes from, and what CUDA takes of it: "--memory-limit", "vgg16.yaml"."""
    stated = config.memory.limit
    if stated is None:
        stated = caps.memory_bytes
        words = f"profile {config.profile or DEFAULT_PROFILE}" if caps.simulated else "what this machine has free"
    elif arguments.memory_limit is not None:
        words = "--memory-limit"
    else:
        _, places = read(arguments.config, arguments.overrides)
        file = place_of(("memory", "limit"), places).file
        words = file.partition("=")[0] if file.startswith("-o ") else file
    if budget_bytes < stated:
        words += f", {format_bytes(stated)} less {format_bytes(stated - budget_bytes)} that CUDA itself holds"
    return words


def unread_profile(config: Config, caps: Caps) -> str | None:
    """A sentence if a profile is given that this device does not read."""
    if config.profile is None or caps.simulated:
        return None
    return f"profile '{config.profile}' is not read by device {caps.name}, only by --device simulated"


def unmet_precision(config: Config, caps: Caps, *, plans: bool = True) -> str | None:
    """A sentence if this device computes, or models, another precision than was asked for, or emulates it.

    plans: whether bytes of a plan are shown too, which are those of the precision asked for.
    """
    asked, device = config.precision, caps.name
    if asked == caps.precision:
        return EMULATION[asked] if device == "cpu" and asked in EMULATION else None
    if caps.simulated:
        bytes_too = ", bytes are as asked for" if plans and config.dtype != "float32" else ""
        return f"precision {asked} is for device cuda; on device {device} times are modelled in {caps.precision}" + (
            bytes_too
        )
    return f"precision {asked} is for device cuda; on device {device} products are computed in {caps.precision}"


def unmodelled_layout(config: Config, caps: Caps) -> str | None:
    """A sentence if a layout was taken that nobody named, is modelled as another, or is little tried on this device."""
    if config.layout_policy_on(caps.name) is not None:
        same = f"profiles know NCHW: times of layers on device {caps.name} are the same in every layout"
        return same if caps.simulated else None
    layout = config.layout_on(caps.name).lower()
    if layout == "nchw":
        return None
    name = f"layout {layout}"
    if config.memory.layout == "auto":
        name += f" (taken for precision {config.precision}; --layout nchw keeps the other)"
    if caps.name == "cuda" and layout == "chwn":
        return f"{name}: its convolutions use tensor cores at the TF32 rate at most, and none in fp32"
    if not caps.simulated:
        return None
    return f"{name} is planned, but profiles know NCHW: times on device {caps.name} are of that"
