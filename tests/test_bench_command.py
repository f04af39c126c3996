"""What commands of vdnn.bench share: signals and errors in a line, values of options, help, an end with the parent."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vdnn.bench
from vdnn.bench import gpu_algos, harness
from vdnn.bench.command import above_zero, command, not_negative, reason, whole_from
from vdnn.bench.gpu_predict import main as predict
from vdnn.bench.harness import check_device
from vdnn.bench.op_floor import main as floor
from vdnn.bench.peers import main as peers
from vdnn.errors import BackendUnavailable, BudgetError, ConfigError
from vdnn.runtime.driver import Driver, find_driver

SOURCES = {path.stem: path.read_text("utf-8") for path in sorted(Path(str(vdnn.bench.__file__)).parent.glob("*.py"))}
OTHERS = ("paper_processes", "peers_worker")
"""Processes that other programs start, and whose last words these show."""
ENTRIES = [name for name, text in SOURCES.items() if '\nif __name__ == "__main__":\n' in text and name not in OTHERS]


# ---- signals and errors


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bench/thing.py", "word"])


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (raising(ConfigError("no such case")), 2, "thing: no such case\n"),
        (raising(OSError(28, "No space left on device", "a.json")), 1, "thing: the system refused 'a.json': No space"),
    ],
)
def test_a_body_becomes_a_code_and_at_most_a_line(
    named: None, capsys: pytest.CaptureFixture[str], body: Callable[[], int | None], code: int, said: str
) -> None:
    assert command(body) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_after_what_was_begun_is_undone(
    named: None, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    undone = []
    before = signal.getsignal(number)

    def body() -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(20)
        except Exception:
            pytest.fail("no failure of a case")
        finally:
            undone.append(True)
        return 0

    assert command(body) == code
    assert capsys.readouterr().err == f"thing: interrupted by {number.name}\n"
    assert undone
    assert signal.getsignal(number) is before


def test_nobody_who_reads_on_is_no_error() -> None:
    script = "import sys; from vdnn.bench.command import command; sys.exit(command(lambda: print('x' * 100_000)))"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_characters_that_the_encoding_lacks_are_no_error() -> None:
    script = "import sys; from vdnn.bench.command import command; sys.exit(command(lambda: print('2 \u00b5s')))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2 us\n", "")


@pytest.mark.parametrize("name", ENTRIES)
def test_every_command_is_run_by_it(name: str) -> None:
    end = SOURCES[name].partition('if __name__ == "__main__":\n')[2].strip()
    assert re.fullmatch(r"sys\.exit\(command\((main|lambda: main\(sys\.argv\[1:\]\))\)\)", end)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("measures", [False, True])
def test_a_real_command_that_is_stopped_says_so(
    tmp_path: Path, number: signal.Signals, code: int, measures: bool
) -> None:
    words = ["vdnn.bench.gpu_predict", "lenet:8", "lenet:256", "--device", "cpu", "--steps", "200"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OUT": str(tmp_path)}
    if not measures:  # so early that libraries are still being loaded
        (tmp_path / "numpy.py").write_text("import time; print('loading', flush=True); time.sleep(20)")
        environment["PYTHONPATH"] = str(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("lenet:8: predicted " if measures else "loading")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, f"gpu_predict: interrupted by {number.name}\n")
    assert (tmp_path / "gpu_predict.json").exists() == measures


def test_reasons_name_no_class_of_ours() -> None:
    error = BudgetError("does not fit", layer="a", needed_bytes=2, budget_bytes=1, smallest_bytes=None)
    assert reason(error) == "does not fit"
    assert reason(KeyError("x")) == "KeyError: 'x'"


# ---- values of options


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (above_zero, {"0.5": 0.5, "1e3": 1000.0}, ["0", "-1", "nan", "inf", "-inf", "x", ""]),
        (not_negative, {"0": 0.0, "2": 2.0}, ["-1", "nan", "inf", "x", ""]),
        (whole_from(1), {"1": 1, "12": 12}, ["0", "-1", "1.5", "nan", "x", ""]),
        (whole_from(0), {"0": 0}, ["-1", "0.5"]),
    ],
)
def test_values_that_make_no_sense_are_refused(
    kind: Callable[[str], Any], good: dict[str, Any], bad: list[str]
) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"got '{text}'")):
            kind(text)


REFUSED = [
    *((floor, ("lenet:4", "--copy-gbps"), text) for text in ("nan", "0", "-1", "inf")),
    *((floor, ("lenet:4", "--tflops"), text) for text in ("nan", "0", "-1")),
    *((predict, ("lenet:4", "--steps"), text) for text in ("0", "-3", "1.5")),
    *((predict, ("lenet:4", "--device"), text) for text in ("simulated", "gpu", "auto")),
    *((peers, ("--minutes",), text) for text in ("nan", "0", "-1", "inf")),
    *((peers, ("--timeout",), text) for text in ("nan", "0", "-1")),
    *((peers, ("--seconds",), text) for text in ("nan", "-1", "inf")),
    *((peers, ("--ahead",), text) for text in ("-1", "1.5")),
    *((gpu_algos.main, ("--minutes",), text) for text in ("nan", "0", "-1")),
]


@pytest.mark.parametrize(("main", "words", "text"), REFUSED)
def test_commands_refuse_them_before_anything_is_made(
    main: Callable[..., int],
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([*words, text])
    assert ended.value.code == 2
    assert f"argument {words[-1]}: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- help


class Seen(Exception):
    """A parser that was about to parse."""


@pytest.mark.parametrize("name", [name for name in ENTRIES if "ArgumentParser(" in SOURCES[name]])
def test_help_states_every_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser, words: Any = None) -> None:
        found.append(parser)
        raise Seen

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Seen):
        importlib.import_module(f"vdnn.bench.{name}").main()
    kept = [action for action in found[0]._actions if action.default not in (None, False, [], argparse.SUPPRESS)]
    assert [action.dest for action in kept if "default: " not in (action.help or "")] == []


def test_help_keeps_the_lines_of_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "    python -m vdnn.bench.gpu_predict googlenet:128:conv:8GiB:tf32 -o memory.layout=nhwc" in lines


# ---- the device


@pytest.mark.skipif(find_driver().gpus > 0, reason="there is a GPU here")
@pytest.mark.parametrize(
    ("main", "words"),
    [
        (gpu_algos.main, ["lenet:8"]),
        (floor, ["lenet:8"]),
        (predict, ["lenet:8"]),
        (peers, ["--networks", "lenet:8", "--programs", "ours"]),
    ],
)
def test_without_a_gpu_the_driver_is_the_reason(
    main: Callable[..., int],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert find_driver().finding in err
    assert "CuPy" not in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_driver().gpus > 0, reason="there is a GPU here")
@pytest.mark.parametrize(
    "words",
    [
        ("gpu_layouts",),
        ("gpu_training", "agree"),
        ("gpu_idle", "alexnet", "128"),
        ("gpu_softmax",),
        ("study", "layouts"),
    ],
)
def test_programs_for_a_gpu_say_so_where_there_is_none(words: tuple[str, ...], tmp_path: Path) -> None:
    name, *rest = words
    command = [sys.executable, "-m", f"vdnn.bench.{name}", *rest]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert find_driver().finding in done.stderr
    assert not list(tmp_path.iterdir())


def test_libraries_are_asked_for_after_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(harness, "load_cupy", lambda: asked.append("cupy"))
    monkeypatch.setattr(harness, "find_driver", lambda: Driver(0, "the driver does not start"))
    with pytest.raises(BackendUnavailable, match="the driver does not start; buy one"):
        check_device("cuda", "buy one")
    assert not asked
    monkeypatch.setattr(harness, "find_driver", lambda: Driver(1, ""))
    check_device("cuda", loads=False)
    check_device("cpu")
    assert not asked
    check_device("cuda")
    assert asked
