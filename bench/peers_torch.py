"""One case of vdnn.bench.peers by PyTorch: a whole training step on random images, timed, with its memory.

    found = measure(Case("resnet50", 256, "tf32", "torch-compile"))
    found["step_ms"], found["reserved_bytes"]

In a process of its own: switches of the whole process are set. Images and labels lie on the device, as floats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from vdnn.bench.peers_cases import Case, Recipe
from vdnn.bench.peers_modules import build_module
from vdnn.bench.peers_timing import RATE, WALL_STEPS, WARM_UP, spread, steps_for
from vdnn.bench.torch_reference import load_torch
from vdnn.errors import BackendUnavailable
from vdnn.networks import build
from vdnn.runtime.config import Config, load_config

CAPTURE_WARM_UP = 3
"""Steps beside a capture, which must find its libraries and gradients made."""


def measure(case: Case) -> dict[str, Any]:
    """Times and bytes of the case; whatever PyTorch raises."""
    started = perf_counter()
    torch, cuda = _open(case)
    peer = _peer(case)
    step = _captured(torch, peer) if peer.recipe.graph and cuda else peer.step
    first_loss = float(step())
    ready = perf_counter()
    for _ in range(WARM_UP):
        step()
    if cuda:
        reserved = torch.cuda.max_memory_reserved()
        gc.collect()
        torch.cuda.empty_cache()  # what only the search for algorithms needed
        torch.cuda.reset_peak_memory_stats()
        step()
    begin = perf_counter()
    float(step())
    count = steps_for((perf_counter() - begin) * 1000, case.seconds)
    times = _event_times(torch, step, count) if cuda else _clock_times(step, count)
    walls = _clock_times(step, WALL_STEPS)
    last_loss = float(step())
    found = {
        **spread(times),
        "wall_ms": spread(walls)["step_ms"],
        "steps": count,
        "timed": "CUDA events between steps" if cuda else "the host's clock",
        "losses": [first_loss, last_loss],
        "prepare_s": ready - started,
        "optimizer": "fused" if peer.fused else "not fused",
        "library": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
    }
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": max(reserved, torch.cuda.max_memory_reserved()),
            "steady_reserved_bytes": torch.cuda.max_memory_reserved(),
            "held_bytes": total - free,
            "device": torch.cuda.get_device_name(),
        }
    return found


def warm(case: Case) -> None:
    """Compile what the case needs, so that it lies in the compiler's cache on disk; nothing is timed."""
    torch, _ = _open(case)
    torch.backends.cudnn.benchmark = False
    float(_peer(case).step())


def _open(case: Case) -> tuple[Any, bool]:
    """torch with its switches set, and whether the case runs on a GPU."""
    torch, cuda = load_torch(), case.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise BackendUnavailable("PyTorch finds no GPU; use --device cpu to try a case without one")
    torch.manual_seed(0)
    products = case.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = products
    torch.backends.cudnn.benchmark = True
    limit = case.parsed.limit_bytes
    if cuda and limit is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    return torch, cuda


def _peer(case: Case) -> Peer:
    recipe = case.parsed.recipe
    assert recipe is not None
    return Peer(case, recipe, load_config(case.network, case.options))


@dataclass(slots=True)
class _Slice:
    """Some images of the step and their labels."""

    images: Any
    labels: Any


class Peer:
    """A network in training on one batch of random images.

    Args:
        config: names the network and its optimiser; the rate is RATE.

    Attributes:
        fused: whether the update is one kernel.
    """

    def __init__(self, case: Case, recipe: Recipe, config: Config):
        self.torch = torch = load_torch()
        self.case, self.recipe = case, recipe
        graph = build(config.network.name, **config.network.options)
        last = {"memory_format": torch.channels_last}
        module = build_module(graph, checkpoint=recipe.checkpoint).to(case.device).to(**last).train()
        self._weights, self._settings = list(module.parameters()), config.optimizer
        self.fused = case.device == "cuda"
        self.optimizer = self._sgd()
        images = torch.randn(case.batch, *graph.input_shape, device=case.device).to(**last)
        labels = torch.randint(0, graph.classes, (case.batch,), device=case.device)
        count = min(recipe.accumulate, case.batch)
        self.slices = [_Slice(*pair) for pair in zip(images.chunk(count), labels.chunk(count), strict=True)]
        self.module = module
        if recipe.compiled:
            if recipe.budget is not None:
                import torch._functorch.config as functorch

                functorch.activation_memory_budget = recipe.budget
            mode = "reduce-overhead" if case.device == "cuda" else "default"
            self.module = torch.compile(module, mode=mode, dynamic=False)
        # a compiled backward reuses the bytes of its gradients, so sums over slices need some of their own
        self.keeps_gradients = recipe.compiled and count > 1
        if self.keeps_gradients:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)

    def step(self) -> Any:
        """Forward, loss, backward and update; the loss."""
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        losses = [self._part(part) for part in self.slices]
        self._update()
        return losses[0] if len(losses) == 1 else sum(losses)

    def _sgd(self) -> Any:
        given = self._settings
        return self.torch.optim.SGD(
            self._weights,
            lr=RATE,
            momentum=given.momentum,
            weight_decay=given.weight_decay,
            nesterov=given.nesterov,
            fused=self.fused,
        )

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError:
            if not self.fused:
                raise
            self.fused = False  # it may refuse gradients with other strides than their weights (filters of 1 x 1)
            self.optimizer = self._sgd()
            self.optimizer.step()

    def _part(self, part: _Slice) -> Any:
        """Forward and backward of some images; their share of the loss."""
        if self.recipe.compiled:
            self.torch.compiler.cudagraph_mark_step_begin()
        half = self.case.precision == "bf16"
        with self.torch.autocast(self.case.device, self.torch.bfloat16, enabled=half), self._kept():
            loss = self.module(part.images, part.labels)
        if len(self.slices) > 1:  # also a copy out of the bytes that the next slice's loss will be in
            loss = loss * (len(part.labels) / self.case.batch)
        loss.backward()
        return loss.detach()

    def _kept(self) -> AbstractContextManager[Any]:
        if not self.recipe.offload:
            return nullcontext()
        kept: AbstractContextManager[Any] = self.torch.autograd.graph.save_on_cpu(pin_memory=self.case.device == "cuda")
        return kept


def _captured(torch: Any, peer: Peer) -> Callable[[], Any]:
    """The peer's step in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARM_UP):
            peer.step()
    torch.cuda.current_stream().wait_stream(side)
    peer.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = peer.step()

    def replay() -> Any:
        graph.replay()
        return loss

    return replay


def _event_times(torch: Any, step: Callable[[], Any], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in pairwise(marks)]


def _clock_times(step: Callable[[], Any], count: int) -> list[float]:
    """With the loss read after every step."""
    times = []
    for _ in range(count):
        begin = perf_counter()
        float(step())
        times.append((perf_counter() - begin) * 1000)
    return times
