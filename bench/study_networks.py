"""The study's table of networks: whole training steps by layout and precision, predicted and measured.

table = networks_table(read_rows("networks"))
measure(recorder, deadline, print)                    # on this GPU
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from vdnn.bench.command import reason
from vdnn.bench.peers_cases import Case
from vdnn.bench.study_cases import NetworkCase, networks
from vdnn.bench.study_files import Recorder, Row, Rows
from vdnn.bench.study_table import TIMES, Column, StudyTable, Value, table_of
from vdnn.errors import BackendUnavailable, VdnnError

PRECISIONS = ("fp32", "tf32", "bf16")
SINGLE = ("nchw", "nhwc", "chwn")
"""Values of memory.layout that are one layout for all layers."""
CHOSEN = ("study", "auto")
"""Those that choose layer by layer."""
SECONDS = 0.4
"""Of timed steps of each case, about."""
TOLERANCE = 0.05
"""By which a prediction may be off."""
NOISE = 0.02
"""By which auto may be slower than the best single layout."""

LOSS = "loss"
"""Of a row: how far the first loss of any layout is from that in NCHW, as a share of it; no column."""

COLUMNS = (
    Column("network", "network"),
    Column("batch", "batch"),
    Column("evidence", "evidence"),
    Column("precision", "precision"),
    *(Column(layout, layout, "ms") for layout in (*SINGLE, *CHOSEN)),
    Column("best", "best single layout"),
    Column("auto_over_best", "speedup of auto over it", TIMES),
    Column("auto_over_nchw", "over nchw", TIMES),
    Column("predicted", "auto predicted", "ms"),
    Column("error", "prediction off", "%"),
    Column("worst", "farthest prediction", "%"),
    Column("note", "ours is another network"),
)


def networks_table(measured: Rows) -> StudyTable:
    """The table; columns without a measurement stay empty."""
    rows = [_row(case, precision, measured) for case in networks().values() for precision in PRECISIONS]
    return table_of("networks", measured.machine, COLUMNS, rows, _ours(rows), _remarks(rows))


def _row(case: NetworkCase, precision: str, measured: Rows) -> dict[str, Value]:
    found: dict[str, Value] = {
        "network": case.name,
        "batch": str(case.batch),
        "evidence": case.evidence,
        "precision": precision,
        "note": case.note,
    }
    steps: dict[str, Row] = {}
    for layout in (*SINGLE, *CHOSEN):
        rows = measured.where(case=case.name, precision=precision, layout=layout)
        if rows and rows[-1].get("step_ms"):
            steps[layout] = rows[-1]
            found[layout] = float(rows[-1]["step_ms"])
    single = [layout for layout in SINGLE if layout in steps]
    if len(single) > 1:
        best = min(single, key=lambda layout: float(found[layout]))
        found["best"] = best
        if "auto" in steps:
            found["auto_over_best"] = float(found[best]) / float(found["auto"])
    if "auto" in steps:
        found["predicted"] = float(steps["auto"]["predicted_ms"])
        found["error"] = _error(steps["auto"])
        if "nchw" in steps:
            found["auto_over_nchw"] = float(found["nchw"]) / float(found["auto"])
    losses = {layout: float(row["losses"][0]) for layout, row in steps.items() if row.get("losses")}
    if "nchw" in losses and len(losses) > 1:
        found[LOSS] = max(abs(loss / losses["nchw"] - 1) for loss in losses.values())
    if steps:
        found["worst"] = max((_error(row) for row in steps.values()), key=abs)
    return found


def _error(row: Row) -> float:
    """Of a predicted step, as a share of the measured one."""
    return float(row["predicted_ms"]) / float(row["step_ms"]) - 1


def _ours(rows: list[dict[str, Value]]) -> dict[str, str]:
    ratios = [row for row in rows if "auto_over_nchw" in row and row["precision"] == "fp32"]
    if not ratios:
        return {}
    top = max(ratios, key=lambda row: float(row["auto_over_nchw"]))
    average, most = mean(float(row["auto_over_nchw"]) for row in ratios), float(top["auto_over_nchw"])
    return {"network": f"auto over nchw in fp32: up to {most:.2f}x ({top['network']}), {average:.2f}x on average"}


def _remarks(rows: list[dict[str, Value]]) -> list[str]:
    found = []
    if missing := [_name(row) for row in rows if "auto" not in row]:
        found.append(f"Not measured in auto, or not at all: {', '.join(missing)}.")
    if asked := [row for row in rows if "auto_over_best" in row]:
        slower = [_name(row) for row in asked if float(row["auto_over_best"]) < 1 - NOISE]
        rest = f"; slower for {', '.join(slower)}" if slower else ""
        found.append(
            f"auto is not slower than the best single layout, within {NOISE:.0%}, in {len(asked) - len(slower)} of "
            f"{len(asked)} cases{rest}."
        )
    if asked := [row for row in rows if "error" in row]:
        off = [_name(row) for row in asked if abs(float(row["error"])) > TOLERANCE]
        rest = f"; farther off for {', '.join(off)}" if off else ""
        found.append(
            f"auto's step is predicted within {TOLERANCE:.0%} in {len(asked) - len(off)} of {len(asked)}{rest}."
        )
    for precision in PRECISIONS:
        if asked := [row for row in rows if LOSS in row and row["precision"] == precision]:
            top = max(asked, key=lambda row: float(row[LOSS]))
            found.append(
                f"First losses in {precision} differ from those in nchw by {float(top[LOSS]):.1e} of them at most "
                f"({top['network']})."
            )
    return found


def _name(row: Mapping[str, Value]) -> str:
    return f"{row['network']} in {row['precision']}"


def options_of(case: NetworkCase, layout: str) -> tuple[str, ...]:
    """Overrides of the packaged configuration."""
    return (*(f"network.{key}={value}" for key, value in case.options.items()), f"memory.layout={layout}")


def measure(
    recorder: Recorder,
    deadline: float,
    note: Callable[[str], None] = print,
    device: str = "cuda",
    seconds: float = SECONDS,
) -> int:
    """Measure what is missing until `deadline` (time.monotonic); how many cases are left."""
    from vdnn.bench import peers_ours  # brings in the trainer, which the table does not need

    left = 0
    for case in networks().values():
        for precision in PRECISIONS:
            for layout in (*SINGLE, *CHOSEN):
                key = {"case": case.name, "precision": precision, "layout": layout}
                if recorder.has(**key):
                    continue
                if time.monotonic() > deadline:
                    left += 1
                    continue
                work = Case(
                    *(case.network, case.batch, precision, "ours"),
                    device=device,
                    ours=options_of(case, layout),
                    seconds=seconds,
                )
                row: dict[str, Any] = {**key, "network": case.network, "batch": case.batch}
                try:
                    found = peers_ours.measure(work)
                except BackendUnavailable:
                    raise
                except (VdnnError, RuntimeError, MemoryError) as error:  # the others are still worth running
                    recorder.add({**row, "step_ms": None, "failed": reason(error)})
                    note(f"{case.name} {precision} {layout}: failed: {error}")
                    continue
                recorder.add({**row, **{name: found[name] for name in KEPT}})
                note(
                    f"{case.name:7} {precision} {layout:5} {found['step_ms']:9.3f} ms, predicted "
                    f"{found['predicted_ms']:9.3f}, loss {found['losses'][0]:.4f}, ready in {found['prepare_s']:.1f} s"
                )
    return left


KEPT = (
    *("step_ms", "low_ms", "high_ms", "wall_ms", "predicted_ms", "steps", "timed", "losses", "prepare_s"),
    *("planned_bytes", "computed_precision", "policy", "algorithms", "device"),
)
"""What is kept of what vdnn.bench.peers_ours finds."""
