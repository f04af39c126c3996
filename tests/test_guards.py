"""Debug mode: a kernel that writes where no storage lies is found, and a plan leaves room for the guards."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from plan_lab import Lab

from vdnn.errors import VdnnError
from vdnn.memory.passes import apply_decisions
from vdnn.memory.planner import plan_program
from vdnn.memory.policy import Budget, none
from vdnn.memory.schedule import make_schedule
from vdnn.runtime.backends.cpu import CpuBackend, backend
from vdnn.runtime.executor import Executor
from vdnn.runtime.measure import blank_feeds

GUARD = 256
LAB = Lab("lenet", 2)
GUARDED = none(LAB.program, LAB.costs, Budget(guard_bytes=GUARD))


def run_step(monkeypatch: pytest.MonkeyPatch, reach: int | None) -> None:
    """LeNet's step under guards and poison; its ReLU also writes the byte `reach` bytes behind y."""
    planned, plan = apply_decisions(LAB.program, GUARDED), plan_program(LAB.program, GUARDED)
    genuine = backend.KERNELS["relu.forward"]

    def careless(op, *, x, y):
        genuine(op, x=x, y=y)
        if reach is not None:
            ctypes.memset(y.ctypes.data + y.nbytes + reach, 0, 1)

    monkeypatch.setattr(backend, "KERNELS", {**backend.KERNELS, "relu.forward": careless})
    machine = CpuBackend(poison=True)
    machine.open(plan.slab_bytes, plan.host_bytes, plan.stage_bytes)
    try:
        Executor(machine, plan, planned).run(blank_feeds(planned))
    finally:
        machine.close()


def test_a_step_that_keeps_to_its_bytes_passes(monkeypatch):
    run_step(monkeypatch, None)


@pytest.mark.parametrize("reach", [0, 100, GUARD - 1])
def test_a_write_behind_a_storage_is_found_and_named(monkeypatch, reach):
    with pytest.raises(VdnnError, match=rf"behind 'fc3': byte {reach} of \d+ that belong to nobody was written"):
        run_step(monkeypatch, reach)


def test_guards_are_added_behind_every_storage():
    planned = apply_decisions(LAB.program, GUARDED)
    guarded = make_schedule(planned, GUARDED).residencies
    plain = make_schedule(planned, replace(GUARDED, guard_bytes=0)).residencies
    own = {stay.storage: planned.tensors[stay.storage].nbytes for stay in plain}
    assert [stay.storage for stay in guarded] == [stay.storage for stay in plain]
    assert all(GUARD <= stay.nbytes - own[stay.storage] < 2 * GUARD for stay in guarded)
