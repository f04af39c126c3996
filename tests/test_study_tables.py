"""The memory-efficiency study's tables: its shapes, rows from measured files, claims, text, files, and the command."""

from __future__ import annotations

import csv
from math import ceil

import pytest

from vdnn.bench.study_cases import (
    PARTS,
    better_in_chwn,
    classifiers,
    convolutions,
    networks,
    pools,
    thresholds,
)
from vdnn.bench.study_files import Rows
from vdnn.bench.study_layouts import layouts_table
from vdnn.bench.study_networks import networks_table, options_of
from vdnn.bench.study_pictures import picture_of
from vdnn.bench.study_pooling import pooling_table
from vdnn.bench.study_sweeps import softmax_table, transforms_table
from vdnn.bench.study_table import NOT_MEASURED, csv_text, markdown, shown
from vdnn.bench.study_tables import TABLES, make_tables
from vdnn.layers.conv import Conv
from vdnn.layers.pool import Pool
from vdnn.runtime.config import load_config
from vdnn.runtime.paper_plots import draw_picture

# ---- shapes: table 1 as it was found and recalled, written down once more by hand

CONVOLUTIONS = """
    CONV1 128 16 28 5 1 1    CONV2 128 16 14 5 16 1    CONV3 128 64 24 5 3 1     CONV4 128 64 12 5 64 1
    CONV5 64 96 224 3 3 2    CONV6 64 256 55 5 96 2    CONV7 64 384 13 3 256 1   CONV8 64 384 13 3 384 1
    CONV9 32 64 224 3 3 1    CONV10 32 256 56 3 128 1  CONV11 32 512 28 3 256 1  CONV12 32 512 14 3 512 1
"""
"""Name, N, K, H, R, C, stride."""
OUTPUTS = [28, 14, 24, 12, 111, 26, 13, 13, 224, 56, 28, 14]
GFLOP = [0.08, 0.32, 0.71, 3.77, 4.09, 53.2, 19.1, 28.7, 5.55, 59.2, 59.2, 29.6]
"""Forward, with the padding of each network."""
POOLED = {1: 14, 2: 7, 3: 12, 4: 6, 5: 27, 6: 13, 7: 6, 8: 55, 9: 13, 10: 6}
WHOLE = {3: 11, 4: 5, 8: 54, 9: 12}
"""Pools whose outputs are others where they round down."""


def test_convolutions_are_those_of_table_1():
    words = CONVOLUTIONS.split()
    rows = [words[i : i + 7] for i in range(0, len(words), 7)]
    found = [[c.name, c.n, c.k, c.size, c.window, c.c, c.stride] for c in convolutions().values()]
    assert [list(map(str, row)) for row in found] == rows
    for case, side, work in zip(convolutions().values(), OUTPUTS, GFLOP, strict=True):
        assert case.y[2:] == (side, side)
        layer = Conv(case.k, case.window, case.stride, case.padding)
        assert layer.output_shape("conv", (case.x[1:],)) == case.y[1:]
        assert case.operations / 1e9 == pytest.approx(work, rel=0.08)
    assert sorted(better_in_chwn()[0]) == ["CONV1", "CONV2", "CONV3", "CONV4", "CONV5", "CONV9"]


def test_the_rule_with_the_titan_blacks_thresholds_gives_what_the_study_found():
    of = thresholds()["Titan Black"]
    picked = {case.name for case in convolutions().values() if case.rule(of["channels"], of["images"]) == "CHWN"}
    assert picked == better_in_chwn()[0]
    conv6 = convolutions()["CONV6"]
    assert [conv6.rule(96, 65), conv6.rule(97, 65), conv6.rule(96, 64)] == ["NCHW", "CHWN", "CHWN"]


def test_outputs_of_pools_round_up():
    for number, case in enumerate(pools().values(), start=1):
        assert case.name == f"POOL{number}"
        assert case.y[2] == POOLED[number] == ceil((case.size - case.window) / case.stride) + 1
        assert case.whole_windows[2] == WHOLE.get(number, POOLED[number])
        layer = Pool("max", case.window, stride=case.stride, ceil_mode=True)
        assert layer.output_shape("pool", (case.x[1:],)) == case.y[1:]


def test_classifiers_and_networks():
    assert [(c.n, c.k) for c in classifiers().values()] == [(128, 10), (128, 10), (128, 1000), (64, 1000), (32, 1000)]
    assert [(n.network, n.batch) for n in networks().values()] == [
        *(("lenet", 128), ("cifar10", 128), ("alexnet", 128), ("zfnet", 64), ("vgg16", 32))
    ]
    for case in networks().values():
        for layout in ("nchw", "nhwc", "chwn", "study", "auto"):
            assert load_config(case.network, options_of(case, layout)).memory.layout == layout


def test_every_number_of_the_study_says_how_well_it_is_known():
    everything = [*convolutions().values(), *pools().values(), *classifiers().values(), *networks().values()]
    assert all(case.evidence.startswith(("recalled", "all found", "K, ", "network ")) for case in everything)
    for table in make_tables(PARTS):
        assert table.claims
        assert all(claim.evidence for claim in table.claims)


# ---- tables without and with measured rows


@pytest.mark.parametrize("name", PARTS)
def test_a_table_without_rows_has_its_cases_and_says_that_nothing_is_measured(name):
    table = TABLES[name](Rows())
    text = markdown(table)
    assert f"Ours: {NOT_MEASURED}." in text
    assert all(claim.ours == "" for claim in table.claims)
    numbers = [c.key for c in table.columns if c.unit]
    assert table.rows
    assert not any(key in row for row in table.rows for key in numbers)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 4 + len(table.rows) + len(table.claims)
    assert len(list(csv.reader(csv_text(table).splitlines()))) == 1 + len(table.rows)


def conv_row(case, precision, layout, method, time_us, direction="forward"):
    return {
        **{"case": case, "direction": direction, "precision": precision, "layout": layout},
        **{"method": method, "time_us": time_us},
    }


def test_layouts_take_the_fastest_of_each_kind():
    rows = (
        conv_row("CONV2", "fp32", "NCHW", "IMPLICIT_GEMM", 60.0),
        conv_row("CONV2", "fp32", "NCHW", "graph:1", 40.0),
        conv_row("CONV2", "fp32", "NCHW", "FFT", 90.0),
        conv_row("CONV2", "fp32", "NCHW", "FFT_TILING", 80.0),
        conv_row("CONV2", "fp32", "CHWN", "DIRECT_64x16", 25.0),
        conv_row("CONV2", "fp32", "CHWN", "DIRECT_32x16", 20.0),
        conv_row("CONV2", "tf32", "NHWC", "graph:2", 10.0),
        conv_row("CONV6", "fp32", "NCHW", "graph:1", 1000.0),
        conv_row("CONV6", "fp32", "CHWN", "DIRECT_64x64", 3000.0),
        conv_row("CONV6", "tf32", "NHWC", "failed: no algorithm serves it", None),
        {"case": "rule", "channels": 97, "images": 512},
    )
    table = layouts_table(Rows(rows, "measured on a test"))
    found = {(row["layer"], row["direction"]): row for row in table.rows}
    operations = 2 * 128 * 16 * 14 * 14 * 16 * 25
    row = found["CONV2", "forward"]
    assert row["nchw"] == pytest.approx(operations / 40e-6 / 1e12)
    assert row["nchw_mm"] == pytest.approx(operations / 60e-6 / 1e12)
    assert row["nchw_fft"] == pytest.approx(operations / 80e-6 / 1e12)
    assert row["chwn"] == pytest.approx(operations / 20e-6 / 1e12)
    assert (row["chwn_over_nchw"], row["chwn_over_mm"]) == (2, 3)
    assert (row["study"], row["rule"], row["fp32"]) == ("CHWN", "CHWN", "CHWN")
    assert (row["fastest"], row["algorithm"]) == ("NHWC TF32", "graph:2")
    assert found["CONV6", "forward"]["fp32"] == "NCHW"
    assert [found[name, "forward"]["rule_here"] for name in ("CONV2", "CONV6", "CONV7")] == ["CHWN", "CHWN", "NCHW"]
    assert "nhwc_tf32" not in found["CONV6", "forward"]
    assert "nchw" not in found["CONV2", "dgrad"]
    claims = [claim.ours for claim in table.claims]
    assert claims == [
        "1 of 1 in fp32: CONV2",
        "1 of 1 in fp32: CONV6",
        "picks the faster of CHWN and NCHW in fp32 for 2 of 2; calibrated here, for 1 of 2",
        "up to 3.00x in fp32, CONV6, NCHW the faster",
    ]
    assert any("1 of 1" in remark for remark in table.remarks)


def pool_row(case, layout, method, time_us, direction="forward", tile="", nbytes=10**9, copy_us=400.0):
    rates = {"gbps": nbytes / time_us / 1e3, "share": copy_us / time_us, "nbytes": nbytes, "copy_us": copy_us}
    return {
        **{"case": case, "direction": direction, "layout": layout, "dtype": "float32", "method": method, "tile": tile},
        **{"time_us": time_us, **rates},
    }


def test_pooling_forms_the_studys_ratios():
    rows = (
        pool_row("POOL5", "NCHW", "caffe", 2000.0),
        pool_row("POOL5", "CHWN", "convnet", 600.0),
        pool_row("POOL5", "NCHW", "cudnn", 900.0),
        pool_row("POOL5", "NHWC", "cudnn", 800.0),
        pool_row("POOL5", "CHWN", "ours", 700.0, tile="TILE_1x1"),
        pool_row("POOL5", "CHWN", "ours", 500.0, tile="TILE_2x2"),
        pool_row("POOL5", "NCHW", "ours", 450.0, tile="TILE_2x1"),
        {**pool_row("POOL5", "NCHW", "ours", 1000.0, "backward"), "variant": "indices"},
        {**pool_row("POOL5", "NCHW", "ours", 1.0, "backward"), "variant": "values"},
        pool_row("POOL5", "NCHW", "cudnn", 900.0, "backward"),
        {**pool_row("POOL5", "CHWN", "ours", 1.0), "dtype": "bfloat16"},
        {**pool_row("POOL6", "CHWN", "ours", 1.0), "time_us": None},
    )
    table = pooling_table(Rows(rows, "measured on a test"))
    found = {(row["layer"], row["direction"]): row for row in table.rows}
    row = found["POOL5", "forward"]
    assert (row["over_caffe"], row["over_convnet"], row["tile"]) == (4, 1.2, "TILE_2x2")
    assert row["over_cudnn"] == pytest.approx(800 / 450)
    assert (row["share_chwn"], row["share_nchw"]) == (0.8, pytest.approx(400 / 450))
    assert row["caffe"] == 500
    assert row["fastest"] == "ours NCHW"
    assert found["POOL5", "backward"]["over_cudnn"] == 0.9
    assert "ours_chwn" not in found["POOL6", "forward"]
    layout, tiles, bandwidth = (claim.ours for claim in table.claims)
    assert layout.startswith("up to 4.0x (POOL5) of one thread an output")
    assert tiles == "+20%, from +20% to +20%"
    assert bandwidth == "2,000 GB/s, 80% (POOL5)"
    assert "reach at least 40% of a copy (POOL5 backward NCHW)" in table.remarks[0]
    assert "on 1 of 2; slower on POOL5 backward" in table.remarks[1]
    assert found["POOL3", "forward"]["outputs"] == "12x12 (cuDNN 11x11)"


def step_row(case, precision, layout, step_ms, predicted_ms):
    keys = {"case": case, "precision": precision, "layout": layout}
    return {**keys, "step_ms": step_ms, "predicted_ms": predicted_ms, "losses": [2.3, 2.2]}


def test_networks_hold_auto_against_the_best_single_layout():
    rows = (
        step_row("LeNet", "fp32", "nchw", 1.0, 1.0),
        {**step_row("LeNet", "fp32", "nhwc", 2.0, 1.5), "losses": [2.3 * 0.99, 2.2]},
        step_row("LeNet", "fp32", "chwn", 0.8, 0.8),
        step_row("LeNet", "fp32", "auto", 0.5, 0.52),
        step_row("VGG", "bf16", "nhwc", 10.0, 10.0),
        step_row("VGG", "bf16", "nchw", 11.0, 10.0),
        step_row("VGG", "bf16", "auto", 12.5, 10.0),
        step_row("VGG", "tf32", "nchw", 10.0, 10.0),
        step_row("VGG", "tf32", "auto", 10.0, 10.0),
        {**step_row("VGG", "bf16", "chwn", None, None), "failed": "no room"},
    )
    table = networks_table(Rows(rows, "measured on a test"))
    found = {(row["network"], row["precision"]): row for row in table.rows}
    row = found["LeNet", "fp32"]
    assert (row["best"], row["auto_over_best"], row["auto_over_nchw"]) == ("chwn", 1.6, 2)
    assert (row["error"], row["worst"]) == (pytest.approx(0.04), pytest.approx(-0.25))
    assert found["VGG", "bf16"]["auto_over_best"] == 0.8
    assert "chwn" not in found["VGG", "bf16"]
    assert "best" not in found["VGG", "tf32"], "one layout is not the best of any"
    assert [claim.ours for claim in table.claims] == ["auto over nchw in fp32: up to 2.00x (LeNet), 2.00x on average"]
    assert table.remarks[0].startswith("Not measured in auto, or not at all: LeNet in tf32, LeNet in bf16, ")
    assert "VGG in tf32" not in table.remarks[0]
    assert "in 1 of 2 cases; slower for VGG in bf16" in table.remarks[1]
    assert "within 5% in 2 of 3; farther off for VGG in bf16" in table.remarks[2]
    assert table.remarks[3:4] == ("First losses in fp32 differ from those in nchw by 1.0e-02 of them at most (LeNet).",)


def test_pictures_have_what_is_measured(tmp_path):
    assert all(picture_of(table(Rows())) is None for table in (layouts_table, networks_table))
    rows = (
        conv_row("CONV2", "fp32", "NCHW", "graph:1", 40.0),
        conv_row("CONV2", "fp32", "CHWN", "DIRECT_64x16", 25.0),
        conv_row("CONV2", "fp32", "CHWN", "DIRECT_64x16", 50.0, "dgrad"),
    )
    table = layouts_table(Rows(rows, "measured on a test"))
    picture = picture_of(table)
    forward, dgrad = picture.panels
    assert (forward.title, dgrad.title) == ("forward", "dgrad"), "nothing of wgrad is measured"
    assert any(remark.startswith("Not measured, wgrad: CONV1, ") for remark in table.remarks)
    assert [series.source for series in forward.bars] == ["cuDNN NCHW", "CHWN"]
    assert forward.labels == tuple(convolutions())
    assert forward.bars[0].parts[0].values[:2] == (None, table.rows[2]["nchw"])
    assert dgrad.labels[0] == "CONV2"
    draw_picture(picture, str(tmp_path / "layouts.png"))
    steps = tuple(step_row("VGG", "bf16", layout, ms, ms) for layout, ms in (("nhwc", 3.0), ("auto", 2.0)))
    bars = picture_of(networks_table(Rows(steps, "measured on a test"))).panels[0].bars
    assert [(series.source, series.parts[0].values[4]) for series in bars] == [("nhwc", 1.5), ("auto", 1.0)]


def test_softmax_has_a_column_for_every_method():
    def row(case, n, k, method, time_us, share):
        keys = {"case": case, "n": n, "k": k, "dtype": "float32", "order": "rows", "method": method}
        return {**keys, "time_us": time_us, "gbps": 8 * n * k / time_us / 1e3, "share": share}

    rows = (
        row("CLASS3", 128, 1000, "caffe", 40.0, 0.1),
        row("CLASS3", 128, 1000, "cudnn", 10.0, 0.4),
        row("CLASS3", 128, 1000, "ours", 5.0, 0.8),
        row("CLASS3", 128, 1000, "ours, loss and gradient", 6.0, 0.9),
        row("CLASS3", 128, 1000, "fused train", 4.0, 0.95),
        row("CLASS3", 128, 1000, "cudnn sequence", 9.0, 0.3),
        row("CLASS3", 128, 1000, "cudnn sequence, its backward", 12.0, 0.2),
        row("sweep", 512, 100000, "ours", 200.0, 0.87),
    )
    table = softmax_table(Rows(rows, "measured on a test"))
    assert [column.heading for column in table.columns if column.unit == "µs"] == [
        *("caffe", "cudnn", "ours", "ours, loss and gradient", "fused train"),
        *("cudnn sequence", "cudnn sequence, its backward"),
    ]
    first = table.rows[0]
    assert (first["over_caffe"], first["over_cudnn"], first["over_best"], first["over_sequence"]) == (8, 2, 2, 2.25)
    assert first["share"] == 0.8
    assert (first["network"], first["evidence"]) == ("AlexNet", "recalled M")
    assert [row["case"] for row in table.rows] == ["CLASS3", "sweep", "CLASS1", "CLASS2", "CLASS4", "CLASS5"]
    assert table.claims[2].ours == "up to 8.0x of five kernels (128 x 1000, float32)"
    assert table.remarks == (
        "From 256 MiB of scores and probabilities on ours reaches at least 87% of a copy (512 x 100000, float32).",
        "Softmax, loss and gradient in one kernel are at least 2.25x as fast as cuDNN's sequence on CLASS3 "
        "(least: CLASS3).",
    )


def test_transforms_name_the_best_candidate():
    def row(method, time_us, share):
        keys = {"shape": [64, 96, 55, 55], "dtype": "float32", "from": "NCHW", "to": "CHWN", "method": method}
        return {**keys, "time_us": time_us, "gbps": 148 / time_us * 1e3, "share": share}

    rows = (row("NAIVE", 400.0, 0.1), row("TILED", 60.0, 0.7), row("VECTOR", 40.0, 0.96))
    table = transforms_table(Rows(rows, "measured on a test"))
    (only,) = table.rows
    assert (only["shape"], only["best"], only["share"], only["over_naive"]) == ("64x96x55x55", "VECTOR", 0.96, 10)
    assert table.claims[0].ours.startswith("3,700 GB/s, 96.0% of a copy (64x96x55x55 float32 NCHW CHWN)")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.914, "% of copy", "91%"),
        (-0.0514, "%", "-5.1%"),
        (3.456, "x", "3.46x"),
        (1234.5, "µs", "1,234"),
        (12.345, "µs", "12.3"),
        (0.1234, "ms", "0.123"),
        (None, "ms", ""),
        ("CHWN", "", "CHWN"),
    ],
)
def test_values_as_people_read_them(value, unit, text):
    assert shown(value, unit) == text
