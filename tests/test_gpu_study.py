"""The parts of the memory-efficiency study that measure, each with little work, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from vdnn.bench import study, study_conv_gpu, study_networks, study_pool_gpu
from vdnn.bench.study_cases import LAYOUTS, convolutions, networks, pools
from vdnn.bench.study_files import read_rows
from vdnn.bench.study_tables import make_tables

pytestmark = pytest.mark.gpu


def measured(part: str, folder: Path) -> list[dict[str, object]]:
    """Rows of a part; printed is what was said, for who looks at a failure."""
    said: list[str] = []
    code = study.run((part,), folder, 60, said.append)
    print("\n".join(said))
    assert code == 0, said
    return [dict(row) for row in read_rows(part, folder).rows]


def test_pools_are_measured_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: pools()[name] for name in ("POOL2", "POOL3", "POOL7")}
    monkeypatch.setattr(study_pool_gpu, "pools", lambda: few)
    rows = measured("pooling", tmp_path)
    assert {(row["method"], row["layout"]) for row in rows if row["dtype"] == "float32"} == {
        *(("ours", layout) for layout in LAYOUTS),
        *(("cudnn", layout) for layout in ("NCHW", "NHWC")),
        *(("caffe", "NCHW"), ("convnet", "CHWN")),
    }
    assert all(0 < float(str(row["share"])) < 3 for row in rows)


def test_convolutions_are_measured_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: convolutions()[name] for name in ("CONV1", "CONV2")}
    monkeypatch.setattr(study_conv_gpu, "convolutions", lambda: few)
    monkeypatch.setattr(study_conv_gpu, "DIRECTIONS", ("forward",))
    rows = measured("layouts", tmp_path)
    methods = {str(row["method"]) for row in rows}
    assert any(method.startswith("DIRECT") for method in methods)
    assert "IMPLICIT_GEMM" in methods
    (table,) = make_tables(("layouts",), tmp_path)
    first = next(row for row in table.rows if row["layer"] == "CONV2")
    assert {"nchw", "nchw_mm", "chwn", "nhwc_tf32", "nhwc_bf16", "chwn_bf16", "fastest"} <= set(first)


def test_networks_give_the_same_loss_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_networks, "networks", lambda: {"LeNet": networks()["LeNet"]})
    rows = measured("networks", tmp_path)
    assert len(rows) == 15
    for precision, most in (("fp32", 1e-4), ("tf32", 5e-3), ("bf16", 5e-2)):
        losses = [float(row["losses"][0]) for row in rows if row["precision"] == precision]  # type: ignore[index]
        assert len(losses) == 5
        assert losses == pytest.approx([losses[0]] * 5, rel=most)
