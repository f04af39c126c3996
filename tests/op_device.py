"""A device of the tests for timed ops: host memory, a clock, and captures that take no time until they are launched."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_cupy import HostCupy

from vdnn.layers import (
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Linear,
    Op,
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)
from vdnn.layers.tensor import TensorSpec
from vdnn.runtime.backends.cuda import op_trial

CACHE_BYTES, SCRATCH_BYTES = 64 * 1024, 8192
START_MS, CHAINED_MS, ALONE_MS = 0.010, 0.003, 0.005


@dataclass
class Stream:
    """A stream with a clock, and captures that take no time until they are launched."""

    ptr: int = 0
    at_ms: float = 0.0
    capture: list[float] | None = None
    captures: list[int] = field(default_factory=list)

    def begin_capture(self) -> None:
        """Work is collected from here on."""
        assert self.capture is None
        self.capture = []

    def end_capture(self) -> Any:
        """A graph of what was collected."""
        assert self.capture is not None
        times, self.capture = self.capture, None
        self.captures.append(len(times))
        return SimpleNamespace(launch=lambda stream: stream.pass_(START_MS + sum(times)))

    def pass_(self, time_ms: float) -> None:
        """Let time pass."""
        self.at_ms += time_ms

    def synchronize(self) -> None:
        """Nothing is ever under way."""
        assert self.capture is None


class Event:
    """A point of the clock."""

    ms = 0.0

    def record(self, stream: Stream) -> None:
        """Now."""
        assert stream.capture is None
        self.ms = stream.at_ms

    def synchronize(self) -> None:
        """It is over."""


class Device(HostCupy):
    """Host memory, and a launch that notes its arrays and lets time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()
        self.seen: list[dict[str, Any]] = []
        self.taken: list[int] = []
        runtime = self.cuda.runtime
        runtime.memset = lambda address, value, nbytes: ctypes.memset(address, value, nbytes)
        runtime.memsetAsync = self.write
        self.written = 0
        runtime.getDeviceProperties = lambda device: {"name": b"host", "l2CacheSize": CACHE_BYTES}
        self.cuda.Event = Event
        self.cuda.get_elapsed_time = lambda start, end: end.ms - start.ms

    def malloc(self, nbytes: int) -> int:
        self.taken.append(nbytes)
        return super().malloc(nbytes)

    def write(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """As memsetAsync, behind the operands."""
        ((memory, _),) = self.memory.items()
        assert address - memory == self.taken[-1] - nbytes
        ctypes.memset(address, value, nbytes)
        self.written += nbytes

    def launch(self, op: Op, arrays: Any, stream: str) -> None:
        """As the backend's."""
        assert stream == "compute"
        self.seen.append(arrays)
        if self.stream.capture is None:
            self.stream.pass_(ALONE_MS)
        else:
            self.stream.capture.append(CHAINED_MS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """The device as cupy, and a cache of its own."""
    made = Device()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(op_trial, "SCRATCH_BYTES", SCRATCH_BYTES)
    monkeypatch.setattr(op_trial, "BUSY_BYTES", 3 * SCRATCH_BYTES)
    return made


def relu(size: int, name: str = "a", **changes: Any) -> tuple[Op, Program]:
    """A ReLU of 2 * size numbers, and its program."""
    x = TensorSpec(f"{name}.x", "act", (2, size))
    y = TensorSpec(f"{name}.y", "act", (2, size), view_of=changes.pop("over", None))
    made = Op(name, "relu.forward", name, "forward", {"x": x.name}, {"y": y.name}, **changes)
    return made, Program("one", 2, "train", {x.name: x, y.name: y}, (made,), (), (), (), "", "")


def small(layout: str = "NCHW", **options: Any) -> Program:
    """Every kind of tensor: branches of a concatenation, winners, labels, dropout, in-place ReLUs.

    options: of `lower`.
    """
    graph = Graph("small", (3, 10, 10), 5)
    first = graph.add("relu1", Relu(), graph.add("conv1", Conv(8, 3, padding=1), graph.input))
    pooled = graph.add("pool1", Pool("max", 2), first)
    one = graph.add("relu2", Relu(), graph.add("conv2", Conv(5, 1), pooled))
    two = graph.add("relu3", Relu(), graph.add("conv3", Conv(6, 3, padding=1), pooled))
    joined = graph.add("join", Concat(), (one, two))
    dropped = graph.add("drop", Dropout(0.5), graph.add("flat", Flatten(), joined))
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(5), dropped))
    return lower(graph, 4, update=Update(momentum=0.9), pool_indices=True, layout=layout, **options)
