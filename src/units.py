"""Bytes as people write them, in both directions, and times as people read them.

parse_bytes("12GiB") == 12 * 2**30; parse_bytes("12 GB") == 12 * 10**9; format_bytes(1536) == "1.5 KiB"
exact_bytes(1536) == "1.5 KiB (1,536 bytes)"; format_ms(90.0) == "90.0 ms"; format_ms(9e6) == "2.50 h"
"""

from __future__ import annotations

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
}
_TIMES = (("ms", 1.0, 999.5), ("s", 1e3, 119.95), ("min", 60e3, 119.95), ("h", 3.6e6, float("inf")))
"""Unit, ms in it, and up to how many of them are said in it."""
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: str | int | float) -> int:
    """Bytes from "12GiB" (2^30), "12 GB" (10^9), "512" or a number; ValueError says what is accepted."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not an amount of bytes (write 12GiB, 12 GB or 12000000000)")
    text = repr(value) if isinstance(value, (int, float)) else value
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not an amount of bytes (write 12GiB, 12 GB or 12000000000)")
    amount = float(match[1]) * _UNITS[match[2].lower()]
    if amount == float("inf"):
        raise ValueError(f"{value!r} is not a finite amount of bytes")
    # integers stay exact beyond 2^53
    whole = re.fullmatch(r"[0-9]+", match[1])
    return int(match[1]) * _UNITS[match[2].lower()] if whole else int(amount)


def format_bytes(count: int | float) -> str:
    """Bytes with a binary unit and three significant digits or more: 1610612736 → "1.5 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    if unit == "B":
        return f"{int(size)} B"
    return f"{size:,.1f} {unit}" if abs(size) < 1000 else f"{size:,.0f} {unit}"


def exact_bytes(count: int) -> str:
    """Bytes rounded and to the byte: 1610612737 → "1.5 GiB (1,610,612,737 bytes)"; below 1 KiB once."""
    return f"{format_bytes(count)} ({count:,} bytes)" if abs(count) >= KIB else format_bytes(count)


def format_ms(time_ms: float) -> str:
    """A time of `time_ms` milliseconds in ms, s, min or h by its size, with three significant digits."""
    unit, scale = next((unit, scale) for unit, scale, most in _TIMES if not abs(time_ms) / scale > most)
    value = time_ms / scale
    digits = next(
        (digits for least, digits in ((99.95, 0), (9.995, 1), (0.9995, 2)) if abs(value) >= least), 3 if value else 0
    )
    return f"{value:,.{digits}f} {unit}"
