"""Measured copy rates are measured once, kept, and measured again where the file cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from vdnn.memory.costs import CopyRates
from vdnn.runtime.backends.cuda.rates import known_rates

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
