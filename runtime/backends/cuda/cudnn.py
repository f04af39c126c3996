"""cuDNN calls by name with checked status, the handle, and the descriptors of the legacy API.

    handle = Handle()
    handle.set_stream(stream.ptr)
    x = TensorDescriptor(handle.api, (64, 32, 28, 28), (128 * 784, 784, 28, 1))  # 32 channels of a tensor of 128

Signatures are those of cudnn_graph.h, cudnn_ops.h and cudnn_cnn.h of cuDNN 9.19; a test compares them with the headers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any

from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda.libraries import CudnnLibrary, load_cudnn

DATA_TYPES: Mapping[str, int] = {"float32": 0, "float16": 2, "bfloat16": 9}
"""cudnnDataType_t by dtype."""

FORMATS: Mapping[str, int] = {"NCHW": 0, "NHWC": 1}
"""cudnnTensorFormat_t by layout."""

CROSS_CORRELATION, DEFAULT_MATH, FMA_MATH = 1, 0, 3
"""Values of cudnnConvolutionMode_t and cudnnMathType_t (FMA: fp32 without tensor cores; the
default takes TF32 for float32 arrays on GPUs that have it, and tensor cores for 16-bit ones)."""

CODES: Mapping[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "z": ctypes.c_size_t,
    "q": ctypes.c_int64,
}
"""Argument types: any pointer, int or enumeration, size_t, int64_t."""

SIGNATURES: Mapping[str, str] = {
    "cudnnCreate": "p",
    "cudnnDestroy": "p",
    "cudnnSetStream": "pp",
    "cudnnCreateTensorDescriptor": "p",
    "cudnnSetTensor4dDescriptorEx": "piiiiiiiii",
    "cudnnDestroyTensorDescriptor": "p",
    "cudnnCreateFilterDescriptor": "p",
    "cudnnSetFilter4dDescriptor": "piiiiii",
    "cudnnDestroyFilterDescriptor": "p",
    "cudnnCreateConvolutionDescriptor": "p",
    "cudnnSetConvolution2dDescriptor": "piiiiiiii",
    "cudnnSetConvolutionGroupCount": "pi",
    "cudnnSetConvolutionMathType": "pi",
    "cudnnDestroyConvolutionDescriptor": "p",
    "cudnnGetConvolutionForwardWorkspaceSize": "pppppip",
    "cudnnGetConvolutionBackwardDataWorkspaceSize": "pppppip",
    "cudnnGetConvolutionBackwardFilterWorkspaceSize": "pppppip",
    "cudnnConvolutionForward": "pppppppipzppp",
    "cudnnConvolutionBackwardData": "pppppppipzppp",
    "cudnnConvolutionBackwardFilter": "pppppppipzppp",
    "cudnnBackendCreateDescriptor": "ip",
    "cudnnBackendDestroyDescriptor": "p",
    "cudnnBackendFinalize": "p",
    "cudnnBackendSetAttribute": "piiqp",
    "cudnnBackendGetAttribute": "piiqpp",
    "cudnnBackendExecute": "ppp",
}
"""Arguments of every function called here, one letter of CODES each; all return cudnnStatus_t."""

NOT_READY = ("not ready", "cuDNN found no usable GPU or driver, or parts of several versions", "run vdnn doctor")
ARGUMENT = (
    "argument",
    "cuDNN refuses an argument, such as an address less aligned than stated",
    "report this text: it is a fault in vdnn",
)
UNSUPPORTED = ("unsupported", "this algorithm does not support this case", "choose another algorithm")
INTERNAL = ("internal", "cuDNN failed inside", "choose another algorithm, or another cuDNN version")
EXECUTION = (
    "execution",
    "the kernel failed on the GPU: an earlier kernel did, or no memory was left beside the slab to load it",
    "run with CUDA_LAUNCH_BLOCKING=1 to find the kernel, or lower memory.limit",
)
HOST_MEMORY = ("memory", "the host has no memory left", "free host memory")
DEVICE_MEMORY = ("memory", "the GPU has no memory left beside the slab", "lower memory.limit")

CAUSES: Mapping[int, tuple[str, str, str]] = {
    1: NOT_READY,
    2: ARGUMENT,
    3: UNSUPPORTED,
    4: INTERNAL,
    5: EXECUTION,
    4003: HOST_MEMORY,
    4004: DEVICE_MEMORY,
}
"""Kind, likely cause and next step by status, or by its thousands."""


class CudnnError(VdnnError):
    """A cuDNN call that failed.

    Args:
        status, status_name: cudnnStatus_t, 3002 and "CUDNN_STATUS_NOT_SUPPORTED_SHAPE".
        call: the function.
        about: the operation and its descriptors in words.
        algorithm: the label of the algorithm, if one was asked for.
        detail: cuDNN's own last message.

    `likely_cause` is "unsupported", "memory", "argument", "not ready", "internal" or "execution".
    """

    def __init__(
        self, status: int, status_name: str, call: str, *, about: str = "", algorithm: str = "", detail: str = ""
    ):
        self.status, self.status_name, self.call = status, status_name, call
        self.about, self.algorithm, self.detail = about, algorithm, detail
        self.likely_cause, cause, step = CAUSES.get(status) or CAUSES.get(status // 1000, INTERNAL)
        what = ", ".join(part for part in (about, algorithm and f"algorithm {algorithm}") if part)
        text = f"{call} returned {status_name} ({status})" + (f" for {what}" if what else "")
        text += f"; likely cause: {cause}; next step: {step}"
        super().__init__(f"{text}; cuDNN says: {detail}" if detail else text)


class Cudnn:
    """A loaded cuDNN whose functions are called by name; a status other than success raises CudnnError."""

    def __init__(self, library: CudnnLibrary):
        self.shared_library = library
        self._functions: dict[str, Any] = {}
        self.bind(SIGNATURES)
        self._error_string = library.dll.cudnnGetErrorString
        self._error_string.argtypes, self._error_string.restype = [ctypes.c_int], ctypes.c_char_p
        self._last_error = library.dll.cudnnGetLastErrorString
        self._last_error.argtypes, self._last_error.restype = [ctypes.c_void_p, ctypes.c_size_t], None

    def bind(self, signatures: Mapping[str, str]) -> None:
        """Have `call` know more functions that return cudnnStatus_t, by their arguments as in SIGNATURES."""
        for name, codes in signatures.items():
            function = getattr(self.shared_library.dll, name)
            function.argtypes, function.restype = [CODES[code] for code in codes], ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *args: Any, about: object = "", algorithm: str = "") -> None:
        """Call the cuDNN function `name`; `about`, turned into text, and `algorithm` are for the error."""
        status = self._functions[name](*args)
        if status:
            text = ctypes.create_string_buffer(2048)
            self._last_error(text, len(text))
            detail = " ".join(text.value.decode(errors="replace").split())
            status_name = self._error_string(status).decode()
            raise CudnnError(status, status_name, name, about=str(about), algorithm=algorithm, detail=detail)

    def create(self, owner: object, create: str, destroy: str, *args: int) -> int:
        """The pointer that the function `create` gives, destroyed by the function `destroy` with its `owner`."""
        pointer = ctypes.c_void_p()
        self.call(create, *args, ctypes.byref(pointer))
        # at exit the driver may be gone before us: the process gives everything back then
        weakref.finalize(owner, self._functions[destroy], pointer.value).atexit = False
        return pointer.value or 0


@cache
def open_cudnn() -> Cudnn:
    """The cuDNN of this process, loaded at the first call; BackendUnavailable says what is missing."""
    return Cudnn(load_cudnn())


class Handle:
    """A cuDNN context on the current device; it works on the stream set last, the legacy stream before that.

    Creating one takes a GPU and some of its memory, which belongs to the context reserve.
    """

    def __init__(self, api: Cudnn | None = None):
        self.api = api or open_cudnn()
        pointer = ctypes.c_void_p()
        self.api.call("cudnnCreate", ctypes.byref(pointer))
        self.pointer: int | None = pointer.value

    def set_stream(self, stream: int) -> None:
        """Run later calls on this cudaStream_t."""
        self.api.call("cudnnSetStream", self.pointer, stream)

    def close(self) -> None:
        """Give the context back; plans made with it can no longer run. A second call does nothing."""
        if self.pointer is not None:
            pointer, self.pointer = self.pointer, None
            self.api.call("cudnnDestroy", pointer)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorDescriptor:
    """A 4-d tensor in any order in memory: shape (N, C, H, W), `strides` in elements for the same dimensions."""

    def __init__(self, api: Cudnn, shape: Sequence[int], strides: Sequence[int], dtype: str = "float32"):
        self.pointer = api.create(self, "cudnnCreateTensorDescriptor", "cudnnDestroyTensorDescriptor")
        about = f"tensor of shape {tuple(shape)}, strides {tuple(strides)}, {dtype}"
        api.call("cudnnSetTensor4dDescriptorEx", self.pointer, DATA_TYPES[dtype], *shape, *strides, about=about)


class FilterDescriptor:
    """A filter of shape (K, C/groups, R, S) without gaps, in this order or for "NHWC" as (K, R, S, C/groups)."""

    def __init__(self, api: Cudnn, shape: Sequence[int], dtype: str = "float32", layout: str = "NCHW"):
        self.pointer = api.create(self, "cudnnCreateFilterDescriptor", "cudnnDestroyFilterDescriptor")
        about = f"filter of shape {tuple(shape)}, {dtype}, {layout}"
        api.call("cudnnSetFilter4dDescriptor", self.pointer, DATA_TYPES[dtype], FORMATS[layout], *shape, about=about)


class ConvolutionDescriptor:
    """Padding, stride and dilation (vertical, horizontal), groups; a cross-correlation summed in fp32.

    Products of float32 operands are fp32 by FMA, or with `tensor_cores` TF32; of 16-bit ones exact.
    """

    def __init__(
        self,
        api: Cudnn,
        padding: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        *,
        tensor_cores: bool = False,
    ):
        self.pointer = api.create(self, "cudnnCreateConvolutionDescriptor", "cudnnDestroyConvolutionDescriptor")
        numbers = (*padding, *stride, *dilation, CROSS_CORRELATION, DATA_TYPES["float32"])
        api.call("cudnnSetConvolution2dDescriptor", self.pointer, *numbers)
        api.call("cudnnSetConvolutionGroupCount", self.pointer, groups)
        # workspaces depend on the math type, so it is set before they are asked for
        api.call("cudnnSetConvolutionMathType", self.pointer, DEFAULT_MATH if tensor_cores else FMA_MATH)
