"""The layer kinds: one file each, all of one shape; graphs of them and their lowering to programs."""

if __name__ != "vdnn.layers":
    raise ImportError("this folder is the package vdnn.layers: install vdnn (pip install -e .) and import vdnn.layers")

from vdnn.layers.add import Add
from vdnn.layers.base import Layer, Parameter
from vdnn.layers.batchnorm import BatchNorm
from vdnn.layers.concat import Concat
from vdnn.layers.conv import Conv
from vdnn.layers.dropout import Dropout
from vdnn.layers.flatten import Flatten
from vdnn.layers.graph import Graph, Node
from vdnn.layers.linear import Linear
from vdnn.layers.lower import Update, lower
from vdnn.layers.lrn import Lrn
from vdnn.layers.op import Op, Program
from vdnn.layers.pool import Pool
from vdnn.layers.relu import Relu
from vdnn.layers.softmax_loss import SoftmaxLoss
from vdnn.layers.tensor import TensorSpec

__all__ = [
    "Add",
    "BatchNorm",
    "Concat",
    "Conv",
    "Dropout",
    "Flatten",
    "Graph",
    "Layer",
    "Linear",
    "Lrn",
    "Node",
    "Op",
    "Parameter",
    "Pool",
    "Program",
    "Relu",
    "SoftmaxLoss",
    "TensorSpec",
    "Update",
    "lower",
]
