"""Measured copy rates are measured once, kept, and measured again where the file cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vdnn.memory.costs import CopyRates
from vdnn.runtime.backends.cuda.rates import known_rates, measure_slowdowns

KEY = {"gpu": "a GPU", "driver": 13000}


class Measure:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> CopyRates:
        self.calls += 1
        return CopyRates(50.0 + self.calls, 40.0, 80.0, 8.0)


def test_rates_are_measured_once_and_kept_by_gpu_and_driver(tmp_path: Path) -> None:
    measure = Measure()
    first = known_rates(KEY, tmp_path / "cache", measure)
    assert known_rates(KEY, tmp_path / "cache", measure) == first == CopyRates(51.0, 40.0, 80.0, 8.0)
    assert measure.calls == 1
    assert known_rates({**KEY, "driver": 13010}, tmp_path / "cache", measure).d2h_gbps == 52.0
    assert not list((tmp_path / "cache").glob("*.part"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rates": {"d2h_gbps": 1.0}}', '{"rates": {"speed": 1.0}}'])
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, text: str) -> None:
    measure = Measure()
    known_rates(KEY, tmp_path, measure)
    (path,) = tmp_path.iterdir()
    path.write_text(text, encoding="utf-8")
    assert known_rates(KEY, tmp_path, measure).d2h_gbps == 52.0
    assert known_rates(KEY, tmp_path, measure).d2h_gbps == 52.0


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    measure = Measure()
    for calls in (1, 2):
        assert known_rates(KEY, tmp_path / "file", measure).d2h_gbps == 50.0 + calls


def test_a_file_from_before_slowdowns_were_measured_is_measured_again(tmp_path: Path) -> None:
    measure = Measure()
    known_rates(KEY, tmp_path, measure)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["rates"]["stream_slowdown"] == 1.0
    del data["rates"]["stream_slowdown"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert known_rates(KEY, tmp_path, measure).d2h_gbps == 52.0


class Stream:
    """A stream on which work passes time; copies to and from the host are in flight until somebody waits."""

    def __init__(self, device: Device) -> None:
        self.device, self.ptr, self.ms, self.waits_for = device, len(device.streams), 0.0, set[int]()
        device.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.waits_for.add(event.stream)

    def synchronize(self) -> None:
        self.device.flying.pop(self.ptr, None)


class Event:
    """A point of a stream's time."""

    ms, stream = 0.0, -1

    def record(self, stream: Stream) -> None:
        self.ms, self.stream = stream.ms, stream.ptr

    def synchronize(self) -> None:
        """It is over."""


class Device:
    """Kernels take longer while copies fly both ways: products 1.1 times as long, copies within the device 1.25."""

    def __init__(self, factor: float = 1.0) -> None:
        self.streams: list[Stream] = []
        self.flying: dict[int, set[int]] = {}
        self.factor = factor
        self.bound = 0
        runtime = SimpleNamespace(
            memcpyAsync=self.copy,
            memset=lambda address, value, nbytes: None,
            deviceSynchronize=lambda: None,
            memcpyDeviceToHost=2,
            memcpyHostToDevice=1,
            memcpyDeviceToDevice=3,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Stream=lambda non_blocking: Stream(self),
            Event=Event,
            get_elapsed_time=lambda start, end: end.ms - start.ms,
        )

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        if kind == 3:
            self._pass(stream, 1.0, 1.25)
        else:
            self.flying.setdefault(stream, set()).add(kind)

    def bind(self, stream: int, workspace: int, nbytes: int) -> None:
        self.bound = stream

    def gemm(self, m: int, n: int, k: int, a: int, b: int, c: int) -> None:
        self._pass(self.bound, 2.0, 1.1)

    def _pass(self, stream: int, time_ms: float, slowdown: float) -> None:
        both = set().union(*self.flying.values()) == {1, 2} and len(self.flying) == 2
        started = self.streams[stream].waits_for == set(self.flying)
        self.streams[stream].ms += time_ms * (slowdown * self.factor if both and started else 1.0)


def test_kernels_are_timed_alone_and_while_copies_run_both_ways() -> None:
    device: Any = Device()
    assert measure_slowdowns(device, device, 4096, 1, 2**20) == pytest.approx((1.1, 1.25))
    assert not device.flying, "copies are left in flight"


def test_nothing_is_faster_beside_copies() -> None:
    device: Any = Device(0.5)
    assert measure_slowdowns(device, device, 4096, 1, 2**20) == (1.0, 1.0)
