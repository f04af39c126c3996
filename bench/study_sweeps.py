"""The study's tables of softmax and of layout transforms: a row for every case, a column for every method.

    table = softmax_table(read_rows("softmax"))
    table = transforms_table(read_rows("transforms"))

Their rows come from vdnn.bench.gpu_softmax and vdnn.bench.gpu_transforms. What is no measured number or method of a row
says which case it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vdnn.bench.study_cases import CHWN, NCHW, classifiers, convolutions
from vdnn.bench.study_files import Row, Rows
from vdnn.bench.study_table import TIMES, Column, StudyTable, Value, table_of

METHOD = "method"
TIME, RATE, SHARE = "time_us", "gbps", "share"
NUMBERS = frozenset(
    (METHOD, TIME, RATE, SHARE, "nbytes", "copy_us", "copy_gbps", "bytes", "error", "whole", "captured")
)
"""Keys of a row that are of its measurement, not of its case."""
OURS = ("ours", "fused", "vdnn")
"""How names of our methods begin."""
CAFFE, CUDNN, FUSED = "caffe", "cudnn", "fused"
"""What is in the names of methods."""
LARGE = 256 * 2**20
"""Bytes from which softmax is held against a copy."""
HELD = ("CLASS3", "CLASS4", "CLASS5")
"""Classifiers on which the fused head is held against cuDNN's sequence."""


def is_ours(method: str) -> bool:
    """Whether a method of softmax is ours."""
    return method.startswith(OURS)


def grouped(rows: Iterable[Row]) -> dict[tuple[tuple[str, Value], ...], dict[str, Row]]:
    """By case, in order of appearance, its rows by method; only those that have a time."""
    found: dict[tuple[tuple[str, Value], ...], dict[str, Row]] = {}
    for row in rows:
        if row.get(TIME):
            case = tuple((key, _text(value)) for key, value in row.items() if key not in NUMBERS)
            found.setdefault(case, {})[str(row[METHOD])] = row
    return found


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _columns(groups: Mapping[tuple[tuple[str, Value], ...], Mapping[str, Row]], first: Sequence[str]) -> list[str]:
    keys = dict.fromkeys(key for case in groups for key, _ in case)
    return [*(key for key in first if key in keys), *(key for key in keys if key not in first)]


def softmax_table(measured: Rows) -> StudyTable:
    """CLASS1 to CLASS5 and the sweep; of the study's classifiers alone where nothing is measured."""
    groups = grouped(measured.rows)
    methods = list(dict.fromkeys(method for rows in groups.values() for method in rows))
    known = classifiers()
    rows: list[dict[str, Value]] = []
    for case, by_method in groups.items():
        row: dict[str, Value] = dict(case)
        if row.get("case") in known:
            of = known[str(row["case"])]
            row |= {"network": of.network, "evidence": of.evidence}
        row |= {f"us {method}": float(found[TIME]) for method, found in by_method.items()}
        ours = [row for method, row in by_method.items() if is_ours(method) and not is_whole(method) and row.get(SHARE)]
        if ours:
            best = max(ours, key=lambda found: float(found[SHARE]))
            row |= {RATE: float(best[RATE]), SHARE: float(best[SHARE])}
        rows.append(row | _softmax_ratios(by_method))
    rows += [
        {"case": name, "n": str(of.n), "k": str(of.k), "network": of.network, "evidence": of.evidence}
        for name, of in known.items()
        if not any(row.get("case") == name for row in rows)
    ]
    keys = _columns(groups, ("case", "n", "k"))
    columns = [
        *(Column(key, HEADINGS.get(key, key)) for key in (keys or ("case", "n", "k"))),
        Column("network", "network"),
        Column("evidence", "evidence"),
        *(Column(f"us {method}", method, "µs") for method in methods),
        Column(RATE, "ours", "GB/s"),
        Column(SHARE, "ours", "% of copy"),
        *(Column(key, heading, TIMES) for key, heading in RATIOS.items()),
    ]
    return table_of("softmax", measured.machine, columns, rows, _softmax_claims(rows), _softmax_remarks(rows))


HEADINGS = {"n": "images", "k": "categories", "source": "from", "target": "to"}
RATIOS = {
    "over_caffe": "speedup over five kernels",
    "over_cudnn": "over cuDNN",
    "over_best": "over the best baseline",
    "over_sequence": "of fused over cuDNN's sequence",
}
"""Column → heading, of times of others over the fastest of ours for the same work; the last with loss and gradient."""


def _softmax_ratios(by_method: Mapping[str, Row]) -> dict[str, Value]:
    """Plain softmax against plain softmax, and the whole head against the whole head."""
    times = {method: float(row[TIME]) for method, row in by_method.items()}
    plain = {method: time for method, time in times.items() if not is_whole(method)}
    found: dict[str, Value] = {}
    for key, of, name in (
        ("over_caffe", plain, CAFFE),
        ("over_cudnn", plain, CUDNN),
        ("over_best", plain, ""),
        ("over_sequence", {method: times[method] for method in times if method not in plain}, CUDNN),
    ):
        ours = [time for method, time in of.items() if is_ours(method)]
        others = [time for method, time in of.items() if not is_ours(method) and name in method]
        if ours and others:
            found[key] = min(others) / min(ours)
    return found


def is_whole(method: str) -> bool:
    """Whether a method is of softmax with loss and gradient."""
    return any(word in method for word in ("train", "loss", "grad", "sequence"))


def _softmax_claims(rows: Sequence[Mapping[str, Value]]) -> dict[str, str]:
    found = {}
    if shares := [row for row in rows if SHARE in row]:
        best = max(shares, key=lambda row: float(row[SHARE]))
        found["bandwidth"] = f"{float(best[RATE]):,.0f} GB/s, {float(best[SHARE]):.0%} ({_name(best)})"
    for key, ratio, words in (("ratio", "over_best", "the best baseline"), ("layer", "over_caffe", "five kernels")):
        if known := [row for row in rows if ratio in row]:
            top = max(known, key=lambda row: float(row[ratio]))
            found[key] = f"up to {float(top[ratio]):.1f}x of {words} ({_name(top)})"
    return found


def _softmax_remarks(rows: Sequence[Mapping[str, Value]]) -> list[str]:
    found = []
    if large := [row for row in rows if SHARE in row and _bytes(row) >= LARGE]:
        least = min(large, key=lambda row: float(row[SHARE]))
        share = f"{float(least[SHARE]):.0%}"
        found.append(
            f"From 256 MiB of scores and probabilities on ours reaches at least {share} of a copy ({_name(least)})."
        )
    if whole := [row for row in rows if "over_sequence" in row and row.get("case") in HELD]:
        least = min(whole, key=lambda row: float(row["over_sequence"]))
        found.append(
            f"Softmax, loss and gradient in one kernel are at least {float(least['over_sequence']):.2f}x as fast as "
            f"cuDNN's sequence on {', '.join(str(row['case']) for row in whole)} (least: {least['case']})."
        )
    return found


def _bytes(row: Mapping[str, Value]) -> int:
    """Of scores and probabilities."""
    return 2 * int(row["n"]) * int(row["k"]) * (4 if row.get("dtype", "float32") == "float32" else 2)


def _name(row: Mapping[str, Value]) -> str:
    dtype = f", {row['dtype']}" if "dtype" in row else ""
    return f"{row['n']} x {row['k']}{dtype}"


def transforms_table(measured: Rows) -> StudyTable:
    """Every pair of layouts, dtype and shape; the shapes of the study's convolutions where nothing is measured."""
    groups = grouped(measured.rows)
    methods = list(dict.fromkeys(method for rows in groups.values() for method in rows))
    rows: list[dict[str, Value]] = []
    for case, by_method in groups.items():
        row: dict[str, Value] = dict(case)
        row |= {f"gbps {method}": float(found[RATE]) for method, found in by_method.items()}
        best = max(by_method, key=lambda method: float(by_method[method][SHARE]))
        row |= {"best": best, SHARE: float(by_method[best][SHARE])}
        if "NAIVE" in by_method:
            row["over_naive"] = float(by_method["NAIVE"][TIME]) / float(by_method[best][TIME])
        rows.append(row)
    keys = _columns(groups, ("case", "shape", "dtype"))
    if not rows:
        keys = ["case", "shape", "from", "to"]
        rows = [
            {"case": name, "shape": _text(case.x), "from": NCHW, "to": CHWN} for name, case in convolutions().items()
        ]
    columns = [
        *(Column(key, HEADINGS.get(key, key)) for key in keys),
        *(Column(f"gbps {method}", method, "GB/s") for method in methods),
        Column("best", "best"),
        Column(SHARE, "best", "% of copy"),
        Column("over_naive", "speedup over NAIVE", TIMES),
    ]
    return table_of("transforms", measured.machine, columns, rows, _transform_claims(rows))


def _transform_claims(rows: Sequence[Mapping[str, Value]]) -> dict[str, str]:
    shares = [row for row in rows if SHARE in row]
    if not shares:
        return {}
    order = sorted(shares, key=lambda row: float(row[SHARE]))
    least, best = (f"{float(row[SHARE]):.1%} of a copy ({' '.join(_case(row))})" for row in (order[0], order[-1]))
    rate = float(order[-1][f"gbps {order[-1]['best']}"])
    return {"best": f"{rate:,.0f} GB/s, {best}; the least is {least}"}


def _case(row: Mapping[str, Value]) -> Iterable[str]:
    return (str(row[key]) for key in ("shape", "dtype", "from", "to", "source", "target") if key in row)
