"""As much of CuPy as vdnn's own kernels use, on host memory: kernels run as host C++, streams and events do nothing.

    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)

What is launched is noted with the stream that was current, and what a GPU would refuse is an AssertionError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda_on_host import HostKernels

ALIGN_BYTES = 512


class HostCupy:
    """The module.

    Attributes:
        compiled: (source, options) of every RawModule.
        launches: (stream, kernel, grid, block, args) of every launch.
    """

    __version__ = "of the host"

    def __init__(self, kernels: HostKernels | None = None) -> None:
        self.kernels = kernels
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.current: HostStream | None = None
        self.memory: dict[int, Any] = {}
        self._late: list[tuple[int, bytes]] = []
        runtime = SimpleNamespace(
            malloc=self.malloc,
            free=lambda address: self.memory.pop(address),
            memcpy=self._memcpy,
            memcpyAsync=lambda target, source, nbytes, kind, stream: ctypes.memmove(target, source, nbytes),
            deviceSynchronize=self._arrive,
            getDeviceProperties=lambda device: {"name": b"host"},
            driverGetVersion=lambda: 0,
            runtimeGetVersion=lambda: 0,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda: SimpleNamespace(id=0),
            Stream=lambda non_blocking: HostStream(self),
            Event=lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None),
            get_elapsed_time=lambda start, end: 1.0,
        )

    def _memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        """As the driver may: what comes from pageable memory is read at once and arrives later, in order."""
        self._arrive()
        if kind == 1:
            self._late.append((target, ctypes.string_at(source, nbytes)))
        else:
            ctypes.memmove(target, source, nbytes)

    def _arrive(self) -> None:
        late, self._late = self._late, []
        for target, content in late:
            ctypes.memmove(target, content, len(content))

    def malloc(self, nbytes: int) -> int:
        """Address of so many bytes, as far aligned as on a GPU."""
        room = np.full(nbytes + ALIGN_BYTES, 0x55, np.uint8)
        address = int(room.ctypes.data) + -room.ctypes.data % ALIGN_BYTES
        self.memory[address] = room
        return address

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        """Compiled already."""
        self.compiled.append((code, options))
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Callable[..., None]:
        def call(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            assert all(isinstance(value, np.generic) or value.size == 1 for value in args), "CuPy would guess a width"
            self.launches.append((self.current, name, grid, block, args))
            if self.kernels is not None:
                self.kernels.launch(name, grid[0], [_given(value) for value in args], None)

        call.num_regs = 32  # type: ignore[attr-defined]
        return call


def _given(value: Any) -> Any:
    """A table as it is, which CuPy passes whole."""
    return value if isinstance(value, np.ndarray) else value.item()


class HostStream:
    """A stream, current within its `with`."""

    ptr = 0

    def __init__(self, cupy: HostCupy) -> None:
        self._cupy, self._before = cupy, cupy.current

    def __enter__(self) -> HostStream:
        self._before, self._cupy.current = self._cupy.current, self
        return self

    def __exit__(self, *error: object) -> None:
        self._cupy.current = self._before

    def synchronize(self) -> None:
        """Nothing is ever under way."""
