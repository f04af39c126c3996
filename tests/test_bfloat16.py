"""bfloat16 against exact fractions, number by number, and against its definition at the edges."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from vdnn.runtime.bfloat16 import from_bfloat16, to_bfloat16


def test_every_bfloat16_comes_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = from_bfloat16(bits)
    again = to_bfloat16(wide)
    numbers = ~np.isnan(wide)
    assert numbers.sum() == 2**16 - 2 * 127  # two signs, 127 fractions that are not 0
    assert (again[numbers] == bits[numbers]).all()
    assert np.isnan(from_bfloat16(again[~numbers])).all()


def test_the_nearest_is_taken_and_of_two_the_even_one() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    halfway = (rng.integers(0, 0x7F00, 500).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values[np.abs(values) < 3e38], halfway, -halfway])
    for value, bits in zip(values, to_bfloat16(values), strict=True):
        found = int(bits) & 0x7FFF
        distances = {
            near: abs(Fraction(float(from_bfloat16(np.uint16([near]))[0])) - abs(Fraction(float(value))))
            for near in range(max(found - 1, 0), min(found + 2, 0x7F80))
        }
        least = min(distances.values())
        nearest = [near for near, distance in distances.items() if distance == least]
        assert found == (nearest[0] if len(nearest) == 1 else next(near for near in nearest if near % 2 == 0)), value
        assert bool(bits >> 15) == np.signbit(value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (0.0, 0), (-0.0, 0x8000), (np.inf, 0x7F80), (3.4e38, 0x7F80), (-3.4e38, 0xFF80)],
)
def test_known_numbers(value: float, wanted: int) -> None:
    assert to_bfloat16(np.float32([value]))[0] == wanted


def test_a_nan_stays_one_whatever_its_bits() -> None:
    nans = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001]).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(nans))).all()


def test_strides_are_kept() -> None:
    array = np.arange(48, dtype=np.float32).reshape(2, 4, 6).transpose(0, 2, 1)[:, 1:4]
    assert (from_bfloat16(to_bfloat16(array)) == array).all()
