"""Images and labels: MNIST and other IDX files, a synthetic source, and the order in which an epoch visits them.

source = open_source(config.data, graph.input_shape, graph.classes, seed=0)
order = epoch_order(seed=0, epoch=3, n=len(source.train))
for images, labels in batches(source.train, order, start=0, batch=64, drop_last=False): ...
"""

if __name__ != "vdnn.runtime.data":
    raise ImportError("this folder is the package vdnn.runtime.data: install vdnn (pip install -e .) and import that")

from vdnn.runtime.data.loader import Batch, batches, epoch_order, steps_per_epoch, with_next
from vdnn.runtime.data.registry import open_source
from vdnn.runtime.data.source import Source, Split

__all__ = ["Batch", "Source", "Split", "batches", "epoch_order", "open_source", "steps_per_epoch", "with_next"]
