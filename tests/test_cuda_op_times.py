"""Times of ops that are no convolutions: what is kept of them, what is estimated, and the candidates made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from op_device import ALONE_MS, CHAINED_MS, Device, device, relu, small

from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import op_times
from vdnn.runtime.backends.cuda import search as search_module
from vdnn.runtime.backends.cuda.measures import Measures
from vdnn.runtime.backends.cuda.op_costs import GEMM_WORKSPACE, OpCosts
from vdnn.runtime.backends.cuda.op_times import OpTimes
from vdnn.runtime.backends.cuda.search import Search

__all__ = ["device"]  # a fixture

KEY = {"gpu": "made up", "driver": 13000, "cudnn": 91900, "layout": "NCHW"}


# ---- what is kept


def times_of(device: Device, limit_bytes: int = 2**30) -> tuple[OpTimes, list[str]]:
    said: list[str] = []
    search = Search(None, KEY, limit_bytes, None)  # type: ignore[arg-type]
    return OpTimes(device.launch, device.stream, limit_bytes, search, 1000.0, said.append), said


def test_an_op_is_measured_once_and_kept_beside_the_algorithms(device: Device, monkeypatch: Any) -> None:
    times, said = times_of(device)
    found = times.time_ms(*relu(64), 0)
    assert found == pytest.approx(CHAINED_MS)
    launches = len(device.seen)
    assert times.time_ms(*relu(64, "another"), 0) == found
    times.kept.flush()  # type: ignore[attr-defined]
    assert times_of(device)[0].time_ms(*relu(64), 0) == pytest.approx(found, rel=1e-4)
    assert len(device.seen) == launches
    times.time_ms(*relu(65), 0)
    assert len(device.seen) > launches
    assert said == ["measuring ops that are no convolutions: some seconds, once for this GPU"]
    launches = len(device.seen)
    for change in (("METHOD", 2), ("source", lambda: "other kernels")):
        monkeypatch.setattr(op_times, *change)
        times_of(device)[0].time_ms(*relu(64), 0)
        assert len(device.seen) > launches, "a time of other kernels, or of another method"
        launches = len(device.seen)


def test_a_table_from_before_ops_were_measured_keeps_its_algorithms(device: Device) -> None:
    times, _ = times_of(device)
    times.time_ms(*relu(64), 0)
    times.kept.flush()  # type: ignore[attr-defined]
    path = times.kept.path  # type: ignore[attr-defined]
    data = json.loads(path.read_text())
    assert list(data) == ["facts", "problems", "ops"]
    del data["ops"]
    data["problems"]["a convolution"] = {"candidates": [["GEMM", 1.5, 0, True, "fp32"]], "limit_bytes": None}
    data["problems"]["a convolution"]["left_out"] = {}
    path.write_text(json.dumps(data))
    search = Search(None, KEY, 2**30, None)  # type: ignore[arg-type]
    assert search.ops == {}
    assert list(search.known) == ["a convolution"]
    search.keep_op("an op", 2.0)
    search.flush()
    again = Search(None, KEY, 2**30, None)  # type: ignore[arg-type]
    assert again.ops == {"an op": 2.0}
    assert again.known == search.known


def test_many_times_are_written_together(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(search_module, "perf_counter", lambda: now[0])
    search = Search(None, KEY, 2**30, None)  # type: ignore[arg-type]
    saves: list[int] = []
    save = search._save
    monkeypatch.setattr(search, "_save", lambda: saves.append(len(search.ops)) or save())  # type: ignore[func-returns-value]
    for number in range(30):
        search.keep_op(f"op {number}", 1.0)
        now[0] += 0.1
    assert saves == [12, 24]
    search.flush()
    search.flush()
    assert saves == [12, 24, 30]
    assert len(Search(None, KEY, 2**30, None).ops) == 30  # type: ignore[arg-type]


def test_variants_of_a_kernel_are_measured_apart(device: Device) -> None:
    times, _ = times_of(device)
    told: list[Any] = []
    launch = device.launch
    times.launch = lambda op, arrays, stream: (told.append(op.attrs.get("algorithm")), launch(op, arrays, stream))[1]
    for variant in ("", "A", "B", "A", ""):
        times.time_ms(*relu(64), 0, variant)
    assert list(dict.fromkeys(told)) == [None, "A", "B"]
    assert len(times.kept.ops) == 3
    assert sorted(key.partition(" by ")[2] for key in times.kept.ops) == ["", "A", "B"]


def test_what_does_not_fit_is_estimated_from_its_bytes_and_said_once(device: Device) -> None:
    times, said = times_of(device, limit_bytes=100_000)
    op, program = relu(250_000)  # 2 MB in, 2 MB out: 4 us at 1000 GB/s, and 2 us to start
    assert times.time_ms(op, program, 0) == pytest.approx(0.006)
    assert times.time_ms(*relu(250_000, "another"), 0) == pytest.approx(0.006)
    assert len(said) == 1
    assert all(word in said[0] for word in ("relu.forward of layer 'a'", "MiB", "estimated"))
    assert not device.seen
    assert times_of(device)[0].time_ms(op, program, 0) == pytest.approx(CHAINED_MS), "an estimate was kept"


def test_launches_in_a_step_take_less_than_alone_by_what_is_measured(device: Device) -> None:
    times, _ = times_of(device)
    assert times.in_step_ms(0.1) == pytest.approx(0.1 + CHAINED_MS - ALONE_MS)
    assert times.in_step_ms(0.003) == pytest.approx(0.0015), "no launch takes less than half of its time"
    times.kept.flush()  # type: ignore[attr-defined]
    launches = len(device.seen)
    assert times_of(device)[0].in_step_ms(0.1) == pytest.approx(0.098)
    assert len(device.seen) == launches


# ---- candidates


class Found:
    """A search that knows two algorithms of everything."""

    def __init__(self) -> None:
        self.ops: dict[str, float] = {}

    def candidates(self, problem: Any) -> tuple[Candidate, ...]:
        """The fast one takes more memory."""
        return (Candidate("FAST", 0.1, 4096), Candidate("SLOW", 0.2))

    def keep_op(self, key: str, time_ms: float) -> None:
        """Keep it."""
        self.ops[key] = time_ms


def costs_of(search: Any, times: OpTimes) -> OpCosts:
    return OpCosts(lambda layout: Measures(search, times), "NCHW")


def test_candidates_are_timed_as_parts_of_a_step(device: Device) -> None:
    program, kept = small(), Found()
    times = OpTimes(device.launch, device.stream, 2**30, kept, 1000.0)
    costs = costs_of(kept, times)
    ops = {op.name: op for op in program.ops}
    shift = CHAINED_MS - ALONE_MS
    found = costs.candidates(replace(ops["conv2.dgrad"], accumulate=()), program)
    assert [(c.algorithm, c.workspace_bytes) for c in found] == [("FAST", 4096), ("SLOW", 0)]
    assert [c.time_ms for c in found] == pytest.approx([0.1 + shift, 0.2 + shift])
    # the bias is added by a kernel of its own, which reads b and y and nothing else
    device.seen.clear()
    found = costs.candidates(ops["conv2.forward"], program)
    assert [c.time_ms for c in found] == pytest.approx([0.1 + shift + CHAINED_MS, 0.2 + shift + CHAINED_MS])
    assert {tuple(arrays) for arrays in device.seen} == {("b", "y")}
    assert device.seen[0]["y"].strides[0] == 11 * 25, "y lies within the concatenation"
    (linear,) = costs.candidates(ops["fc.forward"], program)
    assert linear.algorithm == "CUBLAS"
    assert linear.time_ms == pytest.approx(CHAINED_MS)
    assert device.seen[-1]["workspace"].nbytes == linear.workspace_bytes == GEMM_WORKSPACE
    (gradient,) = costs.candidates(ops["conv1.bgrad"], program)
    assert gradient.algorithm == "KERNEL"
    assert device.seen[-1]["workspace"].nbytes == gradient.workspace_bytes > 0
    (other,) = costs.candidates(ops["relu2.forward"], program)
    assert (other.algorithm, other.workspace_bytes) == ("default", 0)


def test_a_gradient_that_is_added_to_another_reads_it_too(device: Device) -> None:
    program, kept = small(), Found()
    costs = costs_of(kept, OpTimes(device.launch, device.stream, 2**30, kept, 1000.0))
    op = next(op for op in program.ops if op.name == "conv2.dgrad")
    assert op.accumulate == ("dx",), "conv3 has written it"
    nbytes = program.tensors[op.writes["dx"]].nbytes
    writing = costs.candidates(replace(op, accumulate=()), program)
    for alone, added in zip(writing, costs.candidates(op, program), strict=True):
        assert added.time_ms - alone.time_ms == pytest.approx(nbytes / 1e9)  # at 1000 GB/s


def test_a_bias_that_goes_with_an_activation_is_left_to_the_search(device: Device) -> None:
    program, kept = small(), Found()
    costs = costs_of(kept, OpTimes(device.launch, device.stream, 2**30, kept, 1000.0))
    op = next(op for op in program.ops if op.name == "conv2.forward")
    fused = replace(op, attrs={**op.attrs, "activation": "relu"})
    assert costs.candidates(fused, program)[0].time_ms == pytest.approx(0.1 + CHAINED_MS - ALONE_MS)
