"""Replayed steps with uploads beside them, on the CPU: the cuda backend's own copies, captures and replays over a CUDA
that runs everything as late as it may, and kernels of the cpu backend in place of the GPU's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lazy_cuda import LazyCuda
from plan_lab import Case, Lab, reference

from vdnn.memory.plan import STREAMS, Feed, Plan, align
from vdnn.runtime.backends.cpu.kernels import KERNELS
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.cuda.capture import Upload
from vdnn.runtime.bfloat16 import host_dtype
from vdnn.runtime.executor import Executor
from vdnn.runtime.held import Held


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab("lenet", 3, steps=5, image_size=30)


def pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Of a range of pinned bytes, as if every 1000 were registered on their own."""
    end = offset + nbytes
    while offset < end:
        size = min(end, (offset // 1000 + 1) * 1000) - offset
        yield offset, size
        offset += size


class LateCuda(CudaBackend):
    """The cuda backend with a slab and pinned bytes in ordinary memory, and streams that run as late as they may."""

    def __init__(self, plan: Plan, order: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
        cuda = LazyCuda(order)
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        patch.setitem(sys.modules, "cupy.cuda", cuda)
        self._cupy, self._runtime, self.cuda = SimpleNamespace(cuda=cuda), cuda.runtime, cuda
        self._streams = {name: cuda.Stream(name) for name in STREAMS}
        self._events, self._stages, self._waiting, self._guards = {}, {}, [], []
        self._poison, self._copy_repeats, self._capturing, self._opened = False, 1, None, True
        self.caps = SimpleNamespace(poisons=False)  # type: ignore[assignment]
        self.held = Held()
        self._rooms: list[Any] = []
        self._sizes, self._stage_bytes = (plan.slab_bytes, plan.host_bytes), plan.stage_bytes
        self._slab = self._memory(plan.slab_bytes)
        host = self._memory(align(plan.host_bytes) + plan.stage_bytes)
        self._pinned = SimpleNamespace(address=host, pieces=pieces)  # type: ignore[assignment]
        self.captures = 0

    def _memory(self, nbytes: int) -> int:
        room = np.full(nbytes, 0xFF, np.uint8)
        self._rooms.append(room)
        return int(room.ctypes.data)

    def launch(self, op: Any, arrays: Any, stream: str) -> None:
        """The cpu kernel, when its time has come."""
        views = {name: _numpy(array) for name, array in arrays.items()}
        self._streams[stream].add(lambda: KERNELS[op.kind](op, **views))

    def capture(self, body: Any) -> Any:
        self.captures += 1
        return super().capture(body)


def _numpy(array: DeviceArray) -> np.ndarray[Any, Any]:
    size = array.itemsize * (1 + sum(step * (n - 1) for n, step in zip(array.shape, array.strides, strict=True)))
    memory = (ctypes.c_uint8 * size).from_address(array.ptr)
    return np.ndarray(
        array.shape, host_dtype(array.dtype), memory, 0, [array.itemsize * step for step in array.strides]
    )


def section(backend: LateCuda, case: Case) -> np.ndarray[Any, Any]:
    """The persistent section."""
    return _numpy(DeviceArray(backend._slab, (case.plan.persistent_bytes,), (1,), "uint8", case.plan.persistent_bytes))


@pytest.mark.parametrize("order", list(permutations(STREAMS)))
@pytest.mark.parametrize("policy", ["none", "all"])
def test_replayed_steps_with_uploads_beside_them_give_the_bits_of_plain_execution(
    lab: Lab, policy: str, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = lab.case(policy, tight=policy == "all")
    expected = reference(lab, case)
    backend = LateCuda(case.plan, order, monkeypatch)
    kept = section(backend, case)
    kept[:] = 0
    for name, value in lab.first_values(case.program).items():
        place = case.plan.persistent[name]
        kept[place : place + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    executor = Executor(backend, case.plan, case.program, capture=True)
    found = []
    for i, feeds in enumerate(lab.feeds):
        images = lab.feeds[i + 1]["images"] if i + 1 < len(lab.feeds) else lab.after
        if i == 3:  # not what was announced: uploaded before the run, through the same stage
            backend.held.forget(case.program.ahead)
        fetched = executor.run(feeds, {"images": images})
        found += [fetched[name] for name in case.program.fetches]
    assert backend.captures == 1
    assert backend.cuda.log == ["launch"] * 2 * 4, "the upload does not part the step in two graphs"
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(found, expected.fetched, strict=True))
    for name in case.program.persistent:
        place, size = case.plan.persistent[name], case.program.tensors[name].nbytes
        assert np.array_equal(kept[place : place + size], expected.kept[place : place + size]), name


def test_the_host_copies_the_next_images_while_the_graphs_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned bytes are filled after the last launch, so that the GPU has work meanwhile."""
    case = lab.case("none")
    backend = LateCuda(case.plan, STREAMS, monkeypatch)
    executor = Executor(backend, case.plan, case.program, capture=True)
    executor.run(lab.feeds[0], {"images": lab.feeds[1]["images"]})
    copied, copyto = [], np.copyto

    def noted(target: Any, source: Any, **options: Any) -> None:
        copied.append((np.shape(source), len(backend.cuda.log)))
        copyto(target, source, **options)

    monkeypatch.setattr(np, "copyto", noted)
    executor.run(lab.feeds[1], {"images": lab.feeds[2]["images"]})
    monkeypatch.undo()
    assert executor._replay is not None
    uploads = [feed for feed in executor._replay.feeds if isinstance(feed, Upload)]
    assert [upload.graphs for upload in uploads] == [1], "it waits for more than the first graph"
    images = lab.feeds[0]["images"].shape
    assert [launched for shape, launched in copied if shape == images] == [2]
    fed = [step.tensor for step in case.plan.steps if isinstance(step, Feed)]
    before = [shape for shape, launched in copied if launched == 0]
    assert len(before) == len(fed) - 1
    assert images not in before


def test_a_replay_is_launched_again_without_the_host(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    case = lab.case("none")
    backend = LateCuda(case.plan, STREAMS, monkeypatch)
    executor = Executor(backend, case.plan, case.program, capture=True)
    assert executor.replay is None
    for i in range(2):
        executor.run(lab.feeds[i], {"images": lab.feeds[i + 1]["images"]})
    ran: list[str] = []
    replay = executor.replay
    assert replay is not None
    for graph in replay.graphs:  # type: ignore[attr-defined]
        graph.work.append(lambda: ran.append("graph"))
    for _ in range(3):
        replay.relaunch()
    assert not ran, "nothing waits for it"
    backend.sync()
    assert ran == ["graph"] * 2 * 3


def test_a_mark_within_a_capture_is_set_by_every_replay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for a node of the graph: a plain record would only order what is captured."""
    backend = LateCuda(lab.case("none").plan, STREAMS, monkeypatch)
    asked: list[Any] = []

    def record(event: Any, stream: Any, flags: Any) -> int:
        asked.append((event.value, stream.value, flags.value))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuEventRecordWithFlags=record))
    event, stream = SimpleNamespace(ptr=5, record=lambda stream: asked.append("plain")), SimpleNamespace(ptr=7)
    backend._cupy, backend._streams = SimpleNamespace(cuda=SimpleNamespace(Event=lambda: event)), {"compute": stream}
    assert backend.mark("compute") is event
    assert asked == ["plain"]
    backend._capturing = SimpleNamespace()  # type: ignore[assignment]
    assert backend.mark("compute") is event
    assert asked[1:] == [(5, 7, 1)], "CU_EVENT_RECORD_EXTERNAL is 1"
