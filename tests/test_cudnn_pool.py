"""cuDNN's pools against the headers of its wheel; needs no GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import pytest
from test_cuda_libraries import code, header_text, parameters

from vdnn.bench.cudnn_pool import MODES, PROPAGATE_NAN, SIGNATURES, CudnnPool
from vdnn.bench.study_cases import pools
from vdnn.errors import BackendUnavailable
from vdnn.runtime.backends.cuda.cudnn import Cudnn, CudnnError
from vdnn.runtime.backends.cuda.libraries import load_cudnn


class HandleOf:
    """A handle without a context, and what is called with it."""

    pointer = 0

    def __init__(self, api: Cudnn) -> None:
        self.api = api


@pytest.fixture(scope="module")
def api() -> Iterator[Cudnn]:
    try:
        yield Cudnn(load_cudnn())
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_signatures_and_modes_are_those_of_the_headers(api: Cudnn) -> None:
    ops = header_text(api.shared_library.path, "cudnn_ops.h")
    graph = header_text(api.shared_library.path, "cudnn_graph.h")
    for name, codes in SIGNATURES.items():
        assert "".join(code(c_type) for c_type, _ in parameters(ops, name)) == codes, name
    names = ("MAX", "AVERAGE_COUNT_INCLUDE_PADDING", "AVERAGE_COUNT_EXCLUDE_PADDING", "MAX_DETERMINISTIC")
    for name, number in zip(names, MODES.values(), strict=True):
        assert re.search(rf"CUDNN_POOLING_{name}\s*= {number}\b", ops), name
    assert re.search(rf"CUDNN_PROPAGATE_NAN( CUDNN_DEPRECATED_ENUM)?\s*= {PROPAGATE_NAN}\b", graph)
    operands = [name for _, name in parameters(ops, "cudnnPoolingBackward")]
    assert operands == [
        "handle",
        "poolingDesc",
        "alpha",
        "yDesc",
        "y",
        "dyDesc",
        "dy",
        "xDesc",
        "x",
        "beta",
        "dxDesc",
        "dx",
    ]


@pytest.mark.parametrize("name", [f"POOL{number}" for number in range(1, 11)])
def test_cudnn_rounds_outputs_of_the_studys_pools_down(api: Cudnn, name: str) -> None:
    case = pools()[name]
    pool = CudnnPool(HandleOf(api), case.x, case.whole_windows, window=case.window, stride=case.stride)  # type: ignore[arg-type]
    sizes = [ctypes.c_int() for _ in range(4)]
    get = api.shared_library.dll.cudnnGetPooling2dForwardOutputDim
    pointers = (ctypes.c_void_p(pool._pool), ctypes.c_void_p(pool._x.pointer))
    assert get(*pointers, *map(ctypes.byref, sizes)) == 0
    assert tuple(size.value for size in sizes) == case.whole_windows


def test_a_refused_pool_says_which(api: Cudnn) -> None:
    with pytest.raises(CudnnError, match=r"for max of 3x3 / 0, padding 0, x \(1, 1, 8, 8\)"):
        CudnnPool(HandleOf(api), (1, 1, 8, 8), (1, 1, 3, 3), window=3, stride=0)  # type: ignore[arg-type]


def test_operands_stand_where_the_headers_have_them(api: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[object, ...]] = []
    pool = CudnnPool(HandleOf(api), (2, 4, 6, 6), (2, 4, 3, 3), window=2, stride=2, layout="NHWC")  # type: ignore[arg-type]
    monkeypatch.setattr(api, "call", lambda name, *args, about="": called.append((name, *args)))
    pool.forward(11, 22)
    pool.backward(22, 33, 11, 44)
    forward, backward = called
    x, y = pool._x.pointer, pool._y.pointer
    assert [forward[i] for i in (0, 2, 4, 5, 7, 8)] == ["cudnnPoolingForward", pool._pool, x, 11, y, 22]
    assert [backward[i] for i in (0, 4, 5, 6, 7, 8, 9, 11, 12)] == ["cudnnPoolingBackward", y, 22, y, 33, x, 11, x, 44]
