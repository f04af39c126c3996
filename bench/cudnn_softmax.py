"""cuDNN's softmax by its legacy API, to compare with; no training runs it.

    softmax = CudnnSoftmax(handle, 128, 1000, by_columns=False)
    softmax.forward(x_ptr, y_ptr)
    softmax.backward(y_ptr, dy_ptr, dx_ptr)

Over K scores of each of N images, [N][K] or by columns [K][N]. Work is queued on the handle's stream, nothing is
allocated, and it can be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from vdnn.runtime.backends.cuda.cudnn import Handle, TensorDescriptor

SIGNATURES: Mapping[str, str] = {
    "cudnnSoftmaxForward": "piipppppp",
    "cudnnSoftmaxBackward": "piipppppppp",
}
"""Arguments as in vdnn.runtime.backends.cuda.cudnn.SIGNATURES."""
ACCURATE = 1
"""cudnnSoftmaxAlgorithm_t: the largest score is subtracted first, as ours and all others here do."""
OF_IMAGE, OF_CHANNELS = 0, 1
"""cudnnSoftmaxMode_t: over (C, H, W), or over C of every pixel."""
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class CudnnSoftmax:
    """One softmax.

    Args:
        n, k: images and categories. by_columns: whether scores lie as [K][N].
        dtype: of scores and probabilities.
    """

    def __init__(self, handle: Handle, n: int, k: int, *, by_columns: bool, dtype: str = "float32"):
        self.handle = handle
        handle.api.bind(SIGNATURES)
        shape, strides = ((1, k, 1, n), (k * n, n, n, 1)) if by_columns else ((n, k, 1, 1), (k, 1, 1, 1))
        self.about = f"softmax of {n} x {k}, {'columns' if by_columns else 'rows'}, {dtype}"
        self._scores = TensorDescriptor(handle.api, shape, strides, dtype)
        self._how = (ACCURATE, OF_CHANNELS if by_columns else OF_IMAGE)

    def forward(self, x: int, y: int) -> None:
        """y = softmax(x); device addresses."""
        one, zero, scores = ctypes.byref(_ONE), ctypes.byref(_ZERO), self._scores.pointer
        operands = (one, scores, x, zero, scores, y)
        self.handle.api.call("cudnnSoftmaxForward", self.handle.pointer, *self._how, *operands, about=self.about)

    def backward(self, y: int, dy: int, dx: int) -> None:
        """dx from forward's y and its gradient dy; device addresses."""
        one, zero, scores = ctypes.byref(_ONE), ctypes.byref(_ZERO), self._scores.pointer
        operands = (one, scores, y, scores, dy, zero, scores, dx)
        self.handle.api.call("cudnnSoftmaxBackward", self.handle.pointer, *self._how, *operands, about=self.about)
