"""Standard output that lacks characters, that nobody reads, that is full; `python -m vdnn`; whose help errors name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import command, environment

from vdnn.cli import main
from vdnn.runtime import streams

MODELLED = ("algos", "alexnet", "--profile", "h200")
STEP = ("lenet", "--device", "simulated", "--profile", "h200")


def started(words, cwd, stdout, **variables):
    env = {**environment(), **variables}
    return subprocess.run(words, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, timeout=120)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "words",
    [("vdnn", *MODELLED), ("vdnn", "tables", "study"), ("vdnn", "tables", "fig14"), ("vdnn-train", *STEP)],
    ids=["algos", "study", "fig14", "train"],
)
def test_characters_that_the_encoding_lacks_have_plain_words(tmp_path, encoding, words):
    ended = started(command(*words), tmp_path, subprocess.PIPE, PYTHONIOENCODING=encoding)
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode(encoding)
    assert "?" not in text
    if words[1] == "algos":
        assert "0 B -> 8.0 MiB: " in text


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ("vdnn", *MODELLED),
        ("vdnn", *MODELLED, "--json"),
        ("vdnn", "plan", "lenet", "--profile", "h200"),
        ("vdnn-train", *STEP),
    ],
    ids=["table", "json", "plan", "train"],
)
def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path, unbuffered, words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = started(command(*words), tmp_path, writer, PYTHONUNBUFFERED=unbuffered)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (streams.CLOSED, b"")
    assert streams.CLOSED == 141, "what the help and README say"


def test_a_full_disk_is_one_line_and_1(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    for words in (MODELLED, (*MODELLED, "--json"), ("--help",)):
        with open("/dev/full", "wb") as full:
            ended = started(command("vdnn", *words), tmp_path, full, PYTHONUNBUFFERED="")
        said = ended.stderr.decode()
        assert ended.returncode == 1, words
        assert said.count("\n") == 1, said
        assert "the system refused" in said
        assert "No space left" in said


def test_no_standard_output_at_all_is_no_error(tmp_path):
    words = f"exec {' '.join(command('vdnn', *MODELLED))} >&-"
    ended = started(["sh", "-c", words], tmp_path, None)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_bytes_of_file_names_that_are_no_text_come_out_as_they_are(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert streams.run_program("vdnn", lambda: print("a\udcffb → 5 µs ☃") or 3) == 3
    assert raw.getvalue() == b"a\xffb -> 5 us ?\n"


def test_an_exit_that_is_not_of_a_pipe_stays_as_it_is(capsys):
    def ended():
        sys.exit(2)

    with pytest.raises(SystemExit) as caught:
        streams.run_program("vdnn", ended)
    assert caught.value.code == 2


# ---- the program


def test_python_m_vdnn_is_vdnn(tmp_path):
    for words, code in ((("--version",), 0), (("plan", "lenet", "--profile", "h200", "--json"), 0), (("pln",), 2)):
        runs = [
            subprocess.run([*start, *words], cwd=tmp_path, env=environment(), capture_output=True, timeout=60)
            for start in (command("vdnn"), [sys.executable, "-m", "vdnn"])
        ]
        assert [run.returncode for run in runs] == [code, code]
        assert runs[0].stdout == runs[1].stdout
        assert runs[0].stderr == runs[1].stderr
    assert runs[1].stderr.startswith(b"vdnn: ")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("doctor", "--json"), "vdnn doctor"),
        (("plan", "lenet", "--jsn"), "vdnn plan"),
        (("algos", "lenet", "more"), "vdnn algos"),
        (("tables", "--nothing"), "vdnn tables"),
        (("layouts", "explain", "lenet", "--nothing"), "vdnn layouts explain"),
        (("layouts", "calibrate", "--nothing"), "vdnn layouts calibrate"),
        (("--nothing", "doctor"), "vdnn"),
    ],
)
def test_what_a_command_does_not_know_names_its_own_help(capsys, words, program):
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"{program}: unrecognized arguments: ")
    assert said.endswith(f"({program} --help says what there is)\n")
    assert said.count("\n") == 1


def test_the_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert "141 whoever read the output has gone" in " ".join(capsys.readouterr().out.split())
