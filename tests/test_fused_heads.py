"""A loss and its gradient as one op: which heads have it, in what order they add gradients, and equal bits."""

from __future__ import annotations

import pytest
from test_fuse import check_equal, states

from vdnn.layers import Flatten, Graph, Linear, SoftmaxLoss, lower
from vdnn.networks import build


@pytest.mark.parametrize("mode", ["train", "first", "middle", "last"])
def test_loss_and_gradient_of_every_head_are_one_op_without_probabilities(mode: str) -> None:
    plain, fused = (lower(build("googlenet", aux_heads=True), 2, mode, fuse=fuse) for fuse in (False, True))
    heads = [op for op in fused.ops if op.kind.startswith("softmax_loss.")]
    assert [op.kind for op in heads] == ["softmax_loss.train"] * 3
    assert [op.attrs["weight"] for op in heads] == [1.0, 0.3, 0.3]
    assert {op.phase for op in heads} == {"backward"}
    assert all(set(op.writes) == {"dx", "loss", "correct"} for op in heads)
    assert (fused.loss, fused.correct, fused.fetches) == (plain.loss, plain.correct, plain.fetches)
    assert any(name.endswith(".probs") for name in plain.tensors)
    assert not any(name.endswith(".probs") for name in fused.tensors)
    evaluation = lower(build("googlenet", aux_heads=True), 2, "eval", fuse=True)
    assert [op.kind for op in evaluation.ops if "softmax" in op.kind] == ["softmax_loss.forward"]


def forked_heads() -> Graph:
    """Scores that two heads and a further layer read, and a head of the images, which have no gradient."""
    g = Graph("forked", (3, 1, 1), classes=3)
    pixels = g.add("flat", Flatten(), g.input)
    g.add("of_pixels", SoftmaxLoss(weight=0.2), pixels)
    scores = g.add("fc", Linear(3), pixels)
    for name, smoothing in (("a", 0.1), ("b", 0.0)):
        g.add(name, SoftmaxLoss(smoothing, weight=0.4), scores)
    g.add("loss", SoftmaxLoss(), g.add("fc2", Linear(3), scores))
    return g


def test_a_head_without_a_gradient_stays_and_others_add_theirs() -> None:
    ops = {op.name: op for op in lower(forked_heads(), 4, fuse=True).ops}
    assert "of_pixels.forward" in ops
    assert not any(name.startswith("of_pixels.") for name in ops if name != "of_pixels.forward")
    assert [ops[f"{name}.train"].accumulate for name in ("loss", "b", "a")] == [(), ("dx",), ("dx",)]


@pytest.mark.parametrize("layout", ["NCHW", "CHWN"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_one_tensor_are_the_same_bits_fused(layout: str, dtype: str) -> None:
    check_equal(states(forked_heads(), 4, 3, layout=layout, dtype=dtype))
