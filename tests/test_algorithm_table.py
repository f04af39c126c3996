"""What a table of algorithms cannot hold: numbers that nothing measured can be, facts of another kind, damage."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from test_algos import FACTS

from vdnn.errors import DataError
from vdnn.runtime import algorithm_table
from vdnn.runtime.algorithm_table import load_table, read_table
from vdnn.runtime.backends.cuda.op_times import LAUNCH


def table_text(time_ms: str = "1.5", nbytes: str = "0", limit_bytes: str = "null", op_ms: str = "2.5") -> str:
    """A table of one algorithm and one op, with numbers as they are written in JSON."""
    row = (
        f'{{"candidates": [["A", {time_ms}, {nbytes}, true, "fp32"]], "limit_bytes": {limit_bytes}, "left_out": {{}}}}'
    )
    return f'{{"facts": {json.dumps(FACTS)}, "problems": {{"p": {row}}}, "ops": {{"relu.forward x": {op_ms}}}}}'


@pytest.mark.parametrize("field", ["time_ms", "nbytes", "limit_bytes", "op_ms"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-1", "1e999", "1" + "0" * 400, "true", '"7"'])
def test_a_number_that_nothing_measured_can_be_is_damage(field, number):
    read_table(table_text(), "x.json")
    with pytest.raises(DataError, match=r"'x.json' is no table of algorithms: .*: expected "):
        read_table(table_text(**{field: number}), "x.json")


def test_no_time_is_damage_and_no_workspace_is_none():
    for field in ("time_ms", "op_ms"):
        with pytest.raises(DataError, match="expected a time above 0 ms, got 0"):
            read_table(table_text(**{field: "0.0"}), "x.json")
    for nbytes in ("0.5", str(2**63)):
        with pytest.raises(DataError, match="A: expected bytes from 0"):
            read_table(table_text(nbytes=nbytes), "x.json")
    exact = 2**63 - 1
    found = read_table(table_text(nbytes=str(exact), limit_bytes="0"), "x.json").problems["p"]
    assert (found.candidates[0].workspace_bytes, found.limit_bytes) == (exact, 0)


def test_what_a_launch_takes_less_in_a_step_may_be_negative():
    text = table_text(op_ms="-0.002").replace("relu.forward x", f"0a1b2c3d {LAUNCH}")
    assert read_table(text, "x.json").ops == {f"0a1b2c3d {LAUNCH}": -0.002}


def changed(**facts: Any) -> str:
    """A table with other facts; None leaves one out."""
    data = json.loads(table_text())
    data["facts"] = {key: value for key, value in {**data["facts"], **facts}.items() if value is not None}
    return json.dumps(data)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"layout": 7}, "facts: layout: expected NCHW, NHWC or CHWN, got 7"),
        ({"layout": "nhwc"}, 'facts: layout: expected NCHW, NHWC or CHWN, got "nhwc"'),
        ({"layout": ["NCHW"]}, 'facts: layout: expected NCHW, NHWC or CHWN, got ["NCHW"]'),
        ({"precision": "fp99"}, 'facts: precision: expected fp32, tf32, bf16 or fp16, got "fp99"'),
        ({"precision": None}, "facts: there is no 'precision'"),
        ({"gpu": 5}, "facts: gpu: expected a text, got 5"),
        ({"gpu": ""}, 'facts: gpu: expected the name of a GPU, got ""'),
        ({"cudnn": "9.1"}, 'facts: cudnn: expected a version such as 91900, got "9.1"'),
        ({"cudnn": True}, "facts: cudnn: expected a version such as 91900, got true"),
        ({"cudnn": -3}, "facts: cudnn: expected a version such as 91900, got -3"),
    ],
)
def test_facts_that_no_gpu_has_are_damage(facts, words):
    read_table(changed(), "x.json")
    with pytest.raises(DataError) as caught:
        read_table(changed(**facts), "x.json")
    assert str(caught.value) == f"'x.json' is no table of algorithms: {words}; {algorithm_table.WRITTEN_BY}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("written", "instead", "words"),
    [
        ("true", '"no"', "problem 'p': A: deterministic: expected true or false, got \"no\""),
        ("true", "1", "problem 'p': A: deterministic: expected true or false, got 1"),
        ('true, "fp32"', 'true, "fp99"', "problem 'p': A: precision: expected fp32, tf32, bf16 or fp16, got \"fp99\""),
        ('true, "fp32"', "true", "problem 'p': candidates: expected lists of algorithm, ms, bytes, deterministic"),
        ('"A"', "null", "problem 'p': the name of an algorithm: expected a text, got null"),
        ('"left_out": {}', '"left_out": [1]', "problem 'p': left_out: expected an object, got [1]"),
        ('"left_out": {}', '"left_out": {"B": 2}', "problem 'p': left_out, B: expected a text, got 2"),
        (', "left_out": {}', "", "problem 'p': there is no 'left_out'"),
        ('"problems"', '"prolbems"', "algorithms: there is no 'problems'"),
        ('"ops": {"relu.forward x": 2.5}', '"ops": [2.5]', "algorithms: ops: expected an object, got [2.5]"),
        ("2.5", '"2.5"', 'ops: relu.forward x: expected a number, got "2.5"'),
    ],
)
def test_values_of_another_kind_are_damage_and_named(written, instead, words):
    assert table_text().count(written) == 1
    with pytest.raises(DataError) as caught:
        read_table(table_text().replace(written, instead), "x.json")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"facts": {}}', "[" * 100_000, changed(layout=7)])
def test_no_message_has_the_names_of_pythons_errors(text):
    with pytest.raises(DataError) as caught:
        read_table(text, "x.json")
    assert not re.search(r"Error|NoneType|\bstr\b|\bdict\b|\bint\b|recursion", str(caught.value))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", None], ids=["cut", "no text", "not there"])
def test_damage_of_a_table_that_came_with_vdnn_names_its_path_and_the_way_to_mend_it(tmp_path, monkeypatch, content):
    file = tmp_path / "made-up.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(algorithm_table, "resources", SimpleNamespace(files=lambda package: tmp_path))
    monkeypatch.setattr(algorithm_table, "stored_names", lambda: ["made-up"])
    with pytest.raises(DataError) as caught:
        load_table("made-up")
    assert str(file) in str(caught.value)
    assert str(caught.value).endswith(algorithm_table.SHIPPED)
    assert "reinstall vdnn" in algorithm_table.SHIPPED
