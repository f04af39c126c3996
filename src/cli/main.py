"""vdnn COMMAND: everything but training.

vdnn plan vgg16 --memory-limit 12GiB
vdnn algos vgg16 -b 256
vdnn layouts explain alexnet --layout study
vdnn tables fig14
vdnn doctor
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vdnn import __version__
from vdnn.cli import algos, doctor, layouts, paper_tables, plan
from vdnn.cli.options import Parser
from vdnn.runtime.streams import CLOSED, run_program


class CommandParser(Parser):
    """A Parser that refuses itself what it does not know, so that a command's error names the command's own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = CommandParser(
        prog="vdnn",
        description="Plan and inspect; `vdnn-train CONFIG` trains.",
        epilog="exit codes of all commands: 0 done, 1 the system refused, 2 bad input, 130 / 143 interrupted, "
        f"{CLOSED} whoever read the output has gone; `vdnn COMMAND --help` says what else",
    )
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (plan, algos, layouts, paper_tables, doctor):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def run() -> int:
        arguments = make_parser().parse_args(argv)
        return int(arguments.run(arguments))

    return run_program("vdnn", run)
