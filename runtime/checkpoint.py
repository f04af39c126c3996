"""Checkpoints: a folder "step-00000123" with weights.safetensors and state.json, written whole or not at all.

    save(run / "checkpoints", tensors, state, keep=2)
    path = latest(run / "checkpoints")
    tensors, state = load(path)

A save writes a hidden sibling, forces it to disk and renames it, so that a kill at any moment leaves the checkpoints
before it as they were; what a killed save left is removed by the next. state.json (vdnn.runtime.state_file) holds the
SHA-256 of the tensor file and of itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vdnn.errors import CheckpointError, VdnnError
from vdnn.runtime.state_file import STATE, State, Weights, read_state, write_state
from vdnn.runtime.tensor_file import read_tensors, write_tensors

__all__ = [
    "State",
    "check_tensors",
    "intact",
    "is_unfinished",
    "latest",
    "load",
    "load_state",
    "newest_time",
    "prune",
    "save",
    "set_aside",
]

WEIGHTS = "weights.safetensors"
_FOLDER = re.compile(r"step-([0-9]{8,16})")
_WRITING, _REPLACED, _ASIDE = ".writing-", ".replaced-", "aside-"

Tensors = Mapping[str, NDArray[Any]]


def save(folder: Path, tensors: Tensors, state: State, keep: int) -> Path:
    """Write a checkpoint into `folder` and return its path; of the older ones the `keep` - 1 newest stay.

    Args:
        tensors: weights, momentum and statistics by tensor name, of a dtype in vdnn.runtime.tensor_file.DTYPES.
        keep: how many checkpoints to leave, this one included; 1 or more.

    Raises VdnnError if it cannot be written; the checkpoints before it are then untouched.
    """
    name = f"step-{state['step']:08d}"
    final, writing = folder / name, folder / f"{_WRITING}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        writing.mkdir()
        digest, nbytes = write_tensors(writing / WEIGHTS, tensors)
        write_state(writing / STATE, state, digest, nbytes)
        _sync_folder(writing)
        if final.exists():  # a folder cannot be renamed over another that is not empty
            final.rename(folder / f"{_REPLACED}{name}")
        writing.rename(final)
        _sync_folder(folder)
        prune(folder, keep, final)
        _clean(folder)
    except (OSError, TypeError, ValueError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise VdnnError(f"checkpoint '{final}' cannot be written: {error}") from error
    return final


def prune(folder: Path, keep: int, spared: Path) -> None:
    """Remove all checkpoints in `folder` but `spared` and the `keep` - 1 newest of the others."""
    others = [path for path in _complete(folder).values() if path.name != spared.name]
    for path in others[max(0, keep - 1) :]:
        _remove(path)


def set_aside(folder: Path, beyond: int) -> list[Path]:
    """Rename all checkpoints in `folder` of steps after `beyond`, so that none is taken for the newest; the new paths.

    Raises VdnnError if that cannot be.
    """
    moved: list[Path] = []
    try:
        if folder.is_dir():
            _clean(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = _FOLDER.fullmatch(path.name)
            if match and int(match[1]) > beyond:
                numbers = (f"-{number}" if number > 1 else "" for number in count(1))
                names = (folder / f"{_ASIDE}{path.name}{number}" for number in numbers)
                moved.append(path.rename(next(name for name in names if not name.exists())))
    except OSError as error:
        raise VdnnError(
            f"checkpoints in '{folder}' after step {beyond} cannot be set aside: {error.strerror}"
        ) from error
    return moved


def latest(folder: Path, newest: int | None = None) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, `newest` at most; None if there is none."""
    found = _complete(folder)
    return next((path for step, path in found.items() if newest is None or step <= newest), None)


def newest_time(folder: Path) -> float:
    """When the newest of what is named like a checkpoint in `folder` was made, in seconds; 0 if nothing is."""
    return next((path.stat().st_mtime for _, path in _named(folder)), 0.0)


def intact(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` whose bytes are those that were written, each checked; None if there is none.

    And a sentence on every newer one: "step 9 is damaged (why)".
    """
    faults: list[str] = []
    for step, path in _named(folder):
        try:
            _check(path)
        except CheckpointError as error:
            why, _, _ = str(error).partition("; ")  # its advice is for who named that checkpoint
            faults.append(f"step {step} is damaged ({why})")
        else:
            return path, faults
    return None, faults


def is_unfinished(path: Path) -> bool:
    """Whether `path` is what a killed save has left, which the next save removes."""
    return path.name.startswith(_WRITING)


def load(path: Path) -> tuple[dict[str, NDArray[Any]], State]:
    """Tensors and state of the checkpoint at `path`, every byte checked against its SHA-256.

    Raises CheckpointError naming the file, what was expected and what was found.
    """
    state = _check(path)
    return read_tensors(path / WEIGHTS), state


def _check(path: Path) -> State:
    """The state of the checkpoint at `path`; CheckpointError unless every byte of its tensors is as it was written."""
    weights, state = _read_state(path)
    file = path / WEIGHTS
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise CheckpointError(f"checkpoint file '{file}' cannot be read: expected a regular file")
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
            "the file is damaged or of another checkpoint; name an older one with --resume PATH"
        )
    return state


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


def _read_state(path: Path) -> tuple[Weights, State]:
    file = path / STATE
    try:
        weights, state = read_state(file)
    except FileNotFoundError as error:
        inside = latest(path)
        hint = f": the newest checkpoint in it is '{inside}'" if inside else ""
        raise CheckpointError(
            f"'{path}' is no checkpoint: expected a folder with {STATE} and {WEIGHTS}{hint}"
        ) from error
    named = _FOLDER.fullmatch(path.name.removeprefix(_REPLACED))
    if named and int(named[1]) != state["step"]:
        raise CheckpointError(
            f"checkpoint file '{file}': expected state.step {int(named[1])}, for so its folder is named, "
            f"got {state['step']}"
        )
    return weights, state


def _complete(folder: Path) -> dict[int, Path]:
    """Checkpoints in `folder` that have both files in full length by step, the highest first.

    One that was being replaced by a save of the same step counts while its successor is not there.
    """
    found: dict[int, Path] = {}
    for step, path in _named(folder):
        if _is_complete(path):
            found.setdefault(step, path)
    return found


def _named(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of what is named like a checkpoint in `folder`, the highest first, what replaces before the
    replaced."""
    try:
        names = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"folder '{folder}' cannot be read: {error.strerror}") from error
    matches = ((_FOLDER.fullmatch(path.name.removeprefix(_REPLACED)), path) for path in names)
    return sorted(((int(match[1]), path) for match, path in matches if match), key=lambda found: -found[0])


def _is_complete(path: Path) -> bool:
    try:
        weights, _ = _read_state(path)
        return (path / WEIGHTS).stat().st_size == weights["nbytes"]
    except (CheckpointError, OSError):
        return False


def _clean(folder: Path) -> None:
    """Remove what killed saves left; put back a checkpoint whose replacement never came."""
    hidden = sorted(folder.iterdir())
    for path in (path for path in hidden if path.name.startswith(_WRITING)):
        shutil.rmtree(path)
    for path in (path for path in hidden if path.name.startswith(_REPLACED)):
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
