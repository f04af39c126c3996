"""YAML as a person means it, with the line of every key: 1e-3 is a number, yes is a word, a key given twice an error.

    value, lines = parse("train: {lr: 1e-3}", "run.yaml")
    value == {"train": {"lr": 0.001}}; lines[("train", "lr")] == 1

Only plain data: no aliases, no tags but those of the scalars below, one document.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from vdnn.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document: ("schedule", "milestones", 0)."""

MOST_SHOWN = 60
"""Characters of a key or value that a message shows."""
_PREFIX = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": rf"[-+]?{_DIGITS}",
    "float": rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
"""What an unquoted scalar is, first match first; anything else is text. YAML 1.1, which PyYAML follows, would read 1e-3
as text, on and off as truth values, 010 as eight and 1:30 as ninety."""

_COLLECTIONS = {yaml.MappingNode: "map", yaml.SequenceNode: "seq"}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}


for _name, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _name, re.compile(rf"(?:{_pattern})\Z"), None)


def parse(text: str, file: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of a YAML document and the line (from 1) of every key and list item in it.

    Args:
        text: the document; an empty one is None.
        file: its name in ConfigErrors, which also give line and key.
    """
    builder = _Builder(file)
    try:
        node = yaml.compose(text, Loader=_Loader)
        return (None if node is None else builder.value(node, ())), builder.lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(f"not valid YAML: {error.problem or error.context}", file=file, line=line) from error
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "cannot be read")
        raise ConfigError(f"not a text file: {reason}", file=file) from error
    except RecursionError as error:
        raise ConfigError("not a configuration: nested too deep", file=file) from error


def dump(value: Any) -> str:
    """ASCII text that `parse` reads back as `value`, keys in their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)
    return text


class _Builder:
    """Turns nodes into values and remembers lines."""

    def __init__(self, file: str):
        self.file = file
        self.lines: dict[KeyPath, int] = {}
        self._seen: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if id(node) in self._seen:
            raise self._error("an alias (*name) is not supported: write the value out", line, path)
        self._seen.add(id(node))
        kind = node.tag.removeprefix(_PREFIX)
        if isinstance(node, yaml.CollectionNode) and kind != _COLLECTIONS[type(node)]:
            raise self._error(f"a tag ({shorten(node.tag)}) is not supported here: remove it", line, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _PREFIX + "str":
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise self._error(f"expected a word as key, got {shorten(shown)}", line, path)
            key = (*path, key_node.value)
            if key_node.value in result:
                first = self.lines[key]
                raise self._error(f"key '{shorten(dotted(key))}' is given twice, first on line {first}", line, key)
            self.lines[key] = line
            result[key_node.value] = self.value(value_node, key)
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(_PREFIX)
        line = node.start_mark.line + 1
        if kind == "str":
            return text
        if kind not in _SCALARS or not re.fullmatch(_SCALARS[kind], text):
            raise self._error(f"expected plain text or a number, got {shorten(node.tag)} {shorten(text)!r}", line, path)
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text)
                case _:
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError as error:  # Python refuses whole numbers of thousands of digits
            raise self._error(f"expected a number of usual size, got {shorten(text)}", line, path) from error

    def _error(self, message: str, line: int, path: KeyPath) -> ConfigError:
        return ConfigError(message, file=self.file, line=line, key=dotted(path) or None)


def dotted(path: KeyPath) -> str:
    """A key path as people write it: "schedule.milestones.0"."""
    return ".".join(map(str, path))


def shorten(text: str) -> str:
    """`text` for a message: on one line, and not much longer than a line has room for."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: MOST_SHOWN + 1])
    return plain if len(text) <= MOST_SHOWN else f"{plain[:MOST_SHOWN]}... ({len(text)} characters)"
