"""Pinned host memory: mapped, touched by many threads at once, then registered in chunks.

    slab = PinnedSlab(60 * GIB, progress=print)
    slab.address; slab.close()

Registering touched pages is about twice as fast as cudaHostAlloc, and a refusal names host memory and the amount
instead of looking like a lack of device memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from vdnn.errors import BudgetError
from vdnn.units import GIB, MIB, format_bytes

CHUNK = 2 * GIB
"""Bytes registered at once: one call for hundreds of GiB fails on some drivers, and progress shows between chunks."""
TOUCH = 64 * MIB
PAGE = 4096
TELL_ABOVE = 4 * GIB


class PinnedSlab:
    """`nbytes` of page-locked host memory.

    Args:
        progress: told in words how far it is, for slabs of more than TELL_ABOVE bytes.
    """

    def __init__(self, nbytes: int, progress: Callable[[str], None] | None = None):
        from cupy.cuda import runtime

        self._runtime = runtime
        self.nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self._registered: list[int] = []
        started = perf_counter()
        try:
            self._map = mmap.mmap(-1, self.nbytes)
        except OSError as error:
            raise self._refusal(0, str(error)) from error
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for start in range(0, self.nbytes, CHUNK):
                size = min(CHUNK, self.nbytes - start)
                list(threads.map(self._touch, range(start, start + size, TOUCH)))
                self._register(start, size)
                if progress is not None and self.nbytes > TELL_ABOVE:
                    done, seconds = start + size, perf_counter() - started
                    progress(
                        f"pinning host memory: {format_bytes(done)} of {format_bytes(self.nbytes)}, {seconds:.1f} s"
                    )
        self.pinning_s = perf_counter() - started

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the parts of a range that lie in one registration each: no copy may cross two."""
        end = offset + nbytes
        while offset < end:
            size = min(end, (offset // CHUNK + 1) * CHUNK) - offset
            yield offset, size
            offset += size

    def close(self) -> None:
        """Unregister and give the memory back."""
        for address in self._registered:
            self._runtime.hostUnregister(address)
        self._registered = []
        del self._anchor
        self._map.close()

    def _touch(self, start: int) -> None:
        size = min(TOUCH, self.nbytes - start)
        ctypes.memset(self.address + start, 0, size)

    def _register(self, start: int, size: int) -> None:
        try:
            self._runtime.hostRegister(self.address + start, size, 0)
        except self._runtime.CUDARuntimeError as error:
            done = sum(1 for _ in self._registered) * CHUNK
            for address in self._registered:
                self._runtime.hostUnregister(address)
            self._registered = []
            raise self._refusal(done, str(error)) from error
        self._registered.append(self.address + start)

    def _refusal(self, done: int, reason: str) -> BudgetError:
        return BudgetError(
            f"the system refuses to pin {format_bytes(self.nbytes)} ({self.nbytes:,} bytes) of host memory after "
            f"{format_bytes(done)}: {reason}; this is host memory, not the GPU's: lower memory.host_limit, use policy "
            "'conv' or 'none', or raise the limit of locked memory (ulimit -l, or the container's)",
            layer="host slab",
            needed_bytes=self.nbytes,
            budget_bytes=done,
            smallest_bytes=None,
        )
