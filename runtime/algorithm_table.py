"""What is known of convolutions on one GPU: measured candidates by problem, as a file.

    table = load_table("h200-fp32")              # a stored table by name, or a file by path
    table.problems[str(problem)].candidates      # fastest first
    table.save(path)

The key of a problem is `str(ConvProblem)`. Times are rounded to five digits in a file; bytes are exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from vdnn.errors import DataError
from vdnn.memory.costs import Candidate
from vdnn.runtime.files import user_path, write_file

STORED = "vdnn.runtime.algorithm_tables"
MOST_BYTES = 2**63 - 1
DIFFERENCE = "launch"
"""How the key of an op ends whose ms are a difference of two times, which may be negative."""


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
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """What `to_json` described; ValueError for times and bytes that none can be."""
        rows = []
        for algorithm, time, nbytes, deterministic, precision in data["candidates"]:
            time_ms, workspace_bytes = _time_ms(time, str(algorithm)), _nbytes(nbytes, str(algorithm))
            rows.append(Candidate(str(algorithm), time_ms, workspace_bytes, bool(deterministic), str(precision)))
        limit = data["limit_bytes"]
        return cls(tuple(rows), None if limit is None else _nbytes(limit, "limit_bytes"), dict(data["left_out"]))


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
        """ "NCHW" or "NHWC"."""
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
        raise ValueError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name}: expected a finite number, got {found}")
    return found


def read_table(text: str, name: str) -> AlgorithmTable:
    """The table in the content of the file `name`; DataError if it is none, or has times or bytes that none can be."""
    try:
        data = json.loads(text)
        facts = dict(data["facts"])
        problems = {key: Measured.from_json(row) for key, row in data["problems"].items()}
        ops = {str(key): _time_ms(time, str(key)) for key, time in data.get("ops", {}).items()}
        table = AlgorithmTable(facts, problems, ops)
        _ = table.source, table.precision  # whoever shows the table needs both
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"'{name}' is no table of algorithms ({type(error).__name__}: {error}); "
            "python -m vdnn.bench.gpu_algos writes one"
        ) from error
    return table


def stored_names() -> list[str]:
    """Names of the tables that come with vdnn."""
    return sorted(Path(f.name).stem for f in resources.files(STORED).iterdir() if f.name.endswith(".json"))


def load_table(name: str) -> AlgorithmTable:
    """A stored table by name, or one from a .json file by path; DataError if there is none or it is damaged."""
    if name.endswith(".json"):
        path = user_path(name)
        try:
            return read_table(path.read_text(encoding="utf-8", errors="replace"), name)
        except OSError as error:
            raise DataError(f"table '{name}' cannot be read: {error.strerror or error}") from error
    if name not in stored_names():
        known = ", ".join(stored_names()) or "none"
        raise DataError(f"there is no stored table '{name}', stored: {known}; a path must end in .json")
    return read_table((resources.files(STORED) / f"{name}.json").read_text(encoding="utf-8"), name)


def version_text(cudnn: int) -> str:
    """91901 → "9.19.1"."""
    return f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
