"""What only the CPU backend has: poison, orders in place of threads, and maps that outlive close."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from backend_contract import ORDERS, SLOT_BYTES, Numbers, opened, play, values

from vdnn.errors import VdnnError
from vdnn.layers import Op, TensorSpec
from vdnn.runtime.backends.cpu import CpuBackend


@pytest.mark.parametrize("order", [None, *ORDERS])
def test_freed_bytes_turn_to_nan_at_that_point_of_the_stream(order: tuple[str, ...] | None) -> None:
    with opened(lambda: CpuBackend(poison=True, order=order)) as backend:
        play(backend, [("feed", 0, 1.0, "compute"), ("feed", 1, 2.0, "compute")])
        before = np.zeros((1, 8), np.float32)
        backend.fetch(Numbers.at(backend, 0).array, before, 0, "compute")
        backend.freed(0, SLOT_BYTES, "compute")
        after = values(play(backend, [("fetch", 0, "freed", "compute"), ("fetch", 1, "next", "compute")]))
        wide = TensorSpec("wide", "act", (1, 4), "float64")
        assert np.isnan(backend.view(wide, wide, 0)).all()
    assert (before == 1).all()
    assert np.isnan(after["freed"]).all()
    assert after["next"] == [2.0] * 8


def test_freed_bytes_stay_without_poison() -> None:
    with opened(CpuBackend) as backend:
        play(backend, [("feed", 0, 1.0, "compute")])
        backend.freed(0, SLOT_BYTES, "compute")
        assert values(play(backend, [("fetch", 0, "freed", "compute")])) == {"freed": [1.0] * 8}


@pytest.mark.parametrize("order", ORDERS)
def test_the_favoured_stream_runs_as_early_and_the_last_as_late_as_waits_allow(order: tuple[str, ...]) -> None:
    """Three streams write one slot; all but the last of the order are overwritten."""
    numbers = {"compute": 1.0, "out": 2.0, "in": 3.0}
    with opened(lambda: CpuBackend(order=order)) as backend:
        calls = [("feed", 0, numbers[stream], stream) for stream in numbers]
        play(backend, calls)
        assert values(play(backend, [("fetch", 0, "last", "out")])) == {"last": [numbers[order[-1]]] * 8}


def test_a_deadlock_names_streams_and_events() -> None:
    with opened(lambda: CpuBackend(order=("compute", "out", "in"))) as backend:
        for call in (("wait", 1, "compute"), ("record", 2, "compute"), ("wait", 2, "out")):
            getattr(backend, call[0])(*call[1:])
        with pytest.raises(VdnnError, match=r"deadlock: stream 'compute' for event 1, stream 'out' for event 2"):
            backend.sync()


def test_an_order_must_name_each_stream_once() -> None:
    with pytest.raises(VdnnError, match="expected an order of the streams compute, out, in, got compute, out"):
        CpuBackend(order=("compute", "out")).open(0, 0, 0)


def test_close_tolerates_arrays_and_ends_the_threads() -> None:
    before = threading.active_count()
    backend = CpuBackend()
    backend.open(SLOT_BYTES, 0, SLOT_BYTES)
    array = Numbers.at(backend, 0).array
    assert threading.active_count() == before + 3
    play(backend, [("feed", 0, 4.0, "compute")])
    backend.close()
    assert threading.active_count() == before
    assert (array == 4).all()


def test_slabs_begin_on_a_page() -> None:
    with opened(CpuBackend) as backend:
        assert Numbers.at(backend, 0).array.ctypes.data % 4096 == 0


def test_an_unknown_kind_is_named() -> None:
    words = r"op 'op' \(layer 'layer'\): the cpu backend has no kernel 'what\.ever'"
    with opened(CpuBackend) as backend, pytest.raises(VdnnError, match=words):
        backend.launch(Op("op", "what.ever", "layer", "forward", {}, {}), {}, "compute")
