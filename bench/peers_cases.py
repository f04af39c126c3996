"""What is compared with PyTorch: cases by name, and what is known of one that has been measured.

    case = Case("vgg16", 256, "tf32", "torch-compile")
    case.key                                         # "vgg16:256 tf32 torch-compile"
    parse_program("torch-ckpt+accum4-12GiB").limit_bytes == 12 * 2**30

A program is `ours`, `ours-accumK` for a step in K slices, or `torch-WORD[+WORD...]`, with `-LIMIT` for what it may hold
on the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vdnn.errors import ConfigError
from vdnn.units import parse_bytes

PRECISIONS = ("fp32", "tf32", "bf16")
DEFAULT_NETWORKS = ("alexnet:128", "googlenet_bn:128", "resnet50:256", "vgg16:256", "overfeat:128", "vgg19:256")
DEFAULT_PROGRAMS = ("torch-compile", "ours")
DEFAULT_PRECISIONS = ("tf32", "bf16")
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How PyTorch takes a step; all of it with channels_last.

    Args:
        compiled: by torch.compile(mode="reduce-overhead").
        graph: the whole step, update included, in one CUDA graph.
        checkpoint: keep what crosses pools and blocks alone, and compute the rest again in backward.
        offload: keep what backward needs in pinned host memory (save_on_cpu).
        budget: share of the activations that the compiler may keep, the rest is computed again; None for its default.
        accumulate: slices of the batch, one after the other.
    """

    compiled: bool = False
    graph: bool = False
    checkpoint: bool = False
    offload: bool = False
    budget: float | None = None
    accumulate: int = 1


WORDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "compile": {"compiled": True},
    "graph": {"graph": True},
    "ckpt": {"checkpoint": True},
    "offload": {"offload": True},
    "budget": {"compiled": True, "budget": 0.5},
}
"""What a word changes in a Recipe; `accumK` besides."""
_PROGRAM = re.compile(
    r"(?P<base>ours(?:-accum(?P<slices>[1-9][0-9]*))?|torch-(?P<words>[a-z0-9+]+))(?:-(?P<limit>[0-9.]+[GM]iB))?"
)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that trains: PyTorch by `recipe`, or vdnn in so many `slices` where that is None; `limit_bytes` on the
    card, or None."""

    recipe: Recipe | None
    limit_bytes: int | None = None
    slices: int = 1


def parse_program(name: str) -> Program:
    """The program of that name; ConfigError if there is none."""
    match = _PROGRAM.fullmatch(name)
    if match is None:
        known = ", ".join(f"torch-{word}" for word in (*WORDS, "accumK"))
        raise ConfigError(
            f"expected {OURS}, {OURS}-accumK or one of {known}, with -LIMIT such as -12GiB if wanted, got '{name}'"
        )
    limit_bytes = parse_bytes(match["limit"]) if match["limit"] else None
    if match["words"] is None:
        return Program(None, limit_bytes, int(match["slices"] or 1))
    recipe = Recipe()
    for word in match["words"].split("+"):
        slices = re.fullmatch(r"accum([1-9][0-9]*)", word)
        if slices is None and word not in WORDS:
            raise ConfigError(f"program '{name}': expected words of {', '.join((*WORDS, 'accumK'))}, got '{word}'")
        recipe = replace(recipe, **({"accumulate": int(slices[1])} if slices else WORDS[word]))
    if recipe.graph and (recipe.compiled or recipe.offload):
        raise ConfigError(f"program '{name}': graph goes with neither compile nor offload; leave one of them out")
    return Program(recipe, limit_bytes)


@dataclass(frozen=True, slots=True)
class Case:
    """One process's work: a program that trains a network.

    Args:
        batch: images in a step.
        program: its name, see the module.
        repeat: which time this is measured in a run, from 1.
        device: "cuda", or "cpu" to try things out.
        options: overrides of the network's packaged configuration for both programs, such as "network.classes=10".
        ours: overrides for vdnn alone.
        seconds: of timed steps, about.
    """

    network: str
    batch: int
    precision: str
    program: str
    repeat: int = 1
    device: str = "cuda"
    options: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    seconds: float = 1.0

    @property
    def is_ours(self) -> bool:
        """Whether vdnn runs it."""
        return self.parsed.recipe is None

    @property
    def parsed(self) -> Program:
        """Its program."""
        return parse_program(self.program)

    @property
    def key(self) -> str:
        """Its name: what is done under it is not done again."""
        words = [f"{self.network}:{self.batch}", self.precision, self.program]
        words += [f"#{self.repeat}"] if self.repeat > 1 else []
        words += [self.device] if self.device != "cuda" else []
        return " ".join([*words, *self.options, *(self.ours if self.is_ours else ())])

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal case."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case that `to_json` described."""
        return cls(**{**data, "options": tuple(data["options"]), "ours": tuple(data["ours"])})


def parse_network(text: str) -> tuple[str, int]:
    """ "vgg16:256" → ("vgg16", 256); ConfigError if it is none."""
    name, _, batch = text.partition(":")
    if not name or not batch.isdecimal() or int(batch) < 1:
        raise ConfigError(f"expected NETWORK:IMAGES such as vgg16:256, got '{text}'")
    return name, int(batch)


def schedule(
    networks: Sequence[str], precisions: Sequence[str], programs: Sequence[str], *, closing: bool, **settings: Any
) -> list[Case]:
    """The cases network by network; with `closing` the first PyTorch program once more after the others.

    Two measurements of one program around those of others show how far the machine drifts.

    Args:
        settings: further fields of every Case.
    """
    peers = [name for name in programs if parse_program(name).recipe is not None]
    again = peers[:1] if closing and len(programs) > 1 else []
    return [
        Case(network, batch, precision, name, repeat, **settings)
        for network, batch in map(parse_network, networks)
        for precision in precisions
        for repeat, names in ((1, programs), (2, again))
        for name in names
    ]
