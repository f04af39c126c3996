"""cuBLAS's products of rows on host memory, behind the binding: what tests of vdnn's filter gradients multiply with.

    blas = HostCublas()
    blas.cublas.gemm_of_rows(...)         # a Cublas
    blas.calls                            # names of the functions called

A call fails that reads or writes outside of `blas.memory`, if that is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.backends.cuda.cublas import Cublas

CUBLAS_OP_N, CUBLAS_OP_T, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32 = 0, 1, 0, 77


class HostCublas:
    """A cuBLAS that knows one product.

    Args:
        cuts: whether operands lose the bits that TF32 has not.

    Attributes:
        memory: bytes that every operand lies in; None for anywhere.
        status: what products return.
        on_product: called with (m, n, k, count) of each.
    """

    def __init__(self, *, cuts: bool = False) -> None:
        self.cuts, self.calls, self.status = cuts, list[str](), 0
        self.memory: NDArray[np.uint8] | None = None
        self.workspaces: list[tuple[int, int]] = []
        self.on_product: Callable[[int, int, int, int], None] = lambda *sizes: None
        self.cublas = Cublas(SimpleNamespace(dll=self), precision="tf32")  # type: ignore[arg-type]
        self.calls.clear()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublas"):
            raise AttributeError(name)

        class Function:
            """Notes that it was called; argument types are set on it."""

            def __call__(made, *args: Any) -> int:
                self.calls.append(name)
                if name == "cublasSetWorkspace_v2":
                    self.workspaces.append((args[1], args[2]))
                return self.multiply(*args) if name == "cublasGemmStridedBatchedEx" else 0

        function = Function()
        setattr(self, name, function)
        return function

    def multiply(self, *args: Any) -> int:
        """cublasGemmStridedBatchedEx by its definition, columns first: c = op(a) op(b), sums in float64."""
        _, transpose_a, transpose_b, m, n, k, alpha, a_ptr, a_type, lda, a_step, b_ptr, b_type, ldb, b_step, *rest = (
            args
        )
        beta, c_ptr, c_type, ldc, c_step, count, compute, algorithm = rest
        assert (transpose_a, transpose_b) == (CUBLAS_OP_T, CUBLAS_OP_N)
        assert (a_type, b_type, c_type, compute, algorithm) == (*[CUDA_R_32F] * 3, CUBLAS_COMPUTE_32F_FAST_TF32, -1)
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert lda >= k
        assert ldb >= k
        assert ldc >= m
        assert not any(value % 16 for value in (a_ptr, b_ptr, c_ptr if m % 4 == 0 else 0)), "not on 16 bytes"
        assert not any(value % 4 for value in (lda, ldb, a_step, b_step)), "not on 16 bytes"
        if self.status:
            return self.status
        self.on_product(m, n, k, count)
        a = self._columns(a_ptr, m, k, lda, a_step, count)
        b = self._columns(b_ptr, n, k, ldb, b_step, count)
        c = self._columns(c_ptr, n, m, ldc, c_step, count)
        if self.cuts:
            a, b = (self._cut(operand) for operand in (a, b))
        np.matmul(b.astype(float), a.astype(float).transpose(0, 2, 1), out=c, casting="same_kind")
        return 0

    def _columns(self, ptr: int, columns: int, rows: int, ld: int, step: int, count: int) -> NDArray[np.float32]:
        """[i][column][row], a view of what lies there."""
        numbers = (count - 1) * step + (columns - 1) * ld + rows
        if self.memory is not None:
            start = self.memory.ctypes.data
            assert start <= ptr <= ptr + 4 * numbers <= start + self.memory.nbytes, "outside of its memory"
        flat = np.ctypeslib.as_array((ctypes.c_float * numbers).from_address(ptr))
        return np.lib.stride_tricks.as_strided(flat, (count, columns, rows), (4 * step, 4 * ld, 4))

    @staticmethod
    def _cut(operand: NDArray[np.float32]) -> NDArray[np.float32]:
        bits = np.ascontiguousarray(operand).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32)
