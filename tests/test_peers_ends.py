"""The comparison with PyTorch when it is stopped or killed: no process that it has started stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vdnn.bench import paper_processes
from vdnn.bench.paper_processes import Order, measure_apart
from vdnn.bench.paper_runs import Case
from vdnn.bench.paper_tasks import Task
from vdnn.memory.policy import PERFORMANCE_OPTIMAL

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]

WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from vdnn.bench.command import end_with_parent
end_with_parent()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
part = Path(f"pids.{os.getpid()}.part")
part.write_text(f"{os.getpid()} {child.pid}")
part.rename(f"pids.{os.getpid()}")
time.sleep(60)
"""
"""Stands for a case that takes long and has a compiler at work."""

PARENT = """
import sys
from vdnn.bench import peers
from vdnn.bench.command import command
from vdnn.bench.peers_cases import Case
peers.WORKER = [sys.executable, "worker.py"]
cases = [Case("lenet", 8, "fp32", program) for program in ("torch-compile", "torch-budget")]
def main():
    if sys.argv[1] == "measure":
        peers.measure_all(cases, peers.Store.open(__import__("pathlib").Path("out"), ""), print, timeout_s=60.0)
    else:
        peers.compile_ahead(cases, 2, 60.0, print)
sys.exit(command(main))
"""


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for(what: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[int]]:
    """Processes to end in any case."""
    found: list[int] = []
    yield found
    for pid in filter(runs, found):
        os.kill(pid, signal.SIGKILL)


def pids(folder: Path, workers: int) -> list[int]:
    """Of this many workers, and of the child of each."""
    assert wait_for(lambda: len([path for path in folder.glob("pids.*") if path.suffix != ".part"]) == workers)
    return [int(word) for path in folder.glob("pids.*") for word in path.read_text().split()]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize(("part", "workers"), [("measure", 1), ("ahead", 2)])
def test_workers_and_their_children_end_however_the_command_does(
    tmp_path: Path, started: list[int], part: str, workers: int, number: signal.Signals, code: int
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "parent.py").write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, "parent.py", part], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process.pid)
    started += pids(tmp_path, workers)
    assert all(map(runs, started))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "" if code < 0 else f"parent: interrupted by {number.name}\n")
    assert wait_for(lambda: not any(map(runs, started)), 10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_real_command_and_its_real_worker(tmp_path: Path, started: list[int], number: signal.Signals) -> None:
    words = ["--device", "cpu", "--networks", "lenet:8", "lenet:4000", "--programs", "ours", "--precisions", "fp32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vdnn.bench.peers", *words, "--seconds", "0", "--out", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process.pid)
    assert process.stdout is not None
    assert "images/s" in process.stdout.readline(), "the first case is measured, the second takes long"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert wait_for(lambda: "peers_worker" in "".join(map(command_line, children.read_text().split())))
    started += map(int, children.read_text().split())
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert wait_for(lambda: not any(map(runs, started)), 20.0)
    assert (tmp_path / "out" / "peers.json").is_file()


def command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_worker_that_somebody_starts_by_hand_is_left_alone(tmp_path: Path, started: list[int]) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    starter = "import subprocess, sys; subprocess.Popen([sys.executable, 'worker.py'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", starter], cwd=tmp_path, check=True)
    started += pids(tmp_path, 1)
    time.sleep(0.3)
    assert all(map(runs, started))


STAND_IN = "import os\nfrom vdnn.bench.command import end_with_parent\nend_with_parent()\n" + (
    "print(os.getpid(), flush=True)\nimport time\ntime.sleep(60)\n"
)


def test_what_measures_the_papers_cases_ends_with_a_killed_parent(tmp_path: Path, started: list[int]) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    script = f"""
from vdnn.bench import paper_processes
from vdnn.bench.paper_processes import Order, measure_apart
from vdnn.bench.paper_runs import Case
from vdnn.bench.paper_tasks import Task
paper_processes.MODULE = "stand_in"
task = Task(Case("lenet", 8, "base", {PERFORMANCE_OPTIMAL!r}, "layer"))
measure_apart(Order("cpu", 2, "out", (task,)), lambda line: print(line, flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started += [process.pid, int(process.stdout.readline())]
    process.kill()
    process.communicate(timeout=30)
    assert wait_for(lambda: not any(map(runs, started)), 10.0)


def test_a_child_that_hears_no_signal_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    deaf = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (tmp_path / "stand_in.py").write_text(deaf + "print(os.getpid(), flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(paper_processes, "MODULE", "stand_in")
    monkeypatch.setattr(paper_processes, "PATIENCE_S", 0.2)

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    begin = time.monotonic()
    task = Task(Case("lenet", 8, "base", PERFORMANCE_OPTIMAL, "layer"))
    with pytest.raises(KeyboardInterrupt):
        measure_apart(Order("cpu", 2, str(tmp_path), (task,)), interrupt)
    assert time.monotonic() - begin < 30
    assert not any(map(runs, started))
