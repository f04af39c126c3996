"""Device memory and clocks outside of any plan, for checks and benchmarks of single kernels.

    probe = Probe()
    after = probe.run(content, lambda address: ...)      # upload, work, download
    time_ms = probe.time_ms(work)

Use it in a process of its own: what it takes is not counted by any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.tensor import DTYPE_BYTES
from vdnn.runtime.backends.cuda.kernels import KernelSet
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.bfloat16 import to_bfloat16

ROUNDS, CALLS = 7, 5
RANDOM_BYTES = 64 * 2**20


class Probe:
    """The current GPU with its own stream and kernels.

    Args:
        dtype: of the kernels' activations and their gradients.

    Attributes:
        unequal: runs whose two tries did not give the same bytes.
    """

    def __init__(self, dtype: str = "float32") -> None:
        cupy = load_cupy()
        self._cupy, self._cuda = cupy, cupy.cuda.runtime
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        self.kernels = KernelSet(dtype)
        self.kernels.load()
        self.unequal = 0

    def facts(self) -> dict[str, Any]:
        """GPU, driver, runtime and CuPy, and registers a thread of every kernel."""
        return {
            "gpu": self._cuda.getDeviceProperties(self._cupy.cuda.Device().id)["name"].decode(),
            "driver": self._cuda.driverGetVersion(),
            "runtime": self._cuda.runtimeGetVersion(),
            "cupy": self._cupy.__version__,
            "registers": self.kernels.registers,
        }

    def run(self, content: NDArray[np.uint8], work: Callable[[int], None]) -> NDArray[np.uint8]:
        """`content` in device memory, `work` with its address (a multiple of 256), what lies there then; done twice."""
        first, second = self._run(content, work), self._run(content, work)
        self.unequal += int(not np.array_equal(first, second))
        return first

    def _run(self, content: NDArray[np.uint8], work: Callable[[int], None]) -> NDArray[np.uint8]:
        address = self._cuda.malloc(content.nbytes)
        try:
            self.upload(address, content)
            work(address)
            self.stream.synchronize()
            return self.download(address, content.nbytes)
        finally:
            self._cuda.free(address)

    def allocate(self, nbytes: int) -> int:
        """Address of so many bytes, freed with the process."""
        return int(self._cuda.malloc(nbytes))

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._cuda.free(address)

    def fill(self, address: int, nbytes: int) -> None:
        """Normal numbers of the kernels' dtype, repeated after RANDOM_BYTES; two of 16 bits are a finite float32."""
        itemsize = DTYPE_BYTES[self.kernels.dtype]
        block: NDArray[Any] = np.random.default_rng(0).standard_normal(
            min(nbytes, RANDOM_BYTES) // itemsize, np.float32
        )
        if self.kernels.dtype == "bfloat16":
            block = to_bfloat16(block)
        elif self.kernels.dtype == "float16":
            block = block.astype(np.float16)
        self._cuda.memcpy(address, block.ctypes.data, block.nbytes, self._cuda.memcpyHostToDevice)
        for start in range(block.nbytes, nbytes, block.nbytes):
            size = min(block.nbytes, nbytes - start)
            self._cuda.memcpy(address + start, address, size, self._cuda.memcpyDeviceToDevice)
        self._cuda.deviceSynchronize()

    def upload(self, address: int, content: NDArray[np.uint8]) -> None:
        """Bytes to the device, complete on return."""
        self._cuda.memcpy(address, content.ctypes.data, content.nbytes, self._cuda.memcpyHostToDevice)
        self._cuda.deviceSynchronize()

    def download(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the device; what writes them must be over."""
        content = np.empty(nbytes, np.uint8)
        self._cuda.memcpy(content.ctypes.data, address, nbytes, self._cuda.memcpyDeviceToHost)
        return content

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy within the device."""
        self._cuda.memcpyAsync(target, source, nbytes, self._cuda.memcpyDeviceToDevice, self.stream.ptr)

    def replayed_ms(self, work: Callable[[], None]) -> float:
        """As `time_ms`, of `work` replayed as a CUDA graph, as in a step: without the host's time between kernels."""
        work()
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
        return self.time_ms(lambda: graph.launch(self.stream))

    def time_ms(self, work: Callable[[], None]) -> float:
        """Median time of one call of `work`, of a few rounds of CALLS calls in a row."""
        event = self._cupy.cuda.Event
        work()
        times = []
        for _ in range(ROUNDS):
            start, end = event(), event()
            start.record(self.stream)
            for _ in range(CALLS):
                work()
            end.record(self.stream)
            end.synchronize()
            times.append(self._cupy.cuda.get_elapsed_time(start, end) / CALLS)
        return float(median(times))
