"""Matrix products by cuBLAS on a workspace of ours, for the fully connected layers; they can be captured.

    cublas = Cublas()
    cublas.bind(stream.ptr, workspace_ptr, workspace_bytes)
    cublas.gemm(n, k, c, x_ptr, w_ptr, y_ptr, transpose_b=True)                  # y = x wᵀ
    cublas.gemm(n, c, k, dy_ptr, w_ptr, dx_ptr)                                  # dx = dy w
    cublas.gemm(k, c, n, dy_ptr, x_ptr, dw_ptr, transpose_a=True, accumulate=True)  # dw += dyᵀ x

Two runs give equal bits for equal shapes, workspace size, GPU and cuBLAS version. Another workspace size can mean
another kernel and so another rounding: choose it once, never by what happens to be free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda.libraries import CublasLibrary, load_cudnn
from vdnn.units import KIB, MIB

ALIGNMENT_BYTES = 256
"""Of the workspace address, as cublasSetWorkspace demands."""

SMALLEST_WORKSPACE_BYTES = 16 * KIB
"""Enough that no routine fails for want of it, by the documentation of cublasSetWorkspace; more can be faster."""

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.c_void_p,),
    "cublasDestroy_v2": (ctypes.c_void_p,),
    "cublasSetStream_v2": (ctypes.c_void_p, ctypes.c_void_p),
    "cublasSetWorkspace_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "cublasSetMathMode": (ctypes.c_void_p, ctypes.c_int),
    "cublasGemmEx": (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # handle, transpose a and b
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),  # m, n, k
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # alpha, a with its type and row length
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # b
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # beta, c
        *(ctypes.c_int, ctypes.c_int),  # type of the sums, algorithm
    ),
    "cublasGemmStridedBatchedEx": (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # handle, transpose a and b
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),  # m, n, k
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_longlong),  # alpha, a as above, stride
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_longlong),  # b
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_longlong),  # beta, c
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),  # count, type of the sums, algorithm
    ),
    "cublasSgemm_v2": (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),  # handle, transpose a and b
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),  # m, n, k
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),  # alpha, a with its row length
        *(ctypes.c_void_p, ctypes.c_int),  # b
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),  # beta, c
    ),
}
"""Argument types of every function called here, from cublas_api.h of cuBLAS 13; all return cublasStatus_t."""

PEDANTIC_MATH, TF32_MATH, WIDE_SUMS_MATH = 2, 3, 16
"""CUBLAS_PEDANTIC_MATH: fp32 as it is written, no TF32 and no emulation, whatever the environment says.
CUBLAS_TF32_TENSOR_OP_MATH: operands rounded to TF32 for the tensor cores, sums in fp32.
CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: sums of 16-bit operands stay fp32 until they are stored."""

MATH: Mapping[str, int] = {
    "fp32": PEDANTIC_MATH,
    "tf32": TF32_MATH,
    "bf16": WIDE_SUMS_MATH,
    "fp16": WIDE_SUMS_MATH,
}
"""cublasMath_t by precision."""

DATA_TYPES: Mapping[str, int] = {"float32": 0, "float16": 2, "bfloat16": 14}
"""cudaDataType_t by dtype."""

COMPUTE_32F, COMPUTE_32F_FAST_TF32, GEMM_DEFAULT = 68, 77, -1
"""Values of cublasComputeType_t and cublasGemmAlgo_t."""

STATUS: Mapping[int, tuple[str, str]] = {
    1: ("NOT_INITIALIZED", "cuBLAS found no usable GPU or driver; run vdnn doctor"),
    3: (
        "ALLOC_FAILED",
        "the GPU has no memory left beside the slab, or the workspace is below 16 KiB; lower memory.limit",
    ),
    7: (
        "INVALID_VALUE",
        "an argument cuBLAS refuses, such as a misaligned workspace: a fault in vdnn, report this text",
    ),
    8: ("ARCH_MISMATCH", "this GPU is not supported by this cuBLAS; install the other extra, cuda12 or cuda13"),
    13: (
        "EXECUTION_FAILED",
        "an earlier kernel failed, or the GPU has no memory left to load this one; lower memory.limit",
    ),
    14: ("INTERNAL_ERROR", "cuBLAS failed inside; run with CUDA_LAUNCH_BLOCKING=1 to find the kernel"),
    15: ("NOT_SUPPORTED", "cuBLAS does not do this; report this text"),
}
"""Name of a cublasStatus_t, likely cause and next step."""

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class CublasError(VdnnError):
    """A cuBLAS call that failed: the function, the status and its name, the product in words."""

    def __init__(self, status: int, call: str, about: str = ""):
        self.status, self.call, self.about = status, call, about
        self.status_name, cause = STATUS.get(status, ("unknown status", "report this text"))
        what = f" for {about}" if about else ""
        super().__init__(f"{call} returned {self.status_name} ({status}){what}; likely cause and next step: {cause}")


def recommended_workspace_bytes(compute_major: int) -> int:
    """Bytes that cuBLAS recommends: 32 MiB from compute capability 9 (Hopper) on, else 4 MiB. Smaller ones work."""
    return 32 * MIB if compute_major >= 9 else 4 * MIB


class Cublas:
    """A cuBLAS context on the current device, on one stream and workspace at a time.

    precision: "fp32" for products without tensor cores, "tf32", "bf16" or "fp16".

    Creating one takes a GPU and some of its memory, which belongs to the context reserve.
    """

    def __init__(self, library: CublasLibrary | None = None, *, precision: str = "fp32"):
        self.shared_library = library or load_cudnn().cublas
        for name, types in SIGNATURES.items():
            function = getattr(self.shared_library.dll, name)
            function.argtypes, function.restype = types, ctypes.c_int
        pointer = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(pointer))
        self.pointer: int | None = pointer.value
        self._call("cublasSetMathMode", self.pointer, MATH[precision])

    def bind(self, stream: int, workspace_ptr: int, workspace_bytes: int) -> None:
        """Run later products on this cudaStream_t with this workspace, aligned to ALIGNMENT_BYTES.

        Both at once, because a new stream puts cuBLAS back on a workspace of its own.
        """
        about = f"a workspace of {workspace_bytes} bytes at {workspace_ptr:#x}"
        self._call("cublasSetStream_v2", self.pointer, stream)
        self._call("cublasSetWorkspace_v2", self.pointer, workspace_ptr or None, workspace_bytes, about=about)

    def gemm(
        self,
        m: int,
        n: int,
        k: int,
        a_ptr: int,
        b_ptr: int,
        c_ptr: int,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
        dtype: str = "float32",
        out_dtype: str = "float32",
    ) -> None:
        """c = a b, or c += a b, with c of shape (m, n) and sums over k in fp32; all dense, row-major, on the device.

        Args:
            a_ptr: address of a, shape (m, k); (k, m) in memory if transpose_a.
            b_ptr: address of b, shape (k, n); (n, k) in memory if transpose_b.
            c_ptr: address of c, which overlaps neither.
            dtype: of a and b, "float32", "bfloat16" or "float16".
            out_dtype: of c, the same or "float32".
        """
        # cuBLAS counts columns first, so that it sees the transpose of every array: cᵀ = bᵀ aᵀ
        head = (self.pointer, int(transpose_b), int(transpose_a), n, m, k, ctypes.byref(_ONE))
        beta = ctypes.byref(_ONE if accumulate else _ZERO)
        rows_b, rows_a = k if transpose_b else n, m if transpose_a else k
        about = f"c of shape ({m}, {n}) with sums over {k}"
        if dtype == out_dtype == "float32":
            self._call("cublasSgemm_v2", *head, b_ptr, rows_b, a_ptr, rows_a, beta, c_ptr, n, about=about)
            return
        ab, c = DATA_TYPES[dtype], DATA_TYPES[out_dtype]
        operands = (b_ptr, ab, rows_b, a_ptr, ab, rows_a, beta, c_ptr, c, n)
        words = f"{about}, {dtype} to {out_dtype}"
        self._call("cublasGemmEx", *head, *operands, COMPUTE_32F, GEMM_DEFAULT, about=words)

    def gemm_of_rows(
        self,
        shape: tuple[int, int, int],
        pointers: tuple[int, int, int],
        rows: tuple[int, int, int],
        strides: tuple[int, int, int],
        count: int,
    ) -> None:
        """c[i] = a[i] b[i]ᵀ for i < count in TF32, of float32 numbers: sums along the rows of both operands.

        Args:
            shape: (m, n, k) of a[i] (m, k), b[i] (n, k) and c[i] (m, n).
            pointers: device addresses of a[0], b[0] and c[0]; c overlaps neither.
            rows: elements from row to row of a, b and c.
            strides: elements from a[i] to a[i + 1], and so on.
        """
        m, n, k = shape
        (a, b, c), (row_a, row_b, row_c), (step_a, step_b, step_c) = pointers, rows, strides
        kind = DATA_TYPES["float32"]
        self._call(
            "cublasGemmStridedBatchedEx",
            # columns first, as in gemm
            *(self.pointer, 1, 0, n, m, k, ctypes.byref(_ONE), b, kind, row_b, step_b, a, kind, row_a, step_a),
            *(ctypes.byref(_ZERO), c, kind, row_c, step_c, count, COMPUTE_32F_FAST_TF32, GEMM_DEFAULT),
            about=f"{count} times c of shape ({m}, {n}) with sums over {k}",
        )

    def close(self) -> None:
        """Give the context back. A second call does nothing."""
        if self.pointer is not None:
            pointer, self.pointer = self.pointer, None
            self._call("cublasDestroy_v2", pointer)

    def _call(self, name: str, *args: Any, about: str = "") -> None:
        status = getattr(self.shared_library.dll, name)(*args)
        if status:
            raise CublasError(status, name, about)
