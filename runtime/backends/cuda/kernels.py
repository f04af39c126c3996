"""vdnn's own CUDA kernels, compiled once, and the function that launches each op kind.

    kernels = KernelSet("bfloat16")
    kernels.load()
    CUDA_KERNELS[op.kind](op, arrays, kernels, stream)

Everything is queued on the stream given; nothing is allocated and nothing waits, so that launches can be captured in a
CUDA graph. Convolutions and matrix products are not here: of conv.forward and linear.forward this is the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vdnn.errors import VdnnError
from vdnn.layers.op import Op
from vdnn.layers.tensor import Shape
from vdnn.runtime.backends.cuda.batchnorm import (
    batchnorm_backward,
    batchnorm_bytes,
    batchnorm_forward,
    batchnorm_inference,
    batchnorm_update_stats,
    batchnorm_update_stats_all,
)
from vdnn.runtime.backends.cuda.bias import bias_forward, bias_gradient, channel_bytes, relu_bias_backward
from vdnn.runtime.backends.cuda.copy import add_forward, copy_forward
from vdnn.runtime.backends.cuda.dropout import dropout_backward, dropout_forward
from vdnn.runtime.backends.cuda.images import input_normalize
from vdnn.runtime.backends.cuda.launch import INDEX_LIMIT, THREADS, Arrays, Kernels
from vdnn.runtime.backends.cuda.layout import layout_transform
from vdnn.runtime.backends.cuda.lrn import lrn_backward, lrn_forward
from vdnn.runtime.backends.cuda.pool import pool_backward, pool_forward
from vdnn.runtime.backends.cuda.prepare import filter_prepare, filter_prepare_all
from vdnn.runtime.backends.cuda.relu import relu_backward, relu_forward
from vdnn.runtime.backends.cuda.sgd import sgd_update, sgd_update_all
from vdnn.runtime.backends.cuda.softmax import rows_bytes, softmax_bytes, softmax_forward
from vdnn.runtime.backends.cuda.softmax_loss import softmax_loss_backward, softmax_loss_forward, softmax_loss_train
from vdnn.runtime.backends.cuda.source import MODULES, OPTIONS, convert, signatures, source

CudaKernel = Callable[[Op, Arrays, Kernels, Any], None]

CUDA_KERNELS: Mapping[str, CudaKernel] = {
    "input.normalize": input_normalize,
    "filter.prepare": filter_prepare,
    "filter.prepare_all": filter_prepare_all,
    "conv.forward": bias_forward,
    "conv.bgrad": bias_gradient,
    "pool.forward": pool_forward,
    "pool.backward": pool_backward,
    "relu.forward": relu_forward,
    "relu.backward": relu_backward,
    "relu.bias_backward": relu_bias_backward,
    "lrn.forward": lrn_forward,
    "lrn.backward": lrn_backward,
    "linear.forward": bias_forward,
    "linear.bgrad": bias_gradient,
    "batchnorm.forward": batchnorm_forward,
    "batchnorm.inference": batchnorm_inference,
    "batchnorm.update_stats": batchnorm_update_stats,
    "batchnorm.update_stats_all": batchnorm_update_stats_all,
    "batchnorm.backward": batchnorm_backward,
    "dropout.forward": dropout_forward,
    "dropout.backward": dropout_backward,
    "add.forward": add_forward,
    "copy.forward": copy_forward,
    "layout.transform": layout_transform,
    "softmax.forward": softmax_forward,
    "softmax_loss.forward": softmax_loss_forward,
    "softmax_loss.backward": softmax_loss_backward,
    "softmax_loss.train": softmax_loss_train,
    "sgd.update": sgd_update,
    "sgd.update_all": sgd_update_all,
}

_WORKSPACES: Mapping[str, tuple[str, Callable[[Shape, str], int]]] = {
    "conv.bgrad": ("dy", channel_bytes),
    "linear.bgrad": ("dy", channel_bytes),
    "relu.bias_backward": ("dy", channel_bytes),
    "batchnorm.forward": ("x", batchnorm_bytes),
    "batchnorm.backward": ("x", batchnorm_bytes),
    "softmax.forward": ("x", softmax_bytes),
    "softmax_loss.forward": ("x", rows_bytes),
    "softmax_loss.train": ("x", rows_bytes),
}
"""Op kind → the argument whose shape and layout decide, and the bytes of workspace."""


def workspace_bytes(kind: str, shapes: Mapping[str, Shape], layout: str = "NCHW") -> int:
    """Bytes that an op of this kind needs as its `workspace`, for sums on their way: 0 for most, else about 2 MiB
    at most up to 100,000 channels, but for batches of more than 2 GiB.

    shapes: by argument name. layout: of batches of images.
    """
    if kind not in _WORKSPACES:
        return 0
    argument, nbytes = _WORKSPACES[kind]
    return nbytes(shapes[argument], layout)


class KernelSet:
    """The kernels of the `.cu` files on the current GPU; CuPy compiles them and keeps the result on disk.

    Args:
        dtype: of activations and their gradients, a key of source.STORAGE.

    Attributes:
        registers: kernel → registers a thread, of those that are loaded.
    """

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.registers: dict[str, int] = {}
        found = {module: signatures(source(dtype, module)) for module in MODULES}
        self._signatures = {name: own for kernels in found.values() for name, own in kernels.items()}
        self._modules = {name: module for module, kernels in found.items() for name in kernels}
        self._functions: dict[str, Any] = {}

    def load(self, module: str = "main") -> None:
        """Compile a module, a key of source.MODULES, and have the driver load every kernel of it now, as it must not
        while a graph is captured. Nothing if it is loaded; kernels that are launched are loaded then."""
        import cupy

        names = [name for name, own in self._modules.items() if own == module]
        if names[0] in self._functions:
            return
        compiled = cupy.RawModule(code=source(self.dtype, module), options=OPTIONS)
        for name in names:
            self._functions[name] = compiled.get_function(name)
            self.registers[name] = int(self._functions[name].num_regs)

    def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
        """Queue kernel `name` in `blocks` blocks of THREADS threads on `stream` (a cupy stream).

        args: in the order of the kernel's signature; addresses as int, flags as bool, tables as NumPy arrays of one
            element.
        """
        if name not in self._functions:
            self.load(self._modules[name])
        if not 0 < blocks < INDEX_LIMIT:
            raise VdnnError(f"kernel '{name}': expected from 1 to {INDEX_LIMIT - 1} blocks, got {blocks}")
        values = convert(name, self._signatures[name], args)
        with stream:
            self._functions[name]((blocks,), (THREADS,), values)
