"""What the commands share: options that override a configuration, and errors that become one line and an exit code.

parser = Parser(prog="vdnn-train")
add_config_options(parser)
config = read_config(parser.parse_args())
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from vdnn.errors import VdnnError
from vdnn.memory.policy import MEMORY_OPTIMAL, PERFORMANCE_OPTIMAL, POLICIES
from vdnn.runtime.config import Config, load_config

OVERRIDES = {
    "batch_size": "train.batch_size",
    "epochs": "train.epochs",
    "iterations": "train.iterations",
    "lr": "optimizer.lr",
    "seed": "train.seed",
    "output": "output",
    "device": "device",
    "profile": "profile",
    "precision": "precision",
    "policy": "memory.policy",
    "algorithms": "memory.algorithms",
    "memory_limit": "memory.limit",
    "host_limit": "memory.host_limit",
    "workspace_limit": "memory.workspace_limit",
}
"""Option → key of the configuration; values are checked there, once."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says what there is)\n")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """CONFIG and the options that plan and train have in common."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged one such as lenet")
    parser.add_argument("-b", "--batch-size", metavar="N", help="images per step")
    parser.add_argument("--policy", metavar="P", help=f"what leaves the device: {', '.join(POLICIES)}")
    parser.add_argument("--algorithms", metavar="A", help=f"{MEMORY_OPTIMAL} or {PERFORMANCE_OPTIMAL}")
    parser.add_argument("--memory-limit", metavar="BYTES", help="device bytes, such as 12GiB")
    parser.add_argument("--host-limit", metavar="BYTES", help="host bytes for offloaded maps")
    parser.add_argument("--workspace-limit", metavar="BYTES", help="most workspace of one convolution")
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda or simulated")
    parser.add_argument("--profile", metavar="NAME", help="hardware profile of the simulated device")
    parser.add_argument("--precision", metavar="P", help="fp32")
    parser.add_argument("--seed", metavar="N", help="of weights, order and dropout")
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override any key of CONFIG"
    )


def read_config(arguments: argparse.Namespace, extra: Sequence[str] = ()) -> Config:
    """The configuration with -o and then the named options applied."""
    named = [
        f"{key}={getattr(arguments, name)}"
        for name, key in OVERRIDES.items()
        if getattr(arguments, name, None) is not None
    ]
    return load_config(arguments.config, [*arguments.overrides, *extra, *named])


def guarded(program: str, body: Callable[[], int]) -> int:
    """Run `body`; an error that the user can do something about becomes one line on standard error and an exit code."""
    try:
        return body()
    except VdnnError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone; say nothing more
        return 141
    except OSError as error:  # a disk that is full, memory that the system does not give
        where = f" '{error.filename}'" if error.filename else ""
        print(f"{program}: the system refused{where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"{program}: the system has no more memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
