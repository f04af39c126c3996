"""Checkpoints: a folder "step-00000123" with weights.safetensors and state.json, written whole or not at all.

    save(run / "checkpoints", tensors, state, keep=2)
    path = latest(run / "checkpoints")
    tensors, state = load(path)

A save writes a hidden sibling, forces it to disk and renames it, so that a kill at any moment leaves the checkpoints
before it as they were; what a killed save left is removed by the next. state.json holds the SHA-256 of the tensor file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from numpy.typing import NDArray

from vdnn.errors import CheckpointError
from vdnn.runtime.tensor_file import read_tensors, write_tensors

FORMAT = 1
WEIGHTS, STATE = "weights.safetensors", "state.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REPLACED = ".writing-", ".replaced-"

Tensors = Mapping[str, NDArray[Any]]


class State(TypedDict):
    """What a run needs besides its tensors to go on; JSON values only.

    network: its name. step: updates done. epoch: epochs completed. position: images of the current epoch already used.
    seed: of weights, order and dropout. schedule: the schedule section of the configuration. algorithms: the chosen
    algorithm by op. config: the whole configuration (Config.model_dump(mode="json")).
    """

    network: str
    step: int
    epoch: int
    position: int
    seed: int
    schedule: dict[str, Any]
    algorithms: dict[str, Any]
    config: dict[str, Any]


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("network",), str),
    **dict.fromkeys(("step", "epoch", "position", "seed"), int),
    **dict.fromkeys(("schedule", "algorithms", "config"), dict),
}


def save(folder: Path, tensors: Tensors, state: State, keep: int) -> Path:
    """Write a checkpoint into `folder` and return its path; of the older ones the `keep` - 1 newest stay.

    Args:
        tensors: weights, momentum and statistics by tensor name, of a dtype in vdnn.runtime.tensor_file.DTYPES.
        keep: how many checkpoints to leave, this one included; 1 or more.

    Raises CheckpointError if it cannot be written; the checkpoints before it are then untouched.
    """
    name = f"step-{state['step']:08d}"
    final, writing = folder / name, folder / f"{_WRITING}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        writing.mkdir()
        digest, nbytes = write_tensors(writing / WEIGHTS, tensors)
        data = {"format": FORMAT, "weights": {"sha256": digest, "nbytes": nbytes}, "state": state}
        text = json.dumps(data, indent=1, allow_nan=False)
        with (writing / STATE).open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(writing)
        if final.exists():  # a folder cannot be renamed over another that is not empty
            final.rename(folder / f"{_REPLACED}{name}")
        writing.rename(final)
        _sync_folder(folder)
        others = [path for path in _complete(folder) if path.name != name]
        for path in others[max(0, keep - 1) :]:
            _remove(path)
        _clean(folder)
    except (OSError, TypeError, ValueError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(f"checkpoint '{final}' cannot be written: {error}") from error
    return final


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`; None if there is none."""
    return next(iter(_complete(folder)), None)


def load(path: Path) -> tuple[dict[str, NDArray[Any]], State]:
    """Tensors and state of the checkpoint at `path`, every byte checked against its SHA-256.

    Raises CheckpointError naming the file, what was expected and what was found.
    """
    weights, state = _read_state(path)
    file = path / WEIGHTS
    try:
        with file.open("rb") as stream:
            found = os.fstat(stream.fileno()).st_size
            if found != weights["nbytes"]:
                raise CheckpointError(f"checkpoint file '{file}': expected {weights['nbytes']:,} bytes, got {found:,}")
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"checkpoint file '{file}' cannot be read: {error.strerror or error}") from error
    if digest != weights["sha256"]:
        raise CheckpointError(
            f"checkpoint file '{file}': expected the content with SHA-256 {weights['sha256']}, got {digest}: "
            "the file is damaged or of another checkpoint"
        )
    return read_tensors(file), state


def load_state(path: Path) -> State:
    """The state of the checkpoint at `path`, without its tensors; CheckpointError if it cannot be read."""
    return _read_state(path)[1]


def check_tensors(path: Path, tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError unless `tensors`, loaded from `path`, have just the names and shapes that a network expects."""
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or extra:
        names = f"tensor '{min(missing)}', got none" if missing else f"no tensor '{min(extra)}', got one"
        raise CheckpointError(f"checkpoint '{path}' is of another network or optimizer: expected {names}")
    for name, shape in expected.items():
        if tensors[name].shape != tuple(shape):
            raise CheckpointError(
                f"checkpoint '{path}', tensor '{name}': expected shape {tuple(shape)}, got {tensors[name].shape}"
            )


def _read_state(path: Path) -> tuple[dict[str, Any], State]:
    file = path / STATE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        inside = latest(path)
        hint = f": the newest checkpoint in it is '{inside}'" if inside else ""
        raise CheckpointError(
            f"'{path}' is no checkpoint: expected a folder with {STATE} and {WEIGHTS}{hint}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"expected JSON, got: {error}"
        raise CheckpointError(f"checkpoint file '{file}' cannot be read: {reason}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"checkpoint file '{file}': expected format {FORMAT}, got {got!r}")
    weights, state = data.get("weights"), data.get("state")
    kinds = {"sha256": str, "nbytes": int}
    for section, name, fields in ((weights, "weights", kinds), (state, "state", _KINDS)):
        for key, kind in fields.items():
            value = section.get(key) if isinstance(section, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                got = type(value).__name__
                raise CheckpointError(f"checkpoint file '{file}': expected {name}.{key} as {kind.__name__}, got {got}")
    return cast(dict[str, Any], weights), cast(State, state)


def _complete(folder: Path) -> list[Path]:
    """Checkpoints in `folder` that have both files in full length, highest step first.

    One that was being replaced by a save of the same step counts while its successor is not there.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name.removeprefix(_REPLACED))
        if match and _is_complete(path):
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found, reverse=True)]


def _is_complete(path: Path) -> bool:
    try:
        weights, _ = _read_state(path)
        return (path / WEIGHTS).stat().st_size == int(weights["nbytes"])
    except (CheckpointError, OSError):
        return False


def _clean(folder: Path) -> None:
    """Remove what killed saves left; put back a checkpoint whose replacement never came."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path)
    for path in folder.glob(f"{_REPLACED}*"):
        final = folder / path.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)


def _remove(path: Path) -> None:
    """Delete a checkpoint; a kill in between leaves it under a name that is not taken for one."""
    hidden = path.with_name(f"{_WRITING}{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
