"""Which outputs a filter or pooling window reaches at one of its places, as slices along one side of an image.

for tap in taps(size=24, kernel=3, outputs=12, stride=2, padding=1):
    y[tap.outputs] += w[tap.offset] * x[tap.pixels]
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tap(NamedTuple):
    """Place `offset` of the window: it meets a pixel for the outputs in `outputs` (maybe none), those of `pixels`."""

    offset: int
    outputs: slice
    pixels: slice


@lru_cache(maxsize=4096)
def taps(
    size: int, kernel: int, outputs: tuple[int, int], stride: int, padding: int, dilation: int = 1
) -> tuple[Tap, ...]:
    """One tap for each place of the window along one side, in order.

    Args:
        size: pixels of the side (H or W).
        kernel: places of the window (R or S).
        outputs: first and end of the outputs asked for; `Tap.outputs` counts from that first.
        stride, padding, dilation: in pixels; output p at offset r reads pixel p*stride - padding + r*dilation.
    """
    first, end = outputs
    found = []
    for offset in range(kernel):
        shift = offset * dilation - padding
        low = max(first, -(shift // stride))  # the least p with p*stride + shift >= 0
        high = min(end, (size - 1 - shift) // stride + 1)
        if low >= high:
            found.append(Tap(offset, slice(0, 0), slice(0, 0)))
            continue
        pixels = slice(low * stride + shift, (high - 1) * stride + shift + 1, stride)
        found.append(Tap(offset, slice(low - first, high - first), pixels))
    return tuple(found)
