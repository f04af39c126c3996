"""What is known of convolutions on one GPU: measured candidates by problem, as a file.

    table = load_table("nvidia-h200-fp32")       # a stored table by name, or a file by path
    table.problems[str(problem)].candidates      # fastest first
    table.save(path)

The key of a problem is `str(ConvProblem)`. Times are rounded to five digits in a file; bytes are exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from vdnn.errors import DataError
from vdnn.layers.tensor import MEMORY_ORDERS
from vdnn.memory.costs import Candidate
from vdnn.runtime.config import PRECISIONS
from vdnn.runtime.files import user_path, write_file
from vdnn.runtime.yaml_lines import shorten

STORED = "vdnn.runtime.algorithm_tables"
MOST_BYTES = 2**63 - 1
DIFFERENCE = "launch"
"""How the key of an op ends whose ms are a difference of two times, which may be negative."""
WRITTEN_BY = "python -m vdnn.bench.gpu_algos writes one"
SHIPPED = "it came with vdnn: reinstall vdnn (pip install --force-reinstall --no-deps vdnn)"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of one problem.

    Args:
        candidates: what can be used, fastest first.
        limit_bytes: the memory limit under which some were left out; None if none was for its size.
        left_out: label of what cannot be used, and why.
    """

    candidates: tuple[Candidate, ...]
    limit_bytes: int | None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def serves(self, limit_bytes: int) -> bool:
        """Whether nothing would be added by measuring again under `limit_bytes`."""
        return self.limit_bytes is None or self.limit_bytes >= limit_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal one."""
        rows = [[c.algorithm, c.time_ms, c.workspace_bytes, c.deterministic, c.math] for c in self.candidates]
        return {"candidates": rows, "limit_bytes": self.limit_bytes, "left_out": dict(self.left_out)}

    @classmethod
    def from_json(cls, data: Any) -> Measured:
        """What `to_json` described; ValueError for all else, times and bytes that none can be among them."""
        limit = _value(data, "limit_bytes")
        left_out = {key: _text(why, f"left_out, {key}") for key, why in _object(data, "left_out").items()}
        rows = tuple(_candidate(row) for row in _list(_value(data, "candidates"), "candidates"))
        return cls(rows, None if limit is None else _nbytes(limit, "limit_bytes"), left_out)


@dataclass(slots=True)
class AlgorithmTable:
    """Problems measured under the same `facts`: gpu, driver, cudnn, layout, precision, and what else there is.

    Args:
        ops: ms of other ops, by keys of the cuda backend's own.
    """

    facts: Mapping[str, Any]
    problems: dict[str, Measured] = field(default_factory=dict)
    ops: dict[str, float] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """ "fp32", "tf32", "bf16" or "fp16"."""
        return str(self.facts["precision"])

    @property
    def layout(self) -> str:
        """ "NCHW", "NHWC" or "CHWN"."""
        return str(self.facts.get("layout", "NCHW"))

    @property
    def source(self) -> str:
        """Where its times come from, in words."""
        return f"measured on {self.facts['gpu']}, cuDNN {version_text(int(self.facts['cudnn']))}"

    def save(self, path: Path) -> None:
        """Write the table over what is there, whole or not at all; ConfigError or VdnnError if it cannot be written."""
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(found.to_json())}" for key, found in self._rounded().items())
        times = ",\n".join(f"{json.dumps(key)}: {time_ms:.5g}" for key, time_ms in sorted(self.ops.items()))
        ops = f',\n"ops": {{\n{times}\n}}' if times else ""
        write_file(path, f'{{"facts": {json.dumps(self.facts)},\n"problems": {{\n{rows}\n}}{ops}}}\n'.encode())

    def _rounded(self) -> dict[str, Measured]:
        found = {}
        for key, row in sorted(self.problems.items()):
            candidates = (
                Candidate(c.algorithm, float(f"{c.time_ms:.5g}"), c.workspace_bytes, c.deterministic, c.math)
                for c in row.candidates
            )
            found[key] = Measured(tuple(candidates), row.limit_bytes, row.left_out)
        return found


def _time_ms(value: Any, name: str) -> float:
    """ms that a kernel can take; a difference of two times only has to be finite."""
    found = _number(value, name)
    if found <= 0 and name.rpartition(" ")[2] != DIFFERENCE:
        raise ValueError(f"{name}: expected a time above 0 ms, got {found:g}")
    return found


def _nbytes(value: Any, name: str) -> int:
    found = _number(value, name)
    if found != int(found) or not 0 <= int(value) <= MOST_BYTES:
        raise ValueError(f"{name}: expected bytes from 0 to 2^63 - 1, got {found:g}")
    return int(value)


def _number(value: Any, name: str) -> float:
    """The value as a float; ValueError for what is no number, NaN, or beyond what a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name}: expected a finite number, got {found}")
    return found


def _candidate(row: Any) -> Candidate:
    """[algorithm, ms, bytes of workspace, whether deterministic, precision]."""
    if not isinstance(row, list) or len(row) != 5:
        raise _wrong("candidates", "lists of algorithm, ms, bytes, deterministic and precision", row)
    algorithm = _text(row[0], "the name of an algorithm")
    deterministic = row[3]
    if not isinstance(deterministic, bool):
        raise _wrong(f"{algorithm}: deterministic", "true or false", deterministic)
    math_name = _one_of(PRECISIONS, row[4], f"{algorithm}: precision")
    return Candidate(algorithm, _time_ms(row[1], algorithm), _nbytes(row[2], algorithm), deterministic, math_name)


def _check_facts(facts: Mapping[str, Any]) -> None:
    """ValueError for what vdnn reads of the facts of a table and cannot be."""
    if not _text(_value(facts, "gpu"), "gpu"):
        raise _wrong("gpu", "the name of a GPU", facts["gpu"])
    cudnn = _value(facts, "cudnn")
    if isinstance(cudnn, bool) or not isinstance(cudnn, int) or cudnn <= 0:
        raise _wrong("cudnn", "a version such as 91900", cudnn)
    _one_of(PRECISIONS, _value(facts, "precision"), "precision")
    _one_of(MEMORY_ORDERS, facts.get("layout", "NCHW"), "layout")


def _value(data: Any, key: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, which has '{key}', got {_shown(data)}")
    if key not in data:
        raise ValueError(f"there is no '{key}'")
    return data[key]


def _object(data: Any, key: str) -> Mapping[str, Any]:
    value = _value(data, key)
    if not isinstance(value, dict):
        raise _wrong(key, "an object", value)
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(name, "a list", value)
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _one_of(known: Iterable[str], value: Any, name: str) -> str:
    names = list(known)
    if value not in names:
        raise _wrong(name, f"{', '.join(names[:-1])} or {names[-1]}", value)
    return str(value)


def _wrong(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    """As the file has it, in at most a line."""
    return shorten(json.dumps(value, ensure_ascii=False))


def read_table(text: str, name: str, advice: str = WRITTEN_BY) -> AlgorithmTable:
    """The table in the content of the file `name`; DataError with `advice` if it is none, or has what none can have."""
    place = ""
    try:
        data = json.loads(text)
        facts = _object(data, "facts")
        place = "facts: "
        _check_facts(facts)
        place = ""
        problems = {}
        for key, row in _object(data, "problems").items():
            place = f"problem '{key}': "
            problems[key] = Measured.from_json(row)
        place = ""
        times = _object(data, "ops") if "ops" in data else {}
        place = "ops: "
        return AlgorithmTable(facts, problems, {key: _time_ms(time, key) for key, time in times.items()})
    except (ValueError, RecursionError) as error:
        words = "objects within objects without end" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"'{name}' is no table of algorithms: {place}{words}; {advice}") from error


def stored_names() -> list[str]:
    """Names of the tables that come with vdnn."""
    return sorted(Path(f.name).stem for f in resources.files(STORED).iterdir() if f.name.endswith(".json"))


def load_table(name: str) -> AlgorithmTable:
    """A stored table by name, or one from a .json file by path; DataError if there is none or it is damaged."""
    if name.endswith(".json"):
        return _load(user_path(name), name, WRITTEN_BY)
    if name not in stored_names():
        known = ", ".join(stored_names()) or "none"
        raise DataError(f"there is no stored table '{name}', stored: {known}; a path must end in .json")
    file = resources.files(STORED) / f"{name}.json"
    return _load(file, str(file), SHIPPED)


def _load(file: Traversable, name: str, advice: str) -> AlgorithmTable:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"table '{name}' cannot be read: {error.strerror or error}; {advice}") from error
    return read_table(content.decode(errors="replace"), name, advice)


def version_text(cudnn: int) -> str:
    """91901 → "9.19.1"."""
    return f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
