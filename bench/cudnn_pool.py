"""cuDNN's pools by its legacy API, to compare with; no training runs them.

    pool = CudnnPool(handle, (64, 96, 110, 110), (64, 96, 54, 54), window=3, stride=2, layout="NHWC")
    pool.forward(x_ptr, y_ptr)
    pool.backward(y_ptr, dy_ptr, x_ptr, dx_ptr)

Maxima or averages over square windows; outputs round down, as cuDNN's documentation has it. Work is queued on the
handle's stream, nothing is allocated, and it can be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from vdnn.runtime.backends.cuda.cudnn import Handle, TensorDescriptor
from vdnn.runtime.backends.cuda.cudnn_conv import contiguous

SIGNATURES: Mapping[str, str] = {
    "cudnnCreatePoolingDescriptor": "p",
    "cudnnSetPooling2dDescriptor": "piiiiiiii",
    "cudnnDestroyPoolingDescriptor": "p",
    "cudnnPoolingForward": "pppppppp",
    "cudnnPoolingBackward": "pppppppppppp",
}
"""Arguments as in vdnn.runtime.backends.cuda.cudnn.SIGNATURES."""
MODES: Mapping[str, int] = {"max": 0, "average": 1, "average inside": 2, "deterministic max": 3}
"""cudnnPoolingMode_t; the gradient of "max" may be summed in any order."""
PROPAGATE_NAN = 1
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class CudnnPool:
    """One pool.

    Args:
        x, y: shapes (N, C, H, W) and (N, C, P, Q); also of their gradients, all dense in `layout`, NCHW or NHWC.
        window, stride, padding: of both dimensions.
        mode: a key of MODES.
    """

    def __init__(
        self,
        handle: Handle,
        x: Sequence[int],
        y: Sequence[int],
        *,
        window: int,
        stride: int,
        padding: int = 0,
        mode: str = "max",
        layout: str = "NCHW",
        dtype: str = "float32",
    ):
        self.handle, api = handle, handle.api
        api.bind(SIGNATURES)
        self.about = f"{mode} of {window}x{window} / {stride}, padding {padding}, x {tuple(x)}, {layout}, {dtype}"
        self._x, self._y = (self._tensor(shape, layout, dtype) for shape in (x, y))
        self._pool = api.create(self, "cudnnCreatePoolingDescriptor", "cudnnDestroyPoolingDescriptor")
        numbers = (MODES[mode], PROPAGATE_NAN, window, window, padding, padding, stride, stride)
        api.call("cudnnSetPooling2dDescriptor", self._pool, *numbers, about=self.about)

    def _tensor(self, shape: Sequence[int], layout: str, dtype: str) -> TensorDescriptor:
        n, c, h, w = shape
        return TensorDescriptor(self.handle.api, shape, contiguous((n, c, h, w), layout), dtype)

    def forward(self, x: int, y: int) -> None:
        """y = pool(x); device addresses."""
        one, zero = ctypes.byref(_ONE), ctypes.byref(_ZERO)
        operands = (one, self._x.pointer, x, zero, self._y.pointer, y)
        self.handle.api.call("cudnnPoolingForward", self.handle.pointer, self._pool, *operands, about=self.about)

    def backward(self, y: int, dy: int, x: int, dx: int) -> None:
        """dx from dy, x and forward's y; device addresses."""
        one, zero = ctypes.byref(_ONE), ctypes.byref(_ZERO)
        reads = (one, self._y.pointer, y, self._y.pointer, dy, self._x.pointer, x)
        operands = (*reads, zero, self._x.pointer, dx)
        self.handle.api.call("cudnnPoolingBackward", self.handle.pointer, self._pool, *operands, about=self.about)
