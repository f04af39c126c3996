"""The cuDNN and cuBLAS binding against the headers and libraries of installed wheels; needs no GPU.

Skipped, with the reason, where the wheels are not installed.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from vdnn.errors import BackendUnavailable
from vdnn.layers import Conv
from vdnn.runtime.backends.cuda import cublas as cublas_module
from vdnn.runtime.backends.cuda import cudnn as cudnn_module
from vdnn.runtime.backends.cuda import cudnn_conv, cudnn_graph
from vdnn.runtime.backends.cuda.cublas import Cublas, CublasError
from vdnn.runtime.backends.cuda.cudnn import (
    ConvolutionDescriptor,
    Cudnn,
    CudnnError,
    FilterDescriptor,
    Handle,
    TensorDescriptor,
)
from vdnn.runtime.backends.cuda.cudnn_backend import Attribute, BackendDescriptor, Kind, Type
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, contiguous
from vdnn.runtime.backends.cuda.libraries import CUDNN_FOLDERS, CUDNN_SONAME, CudnnLibrary, load_cudnn, open_library


@pytest.fixture(scope="module")
def library() -> CudnnLibrary:
    try:
        return load_cudnn()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def api(library: CudnnLibrary) -> Cudnn:
    return Cudnn(library)


def header_text(library_path: str, header: str) -> str:
    """The text of a header in the wheel that the library is from."""
    path = Path(library_path).parent.parent / "include" / header
    if not path.is_file():
        pytest.skip(f"{header} is not installed beside {library_path}")
    return path.read_text(encoding="utf-8")


def cudnn_headers(library: CudnnLibrary) -> str:
    return "".join(header_text(library.path, f"cudnn_{part}.h") for part in ("graph", "ops", "cnn"))


def parameters(headers: str, function: str) -> list[tuple[str, str]]:
    """C type and name of each parameter of a prototype."""
    match = re.search(rf"\b{function}\s*\(([^;]*?)\)\s*;", headers)
    assert match, f"{function} is not in the headers"
    text = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
    rows = (re.fullmatch(r"(.*?)(\w+)", " ".join(part.split())) for part in text.split(","))
    return [(row[1].strip(), row[2]) for row in rows if row]


def code(c_type: str) -> str:
    """The letter for a C type: every handle and descriptor is a pointer, every other name an enumeration."""
    plain = c_type.replace("const", "").strip()
    pointer = re.fullmatch(r"(cudnn|cublas)(Handle|(Tensor|Filter|Convolution|Pooling)Descriptor)_t", plain)
    if "*" in plain or pointer or plain in ("cudnnBackendDescriptor_t", "cudaStream_t"):
        return "p"
    return {"size_t": "z", "int64_t": "q", "long long int": "q"}.get(plain, "i")


# against the headers of the wheels


def test_cudnn_signatures_are_those_of_the_headers(library: CudnnLibrary) -> None:
    headers = cudnn_headers(library)
    for name, codes in cudnn_module.SIGNATURES.items():
        assert "".join(code(c_type) for c_type, _ in parameters(headers, name)) == codes, name


def test_cublas_signatures_are_those_of_the_header(library: CudnnLibrary) -> None:
    header = header_text(library.cublas.path, "cublas_api.h")
    for name, types in cublas_module.SIGNATURES.items():
        expected = [cudnn_module.CODES[code(c_type)] for c_type, _ in parameters(header, name)]
        assert list(types) == expected, name
    assert re.search(r"CUBLAS_PEDANTIC_MATH = 2,", header)
    for status, (name, _) in cublas_module.STATUS.items():
        assert re.search(rf"CUBLAS_STATUS_{name} = {status}\b", header), name
    modes = {
        "CUBLAS_PEDANTIC_MATH": cublas_module.PEDANTIC_MATH,
        "CUBLAS_TF32_TENSOR_OP_MATH": cublas_module.TF32_MATH,
        "CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION": cublas_module.WIDE_SUMS_MATH,
        "CUBLAS_COMPUTE_32F": cublas_module.COMPUTE_32F,
        "CUBLAS_COMPUTE_32F_FAST_TF32": cublas_module.COMPUTE_32F_FAST_TF32,
        "CUBLAS_GEMM_DEFAULT": cublas_module.GEMM_DEFAULT,
    }
    for name, mode in modes.items():
        assert re.search(rf"\b{name}\s*= {mode}\b", header), name


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        ("forward", {"x": "x", "w": "w", "y": "y"}),
        ("dgrad", {"x": "dx", "w": "w", "y": "dy"}),
        ("wgrad", {"x": "x", "w": "dw", "y": "dy"}),
    ],
)
def test_operands_stand_where_the_headers_have_them(
    library: CudnnLibrary, direction: str, names: dict[str, str]
) -> None:
    calls = cudnn_conv._DIRECTIONS[direction]
    rows = [name for _, name in parameters(cudnn_headers(library), calls.run)]
    assert [rows[3], rows[5], rows[12]] == [names[name] for name in OPERANDS[direction]]
    assert [rows[n] for n in (1, 6, 7, 8, 9, 10)] == [
        *("alpha", "convDesc", "algo", "workSpace", "workSpaceSizeInBytes", "beta")
    ]


def test_algorithms_are_those_of_the_header(library: CudnnLibrary) -> None:
    header = header_text(library.path, "cudnn_ops.h")
    prefixes = {"forward": "FWD", "dgrad": "BWD_DATA", "wgrad": "BWD_FILTER"}
    for direction, prefix in prefixes.items():
        for label, (number, deterministic) in cudnn_conv._DIRECTIONS[direction].algorithms.items():
            name = label if label.startswith("ALGO_") else f"ALGO_{label}"
            row = re.search(rf"CUDNN_CONVOLUTION_{prefix}_{name}\s*= (\d+),(.*)", header)
            assert row, name
            assert (int(row[1]), "non-deterministic" not in row[2]) == (number, deterministic), name


def test_graph_numbers_are_those_of_the_header(library: CudnnLibrary) -> None:
    header = header_text(library.path, "cudnn_graph.h")
    expected = {
        **{f"CUDNN_BACKEND_{member.name}_DESCRIPTOR": member.value for member in Kind},
        **{f"CUDNN_TYPE_{member.name}": member.value for member in Type},
        **{f"CUDNN_ATTR_{member.name}": member.value for member in Attribute},
        **{f"CUDNN_NUMERICAL_NOTE_{name}": number for number, name in enumerate(cudnn_graph.NUMERICAL_NOTES)},
        **{f"CUDNN_BEHAVIOR_NOTE_{name}": number for number, name in enumerate(cudnn_graph.BEHAVIOR_NOTES)},
        **{f"CUDNN_HEUR_MODE_{name}": number for name, number in cudnn_graph.HEURISTICS.items()},
        "CUDNN_DATA_FLOAT": cudnn_module.DATA_TYPES["float32"],
        "CUDNN_DATA_HALF": cudnn_module.DATA_TYPES["float16"],
        "CUDNN_DATA_BFLOAT16": cudnn_module.DATA_TYPES["bfloat16"],
        **{f"CUDNN_POINTWISE_{name}": number for name, number in cudnn_graph.POINTWISE.items()},
        "CUDNN_TENSOR_NCHW": cudnn_module.FORMATS["NCHW"],
        "CUDNN_TENSOR_NHWC": cudnn_module.FORMATS["NHWC"],
        "CUDNN_CROSS_CORRELATION": cudnn_module.CROSS_CORRELATION,
        "CUDNN_DEFAULT_MATH": cudnn_module.DEFAULT_MATH,
        "CUDNN_FMA_MATH": cudnn_module.FMA_MATH,
    }
    for name, number in expected.items():
        assert re.search(rf"\b{name}( CUDNN_DEPRECATED_ENUM)?\s*= {number}\b", header), name


# against the libraries


def test_the_libraries_are_of_one_cuda_version_and_their_paths_exist(library: CudnnLibrary) -> None:
    assert library.version_text.startswith("9.")
    assert Path(library.path).name.startswith("libcudnn.so.9")
    assert Path(library.path).is_file()
    assert Path(library.cublas.path).name.startswith(f"libcublas.so.{library.cuda_major}")
    assert library.cublas.version[0] == library.cuda_major
    assert load_cudnn() is library
    assert open_library(CUDNN_SONAME, CUDNN_FOLDERS, [])[1] == library.path  # the copy that is there, no second one


def test_a_channel_slice_keeps_its_strides(api: Cudnn) -> None:
    descriptor = TensorDescriptor(api, (2, 3, 5, 7), (420, 35, 7, 1))
    values = [ctypes.c_int() for _ in range(9)]
    status = api.shared_library.dll.cudnnGetTensor4dDescriptor(
        ctypes.c_void_p(descriptor.pointer), *(ctypes.byref(value) for value in values)
    )
    assert status == 0
    assert [value.value for value in values] == [0, 2, 3, 5, 7, 420, 35, 7, 1]


def test_a_refused_descriptor_says_which(api: Cudnn) -> None:
    with pytest.raises(CudnnError, match=r"for tensor of shape \(2, -3, 5, 7\)") as caught:
        TensorDescriptor(api, (2, -3, 5, 7), (105, 35, 7, 1))
    assert caught.value.likely_cause == "argument"
    assert caught.value.status_name.startswith("CUDNN_STATUS_BAD_PARAM")


@pytest.mark.parametrize(
    ("images", "filters", "kernel", "stride", "padding", "dilation", "groups"),
    [
        ((2, 3, 17, 19), 4, (3, 5), (2, 1), (0, 2), (1, 3), 1),
        ((1, 6, 30, 21), 9, (5, 2), (3, 4), (2, 1), (2, 1), 3),
    ],
)
def test_cudnn_computes_the_output_shape_of_the_layer(
    api: Cudnn,
    images: tuple[int, int, int, int],
    filters: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> None:
    x = TensorDescriptor(api, images, contiguous(images))
    w = FilterDescriptor(api, (filters, images[1] // groups, *kernel))
    convolution = ConvolutionDescriptor(api, padding, stride, dilation, groups)
    sizes = [ctypes.c_int() for _ in range(4)]
    pointers = (ctypes.c_void_p(thing.pointer) for thing in (convolution, x, w))
    status = api.shared_library.dll.cudnnGetConvolution2dForwardOutputDim(*pointers, *map(ctypes.byref, sizes))
    assert status == 0
    math = ctypes.c_int()
    assert (
        api.shared_library.dll.cudnnGetConvolutionMathType(ctypes.c_void_p(convolution.pointer), ctypes.byref(math))
        == 0
    )
    assert math.value == 3  # CUDNN_FMA_MATH: no tensor cores
    layer = Conv(filters, kernel, stride, padding, dilation, groups)
    assert tuple(size.value for size in sizes) == (images[0], *layer.output_shape("conv", (images[1:],)))


def test_a_handle_without_a_gpu_is_an_error_in_words(api: Cudnn) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(CudnnError, match=r"NOT_INITIALIZED \(1001\).*no usable GPU"):
        Handle(api)
    with pytest.raises(CublasError, match="NOT_INITIALIZED"):
        Cublas(api.shared_library.cublas)


def test_descriptors_are_given_back_with_their_owner(api: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[int] = []
    name = "cudnnBackendDestroyDescriptor"
    original = api._functions[name]

    def destroy(pointer: int) -> Any:
        destroyed.append(pointer)
        return original(pointer)

    monkeypatch.setitem(api._functions, name, destroy)
    descriptor = BackendDescriptor(api, Kind.TENSOR)
    pointer = descriptor.pointer
    assert not destroyed
    del descriptor
    assert destroyed == [pointer]
