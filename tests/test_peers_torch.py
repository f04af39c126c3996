"""PyTorch's side of the comparison: every program trains vdnn's network, and its process says what it found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vdnn.bench.peers import Store, measure_all
from vdnn.bench.peers_cases import Case
from vdnn.bench.peers_modules import build_module, segments
from vdnn.bench.torch_reference import TorchTrainer, load_torch
from vdnn.layers import Graph, Update
from vdnn.networks import build
from vdnn.runtime.init import init_parameters

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch, which vdnn is compared with")
LENET = Case("lenet", 4, "fp32", "torch-plain", device="cpu", options=("data.source=synthetic",), seconds=0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of PyTorch: small layers on several threads take long on a busy machine."""
    torch = load_torch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = {"image_size": 64, "classes": 7}
GRAPHS = {
    "resnet18": build("resnet18", **SMALL),
    "googlenet_bn": build("googlenet_bn", dropout=0.0, **SMALL),
    "googlenet": build("googlenet", dropout=0.0, **SMALL),
    "lenet": build("lenet", dropout=0.0),
}


def fill(module: Any, graph: Graph, weights: dict[str, Any]) -> None:
    """Give the module vdnn's weights, by the number of the layer in its name."""
    torch = load_torch()
    nodes = {f"layer{node.index}": node.name for node in graph.nodes.values()}
    given = dict(weights)
    for name, value in module.state_dict().items():
        layer, suffix = name.split(".")[-2:]
        if suffix != "num_batches_tracked":
            value.copy_(torch.from_numpy(given.pop(f"{nodes[layer]}.{suffix}")))
    assert not given


@needs_torch
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_module_is_the_network(name: str, checkpoint: bool) -> None:
    """Its loss and gradients are those of PyTorch's operators called one by one, and of no other network."""
    torch, graph = load_torch(), GRAPHS[name]
    weights = init_parameters(graph, 0)
    channels = graph.input_shape[0]
    mean, std = (0.5,) * channels, (0.25,) * channels
    trainer = TorchTrainer(graph, weights, Update(), lr=1e-6, mean=mean, std=std, dtype="float64")
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (4, *graph.input_shape), np.uint8)
    labels = rng.integers(0, graph.classes, 4, np.int32)
    trainer.step(images, labels)
    expected = trainer.gradients()

    module = build_module(graph, checkpoint=checkpoint).train()
    fill(module, graph, dict(weights))
    module = module.double()
    x = (torch.from_numpy(images).double() / 255 - 0.5) / 0.25
    module(x.to(memory_format=torch.channels_last), torch.from_numpy(labels).long()).backward()
    nodes = {f"layer{node.index}": node.name for node in graph.nodes.values()}
    seen = {}
    for path, weight in module.named_parameters():
        layer, suffix = path.split(".")[-2:]
        seen[f"{nodes[layer]}.{suffix}"] = weight.grad.numpy()
    assert seen.keys() == expected.keys()
    for key, gradient in expected.items():
        assert np.linalg.norm(seen[key] - gradient) <= 1e-6 * np.linalg.norm(gradient), key


def test_checkpoints_lie_at_pools_and_blocks() -> None:
    def ends(graph: Graph) -> list[str]:
        return [part[-1].layer.kind for part in segments(graph)]

    assert ends(build("vgg16", image_size=32)) == ["pool"] * 5 + ["softmax_loss"]
    resnet = segments(build("resnet18", image_size=64))
    assert [part[-1].layer.kind for part in resnet] == ["pool"] + ["relu"] * 8 + ["pool", "softmax_loss"]
    nodes = [node.name for part in resnet for node in part]
    assert nodes == list(build("resnet18", image_size=64).nodes)
    assert ends(GRAPHS["googlenet_bn"]).count("concat") == 9


@needs_torch
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("program", ["torch-plain", "torch-ckpt", "torch-accum2", "torch-offload"])
def test_programs_of_pytorch_take_the_same_step(program: str) -> None:
    from vdnn.bench import peers_torch

    options = ("data.source=synthetic", "network.dropout=0", "optimizer.weight_decay=0")
    case = replace(LENET, program=program, options=options)
    found, plain = (peers_torch.measure(c) for c in (case, replace(case, program="torch-plain")))
    assert found["step_ms"] > 0
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@needs_torch
def test_the_worker_writes_what_was_found_or_why_not(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out", "command")
    environment = dict(os.environ)
    todo = [LENET, replace(LENET, program="ours", options=("network.image_size=1",))]
    assert measure_all(todo, store, lambda text: None, timeout_s=60.0)
    good, bad = (store.results[case.key] for case in todo)
    assert good["step_ms"] > 0
    assert bad["failed"]
    assert dict(os.environ) == environment
