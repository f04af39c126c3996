"""Central differences for a whole network in float64, and the distance to the nearest kink.

check_gradients(graph)    # every weight gradient of its program against finite differences
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from interpreter import Array, Run

from vdnn.layers import Graph, Op, lower

STEP = 1e-5
TOLERANCE = 1e-6
ZERO = 1e-9


def check_gradients(
    graph: Graph, batch: int = 4, algorithm: int = 0, *, fuse: bool = False, **options: Any
) -> dict[str, float]:
    """Assert that analytic gradients equal central differences; returns the relative error of each tensor.

    Every element of every weight is moved by STEP; relative errors are of norms, tensor by tensor.
    """
    program = lower(graph, batch, dtype="float64", fuse=fuse, **options)
    run = Run(program, _away_from_kinks(graph, batch, algorithm), algorithm=algorithm)
    run.run("forward")
    run.run("backward")
    errors = {}
    for name, spec in program.tensors.items():
        if spec.role != "weight":
            continue
        analytic, numeric = run.values[f"{name}.grad"].copy(), differences(run, run.values[name])
        size = np.linalg.norm(numeric)
        if size < ZERO:  # a bias just before a batch norm moves nothing
            assert np.linalg.norm(analytic) < ZERO, name
        else:
            errors[name] = float(np.linalg.norm(analytic - numeric) / size)
    assert errors
    assert max(errors.values()) < TOLERANCE, errors
    return errors


def differences(run: Run, weight: Array) -> Array:
    """d loss / d weight by central differences."""
    gradient = np.empty_like(weight)
    for index in np.ndindex(weight.shape):
        kept = weight[index]
        losses = []
        for moved in (kept + STEP, kept - STEP):
            weight[index] = moved
            run.run("forward")
            run.run_heads()
            losses.append(run.loss())
        weight[index] = kept
        gradient[index] = (losses[0] - losses[1]) / (2 * STEP)
    return gradient


def _away_from_kinks(graph: Graph, batch: int, algorithm: int) -> int:
    """The seed of weights and images for which no ReLU and no maximum is within 10 steps of changing sides."""
    for seed in range(50):
        run = Run(lower(graph, batch, dtype="float64"), seed, algorithm=algorithm)
        nearest = [np.inf]
        run.run("forward", lambda op, arrays, nearest=nearest: nearest.append(_distance_to_kink(op, arrays)))
        if min(nearest) > 10 * STEP:
            return seed
    raise AssertionError("no seed keeps its distance from kinks; make the network smaller")


def _distance_to_kink(op: Op, arrays: Mapping[str, Array]) -> float:
    """How near an input of `op` is to a point where its gradient jumps."""
    if op.kind == "relu.forward":
        return float(np.abs(arrays["x"]).min())
    if op.kind == "pool.forward" and op.attrs["mode"] == "max":
        return _least_lead(op, arrays["x"], arrays["y"].shape)
    return float("inf")


def _least_lead(op: Op, x: Array, shape: tuple[int, ...]) -> float:
    """The least difference between largest and second pixel of a window."""
    (r, s), (down, right), (top, left) = (op.attrs[key] for key in ("kernel", "stride", "padding"))
    lead = float("inf")
    for p, q in product(range(shape[2]), range(shape[3])):
        h, w = p * down - top, q * right - left
        window = x[:, :, max(h, 0) : h + r, max(w, 0) : w + s].reshape(*x.shape[:2], -1)
        if window.shape[2] > 1:
            ordered = np.sort(window, axis=2)
            lead = min(lead, float((ordered[:, :, -1] - ordered[:, :, -2]).min()))
    return lead
