"""A run as CUDA graphs: captured once, then replayed with other values fed, and uploads for the next run beside it.

    replay = Capture(streams).replay(body)      # body puts a run on the streams through the backend
    replay.run(values, outs)

A graph reads its feeds from fixed pinned bytes, so these must be full before it starts. Images of the next run would
make the GPU wait for that copy. They are therefore no part of a graph: the capture ends where they are fed, and goes
on in another graph. Once all graphs are launched the host fills the pinned bytes and uploads them as soon as the
graphs before that point are over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import VdnnError
from vdnn.runtime.backends.cuda import host_copy
from vdnn.runtime.backends.cuda.array import DeviceArray

EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL (CUDA driver API): a node of the graph; a plain record only orders what is captured."""
Copy = tuple[int, int, int]
"""Device address, host address, bytes."""


class Stage:
    """Pinned bytes through which one array is fed or fetched.

    Args:
        pieces: (device address, host address, bytes) of the copies that this takes, in order and without gaps.

    Attributes:
        array: the pinned bytes.
        busy_on: the stream on which a value in them waits to leave.
    """

    def __init__(self, array: DeviceArray, pieces: Sequence[Copy]):
        self.pieces = pieces
        self.busy_on: str | None = None
        buffer = (ctypes.c_uint8 * array.nbytes).from_address(pieces[0][1])
        self.array = np.ndarray(array.shape, np.dtype(array.dtype), memoryview(buffer))


@dataclass(slots=True)
class Upload:
    """A feed beside the graphs: through `stage` on `stream`, after so many graphs of the run."""

    stage: Stage
    stream: Any
    graphs: int = 0


def mark_replays(event: Any, stream: Any) -> None:
    """While `stream` is captured: let every replay note the time at which it gets here in `event`.

    Raises: VdnnError if the driver refuses (it is CUDA 11.1 or newer that can).
    """
    record = ctypes.CDLL("libcuda.so.1").cuEventRecordWithFlags
    status = record(ctypes.c_void_p(event.ptr), ctypes.c_void_p(stream.ptr), ctypes.c_uint(EXTERNAL))
    if status:
        raise VdnnError(f"cuEventRecordWithFlags returned {status} within a capture; the driver is too old to time one")


class Capture:
    """What is being captured on `streams`, of which "compute" begins and ends every graph.

    Attributes:
        feeds: in the order in which the run feeds: stages that the graphs read, and uploads beside them.
        fetches: stages that the graphs write, in order.
        recorded: events of the present graph; those of earlier graphs are over before it begins.
    """

    def __init__(self, streams: Mapping[str, Any]):
        from cupy.cuda import Event

        self._event = Event
        self._compute = streams["compute"]
        self._others = [stream for name, stream in streams.items() if name != "compute"]
        self._graphs: list[Any] = []
        self._kept: list[Any] = []
        self.feeds: list[Stage | Upload] = []
        self.fetches: list[Stage] = []
        self.recorded: set[int] = set()

    def replay(self, body: Callable[[], None]) -> CudaReplay:
        """Capture what `body` does."""
        self._begin()
        try:
            body()
        except BaseException:
            self._compute.end_capture()
            raise
        self._end()
        return CudaReplay(self._graphs, self._compute, self.feeds, self.fetches)

    def beside(self, upload: Upload) -> None:
        """Let `upload` wait for what has been captured so far, and nothing wait for it."""
        self._end()
        upload.graphs = len(self._graphs)
        self.feeds.append(upload)
        self._begin()

    def _begin(self) -> None:
        self.recorded.clear()
        self._compute.begin_capture()
        fork = self._mark(self._compute)
        for stream in self._others:
            stream.wait_event(fork)

    def _end(self) -> None:
        for stream in self._others:
            self._compute.wait_event(self._mark(stream))
        self._graphs.append(self._compute.end_capture())

    def _mark(self, stream: Any) -> Any:
        event = self._event(disable_timing=True)
        event.record(stream)
        self._kept.append(event)  # until the capture is over
        return event


class CudaReplay:
    """Captured graphs, launched one after the other on `stream`, with what they feed and fetch."""

    def __init__(self, graphs: Sequence[Any], stream: Any, feeds: Sequence[Stage | Upload], fetches: Sequence[Stage]):
        from cupy.cuda import Event, runtime

        self._runtime = runtime
        self.graphs, self.stream, self.feeds, self.fetches = graphs, stream, feeds, fetches
        self._ends = {feed.graphs: Event(disable_timing=True) for feed in feeds if isinstance(feed, Upload)}

    def run(self, values: Sequence[NDArray[Any]], outs: Sequence[NDArray[Any]]) -> None:
        """Feed, launch, feed what the next run needs, wait, fetch."""
        uploads: list[tuple[Upload, NDArray[Any]]] = []
        for feed, value in zip(self.feeds, values, strict=True):
            if isinstance(feed, Upload):
                uploads.append((feed, value))
            else:
                host_copy.copy(feed.array, value)
        for count, graph in enumerate(self.graphs, start=1):
            graph.launch(self.stream)
            if count in self._ends:
                self._ends[count].record(self.stream)
        for upload, value in uploads:
            host_copy.copy(upload.stage.array, value)
            upload.stream.wait_event(self._ends[upload.graphs])
            for target, source, nbytes in upload.stage.pieces:
                self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyHostToDevice, upload.stream.ptr)
        self.stream.synchronize()
        for upload, _ in uploads:
            upload.stream.synchronize()
        for stage, out in zip(self.fetches, outs, strict=True):
            np.copyto(out, stage.array)

    def relaunch(self) -> None:
        """Queue the run once more with what was fed last, and wait for nothing."""
        for graph in self.graphs:
            graph.launch(self.stream)
