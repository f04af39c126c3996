"""Traces: a plan with times chosen by hand, and steps measured on the simulated machine and on threads.

A trace is judged by its file: events must not overlap on a track, must wait where the plan waits, and must add up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import plan_small
import pytest
from plan_lab import Lab, Machine
from scripts import refused, script

from vdnn.errors import ConfigError
from vdnn.memory.clock import Timing, simulate
from vdnn.memory.plan import STREAMS, CopyIn, CopyOut, Feed, Fetch, Launch, Plan, Record, Wait
from vdnn.runtime.backends.cpu import CpuBackend
from vdnn.runtime.backends.simulated import SimulatedBackend
from vdnn.runtime.config import load_config
from vdnn.runtime.executor import Executor
from vdnn.runtime.prepare import prepare
from vdnn.runtime.profile import load_profile, model_costs
from vdnn.runtime.run_folder import RunFolder
from vdnn.runtime.step_tracer import StepTracer
from vdnn.runtime.trace import Marks, check_trace_path, plan_trace, timing_of
from vdnn.runtime.trainer import Trainer

TIMED = (Launch, CopyOut, CopyIn, Feed, Fetch)
ROUNDING_US = 0.0011
"""A file has whole ns."""


class File:
    """A trace file, read as a viewer reads it.

    Attributes:
        tracks: events of each track in the order of their starts; a track is named by the words of its thread.
        live: (µs, bytes) of the counter.
        title: of the process.
    """

    def __init__(self, path: Path):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data["traceEvents"]
        assert {row["ph"] for row in rows} == {"M", "X", "C"}
        assert {row["pid"] for row in rows} == {1}
        named = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
        self.title = next(row["args"]["name"] for row in rows if row["name"] == "process_name")
        self.tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in named.values()}
        for row in rows:
            if row["ph"] == "X":
                self.tracks[named[row["tid"]]].append(row)
        for events in self.tracks.values():
            events.sort(key=lambda row: (row["ts"], row["ts"] + row["dur"]))
        self.live = [(row["ts"], row["args"]["bytes"]) for row in rows if row["ph"] == "C"]

    def stream(self, name: str) -> list[dict[str, Any]]:
        """Events of one of the plan's streams."""
        return next(events for track, events in self.tracks.items() if track.startswith(f"stream {name}"))

    def ends_us(self) -> float:
        return max(row["ts"] + row["dur"] for events in self.tracks.values() for row in events)

    def check_overlap(self) -> None:
        for name, events in self.tracks.items():
            for before, after in pairwise(events):
                assert round(1000 * before["ts"]) + round(1000 * before["dur"]) <= round(1000 * after["ts"]), name


def check_against(file: File, plan: Plan, tick_us: float = ROUNDING_US) -> None:
    """Every timed step is there, in its stream's order, and after all that it waits for; times are that exact."""
    file.check_overlap()
    left = {stream: list(file.stream(stream)) for stream in STREAMS}
    end = dict.fromkeys(STREAMS, 0.0)  # of what the stream has done
    earliest = dict.fromkeys(STREAMS, 0.0)  # what it has waited for
    reached: dict[int, float] = {}
    for step in plan.steps:
        if isinstance(step, Record):
            reached[step.event] = max(end[step.stream], earliest[step.stream])
        elif isinstance(step, Wait):
            earliest[step.stream] = max(earliest[step.stream], reached[step.event])
        elif isinstance(step, TIMED):
            event = left[step.stream].pop(0)
            assert step[0] in event["name"]
            assert event["ts"] >= earliest[step.stream] - tick_us, f"{event['name']} did not wait"
            end[step.stream] = event["ts"] + event["dur"]
    assert not any(left.values())


# ---- by hand

LAYERS = {
    "left": "split",
    "right": "split",
    "z": "head",
    "z2": "head",
    "loss": "head",
    "back": "head",
    "update": "head",
}
PHASES = {"back": "backward", "update": "update"}
OPS = tuple(replace(op, layer=LAYERS[op.name], phase=PHASES.get(op.name, op.phase)) for op in plan_small.PROGRAM.ops)
PROGRAM = replace(plan_small.PROGRAM, ops=OPS)
MS = {
    plan_small.FEED: (0.0, 1.0),
    plan_small.LEFT: (1.0, 2.0),
    plan_small.RIGHT: (2.0, 3.0),
    plan_small.OUT: (3.0, 7.0),
    plan_small.Z: (3.0, 4.0),
    plan_small.Z2: (4.0, 5.0),
    plan_small.LOSS: (7.0, 8.0),
    plan_small.FETCH: (8.0, 9.0),
    plan_small.IN: (7.0, 9.0),
    plan_small.BACK: (9.0, 10.5),
    plan_small.UPDATE: (10.5, 11.0),
}
BY_TYPE = {(type(step), step): span for step, span in MS.items()}
SPANS = tuple(BY_TYPE.get((type(step), step)) for step in plan_small.STEPS)


def hand_made(tmp_path: Path) -> File:
    timing = timing_of(plan_small.PLAN, SPANS)
    assert timing == Timing(11.0, 7.0, 5.0, 3.0, SPANS)
    plan_trace(plan_small.PLAN, PROGRAM, timing, "chosen by hand").write(tmp_path / "trace.json")
    return File(tmp_path / "trace.json")


def test_streams_are_tracks_of_kernels_and_copies(tmp_path: Path) -> None:
    file = hand_made(tmp_path)
    check_against(file, plan_small.PLAN)
    assert list(file.tracks) == ["layers", "stream compute", "stream out: to host", "stream in: from host"]
    assert file.title == "small (train), 2 images: chosen by hand"
    found = {row["name"]: (row["ts"], row["dur"], row["args"]) for row in file.stream("out") + file.stream("in")}
    # bytes over time: 256 B in 4 ms are 64 kB/s
    assert found == {
        "copy out cat": (3000, 4000, {"bytes": 256, "GB/s": 64e-6, "layer": "split"}),
        "copy in cat": (7000, 2000, {"bytes": 256, "GB/s": 128e-6, "layer": "split"}),
        "feed images": (0, 1000, {"bytes": 32, "GB/s": 32e-6}),
        "fetch losses": (8000, 1000, {"bytes": 8, "GB/s": 8e-6, "layer": "head"}),
    }
    back = next(row for row in file.stream("compute") if row["name"] == "back")
    # reads cat and z2 of 256 bytes, writes g of 16
    assert (back["ts"], back["dur"]) == (9000, 1500)
    assert back["args"] == {"layer": "head", "phase": "backward", "kind": "test.op", "bytes": 528}


def test_kernels_of_a_layer_and_phase_make_one_range(tmp_path: Path) -> None:
    ranges = {
        row["name"]: (row["ts"], row["dur"], row["args"]["kernels"]) for row in hand_made(tmp_path).tracks["layers"]
    }
    assert ranges == {
        "split forward": (1000, 2000, 2),
        "head forward": (3000, 5000, 3),
        "head backward": (9000, 1500, 1),
        "head update": (10500, 500, 1),
    }


def test_the_counter_shows_live_bytes(tmp_path: Path) -> None:
    # 256 persistent; images 32, cat 256, z 256, losses 8, cat again 300, g 16
    assert hand_made(tmp_path).live == [
        (0, 256 + 32 + 256),
        (2000, 256 + 32 + 256),
        (3000, 256 + 32 + 256 + 256 - 32),
        (4000, 256 + 256 + 256),
        (5000, 256 + 256 + 256),
        (8000, 256 + 256 + 300 + 16),
        (10500, 256 + 256 + 300 + 16),
        (11000, 256 + 16),
        (11000, 256),
    ]


# ---- measured


def test_on_the_simulated_machine_measured_and_modelled_times_are_the_same(tmp_path: Path) -> None:
    lab, profile = Lab("googlenet", 2, image_size=64, narrow=2), load_profile("titan-x-maxwell")
    lab.costs = costs = model_costs(lab.program, profile)
    case = lab.case("all")
    timing = simulate(case.plan, case.program, costs)
    backend = SimulatedBackend(profile)
    backend.open(case.plan.slab_bytes, case.plan.host_bytes, case.plan.stage_bytes)
    executor = Executor(backend, case.plan, case.program)
    executor.run(lab.feeds[0])  # the trace is of a later run
    before = backend.elapsed_ms
    executor.observer = marks = Marks(backend)
    executor.run(lab.feeds[0])
    measured = marks.trace("simulated")
    assert measured.end_us == pytest.approx(1000 * (backend.elapsed_ms - before))
    modelled = plan_trace(case.plan, case.program, timing, "modelled")
    assert modelled.end_us == pytest.approx(1000 * timing.total_ms)
    for one, other in zip(measured.events, modelled.events, strict=True):
        assert (one.name, one.track) == (other.name, other.track)
        assert (one.start_us, one.end_us) == pytest.approx((other.start_us, other.end_us), abs=1e-3)
    measured.write(tmp_path / "trace.json")
    check_against(File(tmp_path / "trace.json"), case.plan)


@pytest.mark.parametrize("order", [None, ("in", "out", "compute")], ids=["threads", "one after another"])
def test_on_the_cpu_the_trace_obeys_the_plan_and_changes_no_result(tmp_path: Path, order: Any) -> None:
    lab = Lab("resnet18", 2, image_size=32, narrow=4, classes=10)
    case = lab.case("all", tight=True)
    machine = Machine(lab, [case], order)
    plain = machine.run(case, case.plan)
    machine._start(case)
    executor = Executor(machine.backend, case.plan, case.program)
    executor.observer = marks = Marks(machine.backend)
    fetched = executor.run(lab.feeds[0])
    marks.trace("measured").write(tmp_path / "trace.json")
    file = File(tmp_path / "trace.json")
    check_against(file, case.plan)
    assert all(np.array_equal(fetched[name], value) for name, value in zip(fetched, plain.fetched, strict=True))
    ((_, _, timing),) = marks.timings()
    assert file.ends_us() == pytest.approx(1000 * timing.total_ms, abs=ROUNDING_US)
    assert timing.compute_ms == pytest.approx(sum(row["dur"] for row in file.stream("compute")) / 1000, abs=0.01)
    machine.close()


def test_runs_that_follow_one_another_make_one_trace(tmp_path: Path) -> None:
    lab = Lab("lenet", 2)
    case = lab.case("none")
    backend = CpuBackend()
    backend.open(case.plan.slab_bytes, case.plan.host_bytes, case.plan.stage_bytes)
    executor = Executor(backend, case.plan, case.program)
    executor.observer = marks = Marks(backend)
    executor.run(lab.feeds[0])
    executor.run(lab.feeds[0])
    marks.trace("twice").write(tmp_path / "trace.json")
    file = File(tmp_path / "trace.json")
    file.check_overlap()
    assert "4 images in 2 parts" in file.title
    names = [row["name"] for row in file.stream("compute")]
    assert names == 2 * [step.op for step in case.plan.steps if isinstance(step, Launch)]
    backend.close()


# ---- training

TINY = (
    "network={name: lenet, dropout: 0.5}",
    "data={source: synthetic, train_images: 30, test_images: 6}",
    "train={epochs: 1, batch_size: 6, accumulate: 2}",
    "optimizer={lr: 0.01}",
    "memory={policy: all, limit: 64MiB}",
    "device=cpu",
)


class Heard:
    """A listener that keeps the sentences."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, info: Any) -> None:
        pass

    def evaluated(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        pass


def trained(folder: Path, trace: str | None, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """Tensors after a run, and what was said."""
    prepared = prepare(load_config("lenet", [*TINY, *overrides]))
    folder.mkdir()
    listener = Heard()
    trainer = Trainer(prepared, RunFolder(folder), listener)
    trainer.start()
    if trace is not None:
        trainer.listener = StepTracer(trainer, trace)
    trainer.run()
    found = trainer.tensors()
    prepared.backend.close()
    return found, listener.notes


def test_a_traced_run_learns_the_same_and_traces_its_fourth_step_in_parts(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "a", None)
    traced, notes = trained(tmp_path / "b", str(tmp_path / "trace.json"))
    assert all(np.array_equal(plain[name], traced[name]) for name in plain)
    assert any("trace of step 4" in note for note in notes)
    file = File(tmp_path / "trace.json")
    file.check_overlap()
    assert file.title.startswith("lenet (first), 6 images in 2 parts: step 4, measured uncaptured on CPU")
    assert [row["name"] for row in file.stream("compute")].count("conv1.forward") == 2
    assert [row["name"] for row in file.stream("in")].count("feed images") == 2
    assert any(row["name"].startswith("copy out") for row in file.stream("out"))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_short_run_traces_its_last_step(tmp_path: Path, steps: int) -> None:
    _, notes = trained(tmp_path / "a", str(tmp_path / "trace.json"), f"train.iterations={steps}")
    assert any(f"trace of step {steps}" in note for note in notes)
    assert f"step {steps}, measured" in File(tmp_path / "trace.json").title


def test_a_trace_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "a", None)
    (tmp_path / "file").touch()
    traced, notes = trained(tmp_path / "b", str(tmp_path / "file" / "trace.json"))
    assert all(np.array_equal(plain[name], traced[name]) for name in plain)
    assert any(note.startswith("no trace: ") and "cannot be written" in note for note in notes)


# ---- commands


def test_a_path_where_no_file_can_be_is_refused_before_the_run(tmp_path: Path) -> None:
    check_trace_path(str(tmp_path / "trace.json"))
    with pytest.raises(ConfigError, match="is a folder"):
        check_trace_path(str(tmp_path))
    check_trace_path(str(tmp_path / "none" / "either" / "trace.json"))  # folders that are made with it
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file' is no folder"):
        check_trace_path(str(tmp_path / "file" / "none" / "trace.json"))
    (tmp_path / "loop").symlink_to("loop")
    for place in (("loop", "trace.json"), ("long" * 100,), ("a", "long" * 100, "trace.json")):
        with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another place for it"):
            check_trace_path(str(tmp_path.joinpath(*place)))
    (tmp_path / "kept").write_text("kept")
    check_trace_path(str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept", "loop"]
    options = ("lenet", "--device", "cpu", "--iterations", 1, "-o", "data.source=synthetic", "--output", "run")
    refused(script("vdnn-train", *options, "--trace", "loop/t.json", cwd=tmp_path), 2, "loop/t.json", "cannot be")
    assert not (tmp_path / "run").exists()


def test_vdnn_plan_writes_what_it_reports(tmp_path: Path) -> None:
    options = ("vgg16", "--batch-size", 8, "--policy", "conv", "--profile", "h200", "--trace", "t.json", "--json")
    ended = script("vdnn", "plan", *options, cwd=tmp_path)
    assert ended.code == 0, ended.error
    report, file = json.loads(ended.out), File(tmp_path / "t.json")
    file.check_overlap()
    assert "modelled by the clock, not run; times modelled by profile h200" in file.title
    assert file.ends_us() == pytest.approx(1000 * report["predicted_step_ms"], abs=ROUNDING_US)
    assert max(nbytes for _, nbytes in file.live) == report["ideal_peak_bytes"]
    out = [row for row in file.stream("out") if row["name"].startswith("copy out")]
    assert sum(row["args"]["bytes"] for row in out) == report["offloaded_bytes"] > 0
    assert all(row["args"]["GB/s"] <= 55 for row in out)  # the profile's rate


def test_vdnn_train_writes_a_trace(tmp_path: Path) -> None:
    words = [word for section in TINY for word in ("-o", section)]
    ended = script(
        "vdnn-train", "lenet", *words, "--iterations", 5, "--output", "run", "--trace", "t.json", cwd=tmp_path
    )
    assert ended.code == 0, ended.error
    assert "trace of step 4" in ended.out
    File(tmp_path / "t.json").check_overlap()
    simulated = ("vgg16", "--device", "simulated", "--profile", "h200", "--trace", "s.json")
    ended = script("vdnn-train", *simulated, cwd=tmp_path)
    assert ended.code == 0, ended.error
    assert "simulated, modelled by profile h200" in File(tmp_path / "s.json").title


def test_vdnn_train_refuses_a_trace_that_cannot_be(tmp_path: Path) -> None:
    options = ("lenet", "--trace", "/dev/null/t.json")
    refused(script("vdnn-train", *options, cwd=tmp_path), 2, "/dev/null/t.json", "'/dev/null' is no folder")
    refused(script("vdnn-train", "lenet", "--trace", "t.json", "--plan-only", cwd=tmp_path), 2, "vdnn plan --trace")
    assert not list(tmp_path.iterdir())
