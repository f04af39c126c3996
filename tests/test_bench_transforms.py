"""The study of layout transforms, on the host: what it measures, and that it sees a wrong number."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostKernels
from numpy.typing import NDArray

from vdnn.bench import gpu_transforms
from vdnn.bench.gpu_transforms import LARGE, PATTERN, cases, labels, places_in_x, ranking, study, summary
from vdnn.bench.study_cases import convolutions
from vdnn.layers.tensor import DTYPE_BYTES, MEMORY_ORDERS


class HostMachine:
    """The memory of NumPy in place of a GPU's; times are made up."""

    def __init__(self, dtype: str) -> None:
        self.kernels: Any = HostKernels(dtype=dtype)
        self.stream = SimpleNamespace(synchronize=lambda: None)
        self.rooms: dict[int, NDArray[np.uint8]] = {}

    def allocate(self, nbytes: int) -> int:
        room = np.zeros(nbytes + 512, np.uint8)
        address = int(room.ctypes.data) + -room.ctypes.data % 512
        self.rooms[address] = room
        return address

    def free(self, address: int) -> None:
        del self.rooms[address]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def upload(self, address: int, content: NDArray[np.uint8]) -> None:
        ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def download(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def count(self, nbytes: int) -> int:
        return 2

    def time_us(self, calls: Sequence[Callable[[], None]]) -> float:
        assert len(calls) == 2
        return 4.0

    def copy_us(self, places: Sequence[int], nbytes: int) -> float:
        return 3.0


SHAPES = (("by 32", (32, 32, 2, 4)), ("13x13", (3, 20, 13, 13)), ("C = 3", (4, 3, 10, 10)), ("one", (1, 4, 5, 5)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pair_and_way_is_checked_and_timed(dtype: str) -> None:
    machine = HostMachine(dtype)
    rows, failures = study(machine, machine, SHAPES, print)
    assert failures == []
    assert machine.rooms == {}
    for case, shape in SHAPES:
        for one, two in permutations(MEMORY_ORDERS, 2):
            found = [r for r in rows if (r["case"], r["from"], r["to"]) == (case, one, two)]
            assert [r["method"] for r in found] == labels(case, shape, one, two, dtype)
            for row in found:
                assert row["gbps"] == pytest.approx(2 * np.prod(shape) * DTYPE_BYTES[dtype] / 4e3)
                assert (row["share"], row["copy_us"], row["dtype"], row["shape"]) == (0.75, 3.0, dtype, list(shape))
    lines = list(summary(rows))
    assert len(lines) == 1 + len(SHAPES)
    assert "NAIVE 75%" in lines[1]
    first = next(ranking([{**row, "time_us": 3.0 if row["method"] == "BRICKS" else 4.0} for row in rows]))
    tile = "8x16x2" if dtype == "float32" else "4x32x1"
    assert first.startswith(f"32x32x2x4 {dtype} NCHW:NHWC  BRICKS({tile}) 75.0%, NAIVE 75.0%, TILED 75.0%, ")


def test_a_wrong_number_is_a_failure() -> None:
    machine = HostMachine("float32")
    kernels = machine.kernels

    class Vandal:
        dtype = "float32"

        def launch(self, name: str, blocks: int, args: Sequence[Any], stream: Any) -> None:
            kernels.launch(name, blocks, args, stream)
            last = int(np.prod(SHAPES[1][1])) - 1
            y = args[1] if name == "transform_images" else args[2] if "strips" in name else args[3]
            ctypes.memset(y + 4 * last, 0x77, 4)

    machine.kernels = Vandal()
    rows, failures = study(machine, machine, SHAPES[1:2], lambda text: None)
    assert rows == []
    assert "float32 (3, 20, 13, 13) NCHW to NHWC, TILED: 1 of numbers" in failures[1]


def test_where_numbers_come_from() -> None:
    """Against a transposed array."""
    shape = (3, 4, 2, 5)
    for one, two in permutations(MEMORY_ORDERS, 2):
        x = np.arange(120).reshape([shape[axis] for axis in MEMORY_ORDERS[one]])
        logical = x.transpose(np.argsort(MEMORY_ORDERS[one]))
        want = logical.transpose(MEMORY_ORDERS[two]).ravel()
        assert (places_in_x(np.arange(120), shape, one, two) == want).all()


def test_cases_are_large_or_the_studys() -> None:
    names = [name for name, _ in cases()]
    assert names[len(LARGE) :] == list(convolutions())
    for case, shape in LARGE:
        assert 2 * np.prod(shape) >= 2**26, case
        assert case != "by 32" or shape[0] % 32 == shape[1] % 32 == 0
    assert all(np.prod(shape) % PATTERN for _, shape in cases())
    assert "NAIVE" not in labels(*LARGE[1], "NCHW", "CHWN", "float32")
    assert labels(*LARGE[5], "NCHW", "NHWC", "bfloat16") == ["NAIVE", "TILED", "VECTOR", "STRIPS"]
    assert labels(*LARGE[3], "NHWC", "NCHW", "bfloat16") == ["TILED", "VECTOR", "STRIPS", "ROWS"]
    assert labels(*LARGE[2], "NHWC", "CHWN", "bfloat16") == ["TILED", "VECTOR", "BRICKS"]


def test_the_program_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = HostMachine("float32")
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": "host"}, raising=False)
    monkeypatch.setattr(gpu_transforms, "Probe", lambda dtype: machine)
    monkeypatch.setattr(gpu_transforms, "Clock", lambda probe: machine)
    monkeypatch.setattr(gpu_transforms, "cases", lambda: iter(SHAPES))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_transforms.main(["float32", "C = 3"]) == 0
    results = json.loads((tmp_path / "gpu_transforms.json").read_text())["results"]
    assert results["failures"] == []
    assert {row["case"] for row in results["rows"]} == {"C = 3"}
    words = ["bfloat16", "--only", "NHWC:CHWN", "CHWN:NCHW", "--ways", "VECTOR", "BRICKS"]
    machine.kernels = HostKernels(dtype="bfloat16")
    assert gpu_transforms.main(words) == 0
    rows = json.loads((tmp_path / "gpu_transforms.json").read_text())["results"]["rows"]
    assert {(row["from"], row["to"]) for row in rows} == {("NHWC", "CHWN"), ("CHWN", "NCHW")}
    assert {row["method"] for row in rows} == {"VECTOR", "BRICKS"}
    with pytest.raises(SystemExit):
        gpu_transforms.main(["--only", "NHWC:NHWC"])
