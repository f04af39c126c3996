"""Softmax, cross-entropy, "was the first choice right" and the gradient on the CPU; see vdnn.layers.softmax_loss.

    softmax_loss_forward(op, x=x, labels=labels, probs=probs, loss=loss, correct=correct)

Shapes: x, dx (N, K) or (N, K, 1, 1); probs (N, K); labels (N,) int32; loss (N,); correct (N,) uint8; step 64 bytes.
"""

from __future__ import annotations

import numpy as np

from vdnn.errors import DataError
from vdnn.layers.op import Op
from vdnn.runtime.backends.cpu.chunks import Array
from vdnn.runtime.step import STEP_DTYPE


def softmax_loss_forward(op: Op, *, x: Array, labels: Array, probs: Array, loss: Array, correct: Array) -> None:
    """probs = softmax(x); loss = -sum t * log probs per image; correct = 1 where the first largest x is the label's."""
    scores, classes = x.reshape(probs.shape), probs.shape[1]
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        image = int(outside.argmax())
        raise DataError(
            f"layer '{op.layer}', tensor 'labels': expected a label from 0 to {classes - 1}, got {labels[image]} for "
            f"image {image} of the batch; check that the data set has {classes} classes"
        )
    np.equal(scores.argmax(axis=1), labels, out=correct, casting="unsafe")
    np.subtract(scores, scores.max(axis=1, keepdims=True), out=probs)
    shifted_mean, shifted_label = probs.mean(axis=1), probs[np.arange(len(probs)), labels]
    np.exp(probs, out=probs)
    total = probs.sum(axis=1)
    probs /= total[:, None]
    smoothing = op.attrs["label_smoothing"]
    loss[...] = np.log(total) - (1 - smoothing) * shifted_label - smoothing * shifted_mean


def softmax_loss_backward(op: Op, *, probs: Array, labels: Array, step: Array, dx: Array) -> None:
    """dx = (probs - t) * weight * gradient_scale; added to dx if op accumulates it."""
    smoothing, classes = op.attrs["label_smoothing"], probs.shape[1]
    gradient = probs - probs.dtype.type(smoothing / classes)
    gradient[np.arange(len(probs)), labels] -= probs.dtype.type(1 - smoothing)
    gradient *= probs.dtype.type(op.attrs["weight"] * float(step.view(STEP_DTYPE)[0]["gradient_scale"]))
    shaped = gradient.reshape(dx.shape)
    np.copyto(dx, dx + shaped if op.accumulate else shaped)


def softmax_loss_train(op: Op, *, x: Array, labels: Array, step: Array, dx: Array, loss: Array, correct: Array) -> None:
    """Both in one: loss and correct as of softmax_loss_forward, dx as of softmax_loss_backward, in equal bits."""
    probs = np.empty((x.shape[0], x[0].size), loss.dtype)
    softmax_loss_forward(op, x=x, labels=labels, probs=probs, loss=loss, correct=correct)
    softmax_loss_backward(op, probs=probs, labels=labels, step=step, dx=dx)


def softmax_forward(op: Op, *, x: Array, y: Array) -> None:
    """y = softmax(x), both (N, K), whatever the order in memory."""
    exponents = np.exp(x - x.max(axis=1, keepdims=True))
    np.divide(exponents, exponents.sum(axis=1, keepdims=True), out=y)
