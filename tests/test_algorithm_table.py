"""Numbers in a table of algorithms that nothing measured can be."""

from __future__ import annotations

import json

import pytest
from test_algos import FACTS

from vdnn.errors import DataError
from vdnn.runtime.algorithm_table import read_table
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
    with pytest.raises(DataError, match=r"'x.json' is no table of algorithms \(ValueError: .*: expected "):
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
