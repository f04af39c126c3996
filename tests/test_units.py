"""Bytes and times in words, against what a person would write."""

from __future__ import annotations

import pytest

from vdnn.units import exact_bytes, format_ms


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0, "0 ms"),
        (0.042, "0.042 ms"),
        (0.9994, "0.999 ms"),
        (1, "1.00 ms"),
        (12.34, "12.3 ms"),
        (99.96, "100 ms"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (48_600, "48.6 s"),
        (119_900, "120 s"),
        (120_000, "2.00 min"),
        (45 * 60_000, "45.0 min"),
        (2 * 3_600_000, "2.00 h"),
        (1234 * 3_600_000, "1,234 h"),
        (float("inf"), "inf h"),
    ],
)
def test_a_time_is_told_in_the_unit_of_its_size(time_ms, text):
    assert format_ms(time_ms) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB (1,536 bytes)"), (2**30 + 1, "1.0 GiB (1,073,741,825 bytes)")],
)
def test_rounded_bytes_have_the_exact_number_beside_them(count, text):
    assert exact_bytes(count) == text
