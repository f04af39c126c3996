"""Convolution algorithms on a GPU: trained by graph plans and by named ones, in fp32 and TF32, and measured for tables.

    python -m pytest -m gpu tests/test_gpu_algorithms.py

Skipped where there is no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_gpu import AGREEMENT, NETWORKS, Silent, same, train

from vdnn.bench import gpu_algos
from vdnn.cli.main import main
from vdnn.memory.costs import Candidate
from vdnn.runtime.algorithm_table import load_table
from vdnn.runtime.backends.cuda.products import CONV_KINDS, GRAPH_LABEL
from vdnn.runtime.config import load_config
from vdnn.runtime.init import init_parameters
from vdnn.runtime.planset import Algorithms
from vdnn.runtime.prepare import Prepared, prepare
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TF32_AGREEMENT = 2e-3
"""Relative difference of losses that rounding operands to 10 bits may make in the first steps."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured algorithms of these tests are theirs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def prepared(network: str, *overrides: str, recorded: Algorithms | None = None) -> Prepared:
    return prepare(load_config(network, [*NETWORKS[network], *overrides, f"device={DEVICE}"]), recorded)


def convolutions(found: Prepared) -> dict[str, dict[str, tuple[Candidate, ...]]]:
    """Candidates of every convolution, by plan and op."""
    return {
        f"{mode}/{images}": {op.name: p.costs.candidates[op.name] for op in p.program.ops if op.kind in CONV_KINDS}
        for (mode, images), p in found.plans.plans.items()
    }


def first(found: Prepared, wanted: Callable[[Candidate], bool]) -> dict[str, dict[str, str]]:
    """The fastest candidate that is wanted of every convolution that has one."""
    picked = {}
    for key, ops in convolutions(found).items():
        labels = {op: next((c.algorithm for c in options if wanted(c)), None) for op, options in ops.items()}
        picked[key] = {op: label for op, label in labels.items() if label is not None}
    return picked


def trained(folder: Path, made: Prepared, steps: int) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """Losses of the first steps and the tensors after them; the backend is closed."""
    folder.mkdir(exist_ok=True)
    trainer = Trainer(made, RunFolder(folder), Silent())
    try:
        trainer.start()
        return train(trainer, steps), trainer.tensors()
    finally:
        made.backend.close()


@pytest.mark.parametrize("network", ["lenet", "resnet18", "googlenet"])
def test_graph_plans_train_as_named_algorithms_do(tmp_path: Path, network: str) -> None:
    found = prepared(network)
    start = init_parameters(found.graph, found.config.train.seed)
    kinds = {
        "graph": first(found, lambda c: c.algorithm.startswith(GRAPH_LABEL)),
        "named": first(found, lambda c: not c.algorithm.startswith(GRAPH_LABEL)),
    }
    found.backend.close()
    outcomes = {}
    for kind, recorded in kinds.items():
        made = prepared(network, recorded=recorded)
        for key, labels in made.plans.algorithms().items():
            wanted = recorded[key]
            assert len(wanted) > 0.8 * len(convolutions(made)[key])
            assert {op: labels[op] for op in wanted} == wanted
        outcomes[kind] = trained(tmp_path / kind, made, 3)
    (losses, tensors), (others, expected) = outcomes["graph"], outcomes["named"]
    assert len(set(losses)) == 3
    assert losses == pytest.approx(others, rel=AGREEMENT)
    for name in start:
        change = np.linalg.norm(expected[name] - start[name])
        difference = np.linalg.norm(tensors[name] - expected[name])
        # of a bias before batch normalisation only rounding is left, so it is no part of the change that counts
        assert difference <= 1e-3 * change + 1e-6 * np.sqrt(tensors[name].size), name


@pytest.mark.parametrize("network", ["lenet", "resnet18"])
def test_tf32_trains_as_fp32_does_but_not_to_the_bit(tmp_path: Path, network: str) -> None:
    outcomes = {}
    for precision in ("fp32", "tf32", "tf32 again"):
        made = prepared(network, f"precision={precision.split()[0]}")
        assert made.backend.caps.precision == precision.split()[0]
        math = {c.math for ops in convolutions(made).values() for options in ops.values() for c in options}
        assert math <= {"fp32", made.backend.caps.precision}
        outcomes[precision] = trained(tmp_path / precision, made, 5)
    (exact, tensors), (rounded, others), (again, repeated) = outcomes.values()
    assert rounded == pytest.approx(exact, rel=TF32_AGREEMENT)
    assert not same(tensors, others)
    assert again == rounded
    assert same(repeated, others)


def test_what_is_called_deterministic_gives_equal_bits(tmp_path: Path) -> None:
    runs = [trained(tmp_path / name, prepared("resnet18", "precision=tf32"), 4) for name in ("one", "two")]
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_a_measured_table_serves_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["lenet:64", "resnet18:8", "--tables", str(tmp_path), "--minutes", "2"]
    assert gpu_algos.main(arguments) == 0
    for precision in gpu_algos.DEFAULT_PRECISIONS:
        (path,) = tmp_path.glob(f"*-{precision}.json")
        candidates = [c for found in load_table(str(path)).problems.values() for c in found.candidates]
        assert all(c.time_ms > 0 for c in candidates)
        assert len({c.algorithm for c in candidates if c.algorithm.startswith(GRAPH_LABEL)}) > 5
        assert ("tf32" in {c.math for c in candidates}) == (precision == "tf32")
        capsys.readouterr()
        assert main(["algos", "lenet", "-b", "64", "--table", str(path), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["modelled"], data["precision"]) == (False, precision)
    assert gpu_algos.main(arguments) == 0
    assert " 1/" not in capsys.readouterr().out  # nothing is measured twice
