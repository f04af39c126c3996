"""The results of vdnn.bench.peers as Markdown: a line for each network and precision, then every case.

    print(markdown(results))            # as peers.json holds them: {"case": {...}, "step_ms": ..., ...} each

Compared are programs under the same limit in the same run: vdnn with the fastest PyTorch program there is. "images/s
ratio" above 1 means that vdnn is faster, "memory ratio" below 1 that it reserves less. "at that speed" is vdnn's
program with least memory of those which are as fast as PyTorch's, whatever limit they were given, and its ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from vdnn.bench.peers_cases import Case
from vdnn.units import GIB, format_bytes

Result = Mapping[str, Any]
Group = tuple[str, int, str, int | None, str]
"""Network, images a step, precision, limit, device."""
GROUP = ("network", "precision", "limit")
SUMMARY = (
    *(*GROUP, "PyTorch", "ms", "vdnn ms", "images/s ratio", "reserved GiB", "vdnn GiB", "memory ratio"),
    *("at that speed", "ms", "GiB", "ratio"),
)
CASES = (*GROUP, "program", "ms", "drift", "predicted", "images/s", "GiB of tensors", "reserved", "held", "card")
"""Columns."""


@dataclass(frozen=True, slots=True)
class Line:
    """A program in a group, all of its measurements together.

    Args:
        step_ms: the mean of the medians; None if it failed, and then `failed` says why.
        drift: the largest difference of a median from that mean, relative.
        predicted_ms: by vdnn before the first step; None of PyTorch.
        gib: bytes by what they are, in GiB.
    """

    program: str
    ours: bool
    batch: int
    step_ms: float | None
    drift: float
    predicted_ms: float | None
    gib: Mapping[str, float]
    failed: str
    machines: frozenset[str]

    @property
    def images_s(self) -> float | None:
        """Images a second."""
        return None if self.step_ms is None else 1000 * self.batch / self.step_ms

    @property
    def memory_gib(self) -> float | None:
        """What it reserves on the card for tensors and workspace, the CUDA context not counted: vdnn's slab, PyTorch's
        allocator; all that its process holds where that is unknown."""
        names = ("planned_bytes" if self.ours else "reserved_bytes", "held_bytes")
        return next((self.gib[name] for name in names if self.gib.get(name)), None)


def grouped(results: Iterable[Result]) -> dict[Group, list[Line]]:
    """Lines by group, both in the order in which they come."""
    cases: dict[Group, dict[str, list[Result]]] = {}
    for result in results:
        case = Case.from_json(result["case"])
        group = (case.network, case.batch, case.precision, case.parsed.limit_bytes, case.device)
        cases.setdefault(group, {}).setdefault(case.program, []).append(result)
    return {group: [_line(name, rows) for name, rows in found.items()] for group, found in cases.items()}


def _line(program: str, results: Sequence[Result]) -> Line:
    case = Case.from_json(results[0]["case"])
    good = [result for result in results if "failed" not in result]
    times = [result["step_ms"] for result in good]
    step_ms = mean(times) if times else None
    drift = max(abs(time / step_ms - 1) for time in times) if step_ms else 0.0
    names = {name for result in good for name, value in result.items() if name.endswith("_bytes") and value is not None}
    gib = {name: max(result.get(name) or 0 for result in good) / GIB for name in names}
    predicted = next((result["predicted_ms"] for result in good if "predicted_ms" in result), None)
    failed = "" if good else str(results[0]["failed"])
    machines = frozenset(str(result.get("machine")) for result in results)
    return Line(program, case.is_ours, case.batch, step_ms, drift, predicted, gib, failed, machines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """vdnn beside the fastest PyTorch program of a group; ratios are None where one of them is missing."""

    ours: Line | None
    theirs: Line | None

    @property
    def speed(self) -> float | None:
        """Images a second of vdnn over PyTorch's."""
        if self.ours is None or self.theirs is None or not self.ours.step_ms or not self.theirs.step_ms:
            return None
        return self.theirs.step_ms / self.ours.step_ms

    @property
    def memory(self) -> float | None:
        """Memory that vdnn takes over PyTorch's."""
        if self.ours is None or self.theirs is None or not self.ours.memory_gib or not self.theirs.memory_gib:
            return None
        return self.ours.memory_gib / self.theirs.memory_gib


def leanest(groups: Mapping[Group, Sequence[Line]], group: Group) -> Line | None:
    """The line of vdnn with least memory, under any limit, of those as fast as the fastest PyTorch program of `group`;
    None if there is none."""
    theirs = verdict(groups[group]).theirs
    if theirs is None or theirs.step_ms is None:
        return None
    network, batch, precision, _, device = group
    found = [
        line
        for (other, size, kind, _, where), lines in groups.items()
        if (other, size, kind, where) == (network, batch, precision, device)
        for line in lines
        if line.ours and line.memory_gib and line.step_ms is not None and line.step_ms <= theirs.step_ms
    ]
    return min(found, key=lambda line: line.memory_gib or 0.0, default=None)


def verdict(lines: Sequence[Line]) -> Verdict:
    """The best of either side; a side of which nothing ran is None."""

    def best(ours: bool) -> Line | None:
        ran = [line for line in lines if line.ours == ours and line.step_ms is not None]
        return min(ran, key=lambda line: line.step_ms or 0.0, default=None)

    return Verdict(best(True), best(False))


def markdown(results: Iterable[Result]) -> str:
    """Both tables, with the machines and libraries below."""
    results = list(results)
    groups = grouped(results)
    text = [
        "## vdnn and the fastest PyTorch program",
        "",
        *_summary(groups),
        "",
        "## Every case",
        "",
        *_cases(groups),
        "",
    ]
    text += [f"- {note}" for note in _notes(results)]
    return "\n".join(text) + "\n"


def _summary(groups: Mapping[Group, Sequence[Line]]) -> list[str]:
    rows = []
    for group, lines in groups.items():
        found = verdict(lines)
        times = [_number(line.step_ms if line else None, ".2f") for line in (found.theirs, found.ours)]
        sizes = [_number(line.memory_gib if line else None, ".1f") for line in (found.theirs, found.ours)]
        name = found.theirs.program if found.theirs else "none ran"
        ratios = _number(found.speed, ".2f"), _number(found.memory, ".2f")
        rows.append((*_names(group), name, *times, ratios[0], *sizes, ratios[1], *_lean(leanest(groups, group), found)))
    return _table(SUMMARY, rows)


def _lean(line: Line | None, found: Verdict) -> tuple[str, ...]:
    if line is None:
        return ("",) * 4
    ratio = Verdict(line, found.theirs).memory
    return line.program, _number(line.step_ms, ".2f"), _number(line.memory_gib, ".1f"), _number(ratio, ".2f")


def _cases(groups: Mapping[Group, Sequence[Line]]) -> list[str]:
    rows = []
    for group, lines in groups.items():
        for line in lines:
            if line.step_ms is None:
                rows.append((*_names(group), line.program, line.failed[:90].replace("|", "/"), *[""] * 7))
                continue
            tensors, reserve = ("peak_bytes", "planned_bytes") if line.ours else ("allocated_bytes", "reserved_bytes")
            sizes = (_number(line.gib.get(name), ".2f") for name in (tensors, reserve, "held_bytes", "card_peak_bytes"))
            drift = f"{100 * line.drift:.1f}%" if line.drift else ""
            rates = _number(line.predicted_ms, ".2f"), _number(line.images_s, ",.0f")
            rows.append((*_names(group), line.program, f"{line.step_ms:.2f}", drift, *rates, *sizes))
    return _table(CASES, rows)


def _names(group: Group) -> tuple[str, str, str]:
    network, batch, precision, limit, device = group
    where = "" if device == "cuda" else f" on {device}"
    return f"{network}({batch}){where}", precision, "" if limit is None else format_bytes(limit)


def _notes(results: Sequence[Result]) -> list[str]:
    machines = sorted({str(result.get("machine")) for result in results})
    libraries = sorted({str(result["library"]) for result in results if "library" in result})
    several = " (several: compare within one)" if len(machines) > 1 else ""
    return [
        f"machine{several}: {'; '.join(machines)}",
        f"libraries: {'; '.join(libraries)}",
        "ms: median of whole training steps (forward, loss, backward, update) on random data that lies on the device; "
        "drift: of two measurements with others in between, from their mean",
        "PyTorch: channels_last; of tensors and reserved at most, by its allocator; bf16 is autocast; accumK computes "
        "something else where there is batch normalisation, in vdnn too",
        "vdnn: predicted ms before the first step; live bytes at most, and the planned slab",
        "held: at the end, by the driver or NVML, CUDA context included; card: most that was in use on it, by NVML "
        "from outside, the search for algorithms included",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
