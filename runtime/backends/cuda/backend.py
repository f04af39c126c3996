"""The Backend interface on an NVIDIA GPU: one slab, one pinned slab, three streams, and every byte accounted for.

    backend = CudaBackend(memory_limit=12 * GIB)
    backend.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)

cuDNN computes convolutions and cuBLAS matrix products, on workspaces of the plan; all else is our own kernels. After
`open` CuPy's allocator raises, so that nothing is allocated behind the plan's back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import PlanError, VdnnError
from vdnn.layers.op import Op, Program
from vdnn.layers.tensor import DTYPE_BYTES, TensorSpec, element_strides, first_element
from vdnn.memory.costs import Candidate
from vdnn.memory.plan import STREAMS, align
from vdnn.runtime.backend import Caps, check_stage
from vdnn.runtime.backends.cuda import host_copy
from vdnn.runtime.backends.cuda.array import DeviceArray
from vdnn.runtime.backends.cuda.capture import Capture, CudaReplay, Stage, Upload, mark_replays
from vdnn.runtime.backends.cuda.chwn_conv import chwn_convolve
from vdnn.runtime.backends.cuda.cublas import Cublas
from vdnn.runtime.backends.cuda.cudnn import Handle
from vdnn.runtime.backends.cuda.debug import INTACT, check
from vdnn.runtime.backends.cuda.host_order import copies, in_order_of_memory, in_order_of_shape, memory_shape
from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, KernelSet
from vdnn.runtime.backends.cuda.libraries import load_cupy
from vdnn.runtime.backends.cuda.measures import MeasuresByLayout
from vdnn.runtime.backends.cuda.memory import Ledger
from vdnn.runtime.backends.cuda.op_costs import OpCosts
from vdnn.runtime.backends.cuda.pinned import PinnedSlab
from vdnn.runtime.backends.cuda.products import CONV_KINDS, LINEAR_KINDS, Products
from vdnn.runtime.backends.cuda.rates import known_rates, measure_rates, peak_gflops, rates_words
from vdnn.runtime.backends.cuda.search import Search, cache_folder
from vdnn.runtime.backends.cuda.tap_lanes import Lanes
from vdnn.runtime.backends.cuda.taps import TapPlans
from vdnn.runtime.bfloat16 import as_numbers, as_stored, host_dtype
from vdnn.runtime.config import PRECISIONS
from vdnn.runtime.held import Held

POISON = 0xFF
"""A NaN in float32 and float64."""
CAPTURE_BYTES = 16 * 2**20
"""Set aside for captured steps: 6 MB for VGG-19's were seen on an H200, 40 MB for VGG-416's, which plans once more."""
MEMORY_SHARE = 0.85
"""Of the memory bandwidth that kernels are expected to reach, where they cannot be measured."""


class CudaBackend:
    """The current GPU.

    Args:
        memory_limit: bytes that the process may hold on the card, context included; None for all that is free.
        poison: fill freed bytes with NaN.
        copy_repeats: do each copy so often, to make the copy streams late.
        precision: "fp32", "tf32" for products on tensor cores, "bf16" or "fp16" for 16-bit activations on them too.
        candidates: which convolution algorithms are tried: "all", or cuDNN's "named" ones.
        layout: under which times of ops without images are kept; others by the layout of their images.
        progress: told in words what takes long.
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        *,
        poison: bool = False,
        copy_repeats: int = 1,
        precision: str = "fp32",
        candidates: str = "all",
        layout: str = "NCHW",
        progress: Callable[[str], None] | None = None,
    ):
        cupy = load_cupy()
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.layout = layout
        self._poison, self._copy_repeats, self._progress = poison, copy_repeats, progress
        self.ledger = Ledger()
        self._streams = {name: cupy.cuda.Stream(non_blocking=True) for name in STREAMS}
        compute = self._streams["compute"]
        self._handle = Handle()
        self._handle.set_stream(compute.ptr)
        self._cublas = Cublas(precision=precision)
        self._kernels = KernelSet(PRECISIONS[precision][0])
        lanes = Lanes(compute) if precision == "tf32" else None
        self._products = Products(self._handle, self._cublas, TapPlans(self._cublas, self._kernels, compute, lanes))
        self._events: dict[int, Any] = {}
        self._slab = self._first_wrong = 0
        self._guards: list[str] = []
        self._sizes = (0, 0)
        self._pinned: PinnedSlab | None = None
        self._stage_bytes = 0
        self._stages: dict[tuple[int, DeviceArray], Stage] = {}
        self._waiting: list[tuple[Stage, NDArray[Any]]] = []
        self._capturing: Capture | None = None
        self.held = Held()
        self._opened = False
        properties = self._runtime.getDeviceProperties(cupy.cuda.Device().id)
        name = properties["name"].decode()
        library = self._handle.api.shared_library
        self._kernels.load()
        reserve = self.ledger.measure_reserve() + CAPTURE_BYTES
        free, total = self._runtime.memGetInfo()
        limit = memory_limit if memory_limit is not None else free + reserve
        memory_gbps = 2e-6 * properties["memoryClockRate"] * properties["memoryBusWidth"] / 8
        driver = self._runtime.driverGetVersion()
        measure = partial(measure_rates, cupy, self._cublas)
        facts = {"gpu": name, "driver": driver, "cudnn": library.version}
        rates = known_rates({"gpu": name, "driver": driver}, cache_folder(), measure)
        source = f"measured on {name}, cuDNN {library.version_text}; {rates_words(rates)}"
        self.caps = Caps(
            name="cuda",
            has_data=True,
            simulated=False,
            description=f"{name}, {total / 2**30:.0f} GiB, CuPy {cupy.__version__}, cuDNN {library.version_text}",
            memory_bytes=free + reserve,
            rates=rates,
            cost_source=source,
            measured_costs=True,
            poisons=poison,
            reserve_bytes=reserve,
            precision=precision,
            facts=facts,
            memory_gbps=memory_gbps,
            fp32_gflops=peak_gflops(properties),
        )
        self.measures = MeasuresByLayout(
            *(self._products, self._kernels, self._launch_rest, compute),
            key=facts,
            limit_bytes=max(0, limit - reserve),
            precision=precision,
            candidates=candidates,
            stream_gbps=MEMORY_SHARE * memory_gbps,
            note=progress,
        )
        self.costs = OpCosts(self.measures.of, layout)

    # ---- memory

    def open(self, slab_bytes: int, host_bytes: int, stage_bytes: int) -> None:
        """Take the slabs and the stage, which lies pinned behind the host slab; nothing else may be allocated then."""
        if self._opened:
            raise VdnnError("the cuda backend is open already; close it first")
        self.measures.flush()
        self._sizes, self._stage_bytes = (slab_bytes, host_bytes), stage_bytes
        self._slab = self._runtime.malloc(max(slab_bytes, 256))
        if self._poison:  # else left as it is: a plan reads nothing that it has not written, and initcheck can see it
            self._runtime.memset(self._slab, POISON, max(slab_bytes, 256))
            self._first_wrong = self._runtime.malloc(8)
            self._runtime.memset(self._first_wrong, 0xFF, 8)
        if host_bytes + stage_bytes:
            self._pinned = PinnedSlab(align(host_bytes) + stage_bytes, self._progress)
        self._opened = True
        self.ledger.forbid_allocations()

    def view(self, spec: TensorSpec, root: TensorSpec, offset: int) -> DeviceArray:
        """Address, shape and strides of `spec` in the slab."""
        self._require_open()
        start = offset + DTYPE_BYTES[spec.dtype] * first_element(spec, root)
        if start < 0 or offset + root.nbytes > self._sizes[0]:
            raise PlanError(f"tensor '{spec.name}' lies outside the slab of {self._sizes[0]} bytes")
        strides = element_strides(spec, root)
        return DeviceArray(self._slab + start, spec.shape, strides, spec.dtype, spec.nbytes, spec.layout)

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._opened:
            self.sync()
            self._opened, self.held = False, Held()
            self.ledger.allow_allocations()
            self._stages = {}
            self._runtime.free(self._slab)
            if self._first_wrong:
                self._runtime.free(self._first_wrong)
                self._first_wrong = 0
            if self._pinned is not None:
                self._pinned.close()
                self._pinned = None
        self._handle.close()
        self._cublas.close()

    # ---- work

    def launch(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """Start the kernel of op.kind on `stream`."""
        raw = self._streams[stream]
        if op.kind in CONV_KINDS and arrays[CONV_KINDS[op.kind][1]].is_images_last:
            chwn_convolve(op, arrays, self._kernels, raw)  # the bias with it
            return
        if op.kind in CONV_KINDS:
            self._products.convolve(op, arrays, self._kernels, raw)
        elif op.kind in LINEAR_KINDS:
            self._products.multiply(op, arrays, raw.ptr)
        kernel = CUDA_KERNELS.get(op.kind)
        if kernel is not None:
            kernel(op, arrays, self._kernels, raw)
        elif op.kind not in CONV_KINDS and op.kind not in LINEAR_KINDS:
            raise VdnnError(f"op '{op.name}' (layer '{op.layer}'): the cuda backend has no kernel '{op.kind}'")

    def copy_out(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Slab bytes to pinned bytes."""
        for part, host_part, size in self._parts(offset, host_offset, nbytes) * self._copy_repeats:
            self._copy(host_part, part, size, self._runtime.memcpyDeviceToHost, stream)

    def copy_in(self, offset: int, host_offset: int, nbytes: int, stream: str) -> None:
        """Pinned bytes to slab bytes."""
        for part, host_part, size in self._parts(offset, host_offset, nbytes) * self._copy_repeats:
            self._copy(part, host_part, size, self._runtime.memcpyHostToDevice, stream)

    def record(self, event: int, stream: str) -> None:
        """Mark a point of `stream`."""
        if event not in self._events:
            self._events[event] = self._cupy.cuda.Event(disable_timing=True)
        self._events[event].record(self._streams[stream])
        if self._capturing is not None:
            self._capturing.recorded.add(event)

    def wait(self, event: int, stream: str) -> None:
        """Hold `stream` until `event`."""
        if event not in self._events:
            raise PlanError(f"stream '{stream}' waits for event {event}, which nothing records")
        if self._capturing is None or event in self._capturing.recorded:  # else it is of a part that is over by then
            self._streams[stream].wait_event(self._events[event])

    def mark(self, stream: str) -> Any:
        """A CUDA event with a time, on `stream`; within a capture every replay sets it."""
        event, raw = self._cupy.cuda.Event(), self._streams[stream]
        if self._capturing is None:
            event.record(raw)
        else:
            mark_replays(event, raw)
        return event

    def between_ms(self, first: Any, second: Any) -> float:
        """As the GPU measured it, to about half a µs."""
        return float(self._cupy.cuda.get_elapsed_time(first, second))

    def feed(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Upload through the stage."""
        stage = self._stage(array, stage_offset)
        if self._capturing is not None:
            self._capturing.feeds.append(stage)
        else:
            if stage.busy_on is not None:  # fed twice between syncs: the first value must have left
                self._streams[stage.busy_on].synchronize()
            host_copy.copy(stage.array, value)
            stage.busy_on = stream
        for target, source, nbytes in stage.pieces:
            self._copy(target, source, nbytes, self._runtime.memcpyHostToDevice, stream)

    def feed_ahead(self, array: Any, value: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Upload through the stage; of a captured run beside the graph, once the parts up to here are over."""
        if self._capturing is None:
            self.feed(array, value, stage_offset, stream)
        else:
            self._capturing.beside(Upload(self._stage(array, stage_offset), self._streams[stream]))

    def fetch(self, array: Any, out: NDArray[Any], stage_offset: int, stream: str) -> None:
        """Download through the stage; `out` is filled by sync."""
        stage = self._stage(array, stage_offset)
        for source, target, nbytes in stage.pieces:
            self._copy(target, source, nbytes, self._runtime.memcpyDeviceToHost, stream)
        if self._capturing is not None:
            self._capturing.fetches.append(stage)
        else:
            self._waiting.append((stage, out))

    def read(self, array: DeviceArray) -> NDArray[Any]:
        """A copy on the host in the order of the shape, image by image where they lie apart."""
        out = np.empty(memory_shape(array), host_dtype(array.dtype))
        for target, source, nbytes in copies(array, out):
            self._runtime.memcpy(source, target, nbytes, self._runtime.memcpyDeviceToHost)
        return in_order_of_shape(array, as_numbers(out, array.dtype))

    def write(self, array: DeviceArray, value: NDArray[Any]) -> None:
        """Upload from where `value` lies, through the driver's own small buffers."""
        stored = in_order_of_memory(array, as_stored(value, array.dtype))
        laid_out = np.ascontiguousarray(stored, host_dtype(array.dtype))
        for target, source, nbytes in copies(array, laid_out):
            self._runtime.memcpy(target, source, nbytes, self._runtime.memcpyHostToDevice)
        self._runtime.deviceSynchronize()  # such a copy may return before its last bytes have arrived

    def guarded(self, offset: int, nbytes: int, what: str, stream: str) -> None:
        """Check the poison in bytes that belong to nobody, if there is any."""
        if self._poison and nbytes:
            check(self._kernels, self._slab + offset, nbytes, POISON, self._first_wrong, self._streams[stream])
            self._guards.append(what)

    def freed(self, offset: int, nbytes: int, stream: str) -> None:
        """Poison the bytes, if asked to."""
        if self._poison:
            self._runtime.memsetAsync(self._slab + offset, POISON, nbytes, self._streams[stream].ptr)

    def sync(self) -> None:
        """Wait for all streams and hand out what was fetched."""
        self._require_open()
        for stream in self._streams.values():
            stream.synchronize()
        if self._guards:
            self._look_at_guards()
        for stage, out in self._waiting:
            np.copyto(out, stage.array)
        self._waiting = []
        for stage in self._stages.values():
            stage.busy_on = None

    def held_bytes(self) -> int:
        """By NVML, or the driver where there is none."""
        return self.ledger.used_bytes()

    def capture(self, body: Callable[[], None]) -> CudaReplay | None:
        """Everything `body` puts on the three streams, in CUDA graphs; none while guards are to be looked at."""
        if self._poison:
            return None
        self._capturing = Capture(self._streams)
        try:
            return self._capturing.replay(body)
        finally:
            self._capturing = None

    @property
    def search(self) -> Search:
        """That of convolutions in the layout of this backend."""
        return self.measures.of(self.layout).search

    def candidates(self, op: Op, program: Program) -> tuple[Candidate, ...]:
        """Measured algorithms of convolutions, and of another op the one there is or its variants, measured too."""
        return self.costs.candidates(op, program)

    def knows_all(self, op: Op, program: Program) -> bool:
        """Whether every algorithm of a convolution could be measured within the limit; True for other kinds."""
        return self.costs.knows_all(op, program)

    # ---- within

    def _require_open(self) -> None:
        if not self._opened:
            raise VdnnError("the cuda backend is not open; call open(slab_bytes, host_bytes, stage_bytes) first")

    def _launch_rest(self, op: Op, arrays: Mapping[str, Any], stream: str) -> None:
        """As launch, but of a convolution only what follows cuDNN."""
        if op.kind in CONV_KINDS:
            CUDA_KERNELS[op.kind](op, arrays, self._kernels, self._streams[stream])
        else:
            self.launch(op, arrays, stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: str) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, kind, self._streams[stream].ptr)

    def _look_at_guards(self) -> None:
        wrong = np.zeros(1, np.uint64)
        self._runtime.memcpy(wrong.ctypes.data, self._first_wrong, 8, self._runtime.memcpyDeviceToHost)
        checked, self._guards = self._guards, []
        if wrong[0] != INTACT:
            self._runtime.memset(self._first_wrong, 0xFF, 8)
            raise VdnnError(
                f"byte {wrong[0]} of bytes that belong to nobody was written; checked: {', '.join(checked)}"
            )

    def _parts(self, offset: int, host_offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(device address, host address, bytes) of a copy, cut where two registrations of host memory meet."""
        self._require_open()
        for start, size in zip((offset, host_offset), self._sizes, strict=True):
            if start < 0 or start + nbytes > size:
                raise PlanError(f"copy of bytes {start} to {start + nbytes} outside a slab of {size} bytes")
        if self._pinned is None:
            raise PlanError("a copy to the host, but the plan asked for no host memory")
        shift = self._slab + offset - host_offset
        return [(shift + at, self._pinned.address + at, n) for at, n in self._pinned.pieces(host_offset, nbytes)]

    def _stage(self, array: DeviceArray, offset: int) -> Stage:
        key = (offset, array)
        if key not in self._stages:
            self._require_open()
            check_stage(offset, array.nbytes, self._stage_bytes)
            assert self._pinned is not None
            start = align(self._sizes[1]) + offset
            shift, base = array.ptr - start, self._pinned.address
            pieces = [(shift + at, base + at, n) for at, n in self._pinned.pieces(start, array.nbytes)]
            self._stages[key] = Stage(array, pieces)
        return self._stages[key]
