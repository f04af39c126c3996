"""Options that are text whatever YAML makes of it, and messages about what is strange: one short line each."""

from __future__ import annotations

import pytest
from test_config import PLAIN, refusal, write

from vdnn.errors import ConfigError
from vdnn.runtime.config import load_config
from vdnn.runtime.yaml_lines import dump

TEXTS = ["run #3", "2024", "null", "true", "a: b", "[x]", "1e-3", "'q'", " s ", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_an_option_is_taken_as_it_is(text, tmp_path):
    config = load_config("lenet", ["output=other"], {"output": text, "profile": text})
    assert (config.output, config.profile) == (text, text)
    assert load_config(write(tmp_path, config.dump())) == config


def test_text_of_an_option_that_is_wrong_is_named():
    with pytest.raises(ConfigError, match=r"-o memory.policy=null: memory.policy: expected base, none, .* got 'null'"):
        load_config("lenet", (), {"memory.policy": "null"})


@pytest.mark.parametrize("key", ["k" * 5000, "a\nb", "train." + "k" * 5000, "k\x1b[31m"])
def test_a_strange_key_stays_on_one_short_line(key, tmp_path):
    section, _, name = key.rpartition(".")
    text = f"{section or 'x'}: {{{dump(name).splitlines()[0]!r}: 1}}\n" if section else ""
    for error in (refusal("lenet", f"{key}=1"), refusal(write(tmp_path, PLAIN + text + dump({name: 1})))):
        assert len(str(error)) < 700
        assert str(error).isprintable()


@pytest.mark.parametrize("value", ["v" * 5000, '"a\\nb"', "[" * 9000])
def test_a_strange_value_stays_on_one_short_line(value):
    error = refusal("lenet", f"train.epochs={value}")
    assert len(str(error)) < 400
    assert str(error).isprintable()


def test_a_home_that_is_not_there():
    assert "there is no such user" in str(refusal("~nosuchuser/run.yaml"))
