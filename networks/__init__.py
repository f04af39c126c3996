"""The networks: pure Graph builders, one file a family, and their registry.

    graph = build("vgg19", classes=100, dropout=0.0)

`options(name)` lists what a network can be built with.
"""

if __name__ != "vdnn.networks":
    raise ImportError(
        "this folder is the package vdnn.networks: install vdnn (pip install -e .) and import vdnn.networks"
    )

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from vdnn.errors import ConfigError
from vdnn.layers.graph import Graph
from vdnn.networks.alexnet import alexnet
from vdnn.networks.cifar10 import cifar10
from vdnn.networks.googlenet import googlenet
from vdnn.networks.googlenet_bn import googlenet_bn
from vdnn.networks.lenet import lenet
from vdnn.networks.overfeat import overfeat
from vdnn.networks.resnet import DEPTHS, resnet
from vdnn.networks.vgg import CONVOLUTIONS, vgg
from vdnn.networks.zfnet import zfnet

NETWORKS: Mapping[str, Callable[..., Graph]] = {
    "lenet": lenet,
    "cifar10": cifar10,
    "alexnet": alexnet,
    "zfnet": zfnet,
    "overfeat": overfeat,
    "googlenet": googlenet,
    "googlenet_bn": googlenet_bn,
    **{name: partial(vgg, name) for name in CONVOLUTIONS},
    **{name: partial(resnet, name) for name in DEPTHS},
}
"""Builder by name; every option of a builder is a keyword with a default."""

MOST: Mapping[str, int] = {"classes": 10**7, "": 10**5}
"""By option, "" for all other whole numbers. More channels or pixels are slips of the pen, and would take minutes and
gigabytes to be refused for their bytes."""

_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}


def options(name: str) -> dict[str, Any]:
    """The options of a network and their defaults; ConfigError if there is no such network."""
    if name not in NETWORKS:
        raise ConfigError(f"unknown network '{name}', expected one of {', '.join(NETWORKS)}", key=name, known=NETWORKS)
    return {option: p.default for option, p in signature(NETWORKS[name]).parameters.items()}


def build(name: str, /, **chosen: Any) -> Graph:
    """The graph of a network with the `chosen` options.

    Raises ConfigError for an unknown network or option or a wrong type, ShapeError for sizes that do not fit.
    """
    known = options(name)
    for option, value in chosen.items():
        key = f"network.{option}"
        if option not in known:
            message = f"network '{name}' has no option '{option}', only {', '.join(known)}"
            raise ConfigError(message, key=key, known=known)
        types, expected = _KINDS[type(known[option])]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"option '{option}' of network '{name}' must be {expected}, got {value!r}", key=key)
        most = MOST.get(option, MOST[""])
        if types == (int,) and isinstance(value, int) and abs(value) > most:
            raise ConfigError(f"option '{option}' of network '{name}' must be {expected} up to {most:,}", key=key)
    return NETWORKS[name](**chosen)
