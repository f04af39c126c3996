"""The comparison of losses with PyTorch: networks agree under it, and programs that are slightly wrong do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch, which vdnn is compared with and does not depend on")

from vdnn.bench import torch_losses
from vdnn.bench.torch_losses import (
    AGREEMENT,
    AIM,
    COMPARED,
    FIRST,
    MOVED,
    Case,
    Run,
    Start,
    compare_losses,
    distance,
    find_start,
    judge,
    run_vdnn,
)
from vdnn.bench.torch_reference import load_torch

LENET = Case("lenet", 8, ("network.dropout=0", "data.source=synthetic"))
SMALL = ("network.image_size=64", "network.classes=10")
NORMED = Case("resnet18", 8, SMALL, warm_to=0.7)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of PyTorch: small layers on several threads take long on a busy machine."""
    torch = load_torch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [LENET, NORMED, replace(NORMED, network="googlenet_bn")], ids=lambda c: c.network)
def test_losses_that_move_agree(case: Case) -> None:
    case = replace(case, overrides=(*case.overrides, "network.dropout=0"))
    found = compare_losses(case, "cpu")
    assert found["failed"] == {}
    assert found["ok"], found
    assert MOVED < found["moved"] < 2 * AIM
    assert found["relative"] < AGREEMENT
    assert (found["warm_steps"] > 0) == (case.warm_to < 1)
    assert 0 < found["gradient"]["relative"] < 0.05
    assert found["vdnn_losses"] != found["torch_losses"], "the programs are one"
    assert len(found["torch_float64_losses"]) == COMPARED


def rate(case: Case, start: Start) -> tuple[Case, Start]:
    return case, replace(start, lr=start.lr * 1.002)


def momentum(case: Case, start: Start) -> tuple[Case, Start]:
    return replace(case, overrides=(*case.overrides, "optimizer.momentum=0.898")), start


def one_norm(case: Case, start: Start) -> tuple[Case, Start]:
    name = "layer4_1_bn2.weight"
    return case, replace(start, weights={**start.weights, name: start.weights[name] * np.float32(1.0005)})


@pytest.mark.parametrize("wrong", [rate, momentum, one_norm])
def test_a_program_that_is_slightly_wrong_is_found(
    wrong: Callable[[Case, Start], tuple[Case, Start]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_wrongly(case: Case, device: str, start: Start) -> Run:
        changed, moved = wrong(case, start)
        return run_vdnn(changed, device, moved)

    monkeypatch.setattr(torch_losses, "run_vdnn", run_wrongly)
    found = compare_losses(NORMED, "cpu")
    assert found["failed"] == {}
    assert found["moves"]
    assert not found["agrees"]
    assert not found["as_exact"]
    assert not found["ok"]


EXACT = (7.0, 6.95, 6.9, 6.85, 6.8)


@pytest.mark.parametrize(
    ("ours", "theirs", "exact", "agrees", "moves", "as_exact"),
    [
        (EXACT, EXACT, EXACT, True, True, True),
        ((*EXACT[:4], 6.8 * (1 + 1.1e-5)), EXACT, EXACT, False, True, False),
        ((*EXACT[:4], float("nan")), EXACT, EXACT, False, True, False),
        ((7.0,) * 5, (7.0,) * 5, (7.0,) * 5, True, False, True),
        ((7.0 * (1 + 3e-6), *EXACT[1:]), EXACT, EXACT, True, True, False),
        (EXACT, tuple(x * (1 + 2e-5) for x in EXACT), EXACT, False, True, True),
    ],
    ids=["equal", "apart", "NaN", "still", "less exact", "more exact"],
)
def test_the_verdict(
    ours: tuple[float, ...],
    theirs: tuple[float, ...],
    exact: tuple[float, ...],
    agrees: bool,
    moves: bool,
    as_exact: bool,
) -> None:
    found = judge(ours, theirs, exact)
    assert (found["agrees"], found["moves"], found["as_exact"]) == (agrees, moves, as_exact)
    assert found["ok"] == (agrees and moves)


def test_distance_is_of_all_gradients_as_one_vector() -> None:
    assert distance(
        {"a": np.float32([3, 4]), "b": np.float32([2])}, {"a": np.float32([3, 0]), "b": np.float32([4])}
    ) == (pytest.approx((20 / 25) ** 0.5))
    with pytest.raises(ValueError, match=r"same parameters.*'b'"):
        distance({"a": np.float32([1])}, {"a": np.float32([1]), "b": np.float32([1])})


def test_the_first_weights_are_those_of_vdnn_and_the_start_repeats() -> None:
    one, other = (find_start(LENET, "cpu") for _ in range(2))
    assert one.warm_steps == 0
    assert one.lr == other.lr == float(np.float32(one.lr)) > 0
    assert all(np.array_equal(value, other.weights[name]) for name, value in one.weights.items())


def test_what_failed_is_said_and_gives_no_verdict() -> None:
    found = compare_losses(replace(LENET, overrides=("network.dropout=0.5", "data.source=synthetic")), "cpu")
    assert "dropout" in found["failed"]["start"]
    assert "ok" not in found
    found = compare_losses(replace(LENET, overrides=(*LENET.overrides, "memory.limit=1KiB")), "cpu")
    assert list(found["failed"]) == ["vdnn"]
    assert len(found["torch_losses"]) == COMPARED
    assert "ok" not in found


def test_the_study_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(torch_losses, "CASES", {"lenet": LENET})
    torch_losses.main(["--device", "cpu", "--batch", "4", "-o", "network.classes=12"])
    found = json.loads((tmp_path / "torch_losses.json").read_text())
    assert set(found["results"]) == {"lenet", "torch"}
    assert found["results"]["lenet"]["ok"]
    assert found["results"]["lenet"]["batch"] == 4
    assert "network.classes=12" in found["results"]["lenet"]["overrides"]
    with pytest.raises(SystemExit):
        torch_losses.main(["lenet5"])


def test_the_cases_at_first_weights_warm_nothing_up() -> None:
    assert {case.warm_to for case in FIRST.values()} == {1.0}
