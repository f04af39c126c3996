"""Training on a GPU: it agrees with the CPU, captured and not, and runs go on from one to the other.

    python -m pytest -m gpu tests/test_gpu.py tests/test_backend_contract.py

Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_trace import File, check_against

from vdnn.cli import doctor
from vdnn.cli.train import main
from vdnn.errors import BudgetError
from vdnn.layers.lower import STEP
from vdnn.memory.plan import CopyOut
from vdnn.runtime import cut
from vdnn.runtime.checkpoint import load_state
from vdnn.runtime.config import load_config
from vdnn.runtime.data import batches, epoch_order, with_next
from vdnn.runtime.executor import Executor
from vdnn.runtime.init import init_parameters
from vdnn.runtime.prepare import prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trace import Marks
from vdnn.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu

AGREEMENT = 1e-5
"""Relative difference that fp32 on two machines may show in the first steps."""
QUICK = (
    "data.train_images=64",
    "data.test_images=8",
    "evaluate.batch_size=8",
    "memory.limit=null",
    "deterministic=true",
    "memory.layout=nchw",
)
"""One layout: which is the quickest is measured anew by every run, and two runs that chose two agree to no bit."""
SMALL = (*QUICK, "network.image_size=64", "network.classes=10", "optimizer.lr=0.0003")
NETWORKS = {
    "lenet": (*QUICK, "train.batch_size=16", "network.dropout=0.5", "optimizer.lr=0.02"),
    "resnet18": (*SMALL, "train.batch_size=8"),
    "googlenet": (*SMALL, "train.batch_size=4", "train.accumulate=1", "network.dropout=0"),
}
TICK_US = 1.0
"""CUDA events tell times to about half a µs."""


class Silent:
    """A listener that hears nothing."""

    def note(self, text: str) -> None:
        pass

    def step(self, info: Any) -> None:
        pass

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured algorithms of these tests are theirs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@contextmanager
def trainer(
    folder: Path, network: str, device: str, *overrides: str, checkpoint: Path | None = None
) -> Iterator[Trainer]:
    """A trainer that has started, or goes on from `checkpoint`."""
    folder.mkdir(exist_ok=True)
    config = load_config(network, [*NETWORKS[network], *overrides, f"device={device}"])
    prepared = prepare(config, load_state(checkpoint)["algorithms"] if checkpoint else None)
    made = Trainer(prepared, RunFolder(folder), Silent())
    try:
        made.start() if checkpoint is None else made.resume(checkpoint)
        yield made
    finally:
        prepared.backend.close()


def train(made: Trainer, steps: int) -> list[float]:
    """Losses of the next `steps` steps."""
    config, split = made.config, made.prepared.source.train
    size, losses = config.train.batch_size, []
    order = epoch_order(config.train.seed, 0, len(split))[: (made.step + steps) * size]
    for (images, labels), later in with_next(batches(split, order, made.step * size, size)):
        losses.append(made.train_step(images, labels, config.optimizer.lr, later and later[0])[0])
        made.step += 1
    assert len(losses) == steps
    return losses


def without_capture(made: Trainer) -> None:
    """Let every plan run step by step."""
    for key, planned in made.prepared.plans.plans.items():
        made.use(key, Executor(made.backend, planned.plan, planned.program))


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    assert set(one) == set(other)
    return all(np.array_equal(one[name].view(np.uint32), other[name].view(np.uint32)) for name in one)


@pytest.mark.parametrize("network", NETWORKS)
def test_three_steps_agree_with_the_cpu(tmp_path: Path, network: str) -> None:
    outcomes = {}
    for device in ("cpu", "cuda"):
        with trainer(tmp_path / device, network, device, "memory.policy=all") as made:
            first = init_parameters(made.prepared.graph, made.config.train.seed)
            outcomes[device] = train(made, 3), made.tensors()
    (losses, tensors), (found, others) = outcomes["cpu"], outcomes["cuda"]
    assert len(set(losses)) == 3
    assert found == pytest.approx(losses, rel=AGREEMENT)
    for name in first:
        change = np.linalg.norm(tensors[name] - first[name])
        difference = np.linalg.norm(others[name] - tensors[name])
        # of a bias before batch normalisation only rounding is left, so it is no part of the change that counts
        assert difference <= 1e-3 * change + 1e-6 * np.sqrt(tensors[name].size), name


def test_captured_uncaptured_and_traced_steps_give_the_same_bits(tmp_path: Path) -> None:
    outcomes = []
    for label in ("captured", "uncaptured", "traced", "none"):
        policy = "none" if label == "none" else "all"
        with trainer(tmp_path / label, "lenet", "cuda", f"memory.policy={policy}") as made:
            if label == "uncaptured":
                without_capture(made)
            losses = train(made, 3)
            if label == "traced":
                made.observer = Marks(made.backend)
            losses += train(made, 1)
            outcomes.append((losses, made.tensors()))
    (losses, tensors), *rest = outcomes
    for others, found in rest:
        assert others == losses
        assert same(found, tensors)


@pytest.mark.parametrize("network", NETWORKS)
def test_pools_with_and_without_indices_give_the_same_bits(tmp_path: Path, network: str) -> None:
    outcomes = []
    for indices in ("true", "false"):
        options = ("memory.policy=all", f"memory.pool_indices={indices}")
        with trainer(tmp_path / indices, network, "cuda", *options) as made:
            reads = [op.reads for op in made.prepared.plans[made.prepared.steps.full[0]].program.ops]
            assert any("indices" in names for names in reads) is (indices == "true")
            outcomes.append((train(made, 3), made.tensors()))
    (losses, tensors), (others, found) = outcomes
    assert others == losses
    assert same(found, tensors)


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("lenet", ()),
        ("lenet", ("train.accumulate=2",)),
        ("resnet18", ("network.image_size=224", "train.batch_size=16")),  # 2.4 MB a batch: an upload takes a while
    ],
)
def test_ten_captured_steps_fed_ahead_have_the_bits_of_uncaptured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, options: tuple[str, ...], policy: str
) -> None:
    fixed = (f"memory.policy={policy}", "data.train_images=160", *options)
    uploads: list[str] = []
    upload = Executor._upload

    def counted(self: Executor, names: list[str], feeds: Any) -> None:
        uploads.extend(names)
        upload(self, names, feeds)

    monkeypatch.setattr(Executor, "_upload", counted)
    with trainer(tmp_path / "ahead", network, "cuda", *fixed) as made:
        uploads.clear()
        losses, tensors = train(made, 10), made.tensors()
    assert uploads == ["images"], "more than the first batch was waited for"
    assert len(set(losses)) == 10
    with trainer(tmp_path / "not", network, "cuda", *fixed) as made:
        without_capture(made)
        monkeypatch.setattr(cut, "is_frozen", lambda value: False)
        uploads.clear()
        assert train(made, 10) == losses
        assert len(uploads) >= 10
        assert same(made.tensors(), tensors)


def test_a_trace_has_every_step_after_what_it_waits_for(tmp_path: Path) -> None:
    with trainer(tmp_path / "run", "resnet18", "cuda", "memory.policy=all") as made:
        train(made, 2)
        made.observer = marks = Marks(made.backend)
        train(made, 1)
        marks.trace("measured").write(tmp_path / "trace.json")
        plan = made.prepared.plans[made.prepared.steps.full[0]].plan
    file = File(tmp_path / "trace.json")
    check_against(file, plan, TICK_US)
    copies = [step for step in plan.steps if isinstance(step, CopyOut)]
    assert len(copies) == sum(row["name"].startswith("copy out") for row in file.stream("out")) > 5
    assert all(row["args"]["GB/s"] > 0 for row in file.stream("out"))


@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_of_one_device_goes_on_at_the_other(tmp_path: Path, before: str, after: str) -> None:
    with trainer(tmp_path / "whole", "lenet", before) as made:
        whole = train(made, 4)
    with trainer(tmp_path / "half", "lenet", before) as made:
        assert train(made, 2) == whole[:2]
        checkpoint, kept = made.checkpoint(), made.tensors()
    with trainer(tmp_path / "other", "lenet", after, checkpoint=checkpoint) as made:
        assert made.step == 2
        assert STEP not in kept
        assert same(made.tensors(), kept)
        assert train(made, 2) == pytest.approx(whole[2:], rel=AGREEMENT)


def test_a_limit_below_the_context_is_refused_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BudgetError) as refusal:
        prepare(load_config("lenet", ["device=cuda", "memory.limit=64MiB"]))
    assert refusal.value.layer == "context"
    assert refusal.value.budget_bytes == 64 * 2**20 < refusal.value.needed_bytes
    folder = tmp_path / "run"
    assert main(["lenet", "--device", "cuda", "--memory-limit", "64MiB", "--output", str(folder)]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "64.0 MiB" in error
    assert not folder.exists()


def test_the_doctor_measures_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor() == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert lines["device auto"].startswith("cuda")
    assert lines["CUDA"] == "all pieces are here"
    assert "the only copy" in lines["cuDNN"]
    for name in ("GPU 0", "GPU context", "pinned copies", "pinning", "GPU copies", "GPU speed", "offloading"):
        assert name in lines, lines.get("GPU 0")
