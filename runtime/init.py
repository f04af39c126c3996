"""The first weights of a network, from a seed, each tensor by its own generators so that no order matters.

weights = init_parameters(graph, seed=0)
weights["conv1.weight"].shape == (64, 3, 11, 11)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import ConfigError
from vdnn.layers.graph import Graph
from vdnn.layers.tensor import Shape

Array = NDArray[np.float32]
Key = tuple[int, ...]

PIECE = 2**20
"""Numbers that one generator draws; fixed, so that weights do not depend on how many threads draw them."""


def init_parameters(graph: Graph, seed: int) -> dict[str, Array]:
    """Every parameter and statistic of `graph` as float32, contiguous, by the name "LAYER.SUFFIX".

    The generator of a piece is seeded with (seed, CRC-32 of the tensor's name, number of the piece): a layer added
    elsewhere changes nothing. Raises ConfigError for an init that is not known or does not suit the shape.
    """
    arrays: dict[str, Array] = {}
    jobs: list[Callable[[], None]] = []
    for node in graph.nodes.values():
        for parameter in graph.parameters(node):
            rule, scale = _rule(node.name, parameter.suffix, parameter.init, parameter.shape)
            name = f"{node.name}.{parameter.suffix}"
            arrays[name] = np.empty(parameter.shape, np.float32)
            jobs += [partial(rule.fill, key, piece, scale) for key, piece in _pieces(name, arrays[name], seed)]
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda job: job(), jobs):
            pass
    return arrays


def _pieces(name: str, array: Array, seed: int) -> Iterator[tuple[Key, Array]]:
    flat = array.reshape(-1)
    for number, start in enumerate(range(0, flat.size, PIECE)):
        yield (seed, crc32(name.encode()), number), flat[start : start + PIECE]


def _generator(key: Key) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(key))


def _normal(key: Key, out: Array, std: float) -> None:
    _generator(key).standard_normal(out=out, dtype=np.float32)
    out *= np.float32(std)


def _uniform(key: Key, out: Array, bound: float) -> None:
    _generator(key).random(out=out, dtype=np.float32)
    out -= np.float32(0.5)
    out *= np.float32(2 * bound)


def _constant(key: Key, out: Array, value: float) -> None:
    out.fill(value)


def _fans(shape: Shape) -> tuple[int, int]:
    """Inputs and outputs that one number meets: (C*R*S, K*R*S) for a filter (K, C, R, S), (C, K) for (K, C)."""
    if len(shape) < 2:
        raise ValueError("a vector has no fan")
    return prod(shape[1:]), shape[0] * prod(shape[2:])


@dataclass(frozen=True, slots=True)
class Rule:
    """How to fill a tensor: the distribution, and its standard deviation, bound or value from shape and argument."""

    fill: Callable[[Key, Array, float], None]
    scale: Callable[[Shape, str], float]


RULES: Mapping[str, Rule] = {
    "kaiming": Rule(_normal, lambda shape, _: sqrt(2 / _fans(shape)[0])),
    "kaiming_fan_out": Rule(_normal, lambda shape, _: sqrt(2 / _fans(shape)[1])),
    "xavier": Rule(_uniform, lambda shape, _: sqrt(6 / sum(_fans(shape)))),
    "normal": Rule(_normal, lambda shape, std: float(std)),
    "zeros": Rule(_constant, lambda shape, _: 0.0),
    "ones": Rule(_constant, lambda shape, _: 1.0),
}
"""By name, what follows a colon being the argument: He et al. 2015 (kaiming), Glorot and Bengio 2010 (xavier)."""


def _rule(layer: str, suffix: str, init: str, shape: Shape) -> tuple[Rule, float]:
    name, _, argument = init.partition(":")
    try:
        return RULES[name], RULES[name].scale(shape, argument)
    except (KeyError, ValueError) as error:
        known = ", ".join(RULES).replace("normal,", "normal:STD,")
        raise ConfigError(
            f"layer '{layer}', parameter '{suffix}' of shape {shape}: expected an init of {known}, got '{init}'"
        ) from error
