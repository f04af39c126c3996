"""A convolution over slices of its batch: the fastest division whose every slice fits a workspace limit.

    division = divide(256, {256: whole, 128: halves, 64: quarters}, limit_bytes=64 * MIB)
    [(part.images, part.candidate.algorithm) for part in division.parts]     # [(128, 'FFT'), (128, 'FFT')]

A smaller slice needs less workspace, so that a faster algorithm may fit: the idea of Oyama, Ben-Nun, Hoefler and
Matsuoka, "Accelerating Deep Learning Frameworks with Micro-batches" (2018). The division is found by dynamic
programming over the images that are done: O(batch times sizes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vdnn.memory.costs import Candidate


@dataclass(frozen=True, slots=True)
class Part:
    """So many images by one candidate."""

    images: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Division:
    """Parts that together are the batch, the largest first; they run one after another in one workspace."""

    parts: tuple[Part, ...]

    @property
    def time_ms(self) -> float:
        """The sum of their times."""
        return sum(part.candidate.time_ms for part in self.parts)

    @property
    def workspace_bytes(self) -> int:
        """The largest of their workspaces."""
        return max(part.candidate.workspace_bytes for part in self.parts)


def sizes_of(batch: int, halvings: int = 3) -> tuple[int, ...]:
    """Sizes of slices worth knowing: the batch, its half, quarter ..., rounded up and down; the largest first."""
    found = {batch}
    for step in range(1, halvings + 1):
        found |= {batch >> step, -(-batch // 2**step)}
    return tuple(sorted(found - {0}, reverse=True))


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
    costs: list[tuple[float, int, int] | None] = [(0.0, 0, 0)] + [None] * batch
    for done in range(1, batch + 1):
        for images, candidate in best.items():
            before = costs[done - images] if images <= done else None
            if before is None:
                continue
            cost = (before[0] + candidate.time_ms, before[1] + 1, images)
            known = costs[done]
            if known is None or cost < known:
                costs[done] = cost
    if costs[batch] is None:
        return None
    parts, left = [], batch
    while left:
        found = costs[left]
        assert found is not None  # every step led here
        parts.append(Part(found[2], best[found[2]]))
        left -= found[2]
    return Division(tuple(sorted(parts, key=lambda part: -part.images)))
