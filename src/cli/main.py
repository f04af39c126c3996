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

from vdnn import __version__
from vdnn.cli import algos, doctor, layouts, paper_tables, plan
from vdnn.cli.options import Parser


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = Parser(prog="vdnn", description="Plan and inspect; `vdnn-train CONFIG` trains.")
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (plan, algos, layouts, paper_tables, doctor):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    return int(arguments.run(arguments))
