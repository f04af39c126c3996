"""From a file or a packaged name, with overrides, to plain data and the place of every key; and errors in those terms.

data, places = read("lenet", ["train.lr=1e-3"])
try:
    Config.model_validate(data)
except ValidationError as error:
    raise explain(error, Config, places) from error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from vdnn.errors import ConfigError
from vdnn.runtime.files import user_path
from vdnn.runtime.yaml_lines import KeyPath, dotted, parse, shorten

MAX_BYTES = 2**20
"""No configuration is as long as this; it keeps a mistaken path (a data file, a device) from being read whole."""


class Place(NamedTuple):
    """Where a value was written: a file and a line, or an override and no line."""

    file: str
    line: int | None


Places = dict[KeyPath, Place]


def packaged_configs() -> tuple[str, ...]:
    """Names of the configurations that come with vdnn, sorted."""
    names = (entry.name for entry in files("vdnn.configs").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read(
    path_or_name: str, overrides: Sequence[str] = (), texts: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], Places]:
    """The mapping in a file, with `overrides` put into it, and the place of every key.

    Args:
        path_or_name: a packaged name ("lenet"), or a path; what ends in .yaml or .yml or has a folder is a path.
        overrides: "key.path=value" each, the value in YAML. A mapping replaces a whole section.
        texts: text by key path, which is not read as YAML and comes last.
    """
    file, text = _find(path_or_name)
    data, lines = parse(text, file)
    if data is None:
        raise ConfigError("the file is empty: expected at least network: {name: lenet}", file=file)
    if not isinstance(data, dict):
        raise ConfigError(f"expected keys with values, got {show(data)}", file=file, line=lines[()])
    places = {path: Place(file, line) for path, line in lines.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        path, place = tuple(key.strip().split(".")), Place(f"-o {shorten(override)}", None)
        if not equals or not all(path):
            raise ConfigError(f"expected key.path=value, such as optimizer.lr=0.01, got '{shorten(override)}'")
        _put(data, places, path, parse(text, place.file)[0], place)
    for key, text in (texts or {}).items():
        _put(data, places, tuple(key.split(".")), text, Place(f"-o {shorten(f'{key}={text}')}", None))
    return data, places


def _find(path_or_name: str) -> tuple[str, str]:
    """Name for messages, and text."""
    packaged = packaged_configs()
    if path_or_name in packaged:
        name = f"{path_or_name}.yaml"
        return name, _decode(files("vdnn.configs").joinpath(name).read_bytes(), name)
    path = user_path(path_or_name)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise _not_found(path_or_name, path, packaged) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot be read: {reason}", file=path_or_name) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"not a configuration: longer than {MAX_BYTES} bytes", file=path_or_name)
    return path_or_name, _decode(raw, path_or_name)


def _not_found(given: str, path: Path, packaged: Sequence[str]) -> ConfigError:
    """No such file; nor, if it looks like a name, a packaged configuration."""
    if path.stem in packaged:
        return ConfigError(f"no such file '{given}': the packaged configuration is called '{path.stem}'")
    if path.name != given or path.suffix in (".yaml", ".yml"):
        return ConfigError(f"no such file '{given}'", key=path.stem.replace(".", ""), known=packaged)
    hint = "" if get_close_matches(given, packaged, n=1) else f": expected a path, or one of {', '.join(packaged)}"
    return ConfigError(f"no configuration named '{given}'{hint}", key=given.replace(".", ""), known=packaged)


def _decode(raw: bytes, file: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not a text file: expected UTF-8, got byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise ConfigError(message, file=file) from error


def _put(data: dict[str, Any], places: Places, path: tuple[str, ...], value: Any, place: Place) -> None:
    """Set the value at `path`; sections on the way that are not there are made, and are then from `place` too."""
    target = data
    for depth, part in enumerate(path[:-1], start=1):
        if part not in target:
            places[path[:depth]] = place
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(
                f"{shorten(dotted(path[:depth]))} has no keys of its own", file=place.file, key=dotted(path)
            )
    target[path[-1]] = value
    for old in [p for p in places if p[: len(path)] == path]:
        del places[old]
    places[path] = place


def place_of(path: KeyPath, places: Places) -> Place:
    """Where the key at `path` was written, or the nearest section around it."""
    return next(places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in places)


def explain(error: ValidationError, model: type[BaseModel], places: Places) -> ConfigError:
    """The first of the errors as one line; unknown keys come first, for they often explain the others."""
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    path: KeyPath = first["loc"]
    name = shorten(dotted(path))
    known: tuple[str, ...] = ()
    if first["type"] == "extra_forbidden":
        known = tuple(_model_at(model, path[:-1]).model_fields)
        message = f"unknown key '{name}'{_where_else(model, path, known)}"
    elif first["type"] == "conflict":
        path = (*path, *first["ctx"]["key"].split("."))
        message = f"{dotted(path)}: {first['msg']}"
    elif first["type"] == "missing":
        message = f"missing key '{name}': expected {_expected(model, path)}"
    else:
        message = f"{name}: expected {_expected(model, path)}, got {show(first['input'])}"
    place = place_of(path, places)
    return ConfigError(message, file=place.file, line=place.line, key=dotted(path), known=known)


def _where_else(model: type[BaseModel], path: KeyPath, known: Sequence[str]) -> str:
    """What to say of an unknown key that no known one resembles."""
    key = str(path[-1])
    if get_close_matches(key, known, n=1):
        return ""
    sections = {name: _model_at(model, (name,)).model_fields for name in model.model_fields if _is_section(model, name)}
    homes = [name for name, fields in sections.items() if key in fields]
    return f": it is a key of {homes[0]}" if homes else f": expected one of {', '.join(known)}"


def _expected(model: type[BaseModel], path: KeyPath) -> str:
    """The description of the field at or around `path`; the keys, if it is a section."""
    owner = model
    for part in path:
        name = str(part)
        if not _is_section(owner, name):
            return str(owner.model_fields[name].description)
        owner = _model_at(owner, (name,))
    return f"keys with values ({', '.join(owner.model_fields)})"


def _is_section(model: type[BaseModel], name: str) -> bool:
    annotation = model.model_fields[name].annotation
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """The model of the section at `path`."""
    for part in path:
        model = cast(type[BaseModel], model.model_fields[str(part)].annotation)
    return model


def show(value: Any) -> str:
    """A value as it looks in YAML, shortened."""
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
