"""A step's images cut into the parts that its plans take, each with the images that follow it.

for key, images, following in cut_step(prepared.steps, batch, next_batch): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vdnn.runtime.held import is_frozen
from vdnn.runtime.planset import Key
from vdnn.runtime.prepare import Steps

Images = NDArray[np.uint8]


def cut_step(steps: Steps, images: Images, following: Images | None) -> Iterator[tuple[Key, Images, Images | None]]:
    """Key, images and what can be fed ahead meanwhile, of every part of a step.

    Args:
        images: (N, C, H, W) uint8 of the step. following: of the next step, or None.

    What follows a part is fed ahead if it is of the part's own shape and no array can write its memory; else None.
    """
    keys = steps.parts(len(images))
    ends = accumulate(n for _, n in keys)
    parts = [images[end - n : end] for (_, n), end in zip(keys, ends, strict=True)]
    first = None if following is None else following[: steps.parts(len(following))[0][1]]
    for key, part, after in zip(keys, parts, [*parts[1:], first], strict=True):
        fits = after is not None and after.shape == part.shape and is_frozen(after)
        yield key, part, after if fits else None
