"""Concatenations flattened before an in-place layer: channels of a flattened gradient are no image channels."""

from __future__ import annotations

import pytest
from gradients import check_gradients

from vdnn.layers import BatchNorm, Concat, Conv, Dropout, Flatten, Graph, Linear, Relu, SoftmaxLoss

TAILS = {
    "flatten": [Flatten()],
    "flatten, relu": [Flatten(), Relu()],
    "flatten, dropout": [Flatten(), Dropout(0.5)],
    "relu, flatten, dropout": [Relu(), Flatten(), Dropout(0.5)],
    "flatten, batchnorm": [Flatten(), BatchNorm()],
}


@pytest.mark.parametrize("shared", [False, True], ids=["own branches", "one branch on the other"])
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_gradients(tail, shared):
    graph = Graph("cat", (1, 3, 3), 3)
    a = graph.add("a", Conv(2, 1), graph.input)
    b = graph.add("b", BatchNorm(), a) if shared else graph.add("b", Conv(2, 1), graph.input)
    x = graph.add("cat", Concat(), [a, b])
    for i, layer in enumerate(tail):
        x = graph.add(f"t{i}", layer, x)
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), x))
    check_gradients(graph, batch=2)
