"""state.json of a checkpoint: what a run needs besides its tensors, checked field by field and sealed by a hash.

    write_state(folder / STATE, state, digest, nbytes)
    weights, state = read_state(folder / STATE)
    weights["sha256"] == digest

Format: one JSON object {format, weights: {sha256, nbytes}, state, sha256}. The last is that of the rest but the format,
as JSON without spaces and with sorted keys, so that an edit shows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from vdnn.errors import CheckpointError
from vdnn.networks import NETWORKS
from vdnn.runtime.loss_scale import LossScale

FORMAT = 2
STATE = "state.json"
MAX_BYTES = 2**26
"""No state is as long as this; it keeps a file that is something else from being read whole."""
MOST = 2**53
"""Counts up to here are the same in every reader of JSON."""


class State(TypedDict):
    """What a run needs besides its tensors to go on; JSON values only.

    network: its name. step: updates done. epoch: epochs completed. position: images of the current epoch already used.
    seed: of weights, order and dropout. schedule: the schedule section of the configuration. algorithms: the chosen
    algorithm, or slices in words, by plan and op. config: the whole configuration (Config.model_dump(mode="json")).
    loss_scale: that of the next step in fp16 (see vdnn.runtime.loss_scale); None, or not there, in the others.
    """

    network: str
    step: int
    epoch: int
    position: int
    seed: int
    schedule: dict[str, Any]
    algorithms: dict[str, Any]
    config: dict[str, Any]
    loss_scale: NotRequired[dict[str, Any] | None]


class Weights(TypedDict):
    """What the tensor file must be: its SHA-256, hexadecimal, and its length in bytes."""

    sha256: str
    nbytes: int


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= MOST


def _is_choice(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(plan, dict) and all(isinstance(name, str) for name in plan.values()) for plan in value.values()
    )


_SECTIONS = ("network", "data", "train", "optimizer", "schedule", "memory", "evaluate", "checkpoint", "debug")


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name, {}), dict) for name in _SECTIONS)


_COUNT = (_is_count, f"a whole number from 0 to {MOST}")
_FIELDS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "weights": {"sha256": (lambda value: isinstance(value, str), "text"), "nbytes": _COUNT},
    "state": {
        "network": (lambda value: isinstance(value, str) and value in NETWORKS, "the name of a network"),
        **dict.fromkeys(("step", "epoch", "position"), _COUNT),
        "seed": (lambda value: _is_int(value) and 0 <= value < 2**63, "a whole number from 0 to 2^63 - 1"),
        "schedule": (lambda value: isinstance(value, dict), "keys with values"),
        "algorithms": (_is_choice, "the name of an algorithm by plan and op"),
        "config": (_is_config, "a configuration with its sections"),
        "loss_scale": (lambda value: value is None or LossScale.is_json(value), "scale, good_steps and skipped"),
    },
}
"""What every field must be: a check, and words for it."""


def write_state(file: Path, state: State, digest: str, nbytes: int) -> None:
    """Write state.json and force it to disk; `digest` and `nbytes` are those of the tensor file.

    Raises TypeError or ValueError for what JSON cannot hold, OSError as the system does.
    """
    data: dict[str, Any] = {"weights": {"sha256": digest, "nbytes": nbytes}, "state": state}
    text = json.dumps({"format": FORMAT, **data, "sha256": _seal(data)}, indent=1, allow_nan=False)
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_state(file: Path) -> tuple[Weights, State]:
    """What state.json says; CheckpointError naming the file, the field, what was expected and what was found.

    Raises FileNotFoundError if there is no such file.
    """
    data = _parse(file)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"checkpoint file '{file}': expected format {FORMAT}, got {_show(got)}")
    for name, fields in _FIELDS.items():
        section = data.get(name)
        for key, (right, words) in fields.items():
            value = section.get(key) if isinstance(section, dict) else None
            if not right(value):
                raise CheckpointError(f"checkpoint file '{file}': expected {name}.{key} as {words}, got {_show(value)}")
    seal = _seal({"weights": data["weights"], "state": data["state"]})
    if data.get("sha256") != seal:
        raise CheckpointError(
            f"checkpoint file '{file}': expected sha256 {seal}, got {_show(data.get('sha256'))}: "
            "the file was edited or is damaged; resume from another checkpoint"
        )
    return cast(Weights, data["weights"]), cast(State, data["state"])


def _parse(file: Path) -> Any:
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for, a device has no end
            raise CheckpointError(f"checkpoint file '{file}' cannot be read: expected a regular file")
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise CheckpointError(f"checkpoint file '{file}': expected at most {MAX_BYTES:,} bytes, got more")
        return json.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"expected JSON, got: {error}"
        raise CheckpointError(f"checkpoint file '{file}' cannot be read: {reason}") from error


def _seal(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _show(value: Any) -> str:
    """A value of a file, short enough for a line."""
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
