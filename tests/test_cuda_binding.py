"""The cuDNN and cuBLAS binding without the libraries: search in fake trees, error texts, arguments of fake calls."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vdnn.errors import BackendUnavailable, VdnnError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda import cudnn_conv
from vdnn.runtime.backends.cuda.array import contiguous
from vdnn.runtime.backends.cuda.cublas import Cublas, CublasError, recommended_workspace_bytes
from vdnn.runtime.backends.cuda.cudnn import (
    Cudnn,
    CudnnError,
    Handle,
)
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem
from vdnn.runtime.backends.cuda.libraries import (
    CUDNN_FOLDERS,
    CUDNN_SONAME,
    mapped_copies,
    open_library,
    require_one_copy,
    wheel_copies,
)
from vdnn.runtime.backends.cuda.operands import load, store
from vdnn.runtime.backends.cuda.products import Products
from vdnn.runtime.bfloat16 import from_bfloat16

# search


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not a library")


def test_wheel_copies_follow_the_order_of_the_roots_and_folders(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    put(first, "nvidia/cublas/lib/libcublas.so.12")
    put(second, "nvidia/cu12/lib/libcublas.so.12", "nvidia/cublas/lib/libcublas.so.12")
    found = wheel_copies("libcublas.so.12", ("nvidia/cu12/lib", "nvidia/cublas/lib"), ["", str(first), str(second)])
    expected = [
        first / "nvidia/cublas/lib/libcublas.so.12",
        second / "nvidia/cu12/lib/libcublas.so.12",
        second / "nvidia/cublas/lib/libcublas.so.12",
    ]
    assert found == [str(path) for path in expected]


def test_wheel_copies_of_one_file_through_two_roots_are_one(tmp_path: Path) -> None:
    put(tmp_path / "real", f"{CUDNN_FOLDERS[0]}/{CUDNN_SONAME}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = wheel_copies(CUDNN_SONAME, CUDNN_FOLDERS, [str(tmp_path / "link"), str(tmp_path / "real")])
    assert found == [str(tmp_path / "link" / CUDNN_FOLDERS[0] / CUDNN_SONAME)]


def test_a_missing_library_is_an_error_that_says_what_was_tried(tmp_path: Path) -> None:
    put(tmp_path, "nvidia/none/lib/libvdnn_none.so.9")
    with pytest.raises(BackendUnavailable) as caught:
        open_library("libvdnn_none.so.9", ("nvidia/none/lib",), [str(tmp_path)])
    text = str(caught.value)
    assert f"{tmp_path}/nvidia/none/lib/libvdnn_none.so.9 (" in text  # the broken file, with the loader's reason
    assert "tried" in text
    assert "; libvdnn_none.so.9 (" in text  # then the system loader
    assert "pip install 'vdnn[cuda13]'" in text
    assert caught.value.exit_code == 2


def maps_file(tmp_path: Path, *paths: str) -> Path:
    maps = tmp_path / "maps"
    lines = [f"7f00-7f01 r-xp 00000000 08:01 {n}   {path}" for n, path in enumerate(paths) for _ in range(2)]
    maps.write_text("\n".join(["7ffe-7fff rw-p 00000000 00:00 0", "7ffe-7fff rw-p 00000000 00:00 0 [stack]", *lines]))
    return maps


def test_the_mapped_copy_is_found_among_its_sublibraries(tmp_path: Path) -> None:
    maps = maps_file(tmp_path, "/opt/x y/libcudnn.so.9.19.1", "/opt/libcudnn_graph.so.9", "/opt/libcudnn.so.91")
    assert mapped_copies(CUDNN_SONAME, maps) == ["/opt/x y/libcudnn.so.9.19.1"]
    assert require_one_copy(CUDNN_SONAME, maps) == "/opt/x y/libcudnn.so.9.19.1"
    assert require_one_copy("libcublas.so.13", maps) is None
    assert mapped_copies(CUDNN_SONAME, tmp_path / "absent") == []


def test_two_mapped_copies_are_an_error_that_names_both(tmp_path: Path) -> None:
    maps = maps_file(tmp_path, "/one/libcudnn.so.9", "/two/libcudnn.so.9")
    with pytest.raises(BackendUnavailable, match=r"2 copies of libcudnn\.so\.9: /one/libcudnn\.so\.9 and /two/"):
        require_one_copy(CUDNN_SONAME, maps)


def test_importing_the_binding_loads_nothing() -> None:
    names = ("libraries", "cudnn", "cudnn_backend", "cudnn_conv", "cudnn_graph", "cublas")
    lines = [f"import vdnn.runtime.backends.cuda.{name}" for name in names]
    check = "import sys; assert not {'cupy', 'numpy'} & set(sys.modules); maps = open('/proc/self/maps').read()"
    code = "\n".join([*lines, check, "assert 'libcudnn' not in maps and 'libcublas' not in maps"])
    subprocess.run([sys.executable, "-c", code], check=True)


# errors


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (1001, "not ready", "run vdnn doctor"),
        (2003, "argument", "less aligned than stated"),
        (3000, "unsupported", "choose another algorithm"),
        (3010, "unsupported", "choose another algorithm"),
        (4000, "internal", "failed inside"),
        (4003, "memory", "the host has no memory left"),
        (4004, "memory", "lower memory.limit"),
        (5003, "execution", "CUDA_LAUNCH_BLOCKING=1"),
        (9999, "internal", "failed inside"),
    ],
)
def test_a_cudnn_error_says_call_case_cause_and_next_step(status: int, kind: str, words: str) -> None:
    problem = ConvProblem("forward", (2, 4, 9, 9), (8, 2, 3, 3), (2, 8, 7, 7), groups=2)
    error = CudnnError(status, "CUDNN_STATUS_X", "cudnnF", about=str(problem), algorithm="FFT", detail="why")
    text = str(error)
    assert text.startswith(f"cudnnF returned CUDNN_STATUS_X ({status}) for convolution forward, x (2, 4, 9, 9)")
    assert "groups 2, float32, algorithm FFT; likely cause: " in text
    assert words in text
    assert text.endswith("cuDNN says: why")
    assert error.likely_cause == kind
    assert isinstance(error, VdnnError)


def test_a_cublas_error_names_status_and_product() -> None:
    text = str(CublasError(3, "cublasSgemm_v2", "c of shape (2, 3)"))
    assert text.startswith(
        "cublasSgemm_v2 returned ALLOC_FAILED (3) for c of shape (2, 3); likely cause and next step: "
    )
    assert "unknown status (99);" in str(CublasError(99, "cublasF"))


# calls, without the libraries


class FakeDll:
    """Functions that succeed, number what they create, and note their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.created = 100

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.calls.append((name, args))
            if "Create" in name:
                self.created += 1
                args[-1]._obj.value = self.created
            if name.endswith("WorkspaceSize"):
                args[-1]._obj.value = 640
            return 0

        setattr(self, name, function)
        return function


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("direction", OPERANDS)
def test_a_legacy_plan_passes_addresses_workspace_and_beta(direction: str, accumulate: bool) -> None:
    dll = FakeDll()
    fake: Any = SimpleNamespace(dll=dll)
    handle = Handle(Cudnn(fake))
    problem = ConvProblem(direction, (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6))
    for plan in cudnn_conv.plans(handle, problem):
        assert plan.workspace_bytes == 640
        plan.run(handle, 0x1000, 0x2000, 0x3000, 0x4000, accumulate)
        args = dll.calls[-1][1]
        assert (args[3], args[5], args[12], args[8], args[9]) == (0x1000, 0x2000, 0x3000, 0x4000, 640)
        assert args[1]._obj.value == 1.0  # alpha
        assert args[10]._obj.value == float(accumulate)  # beta
    handle.close()
    handle.close()
    assert [name for name, _ in dll.calls].count("cudnnDestroy") == 1


@pytest.mark.parametrize("direction", OPERANDS)
def test_tf32_is_the_default_math_type_and_has_labels_of_its_own(direction: str) -> None:
    dll = FakeDll()
    fake: Any = SimpleNamespace(dll=dll)
    handle = Handle(Cudnn(fake))
    problem = ConvProblem(direction, (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6))
    plain = [plan.algorithm for plan in cudnn_conv.plans(handle, problem)]
    both = cudnn_conv.plans(handle, problem, tensor_cores=True)
    assert [plan.algorithm for plan in both] == [*plain, *(f"{label}+TF32" for label in plain)]
    for label in plain:
        numbers, math_types = [], []
        for name in (label, f"{label}+TF32"):
            del dll.calls[:]
            made = cudnn_conv.plan(handle, problem, name)
            assert (made.algorithm, "TENSOR_CORE" in made.notes) == (name, name != label)
            calls = [call for call, _ in dll.calls]
            # the workspace depends on the math type
            assert calls.index("cudnnSetConvolutionMathType") < next(
                i for i, call in enumerate(calls) if call.endswith("WorkspaceSize")
            )
            math_types.append(dict(dll.calls)["cudnnSetConvolutionMathType"][1])
            numbers.append(next(args[5] for call, args in dll.calls if call.endswith("WorkspaceSize")))
        assert math_types == [3, 0]  # CUDNN_FMA_MATH, CUDNN_DEFAULT_MATH
        assert numbers[0] == numbers[1]
    with pytest.raises(ValueError, match=r"no algorithm 'SOME\+TF32', known: "):
        cudnn_conv.plan(handle, problem, "SOME+TF32")


@pytest.mark.parametrize(
    ("dtype", "layout", "expected"),
    [
        ("float32", "NHWC", ("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "WINOGRAD", "WINOGRAD_NONFUSED")),
        ("bfloat16", "NHWC", ("IMPLICIT_PRECOMP_GEMM",)),
        ("float16", "NCHW", ("IMPLICIT_PRECOMP_GEMM",)),
    ],
)
def test_named_algorithms_that_do_not_serve_a_layout_or_dtype_are_not_asked(
    dtype: str, layout: str, expected: tuple[str, ...]
) -> None:
    dll = FakeDll()
    fake: Any = SimpleNamespace(dll=dll)
    problem = ConvProblem(
        *("forward", (2, 8, 8, 8), (4, 8, 3, 3), (2, 4, 6, 6)), dtype=dtype, layout=layout, epilogue="bias+relu"
    )
    plans = cudnn_conv.plans(Handle(Cudnn(fake)), problem)
    assert tuple(plan.algorithm for plan in plans) == expected
    kinds = {args[1] for name, args in dll.calls if name.startswith(("cudnnSetTensor", "cudnnSetFilter"))}
    assert kinds == {{"float32": 0, "bfloat16": 9, "float16": 2}[dtype]}  # CUDNN_DATA_FLOAT, _BFLOAT16, _HALF
    computed = {args[-1] for name, args in dll.calls if name == "cudnnSetConvolution2dDescriptor"}
    assert computed == {0}  # sums in fp32
    modes = {args[1] for name, args in dll.calls if name == "cudnnSetConvolutionMathType"}
    assert modes == ({3} if dtype == "float32" else {0})  # CUDNN_FMA_MATH, CUDNN_DEFAULT_MATH
    assert all(("TENSOR_CORE" in plan.notes) == (dtype != "float32") for plan in plans)


def host_sgemm(*args: Any) -> int:
    """cublasSgemm by its definition, on host memory: columns first, c = alpha op(a) op(b) + beta c."""
    _, transpose_a, transpose_b, m, n, k, alpha, a_ptr, lda, b_ptr, ldb, beta, c_ptr, ldc = args

    def matrix(pointer: int, rows: int, columns: int, ld: int) -> np.ndarray[Any, Any]:
        assert ld >= rows
        flat = np.ctypeslib.as_array((ctypes.c_float * (ld * columns)).from_address(pointer))
        return flat.reshape(columns, ld).T[:rows]

    a = matrix(a_ptr, k, m, lda).T if transpose_a else matrix(a_ptr, m, k, lda)
    b = matrix(b_ptr, n, k, ldb).T if transpose_b else matrix(b_ptr, k, n, ldb)
    c = matrix(c_ptr, m, n, ldc)
    c[:] = alpha._obj.value * (a.astype(float) @ b) + (beta._obj.value * c if beta._obj.value else 0)
    return 0


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_gemm_is_row_major(transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
    dll: Any = FakeDll()
    dll.cublasSgemm_v2 = host_sgemm
    fake: Any = SimpleNamespace(dll=dll)
    rng = np.random.default_rng(7)
    m, n, k = 5, 3, 7
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))
    old = c.copy()
    stored_a, stored_b = (
        np.ascontiguousarray(array.T if t else array) for array, t in ((a, transpose_a), (b, transpose_b))
    )
    Cublas(fake).gemm(
        *(m, n, k, stored_a.ctypes.data, stored_b.ctypes.data, c.ctypes.data),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        accumulate=accumulate,
    )
    expected = np.einsum("mk,kn->mn", a.astype(float), b) + (old if accumulate else 0)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-6)


def host_gemm_ex(*args: Any) -> int:
    """cublasGemmEx by its definition, on host memory: columns first, sums in float64, rounded when stored."""
    _, transpose_a, transpose_b, m, n, k, alpha, a_ptr, a_type, lda, b_ptr, b_type, ldb, *rest = args
    beta, c_ptr, c_type, ldc, compute, algorithm = rest
    assert (compute, algorithm) == (68, -1)  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT

    def bits(pointer: int, type_: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
        kind = {0: np.float32, 2: np.float16, 14: np.uint16}[type_]  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
        raw = (ctypes.c_char * (rows * columns * np.dtype(kind).itemsize)).from_address(pointer)
        return np.frombuffer(raw, kind).reshape(columns, rows).T

    def numbers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(float)

    a = bits(a_ptr, a_type, k if transpose_a else m, m if transpose_a else k)
    b = bits(b_ptr, b_type, n if transpose_b else k, k if transpose_b else n)
    assert (lda, ldb, ldc) == (a.shape[0], b.shape[0], m)
    c = bits(c_ptr, c_type, m, n)
    product = (numbers(a).T if transpose_a else numbers(a)) @ (numbers(b).T if transpose_b else numbers(b))
    total = alpha._obj.value * product + (beta._obj.value * numbers(c) if beta._obj.value else 0)
    c[:] = store(total.astype(np.float32), {0: "float32", 2: "float16", 14: "bfloat16"}[c_type])
    return 0


HALF_ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}
"""Relative to the largest result: half a unit of the last place that is stored."""


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["linear.forward", "linear.dgrad", "linear.wgrad"])
def test_fully_connected_layers_multiply_16_bit_numbers(kind: str, dtype: str, accumulate: bool) -> None:
    dll: Any = FakeDll()
    dll.cublasGemmEx = host_gemm_ex
    fake: Any = SimpleNamespace(dll=dll)
    products = Products(None, Cublas(fake, precision="bf16"))  # type: ignore[arg-type]
    rng = np.random.default_rng(5)
    n, c, k = 4, 12, 5
    shapes = {"x": (n, 3, 2, 2), "w": (k, c), "dy": (n, k), "y": (n, k), "dx": (n, 3, 2, 2), "dw": (k, c)}
    out = {"linear.forward": "y", "linear.dgrad": "dx", "linear.wgrad": "dw"}[kind]
    operands = {"linear.forward": ("x", "w"), "linear.dgrad": ("dy", "w"), "linear.wgrad": ("dy", "x")}[kind]
    held: dict[str, Any] = {}
    arrays = {"workspace": contiguous(4096, (64,), "uint8")}
    for name in (*operands, out):
        stored = "float32" if name == "dw" else dtype
        held[name] = store(rng.standard_normal(shapes[name]).astype(np.float32), stored)
        arrays[name] = contiguous(held[name].ctypes.data, shapes[name], stored)
    values = {name: load(held[name], arrays[name].dtype).reshape(shapes[name][0], -1).astype(float) for name in held}
    formula = {"linear.forward": "nc,kc->nk", "linear.dgrad": "nk,kc->nc", "linear.wgrad": "nk,nc->kc"}[kind]
    expected = np.einsum(formula, *(values[name] for name in operands)) + (values[out] if accumulate else 0)
    op = Op("fc", kind, "fc", "forward", {}, {}, accumulate=(out,) if accumulate else ())
    products.multiply(op, arrays, stream=7)
    found = load(held[out], arrays[out].dtype).reshape(expected.shape)
    assert np.abs(found - expected).max() <= HALF_ERROR[arrays[out].dtype] * np.abs(expected).max()
    assert ("cublasSetStream_v2", (101, 7)) in dll.calls


def test_binding_a_stream_sets_the_workspace_after_it() -> None:
    dll: Any = FakeDll()
    fake: Any = SimpleNamespace(dll=dll)
    cublas = Cublas(fake)
    assert ("cublasSetMathMode", (101, 2)) in dll.calls  # CUBLAS_PEDANTIC_MATH
    # CUBLAS_TF32_TENSOR_OP_MATH, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
    for precision, mode in {"tf32": 3, "bf16": 16, "fp16": 16}.items():
        other: Any = FakeDll()
        Cublas(SimpleNamespace(dll=other), precision=precision)  # type: ignore[arg-type]
        assert ("cublasSetMathMode", (101, mode)) in other.calls
    del dll.calls[:]
    cublas.bind(5, 0x1000, 4096)
    # the documentation of cublasSetStream: it puts the workspace back to the library's own
    assert dll.calls == [("cublasSetStream_v2", (101, 5)), ("cublasSetWorkspace_v2", (101, 0x1000, 4096))]


def test_the_recommended_workspace_is_that_of_the_cublas_documentation() -> None:
    assert [recommended_workspace_bytes(major) for major in (7, 8, 9)] == [4 * 2**20, 4 * 2**20, 32 * 2**20]
