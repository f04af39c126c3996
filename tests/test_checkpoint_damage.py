"""Damaged and edited checkpoints: every kind is an error that names the file, the field, expected and got."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import state, tensors
from safetensors.numpy import save_file

from vdnn.errors import CheckpointError
from vdnn.runtime.checkpoint import load, save


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def rewrite(reseal: bool = True, **changes):
    """Other values in state.json, under a hash that vouches for them if `reseal`."""

    def damage(path: Path) -> None:
        data = json.loads((path / "state.json").read_text())
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (data[section] if section else data)[name] = value
        if reseal:
            rest = {key: data.get(key) for key in ("weights", "state")}
            text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
            data["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (path / "state.json").write_text(json.dumps(data))

    return damage


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def forge(content: bytes):
    """Other content under a state that vouches for it: what a reader meets whom hash and length cannot help."""

    def damage(path: Path) -> None:
        (path / "weights.safetensors").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        rewrite(weights={"sha256": digest, "nbytes": len(content)})(path)

    return damage


def replace_weights(path: Path) -> None:
    save_file({"other": np.zeros(3, np.float32)}, path / "weights.safetensors")


WEIGHTS, STATE = "weights.safetensors", "state.json"
HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (lambda p: flip(p / WEIGHTS, -1), WEIGHTS, "expected the content with SHA-256"),
        (lambda p: flip(p / WEIGHTS, 12), WEIGHTS, "expected the content with SHA-256"),
        (lambda p: os.truncate(p / WEIGHTS, 50), WEIGHTS, "bytes, got 50"),
        (lambda p: os.truncate(p / WEIGHTS, 0), WEIGHTS, "bytes, got 0"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes() + b"x"), WEIGHTS, "bytes, got"),
        (lambda p: (p / WEIGHTS).unlink(), WEIGHTS, "cannot be read: No such file"),
        (replace_weights, WEIGHTS, "bytes, got"),
        (forge(b""), WEIGHTS, "safetensors format"),
        (forge(b"\xff" * 100), WEIGHTS, "safetensors format"),
        (forge(b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s."), WEIGHTS, "safetensors format"),
        (forge((2**63).to_bytes(8, "little") + HEADER), WEIGHTS, "safetensors format"),
        (forge(len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 7), WEIGHTS, "safetensors format"),
        (lambda p: (p / STATE).unlink(), "", "expected a folder with state.json and weights.safetensors"),
        (lambda p: (p / STATE).write_text(""), STATE, "expected JSON"),
        (lambda p: os.truncate(p / STATE, 60), STATE, "expected JSON"),
        (lambda p: (p / STATE).write_bytes(b"\xff\xfe"), STATE, "expected JSON"),
        (lambda p: (p / STATE).write_text("[" * 100_000), STATE, "expected JSON"),
        (lambda p: (p / STATE).write_text("[1]"), STATE, "expected format 2, got 'list'"),
        (lambda p: (p / STATE).write_text("{}"), STATE, "expected format 2, got None"),
        (rewrite(format=1), STATE, "expected format 2, got 1"),
        (rewrite(weights=3), STATE, "expected weights.sha256 as text, got None"),
        (rewrite(weights__nbytes="9"), STATE, "expected weights.nbytes as a whole number from 0 to 9007199254740992"),
        (rewrite(state=None), STATE, "expected state.network as the name of a network, got None"),
        (rewrite(state__network="lenett"), STATE, "expected state.network as the name of a network, got 'lenett'"),
        (rewrite(state__step=None), STATE, "expected state.step as a whole number from 0"),
        (rewrite(state__step=True), STATE, "expected state.step as a whole number from 0"),
        (rewrite(state__step=-1), STATE, "expected state.step as a whole number from 0 to 9007199254740992, got -1"),
        (rewrite(state__step=10**30), STATE, f"got {10**30}"),
        (rewrite(state__step=2), STATE, "expected state.step 1, for so its folder is named, got 2"),
        (rewrite(state__epoch=1.5), STATE, "expected state.epoch as a whole number"),
        (rewrite(state__position=-64), STATE, "expected state.position as a whole number"),
        (rewrite(state__seed=2**63), STATE, "expected state.seed as a whole number from 0 to 2^63 - 1"),
        (rewrite(state__schedule="cosine"), STATE, "expected state.schedule as keys with values, got 'cosine'"),
        (rewrite(state__algorithms={"train/64": "IM2COL"}), STATE, "expected state.algorithms as the name of an"),
        (rewrite(state__algorithms={"train/64": {"conv1": 3}}), STATE, "expected state.algorithms as the name of an"),
        (rewrite(state__config=[]), STATE, "expected state.config as a configuration with its sections, got a list"),
        (rewrite(state__config={"train": []}), STATE, "expected state.config as a configuration with its sections"),
        (rewrite(False, sha256="0"), STATE, "got '0': the file was edited or is damaged"),
        (rewrite(False, state__epoch=2), STATE, "the file was edited or is damaged"),
        (rewrite(False, state__schedule={}), STATE, "the file was edited or is damaged"),
        (lambda p: pipe(p / STATE), STATE, "cannot be read: expected a regular file"),
        (lambda p: pipe(p / WEIGHTS), WEIGHTS, "cannot be read: expected a regular file"),
    ],
)
def test_damage_is_an_error_that_names_the_file(tmp_path, damage, file, words):
    path = save(tmp_path, tensors(), state(1), keep=1)
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path / file if file else path) in message
    assert words in message
    assert caught.value.exit_code == 2


def test_the_folder_around_checkpoints_is_no_checkpoint_but_names_the_newest(tmp_path):
    for step in (1, 2):
        save(tmp_path, tensors(), state(step), keep=2)
    with pytest.raises(CheckpointError, match=r"the newest checkpoint in it is '.*step-00000002'"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="Not a directory"):
        load(tmp_path / "step-00000001" / "state.json")
