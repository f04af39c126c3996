"""Dropout on the CPU, its mask drawn anew in backward; see vdnn.layers.dropout for the counters.

    dropout_forward(op, x=x, step=step, y=y)

Shapes: x, y, dy, dx (N, ...) of equal size and dtype; y may be the bytes of x, dx those of dy. step: the 64-byte record
of vdnn.runtime.step, uint8. op.attrs: p, the probability of dropping, and key, the layer's 32-bit key.
"""

from __future__ import annotations

from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array, image_slices
from vdnn.runtime.backends.cpu.philox import philox
from vdnn.runtime.backends.cpu.select import select
from vdnn.runtime.step import STEP_DTYPE

_WORD = np.uint64(0xFFFFFFFF)


def dropout_forward(op: Op, *, x: Array, step: Array, y: Array) -> None:
    """y = x / (1 - p) where the value is kept, else 0."""
    for images in image_slices(y):
        _drop(op, step, images, x[images], out=y[images])


def dropout_backward(op: Op, *, dy: Array, step: Array, dx: Array) -> None:
    """dx = dy / (1 - p) where forward kept the value, else 0; added to dx if op accumulates it."""
    for images in image_slices(dx):
        part = dx[images]
        kept = _drop(op, step, images, dy[images], out=np.empty_like(part) if op.accumulate else part)
        if op.accumulate:
            part += kept


def _drop(op: Op, step: Array, images: slice, values: Array, out: Array) -> Array:
    np.multiply(values.reshape(out.shape), out.dtype.type(1 / (1 - op.attrs["p"])), out=out)
    return select(out, _kept(op, step, images, out.shape), out=out)


def _kept(op: Op, step: Array, images: slice, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which values of the images `images` of this run, in shape (images, ...), are kept."""
    record = step.view(STEP_DTYPE)[0]
    seed, values = int(record["seed"]), prod(shape[1:])
    samples = np.arange(images.start, images.stop, dtype=np.uint64) + np.uint64(record["sample"])
    counter = (
        np.arange(-(-values // 4), dtype=np.uint64)[None, :],
        samples[:, None] & _WORD,
        np.asarray(record["step"] & _WORD),
        np.asarray(op.attrs["key"], np.uint64),
    )
    words = philox(counter, (seed & int(_WORD), seed >> 32))
    threshold = np.uint64(ceil(op.attrs["p"] * 2**32))
    kept = np.empty((shape[0], counter[0].size, 4), np.bool_)
    for i, word in enumerate(words):
        np.greater_equal(word, threshold, out=kept[:, :, i])
    return kept.reshape(shape[0], -1)[:, :values].reshape(shape)
