"""What every backend must do, as functions of a fresh, open backend: a new backend joins with a row in BACKENDS.

    for check in CHECKS:
        with opened(make) as backend:
            check(backend)

The tensors are rows of eight float32 numbers, 256 bytes apart in both slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from vdnn.errors import VdnnError
from vdnn.layers import Conv, Flatten, Graph, Linear, Op, Program, SoftmaxLoss, TensorSpec, lower
from vdnn.memory.plan import STREAMS
from vdnn.runtime.backend import Backend
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.cuda.backend import CudaBackend
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.profile import load_profile

SLOTS, SLOT_BYTES, NUMBERS = 6, 256, 8
ORDERS = tuple(permutations(STREAMS))

BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu, threads": CpuBackend,
    **{f"cpu, {' before '.join(order)}": lambda order=order: CpuBackend(order=order) for order in ORDERS},
    "simulated": lambda: SimulatedBackend(load_profile("titan-x-maxwell")),
    "cuda": CudaBackend,
}
ROWS = [
    pytest.param(make, id=name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name, make in BACKENDS.items()
]
"""The backends as parameters of a test."""
TICK_MS = 0.001
"""No finer does any backend tell times apart."""

Call = tuple[Any, ...]


@contextmanager
def opened(make: Callable[[], Backend]) -> Iterator[Backend]:
    """A backend with SLOTS slots on either side."""
    backend = make()
    backend.open(SLOTS * SLOT_BYTES, SLOTS * SLOT_BYTES, 2 * SLOTS * SLOT_BYTES)
    try:
        yield backend
    finally:
        backend.close()


class Numbers(NamedTuple):
    """A slot of the slab as a tensor and as the backend's array."""

    spec: TensorSpec
    array: Any

    @classmethod
    def at(cls, backend: Backend, slot: int) -> Numbers:
        spec = TensorSpec(f"slot{slot}", "act", (1, NUMBERS))
        return cls(spec, backend.view(spec, spec, slot * SLOT_BYTES))


def copy_op(x: str, y: str) -> Op:
    """y = x."""
    return Op("cat.copy0", "copy.forward", "cat", "forward", {"x": x}, {"y": y})


def play(backend: Backend, calls: Sequence[Call]) -> dict[str, NDArray[np.float32]]:
    """Make `calls` and sync; returns what was fetched.

    Calls, a stream last: ("feed", slot, number), ("copy", from slot, to slot), ("out", slot, host slot),
    ("in", host slot, slot), ("fetch", slot, name), ("record", event), ("wait", event).
    """
    fetched: dict[str, NDArray[np.float32]] = {}
    for what, *arguments, stream in calls:
        if what == "feed":
            slot, number = arguments
            value = np.full((1, NUMBERS), number, np.float32)
            backend.feed(Numbers.at(backend, slot).array, value, slot * SLOT_BYTES, stream)
        elif what == "copy":
            x, y = (Numbers.at(backend, slot) for slot in arguments)
            backend.launch(copy_op(x.spec.name, y.spec.name), {"x": x.array, "y": y.array}, stream)
        elif what == "out":
            backend.copy_out(arguments[0] * SLOT_BYTES, arguments[1] * SLOT_BYTES, SLOT_BYTES, stream)
        elif what == "in":
            backend.copy_in(arguments[1] * SLOT_BYTES, arguments[0] * SLOT_BYTES, SLOT_BYTES, stream)
        elif what == "fetch":
            slot, name = arguments
            fetched[name] = np.full((1, NUMBERS), -1, np.float32)
            stage = (SLOTS + slot) * SLOT_BYTES
            backend.fetch(Numbers.at(backend, slot).array, fetched[name], stage, stream)
        else:
            getattr(backend, what)(arguments[0], stream)
    backend.sync()
    return fetched


# slot 0 is computed, copied out, overwritten, copied back in to slot 2, and read; each wait is needed
ROUND_TRIP: tuple[Call, ...] = (
    ("feed", 0, 0.0, "compute"),
    ("feed", 1, 7.0, "compute"),
    ("feed", 2, 0.0, "compute"),
    ("copy", 1, 0, "compute"),
    ("record", 0, "compute"),
    ("wait", 0, "out"),
    ("out", 0, 3, "out"),
    ("record", 1, "out"),
    ("feed", 1, 9.0, "compute"),
    ("wait", 1, "compute"),
    ("copy", 1, 0, "compute"),
    ("wait", 1, "in"),
    ("in", 3, 2, "in"),
    ("record", 2, "in"),
    ("wait", 2, "compute"),
    ("fetch", 2, "kept", "compute"),
    ("fetch", 0, "overwritten", "compute"),
)


def values(fetched: dict[str, NDArray[np.float32]]) -> dict[str, list[float]]:
    return {name: array.ravel().tolist() for name, array in fetched.items()}


def events_order_the_streams(backend: Backend) -> None:
    """Twice, with the same events: the second time must wait for the second records."""
    for _ in range(2):
        fetched = values(play(backend, ROUND_TRIP))
        if backend.caps.has_data:
            assert fetched == {"kept": [7.0] * NUMBERS, "overwritten": [9.0] * NUMBERS}


def a_wait_is_for_the_latest_record(backend: Backend) -> None:
    calls: list[Call] = [("feed", 0, 1.0, "compute"), ("record", 5, "compute")]
    calls += [("feed", 0, 2.0, "compute"), ("record", 5, "compute")]
    calls += [("wait", 5, "out"), ("out", 0, 0, "out"), ("record", 6, "out")]
    calls += [("wait", 6, "in"), ("in", 0, 1, "in"), ("fetch", 1, "read", "in")]
    fetched = values(play(backend, calls))
    if backend.caps.has_data:
        assert fetched == {"read": [2.0] * NUMBERS}


def a_view_may_be_some_channels(backend: Backend) -> None:
    root, source = TensorSpec("cat", "act", (2, 5, 2, 2)), TensorSpec("x", "act", (2, 2, 2, 2))
    part = TensorSpec("branch", "act", (2, 2, 2, 2), view_of="cat", channel=3)
    whole, view = backend.view(root, root, SLOT_BYTES), backend.view(part, root, SLOT_BYTES)
    x = backend.view(source, source, 3 * SLOT_BYTES)
    held = np.arange(40, dtype=np.float32).reshape(root.shape)
    new = -np.ones(part.shape, np.float32)
    got = np.zeros(root.shape, np.float32)
    backend.feed(whole, held, 0, "compute")
    backend.feed(x, new, SLOT_BYTES, "compute")
    backend.launch(copy_op("x", "branch"), {"x": x, "y": view}, "compute")
    backend.fetch(whole, got, 2 * SLOT_BYTES, "compute")
    backend.sync()
    if backend.caps.has_data:
        expected = held.copy()
        expected[:, 3:5] = -1
        assert (got == expected).all()


def a_second_open_raises(backend: Backend) -> None:
    with pytest.raises(VdnnError, match="open"):
        backend.open(SLOT_BYTES, SLOT_BYTES, SLOT_BYTES)


def close_twice_does_nothing_and_use_after_it_raises(backend: Backend) -> None:
    backend.close()
    backend.close()
    with pytest.raises(VdnnError, match="open"):
        Numbers.at(backend, 0)
    with pytest.raises(VdnnError, match="open"):
        backend.copy_out(0, 0, SLOT_BYTES, "out")
    with pytest.raises(VdnnError, match="open"):
        backend.sync()


def places_outside_a_slab_raise(backend: Backend) -> None:
    end = SLOTS * SLOT_BYTES
    with pytest.raises(VdnnError, match=f"slab of {end} bytes"):
        Numbers.at(backend, SLOTS)
    for offset, host_offset in ((end - 128, 0), (0, end - 128), (-256, 0), (0, -256)):
        with pytest.raises(VdnnError, match=f"slab of {end} bytes"):
            backend.copy_out(offset, host_offset, SLOT_BYTES, "out")
        with pytest.raises(VdnnError, match=f"slab of {end} bytes"):
            backend.copy_in(offset, host_offset, SLOT_BYTES, "in")


def a_wait_without_a_record_is_an_error(backend: Backend) -> None:
    """At the wait or at sync; nothing hangs."""

    def wait_in_vain() -> None:
        backend.wait(99, "in")
        backend.record(0, "in")
        backend.wait(0, "compute")
        backend.sync()

    with pytest.raises(VdnnError, match=r"'in'.* event 99"):
        wait_in_vain()


def what_a_kernel_raises_comes_by_sync(backend: Backend) -> None:
    """The error names op and layer; streams that wait for the failed one go on; the next step is a fresh start."""
    if not backend.caps.has_data:
        return
    wrong = TensorSpec("wrong", "act", (1, NUMBERS), "uint8")
    arrays = {"x": Numbers.at(backend, 0).array, "y": backend.view(wrong, wrong, SLOT_BYTES)}
    op = copy_op("slot0", "wrong")

    def fail() -> None:
        backend.launch(op, arrays, "out")
        backend.record(0, "out")
        backend.wait(0, "compute")
        backend.launch(op, arrays, "compute")
        backend.sync()

    with pytest.raises(VdnnError, match=r"op 'cat\.copy0' \(layer 'cat'\)"):
        fail()
    backend.sync()
    events_order_the_streams(backend)


def marks_tell_the_time_of_their_stream(backend: Backend) -> None:
    """Later marks of a stream are later, and so is what waits; differences add up, past a sync too."""
    first = backend.mark("compute")
    for _ in range(3):
        backend.feed(Numbers.at(backend, 0).array, np.zeros((1, NUMBERS), np.float32), 0, "compute")
    fed = backend.mark("compute")
    backend.record(0, "compute")
    backend.wait(0, "out")
    waited = backend.mark("out")
    backend.copy_out(0, 0, SLOT_BYTES, "out")
    copied = backend.mark("out")
    backend.sync()
    last = backend.mark("in")
    backend.sync()
    assert backend.between_ms(first, first) == 0
    assert backend.between_ms(first, fed) > 0
    assert backend.between_ms(waited, copied) > 0
    assert backend.between_ms(fed, waited) >= -TICK_MS
    assert backend.between_ms(copied, last) >= -TICK_MS
    whole = backend.between_ms(first, copied) + backend.between_ms(copied, last)
    assert whole == pytest.approx(backend.between_ms(first, last), abs=TICK_MS)
    assert backend.between_ms(last, first) == pytest.approx(-backend.between_ms(first, last), abs=TICK_MS)


def every_op_has_candidates(backend: Backend) -> None:
    """Fastest first, no name twice."""
    for program in (small_program("train"), small_program("eval")):
        for op in program.ops:
            options = backend.candidates(op, program)
            assert options, op.name
            assert len({c.algorithm for c in options}) == len(options), op.name
            assert all(c.time_ms > 0 and c.workspace_bytes >= 0 for c in options), op.name
            assert [c.time_ms for c in options] == sorted(c.time_ms for c in options), op.name


def small_program(mode: str) -> Program:
    g = Graph("small", (3, 8, 8), classes=4)
    x = g.add("conv2", Conv(6, 1), g.add("conv1", Conv(4, 3, padding=1), g.input))
    g.add("loss", SoftmaxLoss(), g.add("fc", Linear(4), g.add("flat", Flatten(), x)))
    return lower(g, 2, mode)


def read_gives_the_numbers_of_a_view(backend: Backend) -> None:
    """Of a whole tensor and of some of its channels, which lie apart in memory."""
    root = TensorSpec("cat", "act", (2, 5, 2, 2))
    part = TensorSpec("branch", "act", (2, 2, 2, 2), view_of="cat", channel=3)
    whole = backend.view(root, root, SLOT_BYTES)
    numbers = np.arange(40, dtype=np.float32).reshape(root.shape)
    backend.feed(whole, numbers, 0, "compute")
    backend.sync()
    if backend.caps.has_data:
        assert np.array_equal(backend.read(whole), numbers)
        assert np.array_equal(backend.read(backend.view(part, root, SLOT_BYTES)), numbers[:, 3:])


def what_is_written_is_read_and_computed_with(backend: Backend) -> None:
    """Now, not in a stream's time: a whole tensor, then some of its channels, which lie apart in memory."""
    root = TensorSpec("cat", "act", (2, 5, 2, 2))
    part = TensorSpec("branch", "act", (2, 2, 2, 2), view_of="cat", channel=3)
    whole, branch = backend.view(root, root, SLOT_BYTES), backend.view(part, root, SLOT_BYTES)
    numbers = np.arange(40, dtype=np.float32).reshape(root.shape)
    backend.write(whole, numbers)
    backend.write(branch, -numbers[:, 3:])
    if backend.caps.has_data:
        expected = np.concatenate([numbers[:, :3], -numbers[:, 3:]], axis=1)
        assert np.array_equal(backend.read(whole), expected)
        got = np.zeros(root.shape, np.float32)
        backend.fetch(whole, got, 0, "compute")
        backend.sync()
        assert np.array_equal(got, expected)


def sixteen_bits_are_read_and_written_as_numbers(backend: Backend) -> None:
    """bfloat16 comes and goes as float32, which has all of its numbers; float16 as it is."""
    numbers = (np.arange(40, dtype=np.float32) / 4 - 3).reshape(2, 5, 2, 2)
    for dtype in ("bfloat16", "float16"):
        root = TensorSpec("cat", "act", (2, 5, 2, 2), dtype)
        part = TensorSpec("branch", "act", (2, 2, 2, 2), dtype, view_of="cat", channel=3)
        whole, branch = backend.view(root, root, SLOT_BYTES), backend.view(part, root, SLOT_BYTES)
        backend.write(whole, numbers if dtype == "bfloat16" else numbers.astype(dtype))
        if backend.caps.has_data:
            assert np.array_equal(backend.read(whole), numbers)
            assert np.array_equal(backend.read(branch), numbers[:, 3:])
            assert backend.read(whole).dtype == ("float32" if dtype == "bfloat16" else dtype)


def a_feed_ahead_is_there_after_the_next_sync(backend: Backend) -> None:
    value = np.arange(NUMBERS, dtype=np.float32).reshape(1, NUMBERS)
    backend.feed_ahead(Numbers.at(backend, 0).array, value, 0, "in")
    backend.sync()
    if backend.caps.has_data:
        assert np.array_equal(backend.read(Numbers.at(backend, 0).array), value)


def places_outside_the_stage_raise(backend: Backend) -> None:
    array, value = Numbers.at(backend, 0).array, np.zeros((1, NUMBERS), np.float32)
    end = 2 * SLOTS * SLOT_BYTES
    for offset in (end - value.nbytes + 1, -1):
        for call in (backend.feed, backend.feed_ahead, backend.fetch):
            with pytest.raises(VdnnError, match=f"outside the stage of {end} bytes"):
                call(array, value, offset, "in")
    backend.sync()


CHECKS: tuple[Callable[[Backend], None], ...] = (
    events_order_the_streams,
    a_wait_is_for_the_latest_record,
    a_view_may_be_some_channels,
    read_gives_the_numbers_of_a_view,
    a_second_open_raises,
    close_twice_does_nothing_and_use_after_it_raises,
    places_outside_a_slab_raise,
    places_outside_the_stage_raise,
    what_is_written_is_read_and_computed_with,
    sixteen_bits_are_read_and_written_as_numbers,
    a_feed_ahead_is_there_after_the_next_sync,
    a_wait_without_a_record_is_an_error,
    what_a_kernel_raises_comes_by_sync,
    marks_tell_the_time_of_their_stream,
    every_op_has_candidates,
)
