"""vdnn beside PyTorch on one GPU, both in fp32: first losses from the same weights and images, then time per step.

    python -m vdnn.bench.gpu_torch                     # every case
    python -m vdnn.bench.gpu_torch resnet50 alexnet    # gpu_torch.json goes to the folder $OUT

Every step sees the same images, in another order each time, so that a loss moves by learning alone. Rates are small:
at larger ones two roundings of the same sum drift apart within a few steps in either program. A part that fails says
so and the others go on.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.harness import Outcome, train, write_results
from vdnn.bench.torch_reference import TorchTrainer, load_torch
from vdnn.networks import build
from vdnn.runtime.config import load_config
from vdnn.runtime.data import batches, epoch_order, open_source
from vdnn.runtime.init import init_parameters
from vdnn.runtime.prepare import make_recipe

AGREEMENT = 1e-5
"""Relative difference of a loss that two fp32 programs may show."""
MOVED = 100 * AGREEMENT
"""Relative change of the loss, first to last, below which agreement would say nothing about backward and update."""
COMPARED, WARM_UP, TIMED = 5, 5, 20
"""Steps: compared, run before the clock, timed by it."""


Losses = tuple[float, ...]
Feed = Callable[[int], Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]]


@dataclass(frozen=True, slots=True)
class Case:
    """A network as both programs train it: batch, learning rate, further overrides of its configuration."""

    network: str
    batch: int
    lr: float
    overrides: tuple[str, ...] = ("network.dropout=0",)

    def settings(self) -> list[str]:
        """Overrides of the packaged configuration; the data are one batch of images."""
        shared = [f"train.batch_size={self.batch}", f"data.train_images={self.batch}", f"optimizer.lr={self.lr!r}"]
        rest = ["data.test_images=8", "evaluate.batch_size=8", "memory.policy=none", "memory.limit=null"]
        return [*shared, *rest, *self.overrides]


CASES: Mapping[str, Case] = {
    "alexnet": Case("alexnet", 128, 1e-5),
    "vgg16": Case("vgg16", 64, 1e-6),
    "googlenet_bn": Case("googlenet_bn", 128, 3e-7),
    "resnet50": Case("resnet50", 64, 1e-7, ()),
    "resnet50-zero-init": Case("resnet50", 64, 1e-4, ("network.zero_init_residual=true",)),
}
"""Rates at which two float32 algorithms of PyTorch itself differ by less than AGREEMENT in five steps (found on a CPU
with smaller images and batches).

ResNet-50 magnifies roundings at its first weights: at 1e-6 two such runs of 12 images are 2.5e-4 apart. With the last
norm of each block at zero they are not, but its branches then learn little; so it is compared both ways.
"""


def compare(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Losses and times of one case; what failed is in "failed", by part.

    "relative" is of vdnn's losses to PyTorch's; "vdnn_error" and "torch_error" are of either to PyTorch's in float64:
    what rounding alone does, that of the weights included.

    Args:
        device: "cuda", or "cpu" for the losses only.
    """
    failed: dict[str, str] = {}
    found: dict[str, Any] = {**asdict(case), "failed": failed}
    on_gpu = device == "cuda"
    steps = COMPARED + TIMED if on_gpu else COMPARED
    ours: Outcome | None = _try(
        failed, "vdnn", lambda: train(case.network, [*case.settings(), f"device={device}"], steps)
    )
    theirs: Losses | None = _try(failed, "torch", lambda: torch_losses(case, device))
    times: dict[str, Any] | None = _try(failed, "torch times", lambda: torch_times(case)) if on_gpu else None
    exact: Losses | None = _try(failed, "torch float64", lambda: torch_losses(case, device, "float64"))
    losses = ours.losses[:COMPARED] if ours is not None else None
    found |= {"vdnn_losses": losses, "torch_losses": theirs, "torch_float64_losses": exact}
    pairs = {"relative": (losses, theirs), "vdnn_error": (losses, exact), "torch_error": (theirs, exact)}
    found |= {name: difference(a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    if losses is not None and theirs is not None:
        found["moved"] = abs(losses[-1] - losses[0]) / abs(losses[0])
        found["ok"] = found["relative"] <= AGREEMENT and found["moved"] >= MOVED
    if ours is not None and on_gpu:
        found |= {"vdnn_device": ours.device, "vdnn_step_ms": ours.step_ms, "vdnn_slab_bytes": ours.slab_bytes}
    if times is not None:
        found |= times
    if ours is not None and times is not None:
        found["vdnn_over_torch"] = ours.step_ms / times["torch_step_ms"]
        found["vdnn_over_torch_wall"] = ours.step_ms / times["torch_wall_ms"]
    return found


def difference(got: Losses, expected: Losses) -> float:
    """The largest relative difference of a loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def torch_losses(case: Case, device: str, dtype: str = "float32") -> Losses:
    """The first losses by PyTorch with deterministic algorithms."""
    trainer, feed = _peer(case, device, dtype=dtype)
    return trainer.train(feed(COMPARED)).losses


def torch_times(case: Case) -> dict[str, Any]:
    """Time of a step by PyTorch with the fastest algorithms it finds, and the most bytes its tensors took.

    A step is upload of the images, forward, backward and update. "torch_step_ms" is the median between CUDA events,
    steps queued one after the other, beside its quartiles; "torch_wall_ms" is by the host's clock with the loss read
    after every step, as vdnn's step time is.
    """
    torch = load_torch()
    trainer, feed = _peer(case, "cuda", fast=True)
    torch.cuda.reset_peak_memory_stats()
    given = list(feed(1))
    images, labels = given[0]
    for _ in range(WARM_UP):
        trainer.step(images, labels)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        trainer.step(images, labels)
        mark.record()
    torch.cuda.synchronize()
    low, middle, high = quantiles(a.elapsed_time(b) for a, b in pairwise(marks))
    walls = []
    for _ in range(TIMED):
        begin = perf_counter()
        float(trainer.step(images, labels))
        walls.append((perf_counter() - begin) * 1000)
    return {
        "torch_step_ms": middle,
        "torch_step_quartiles_ms": [low, high],
        "torch_wall_ms": quantiles(walls)[1],
        "torch_peak_bytes": torch.cuda.max_memory_allocated(),
        "timed_steps": TIMED,
    }


def _peer(case: Case, device: str, *, dtype: str = "float32", fast: bool = False) -> tuple[TorchTrainer, Feed]:
    """A trainer with vdnn's first weights, and the images of so many steps as vdnn's harness gives them."""
    config = load_config(case.network, case.settings())
    graph = build(config.network.name, **config.network.options)
    seed = config.train.seed
    source = open_source(config.data, graph.input_shape, graph.classes, seed)
    recipe = make_recipe(config, source)
    if recipe.mean is None or recipe.std is None:
        raise ValueError(f"source '{source.name}' states no mean and deviation of its pixels")
    trainer = TorchTrainer(
        graph,
        init_parameters(graph, seed),
        recipe.update,
        lr=config.optimizer.lr,
        mean=recipe.mean,
        std=recipe.std,
        device=device,
        dtype=dtype,
        fast=fast,
    )

    def feed(steps: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]:
        order = np.concatenate([epoch_order(seed, epoch, len(source.train)) for epoch in range(steps)])
        return batches(source.train, order[: steps * case.batch], 0, case.batch)

    return trainer, feed


def _try(failed: dict[str, str], part: str, run: Callable[[], Any]) -> Any:
    """What `run` returns; None after an error, which goes to `failed`. Memory is given back either way."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        failed[part] = f"{type(error).__name__}: {error}"
        return None
    finally:
        gc.collect()
        if "torch" in sys.modules:
            load_torch().cuda.empty_cache()


def main() -> None:
    """Compare the cases named on the command line, or all."""
    names = sys.argv[1:] or list(CASES)
    if not set(names) <= set(CASES):
        sys.exit(f"name one or more of: {', '.join(CASES)}")
    if find_spec("torch") is None:  # imported later: vdnn's libraries must be the first of their names in the process
        sys.exit("PyTorch is not installed: install it beside vdnn to compare with it")
    found: dict[str, Any] = {}
    for name in names:
        found[name] = compare(CASES[name])
        print(name, {k: v for k, v in found[name].items() if not k.endswith("losses")}, flush=True)
    torch = load_torch()
    found["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    write_results("gpu_torch.json", " ".join(["python -m vdnn.bench.gpu_torch", *sys.argv[1:]]), found)


if __name__ == "__main__":
    main()
