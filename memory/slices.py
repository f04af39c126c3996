"""A convolution over slices of its batch: the fastest division whose every slice fits a workspace limit.

    division = divide(256, {256: whole, 128: halves, 64: quarters}, limit_bytes=64 * MIB)
    [(part.images, part.candidate.algorithm) for part in division.parts]     # [(128, 'FFT'), (128, 'FFT')]
    quickest(costs, "conv1.forward", 256, 64 * MIB)     # that, or the fastest whole candidate if that is no slower

A smaller slice needs less workspace, so that a faster algorithm may fit: the idea of Oyama, Ben-Nun, Hoefler and
Matsuoka, "Accelerating Deep Learning Frameworks with Micro-batches" (2018). The division is found by dynamic
programming over the images that are done: O(batch times sizes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd

from vdnn.memory.costs import Candidate, CostTable, Division, Options, Part
from vdnn.units import MIB

__all__ = ["Division", "Part", "describe", "divide", "parse", "quickest", "sizes_of", "step_of"]

HALVINGS = 5
"""Of the batch, at most, in search of a slice whose fastest algorithm fits."""
LEAST_BYTES = MIB
"""With less room than this for a workspace no slices are looked at: what fits there fits the whole batch too."""
_GROUP = re.compile(r"([0-9]+) x ([0-9]+) images with (\S+)")


def sizes_of(batch: int, halvings: int = 3) -> tuple[int, ...]:
    """Sizes of slices worth knowing: the batch, its half, quarter ..., rounded up and down; the largest first."""
    found = {batch}
    for step in range(1, halvings + 1):
        found |= set(_halved(batch, step))
    return tuple(sorted(found, reverse=True))


def step_of(batch: int) -> int:
    """Images of which every slice of `batch` images, and so the first image of each, is a multiple."""
    return gcd(*sizes_of(batch, HALVINGS))


def divide(
    batch: int, candidates: Mapping[int, Sequence[Candidate]], limit_bytes: int | None = None
) -> Division | None:
    """The fastest division of `batch` images, of equally fast ones that with the fewest parts.

    Args:
        candidates: by number of images, what can compute so many at once.
        limit_bytes: most workspace of a part; None for no limit.

    Returns None if no division has all its parts within the limit.
    """
    best: dict[int, Candidate] = {}
    for images, options in candidates.items():
        fits = [c for c in options if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        if fits and 0 < images <= batch:
            best[images] = min(fits, key=lambda c: (c.time_ms, c.workspace_bytes))
    # cost of the first n images: time and parts, and the images of the last of them
    costs: dict[int, tuple[float, int, int]] = {0: (0.0, 0, 0)}
    step = gcd(batch, *best)
    for done in range(step, batch + 1, step):
        for images, candidate in best.items():
            before = costs.get(done - images)
            if before is None:
                continue
            cost = (before[0] + candidate.time_ms, before[1] + 1, images)
            if done not in costs or cost < costs[done]:
                costs[done] = cost
    if batch not in costs:
        return None
    parts, left = [], batch
    while left:
        images = costs[left][2]
        parts.append(Part(images, best[images]))
        left -= images
    return Division(tuple(sorted(parts, key=lambda part: -part.images)))


def quickest(costs: CostTable, op: str, batch: int, limit_bytes: int | None) -> Candidate | Division:
    """The fastest way to run the convolution `op` with at most `limit_bytes` of workspace: as a whole, or divided.

    Slices are asked for only where the fastest algorithm of the whole batch does not fit, and no smaller ones than it
    takes until the fastest of a slice does.
    """
    whole = costs.fastest(op, limit_bytes)
    if limit_bytes is None or limit_bytes < LEAST_BYTES or costs.slices is None:
        return whole
    known: dict[int, tuple[Candidate, ...]] = {}
    for sizes in ((batch,), *(_halved(batch, step) for step in range(1, HALVINGS + 1))):
        found = {images: costs.slices(op, images) for images in sizes}
        known |= {images: options.candidates for images, options in found.items()}
        if all(_has_room(options, limit_bytes) for options in found.values()):
            break
    division = divide(batch, known, limit_bytes)
    if division is None or len(division.parts) == 1:
        return whole
    return division if whole.workspace_bytes > limit_bytes or division.time_ms < whole.time_ms else whole


def describe(rows: Iterable[tuple[int, str]]) -> str:
    """Slices in words, from images and algorithm of each: "2 x 96 images with FFT, 1 x 64 images with GEMM"."""
    groups = ((len(list(same)), *row) for row, same in groupby(rows))
    return ", ".join(f"{count} x {images} images with {algorithm}" for count, images, algorithm in groups)


def parse(words: str, batch: int) -> list[tuple[int, str]] | None:
    """The slices of `batch` images that `describe` put in words; None if these words are of no such slices."""
    matches = [_GROUP.fullmatch(group) for group in words.split(", ")]
    groups = [(int(match[1]), int(match[2]), match[3]) for match in matches if match is not None]
    if len(groups) < len(matches) or sum(count * images for count, images, _ in groups) != batch:
        return None
    return [(images, algorithm) for count, images, algorithm in groups if images for _ in range(count)]


def _halved(batch: int, times: int) -> Iterator[int]:
    """`batch` halved so many times, rounded up and down, without 0."""
    return iter(sorted({-(-batch // 2**times), batch >> times} - {0}, reverse=True))


def _has_room(options: Options, limit_bytes: int) -> bool:
    """Whether the fastest algorithm that there is fits, so that smaller slices have nothing to offer."""
    fastest = min(options.candidates, key=lambda c: (c.time_ms, c.workspace_bytes), default=None)
    return options.complete and fastest is not None and fastest.workspace_bytes <= limit_bytes
