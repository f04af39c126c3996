"""LeNet and its training in plain float64 NumPy, written from the formulas and nothing of vdnn.

reference = Reference(weights)
loss = reference.step(x, labels, lr=0.05, momentum=0.9, decay=5e-4)
loss, right = reference.evaluate(x, labels)

Shapes: x (N, 1, 28, 28), already normalised; labels (N,); weights by name, "conv1.weight" (20, 1, 5, 5) and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]


class Reference:
    """Weights and momentum, and what a step does to them."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.w.items()}

    def forward(self, x: Array) -> dict[str, Array]:
        """Every value that backward needs; "scores" (N, 10) at the end."""
        found: dict[str, Array] = {"data": x}
        for number, source in ((1, "data"), (2, "pool1")):
            windows = sliding_window_view(found[source], (5, 5), axis=(2, 3))
            y = np.einsum("ncpqrs,kcrs->nkpq", windows, self.w[f"conv{number}.weight"], optimize=True)
            y += self.w[f"conv{number}.bias"][:, None, None]
            n, k, p, q = y.shape
            cells = y.reshape(n, k, p // 2, 2, q // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, k, p // 2, q // 2, 4)
            found |= {f"windows{number}": windows, f"first{number}": cells.argmax(-1), f"pool{number}": cells.max(-1)}
        flat = found["pool2"].reshape(len(x), -1)
        hidden = flat @ self.w["fc3.weight"].T + self.w["fc3.bias"]
        active = np.maximum(hidden, 0)
        scores = active @ self.w["fc4.weight"].T + self.w["fc4.bias"]
        return {**found, "flat": flat, "hidden": hidden, "active": active, "scores": scores}

    def evaluate(self, x: Array, labels: Array) -> tuple[float, int]:
        """Sum of the losses, and how many first choices are right."""
        scores = self.forward(x)["scores"]
        return float(_losses(scores, labels).sum()), int((scores.argmax(1) == labels).sum())

    def step(self, x: Array, labels: Array, lr: float, momentum: float, decay: float) -> float:
        """One step of SGD with momentum and weight decay; the mean loss before it."""
        found = self.forward(x)
        for name, gradient in self._gradients(found, labels).items():
            self.v[name] = momentum * self.v[name] + gradient + decay * self.w[name]
            self.w[name] = self.w[name] - lr * self.v[name]
        return float(_losses(found["scores"], labels).mean())

    def _gradients(self, found: Mapping[str, Array], labels: Array) -> dict[str, Array]:
        n = len(labels)
        d = _softmax(found["scores"])
        d[np.arange(n), labels] -= 1
        d /= n
        gradients = {"fc4.weight": d.T @ found["active"], "fc4.bias": d.sum(0)}
        d = (d @ self.w["fc4.weight"]) * (found["hidden"] > 0)
        gradients |= {"fc3.weight": d.T @ found["flat"], "fc3.bias": d.sum(0)}
        d = (d @ self.w["fc3.weight"]).reshape(found["pool2"].shape)
        for number in (2, 1):
            cells = np.zeros((*d.shape, 4))
            np.put_along_axis(cells, found[f"first{number}"][..., None], d[..., None], -1)
            n, k, p, q = d.shape
            d = cells.reshape(n, k, p, q, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, k, 2 * p, 2 * q)
            gradients[f"conv{number}.weight"] = np.einsum(
                "nkpq,ncpqrs->kcrs", d, found[f"windows{number}"], optimize=True
            )
            gradients[f"conv{number}.bias"] = d.sum((0, 2, 3))
            padded = sliding_window_view(np.pad(d, ((0, 0), (0, 0), (4, 4), (4, 4))), (5, 5), axis=(2, 3))
            turned = self.w[f"conv{number}.weight"][:, :, ::-1, ::-1]
            d = np.einsum("nkpqrs,kcrs->ncpq", padded, turned, optimize=True)
        return gradients


def _softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _losses(scores: Array, labels: Array) -> Array:
    return -np.log(_softmax(scores)[np.arange(len(labels)), labels])
