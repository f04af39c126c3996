"""Softmax, cross-entropy, "was the first choice right" and the gradient on the GPU; see vdnn.layers.softmax_loss.

    softmax_loss_forward(op, {"x": x, "labels": labels, "probs": probs, "loss": loss, "correct": correct}, ...)
    softmax_loss_train(op, {"x": x, "labels": labels, "step": step, "dx": dx, "loss": loss, "correct": correct}, ...)

x, dx (N, K) or (N, K, 1, 1), activations, may be channels of a larger tensor; probs (N, K); loss (N,), both float32;
labels (N,) int32; correct (N,) uint8; step the 64-byte record. A label outside of 0 .. K - 1 gives a loss and a
gradient that are not numbers, so that no weight is updated.
"""

from __future__ import annotations

from typing import Any

from vdnn.layers.op import Op
from vdnn.runtime.backends.cuda.launch import Arrays, Kernels, operands
from vdnn.runtime.backends.cuda.softmax import Head, launch_rows


def softmax_loss_forward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """probs = softmax(x); loss = -sum t * log probs per image; correct = 1 where the first largest x is the label's."""
    (x,), (probs, loss) = operands(op, arrays, "x", dtype=kernels.dtype), operands(op, arrays, "probs", "loss")
    labels, correct = arrays["labels"].ptr, arrays["correct"].ptr
    smoothing = op.attrs["label_smoothing"]
    head = Head(labels=labels, probs=probs.ptr, loss=loss.ptr, correct=correct, smoothing=smoothing)
    launch_rows(op, arrays, x, head, kernels, stream)


def softmax_loss_train(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """loss and correct as of softmax_loss_forward, dx as of softmax_loss_backward, from one read of x."""
    x, dx = operands(op, arrays, "x", "dx", dtype=kernels.dtype)
    (loss,) = operands(op, arrays, "loss")
    head = Head(
        labels=arrays["labels"].ptr,
        step=arrays["step"].ptr,
        loss=loss.ptr,
        correct=arrays["correct"].ptr,
        y=dx,
        smoothing=op.attrs["label_smoothing"],
        weight=op.attrs["weight"],
        accumulate=bool(op.accumulate),
    )
    launch_rows(op, arrays, x, head, kernels, stream)


def softmax_loss_backward(op: Op, arrays: Arrays, kernels: Kernels, stream: Any) -> None:
    """dx = (probs - t) * weight * gradient_scale; added to dx if op accumulates it."""
    (probs,), (dx,) = operands(op, arrays, "probs"), operands(op, arrays, "dx", dtype=kernels.dtype)
    (n, k), smoothing = probs.shape, op.attrs["label_smoothing"]
    places = [probs.ptr, arrays["labels"].ptr, arrays["step"].ptr, dx.ptr, dx.image_stride]
    args = [*places, k, smoothing / k, 1 - smoothing, op.attrs["weight"], bool(op.accumulate)]
    kernels.launch("softmax_loss_backward", n, args, stream)
