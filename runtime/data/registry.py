"""The sources of data by the name that a configuration gives them.

source = open_source(config.data, graph.input_shape, graph.classes, seed=config.train.seed)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vdnn.runtime.config import DataConfig
from vdnn.runtime.data.folder import open_folder
from vdnn.runtime.data.source import ImageShape, Source
from vdnn.runtime.data.synthetic import open_synthetic

SOURCES: Mapping[str, Callable[[DataConfig, ImageShape, int, int], Source]] = {
    "mnist": open_folder,
    "idx": open_folder,
    "synthetic": open_synthetic,
}


def open_source(data: DataConfig, input_shape: ImageShape, classes: int, seed: int) -> Source:
    """The source that `data.source` names, checked against the network; DataError if its files cannot be used.

    Args:
        input_shape: (C, H, W) of the network's input.
        classes: labels must lie from 0 to classes - 1.
        seed: of the run; synthetic images depend on it.
    """
    return SOURCES[data.source](data, input_shape, classes, seed)
