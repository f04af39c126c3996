"""The study's table of pools: POOL1 to POOL10, the libraries' ways rebuilt, cuDNN and ours in three layouts.

table = pooling_table(read_rows("pooling"))
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from vdnn.bench.study_cases import CHWN, LAYOUTS, NCHW, NHWC, PoolCase, pools
from vdnn.bench.study_files import Row, Rows
from vdnn.bench.study_table import TIMES, Column, StudyTable, Value, table_of

CAFFE, CONVNET, CUDNN, OURS = "caffe", "convnet", "cudnn", "ours"
"""Methods; a row of ours says the tile of outputs a thread besides."""
DIRECTIONS = ("forward", "backward")
TILE, INDICES = "tile", "indices"
BYTES, SHARE = "GB/s", "% of copy"
BEYOND_CACHE = 64 * 2**20
"""Operands larger than this do not fit in the L2 cache of an H200, of 60 MiB."""

SPEEDS: Mapping[str, tuple[str, str, str]] = {
    "caffe": ("one thread an output, NCHW", CAFFE, NCHW),
    "convnet": ("convnet, CHWN", CONVNET, CHWN),
    "cudnn_nchw": ("cuDNN NCHW", CUDNN, NCHW),
    "cudnn_nhwc": ("cuDNN NHWC", CUDNN, NHWC),
    **{f"ours_{layout.lower()}": (f"ours {layout}", OURS, layout) for layout in LAYOUTS},
}
"""Column → heading, method, layout."""

COLUMNS = (
    Column("layer", "layer"),
    Column("shape", "x (N C H W), window"),
    Column("outputs", "y"),
    Column("network", "network"),
    Column("evidence", "evidence"),
    Column("direction", "direction"),
    *(Column(key, heading, BYTES) for key, (heading, *_) in SPEEDS.items()),
    *(Column(f"share_{layout.lower()}", f"ours {layout}", SHARE) for layout in LAYOUTS),
    Column("tile", "tile in CHWN"),
    Column("over_caffe", "speedup of ours in CHWN over one thread an output", TIMES),
    Column("over_convnet", "over convnet", TIMES),
    Column("over_cudnn", "of our best over cuDNN's best", TIMES),
    Column("fastest", "fastest here"),
)


def pooling_table(measured: Rows) -> StudyTable:
    """The table; columns without a measurement stay empty."""
    rows = [_row(case, direction, measured) for case in pools().values() for direction in DIRECTIONS]
    return table_of("pooling", measured.machine, COLUMNS, rows, _ours(rows), _remarks(rows, measured))


def _row(case: PoolCase, direction: str, measured: Rows) -> dict[str, Value]:
    found: dict[str, Value] = {
        "layer": case.name,
        "shape": case.words,
        "outputs": f"{case.y[2]}x{case.y[3]}",
        "network": case.network,
        "evidence": case.evidence,
        "direction": direction,
    }
    if case.whole_windows != case.y:
        found["outputs"] = f"{found['outputs']} (cuDNN {case.whole_windows[2]}x{case.whole_windows[3]})"
    best: dict[str, Row] = {}
    for key, (_, method, layout) in SPEEDS.items():
        # backward by the places of winners, as training does it; from the values it moves other bytes
        more = {"variant": INDICES} if (method, direction) == (OURS, "backward") else {}
        row = measured.one(case=case.name, direction=direction, dtype="float32", method=method, layout=layout, **more)
        if row is not None:
            best[key], found[key] = row, float(row["gbps"])
            if method == OURS:
                found[f"share_{layout.lower()}"] = float(row["share"])
    if "ours_chwn" in best:
        found["tile"] = str(best["ours_chwn"].get(TILE, ""))
        for name in (CAFFE, CONVNET):
            if name in best:
                found[f"over_{name}"] = float(best[name]["time_us"]) / float(best["ours_chwn"]["time_us"])
    ours, theirs = (_least(best, start) for start in (OURS, CUDNN))
    if ours and theirs:
        found["over_cudnn"] = theirs / ours
    if best:
        found["fastest"] = SPEEDS[min(best, key=lambda key: float(best[key]["time_us"]))][0]
    return found


def _least(best: Mapping[str, Row], start: str) -> float | None:
    times = [float(row["time_us"]) for key, row in best.items() if key.startswith(start)]
    return min(times) if times else None


def _ours(rows: list[dict[str, Value]]) -> dict[str, str]:
    """What this GPU says to the claims, of forward."""
    forward = [row for row in rows if row["direction"] == "forward"]
    found = {}
    if ratios := [row for row in forward if "over_caffe" in row]:
        top = max(ratios, key=lambda row: float(row["over_caffe"]))
        words = f"up to {float(top['over_caffe']):.1f}x ({top['layer']}) of one thread an output"
        if both := [row for row in ratios if "cudnn_nchw" in row]:
            best = max(both, key=_over_cudnn_nchw)
            words += f", up to {_over_cudnn_nchw(best):.1f}x in GB/s of cuDNN in NCHW ({best['layer']})"
        found["layout"] = words
    if gains := [float(row["over_convnet"]) - 1 for row in forward if "over_convnet" in row]:
        found["tiles"] = f"{mean(gains):+.0%}, from {min(gains):+.0%} to {max(gains):+.0%}"
    if shares := [row for row in forward if "share_chwn" in row]:
        top = max(shares, key=lambda row: float(row["share_chwn"]))
        found["bandwidth"] = f"{float(top['ours_chwn']):,.0f} GB/s, {float(top['share_chwn']):.0%} ({top['layer']})"
    return found


def _over_cudnn_nchw(row: Mapping[str, Value]) -> float:
    return float(row["ours_chwn"]) / float(row["cudnn_nchw"])


def _remarks(rows: list[dict[str, Value]], measured: Rows) -> list[str]:
    found = []
    large = {str(row["case"]) for row in measured.rows if row.get("method") == OURS and row["nbytes"] > BEYOND_CACHE}
    shares = [
        (float(row[f"share_{layout.lower()}"]), f"{row['layer']} {row['direction']} {layout}")
        for row in rows
        for layout in LAYOUTS
        if row["layer"] in large and f"share_{layout.lower()}" in row
    ]
    if shares:
        least = min(shares)
        found.append(f"On operands larger than the L2 cache ours reach at least {least[0]:.0%} of a copy ({least[1]}).")
    if both := [row for row in rows if "over_cudnn" in row]:
        slower = [f"{row['layer']} {row['direction']}" for row in both if float(row["over_cudnn"]) < 1]
        rest = f"; slower on {', '.join(slower)}" if slower else ""
        found.append(f"Our best is at least as fast as cuDNN's best on {len(both) - len(slower)} of {len(both)}{rest}.")
    return found
