"""The first losses of vdnn beside PyTorch's, from the same weights and images, in float32 and against float64.

    python -m vdnn.bench.torch_losses                   # the four networks; torch_losses.json goes to folder $OUT
    python -m vdnn.bench.torch_losses resnet50-first
    python -m vdnn.bench.torch_losses --device cpu --batch 8 -o network.image_size=64 googlenet_bn

Three programs take five steps: vdnn, PyTorch in float32, PyTorch in float64. The rate is set by PyTorch's gradient in
float64 alone, so that the loss falls by about AIM: too little movement would hide a wrong update, and at large rates
two roundings of one sum part within steps. For agreement to 1e-5 an update may be wrong by 0.05% of its length.

Networks with batch normalisation start from weights that PyTorch has trained for a few steps. At their first weights
roundings grow from norm to norm (Yang et al. 2019, arXiv 1902.08129, theory): in ResNet-50 from 2e-7 to 8e-5 of
a norm's output (on a CPU, 16 images of 64 x 64). Then 27 of 13 million ReLUs and maxima turn over, and the float32
gradient of PyTorch is 1.6% off; with the choices of float64 it is 3e-5 off. After the warm-up 2 turn over, and it is
0.3% off. The cases "-first" start from the first weights nevertheless.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.bench.command import command, reason, whole_from
from vdnn.bench.harness import Silent, write_results
from vdnn.bench.torch_reference import TorchTrainer, load_torch
from vdnn.errors import BackendUnavailable
from vdnn.networks import build
from vdnn.runtime.config import load_config
from vdnn.runtime.data import Split, batches, epoch_order, open_source
from vdnn.runtime.devices import open_device
from vdnn.runtime.init import init_parameters
from vdnn.runtime.prepare import make_recipe, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

AGREEMENT = 1e-5
"""Relative difference of a loss that two float32 programs may show."""
MOVED, AIM = 0.01, 0.02
"""Relative change of the loss, first to last: the least that counts, and what the rate is set for."""
COMPARED, MOST_WARM_UP = 5, 150
"""Steps: compared, and before them at most (the loss they reach is then compared wherever it is)."""
SLACK = 1e-7
"""Relative distance from float64 that is rounding of the loss itself."""

Losses = tuple[float, ...]
Tensors = Mapping[str, NDArray[Any]]
Feed = Callable[[int], Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]]


@dataclass(frozen=True, slots=True)
class Case:
    """A network as all programs train it.

    Args:
        overrides: further ones of its configuration.
        warm_to: share of the first loss to which PyTorch trains before losses are compared; 1 for the first weights.
        warm_lr: the rate of that training.
    """

    network: str
    batch: int
    overrides: tuple[str, ...] = ("network.dropout=0",)
    warm_to: float = 1.0
    warm_lr: float = 0.01

    def settings(self) -> list[str]:
        """Overrides of the packaged configuration; the data are one batch of images."""
        shared = [f"train.batch_size={self.batch}", f"data.train_images={self.batch}"]
        rest = ["data.test_images=8", "evaluate.batch_size=8", "memory.policy=none", "memory.limit=null"]
        rest.append("memory.layout=nchw")
        return [*shared, *rest, *self.overrides]


CASES: Mapping[str, Case] = {
    "alexnet": Case("alexnet", 128),
    "vgg16": Case("vgg16", 64),
    "googlenet_bn": Case("googlenet_bn", 128, warm_to=0.3),
    "resnet50": Case("resnet50", 64, (), warm_to=0.3),
}
FIRST: Mapping[str, Case] = {
    "googlenet_bn-first": Case("googlenet_bn", 128),
    "resnet50-first": Case("resnet50", 64, ()),
    "resnet50-zero-init": Case("resnet50", 64, ("network.zero_init_residual=true",)),
}
"""Networks with batch normalisation at their first weights, and ResNet-50 with the last norm of each block at zero."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where the compared steps begin: weights and statistics by name, momentum at rest.

    Args:
        warm_steps: that PyTorch took to get there.
        lr: of the compared steps, a float32.
    """

    weights: Tensors
    warm_steps: int
    lr: float


@dataclass(frozen=True, slots=True)
class Run:
    """Losses of the compared steps; gradients of the first, weight decay included, by the name of the parameter."""

    losses: Losses
    gradients: Tensors
    seconds: float


def compare_losses(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Losses of one case by all programs and the verdict; what failed is in "failed", by part, and then no verdict.

    Args:
        device: "cuda", or "cpu".
    """
    failed: dict[str, str] = {}
    found: dict[str, Any] = {**asdict(case), "device": device, "failed": failed}
    begin = perf_counter()
    start: Start | None = attempt(failed, "start", partial(find_start, case, device))
    if start is None:
        return found
    found |= {"warm_steps": start.warm_steps, "lr": start.lr, "start_s": perf_counter() - begin}
    programs: Mapping[str, Callable[[], Run]] = {
        "vdnn": partial(run_vdnn, case, device, start),
        "torch": partial(run_torch, case, device, start),
        "torch_float64": partial(run_torch, case, device, start, "float64"),
    }
    runs: dict[str, Run] = {}
    for name, program in programs.items():
        run: Run | None = attempt(failed, name, program)
        if run is not None:
            runs[name] = run
            found |= {f"{name}_losses": run.losses, f"{name}_s": run.seconds}
    if len(runs) == len(programs):
        ours, theirs, exact = runs.values()
        found |= judge(ours.losses, theirs.losses, exact.losses)
        pairs = {"relative": (ours, theirs), "vdnn_error": (ours, exact), "torch_error": (theirs, exact)}
        found["gradient"] = {name: distance(a.gradients, b.gradients) for name, (a, b) in pairs.items()}
    return found


def judge(ours: Losses, theirs: Losses, exact: Losses) -> dict[str, Any]:
    """Differences and verdict for losses by vdnn and by PyTorch in float32, and by PyTorch in float64.

    "relative" is of vdnn's losses to PyTorch's, "vdnn_error" and "torch_error" are of either to those in float64: what
    rounding alone does, that of the weights included. "ok" asks for agreement of losses that have moved; "as_exact" is
    said beside it, because of two programs that round differently either may be the closer one by chance.
    """
    relative, ours_off, theirs_off = difference(ours, theirs), difference(ours, exact), difference(theirs, exact)
    moved = abs(exact[-1] - exact[0]) / abs(exact[0])
    return {
        "relative": relative,
        "vdnn_error": ours_off,
        "torch_error": theirs_off,
        "moved": moved,
        "agrees": relative <= AGREEMENT,
        "moves": moved >= MOVED,
        "as_exact": ours_off <= 2 * theirs_off + SLACK,
        "ok": relative <= AGREEMENT and moved >= MOVED,
    }


def difference(got: Losses, expected: Losses) -> float:
    """The largest relative difference of a loss; NaN if one is NaN."""
    return float(np.max([abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True)]))


def distance(got: Tensors, expected: Tensors) -> float:
    """Relative distance of all gradients taken as one vector; ValueError if the names differ."""
    if got.keys() != expected.keys():
        raise ValueError(f"expected gradients of the same parameters, differ in {sorted(got.keys() ^ expected.keys())}")
    apart = sum(float(np.sum((got[name].astype(np.float64) - expected[name]) ** 2)) for name in expected)
    return float((apart / squares(expected)) ** 0.5)


def squares(gradients: Tensors) -> float:
    """Sum of the squares of all numbers, in float64."""
    return sum(float(np.sum(array.astype(np.float64) ** 2)) for array in gradients.values())


def find_start(case: Case, device: str) -> Start:
    """Train as the case asks, and find the rate at which the loss will fall by AIM.

    To first order the update after step k moves the loss by -lr |g|^2 (1 + m + ... + m^k), with momentum m at rest.
    """
    trainer, feed = peer(case, device, lr=case.warm_lr)
    weights, warm_steps = (trainer.weights(), 0) if case.warm_to >= 1 else _warm_up(trainer, feed, case.warm_to)
    del trainer
    exact, feed = peer(case, device, weights, dtype="float64")
    images, labels = next(feed(1))
    loss, momentum = float(exact.step(images, labels)), exact.update.momentum
    reach = sum(momentum**j for k in range(COMPARED - 1) for j in range(k + 1))
    return Start(weights, warm_steps, float(np.float32(AIM * loss / (reach * squares(exact.gradients())))))


def _warm_up(trainer: TorchTrainer, feed: Feed, share: float) -> tuple[Tensors, int]:
    losses: list[float] = []
    for images, labels in feed(MOST_WARM_UP):
        losses.append(float(trainer.step(images, labels)))
        if losses[-1] <= share * losses[0]:
            break
    return trainer.weights(), len(losses)


def run_vdnn(case: Case, device: str, start: Start) -> Run:
    """The compared steps by vdnn, with deterministic algorithms."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["deterministic=true", f"device={device}", f"train.iterations={COMPARED}", f"output={folder}/run"]
        prepared = prepare(load_config(case.network, [*case.settings(), *run]))
        trainer = Trainer(prepared, RunFolder(Path(folder)), Silent())
        try:
            trainer.start()
            trainer.kept.write(start.weights)
            begin = perf_counter()
            losses: list[float] = []
            gradients: Tensors = {}
            for images, labels in make_feed(case, prepared.config.train.seed, prepared.source.train)(COMPARED):
                losses.append(trainer.train_step(images, labels, start.lr)[0])
                trainer.step += 1
                if len(losses) == 1:  # from rest, momentum is the gradient
                    kept, ending = trainer.kept.read(), ".momentum"
                    gradients = {n.removesuffix(ending): v for n, v in kept.items() if n.endswith(ending)}
            return Run(tuple(losses), gradients, perf_counter() - begin)
        finally:
            prepared.backend.close()


def run_torch(case: Case, device: str, start: Start, dtype: str = "float32") -> Run:
    """The compared steps by PyTorch, with deterministic algorithms where it has them."""
    trainer, feed = peer(case, device, start.weights, lr=start.lr, dtype=dtype)
    begin = perf_counter()
    losses: list[float] = []
    gradients: Tensors = {}
    for images, labels in feed(COMPARED):
        losses.append(float(trainer.step(images, labels)))
        gradients = gradients or trainer.momentum()
    return Run(tuple(losses), gradients, perf_counter() - begin)


def peer(
    case: Case,
    device: str,
    weights: Tensors | None = None,
    *,
    lr: float = 0.0,
    dtype: str = "float32",
    fast: bool = False,
) -> tuple[TorchTrainer, Feed]:
    """A trainer of PyTorch, with vdnn's first weights unless some are given, and the images as vdnn gets them."""
    config = load_config(case.network, case.settings())
    graph = build(config.network.name, **config.network.options)
    seed = config.train.seed
    source = open_source(config.data, graph.input_shape, graph.classes, seed)
    recipe = make_recipe(config, source)
    if recipe.mean is None or recipe.std is None:
        raise ValueError(f"source '{source.name}' states no mean and deviation of its pixels")
    first = init_parameters(graph, seed) if weights is None else weights
    numbers: dict[str, Any] = {"lr": lr, "mean": recipe.mean, "std": recipe.std}
    trainer = TorchTrainer(graph, first, recipe.update, **numbers, device=device, dtype=dtype, fast=fast)
    return trainer, make_feed(case, seed, source.train)


def make_feed(case: Case, seed: int, split: Split) -> Feed:
    """The same images for every step, in another order each time, so that a loss moves by learning alone."""

    def feed(steps: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]:
        order = np.concatenate([epoch_order(seed, epoch, len(split)) for epoch in range(steps)])
        return batches(split, order[: steps * case.batch], 0, case.batch)

    return feed


def attempt(failed: dict[str, str], part: str, run: Callable[[], Any]) -> Any:
    """What `run` returns; None after an error, which goes to `failed`. Memory is given back either way."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        failed[part] = reason(error)
        return None
    finally:
        gc.collect()
        if "torch" in sys.modules:
            load_torch().cuda.empty_cache()


def torch_facts() -> dict[str, Any]:
    """Versions of PyTorch and its libraries."""
    torch = load_torch()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def open_first(device: str) -> None:
    """Load vdnn's libraries before PyTorch's: a process keeps the first copy it meets of those that both need.

    Leaves with a sentence if `device` or PyTorch is not there.
    """
    if find_spec("torch") is None:
        sys.exit("PyTorch is not installed: install it beside vdnn to compare with it")
    try:
        open_device(device)[0].close()
    except BackendUnavailable as error:
        sys.exit(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the losses of the cases named on the command line, or of the four networks."""
    known = {**CASES, **FIRST}
    parser = argparse.ArgumentParser(prog="python -m vdnn.bench.torch_losses", description="losses beside PyTorch's")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(known)} (default: the first four)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (default: cuda)")
    parser.add_argument("--batch", type=whole_from(1), metavar="N", help="images per step (default: the case's)")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="of the network's configuration")
    given = parser.parse_args(arguments)
    if not set(given.cases) <= set(known):
        parser.error(f"name one or more of: {', '.join(known)}")
    open_first(given.device)
    found: dict[str, Any] = {}
    for name in given.cases or CASES:
        case = known[name]
        case = replace(case, batch=given.batch or case.batch, overrides=(*case.overrides, *given.o))
        found[name] = compare_losses(case, given.device)
        print(name, {k: v for k, v in found[name].items() if not k.endswith("losses")}, flush=True)
    found["torch"] = torch_facts()
    words = sys.argv[1:] if arguments is None else arguments
    write_results("torch_losses.json", " ".join(["python -m vdnn.bench.torch_losses", *words]), found)


if __name__ == "__main__":
    sys.exit(command(main))
