"""The study's table of convolutions: CONV1 to CONV12 by layout and implementation.

table = layouts_table(read_rows("layouts"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vdnn.bench.study_cases import (
    CHWN,
    NCHW,
    NHWC,
    ConvCase,
    better_in_chwn,
    convolutions,
    thresholds,
)
from vdnn.bench.study_files import Row, Rows
from vdnn.bench.study_table import TIMES, Column, StudyTable, Value, table_of

MM = "IMPLICIT_GEMM"
FFT = ("FFT", "FFT_TILING")
RULE_OF = "Titan Black"
RULE = "rule"
"""The case of the row with the thresholds found on the GPU that was measured."""
AS_FAST = 1.0
"""CHWN counts as faster from this ratio on."""

SPEEDS: Mapping[str, tuple[str, str, str, Callable[[str], bool]]] = {
    "nchw": ("cuDNN NCHW", "fp32", NCHW, lambda method: True),
    "nchw_mm": ("cuDNN MM", "fp32", NCHW, lambda method: method == MM),
    "nchw_fft": ("cuDNN FFT", "fp32", NCHW, lambda method: method in FFT),
    "chwn": ("CHWN", "fp32", CHWN, lambda method: True),
    "nhwc": ("NHWC fp32", "fp32", NHWC, lambda method: True),
    "nhwc_tf32": ("NHWC TF32", "tf32", NHWC, lambda method: True),
    "nhwc_bf16": ("NHWC bf16", "bf16", NHWC, lambda method: True),
    "chwn_bf16": ("CHWN bf16", "bf16", CHWN, lambda method: True),
}
"""Column → heading, precision, layout, and which algorithms count."""

COLUMNS = (
    Column("layer", "layer"),
    Column("shape", "x (N C H W), filters"),
    Column("network", "network"),
    Column("evidence", "evidence"),
    Column("direction", "direction"),
    *(Column(key, heading, "TFLOP/s") for key, (heading, *_) in SPEEDS.items()),
    Column("chwn_over_nchw", "speedup of CHWN over NCHW", TIMES),
    Column("chwn_over_mm", "over MM", TIMES),
    Column("study", "better in the study"),
    Column("rule", "rule"),
    Column("rule_here", "rule, calibrated here"),
    Column("fp32", "better here in fp32"),
    Column("fastest", "fastest here"),
    Column("algorithm", "its algorithm"),
)


def layouts_table(measured: Rows) -> StudyTable:
    """The table; columns without a measurement stay empty."""
    rows = [_row(case, direction, measured) for case in convolutions().values() for direction in case.directions]
    return table_of("layouts", measured.machine, COLUMNS, rows, _ours(rows), _remarks(rows))


def _row(case: ConvCase, direction: str, measured: Rows) -> dict[str, Value]:
    rule = thresholds()[RULE_OF]
    found: dict[str, Value] = {
        "layer": case.name,
        "shape": case.words,
        "network": case.network,
        "evidence": case.evidence,
        "direction": direction,
    }
    if direction == "forward":  # the study is of forward alone
        found["study"] = CHWN if case.name in better_in_chwn()[0] else NCHW
        found["rule"] = case.rule(rule["channels"], rule["images"])
        for row in measured.where(case=RULE):
            found["rule_here"] = case.rule(int(row["channels"]), int(row["images"]))
    best: dict[str, Row] = {}
    for key, (_, precision, layout, counts) in SPEEDS.items():
        rows = measured.where(case=case.name, direction=direction, precision=precision, layout=layout)
        timed = [row for row in rows if row.get("time_us") and counts(str(row["method"]))]
        if timed:
            best[key] = min(timed, key=lambda row: float(row["time_us"]))
            found[key] = case.operations / float(best[key]["time_us"]) / 1e6
    if "chwn" in best and "nchw" in best:
        ratio = float(best["nchw"]["time_us"]) / float(best["chwn"]["time_us"])
        found["chwn_over_nchw"], found["fp32"] = ratio, CHWN if ratio >= AS_FAST else NCHW
        if "nchw_mm" in best:
            found["chwn_over_mm"] = float(best["nchw_mm"]["time_us"]) / float(best["chwn"]["time_us"])
    if best:
        first = min(best, key=lambda key: float(best[key]["time_us"]))
        found["fastest"], found["algorithm"] = SPEEDS[first][0], str(best[first]["method"])
    return found


def _forward(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
    return [row for row in rows if row["direction"] == "forward" and "fp32" in row]


def _ours(rows: list[dict[str, Value]]) -> dict[str, str]:
    """What this GPU says to the claims."""
    forward = _forward(rows)
    if not forward:
        return {}
    found = {}
    for key, layout in (("chwn", CHWN), ("nchw", NCHW)):
        asked = [row for row in forward if row["study"] == layout]
        agreed = [str(row["layer"]) for row in asked if row["fp32"] == layout]
        found[key] = f"{len(agreed)} of {len(asked)} in fp32" + (f": {', '.join(agreed)}" if agreed else "")
    right = sum(row["rule"] == row["fp32"] for row in forward)
    found["rule"] = f"picks the faster of CHWN and NCHW in fp32 for {right} of {len(forward)}"
    if known := [row for row in forward if "rule_here" in row]:
        right = sum(row["rule_here"] == row["fp32"] for row in known)
        found["rule"] += f"; calibrated here, for {right} of {len(known)}"
    top = max(forward, key=_effect)
    found["effect"] = f"up to {_effect(top):.2f}x in fp32, {top['layer']}, {top['fp32']} the faster"
    return found


def _effect(row: Mapping[str, Value]) -> float:
    ratio = float(row["chwn_over_nchw"])
    return max(ratio, 1 / ratio)


def _remarks(rows: list[dict[str, Value]]) -> list[str]:
    """What tensor cores do to the rule."""
    forward = [row for row in _forward(rows) if "nhwc_tf32" in row or "nhwc_bf16" in row]
    found = []
    for direction in dict.fromkeys(str(row["direction"]) for row in rows):
        if missing := [str(r["layer"]) for r in rows if r["direction"] == direction and "fastest" not in r]:
            found.append(f"Not measured, {direction}: {', '.join(missing)}.")
    for key, name in (("nhwc_tf32", "TF32"), ("nhwc_bf16", "bf16")):
        both = [row for row in forward if key in row]
        slower = [str(r["layer"]) for r in both if float(r[key]) < max(float(r["chwn"]), float(r["nchw"]))]
        if both:
            rest = f"; not on {', '.join(slower)}" if slower else ""
            found.append(
                f"Forward, NHWC with tensor cores in {name} is faster than both layouts in fp32 on "
                f"{len(both) - len(slower)} of {len(both)} layers{rest}."
            )
    return found
