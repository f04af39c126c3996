"""Tables of the vDNN paper's figures: the data, what bars are in terms of runs, ratios and remarks."""

from __future__ import annotations

import pytest
from paper_fakes import BASE_MIB, HEADINGS, MIB, STEP_MS, Fakes, run_of, table_of

from vdnn.bench.paper_figures import FIGURES, load_figure
from vdnn.bench.paper_remarks import Number, inversions, remarks, speed_errors
from vdnn.bench.paper_runs import NETWORKS
from vdnn.bench.paper_sources import case_of
from vdnn.bench.paper_study import choose_networks
from vdnn.bench.paper_tables import SIMULATED, UNJOINED, Sources, make_table
from vdnn.bench.paper_text import markdown
from vdnn.bench.paper_values import GROUPS, bar_values, layer_runs, speed
from vdnn.errors import ConfigError

# ---- the paper's data


@pytest.mark.parametrize("key", FIGURES)
def test_every_figure_says_what_it_is_where_it_was_read_and_how_exactly(key):
    figure = load_figure(key)
    assert "1602.08124" in figure.source
    assert set(figure.read_to) <= set(figure.quantities.values())
    assert figure.recalled is False
    assert len(figure.about) > 100
    for network, bars in figure.bars.items():
        assert network in NETWORKS or network in GROUPS or network == "DRAM"
        for bar, values in bars.items():
            assert values, (network, bar)
            assert set(values) <= set(figure.quantities)
            assert all(isinstance(value, (int, float)) and value >= 0 for value in values.values())
    for network, texts in figure.notes.items():
        known = {*figure.bars[network], *(name for bar in figure.bars[network].values() for name in bar)}
        assert set(texts) <= known, "a note that no row shows"
    for network, bars in figure.does_not_fit.items():
        assert set(bars) <= set(figure.bars[network])


def test_the_categories_of_figure_4_sum_to_its_totals_and_shares():
    for network, bars in load_figure("fig4").bars.items():
        parts = dict(bars["base(p)"])
        total, share = parts.pop("total"), parts.pop("feature share")
        assert sum(parts.values()) == pytest.approx(total, abs=20), network
        assert 100 * parts["feature maps"] / total == pytest.approx(share, abs=2), network


def test_the_figures_agree_with_one_another_where_they_show_the_same():
    one, eleven = load_figure("fig1").bars, load_figure("fig11").bars
    for network, bars in eleven.items():
        base = bars["base(p)"]["average"]
        assert one[network]["base(p)"]["allocation"] == pytest.approx(base, rel=0.012)
        for bar, values in bars.items():
            if "saved" in values:
                saved = 100 * (1 - values["average"] / base)
                assert values["saved"] == pytest.approx(saved, abs=1.5 + 100 * 20 / base), (network, bar)


def test_offloaded_bytes_of_vgg_are_those_of_its_shapes():
    """Inputs of 16 convolutions and 5 pools of VGG-19 on 224x224 images, in MiB of float32."""
    maps = {"conv": 3 * 224**2, "all": 3 * 224**2}
    side, before = 224, 3
    for filters, count in zip((64, 128, 256, 512, 512), (2, 2, 4, 4, 4), strict=True):
        inputs = ([before * side**2] if side < 224 else []) + [filters * side**2] * (count - 1)
        maps["conv"] += sum(inputs)
        maps["all"] += sum(inputs) + filters * side**2
        side, before = side // 2, filters
    for batch in (64, 128, 256):
        bars = load_figure("fig12").bars[f"VGG-16 ({batch})"]
        for policy, numbers in maps.items():
            assert bars[f"{policy}(m)"]["offloaded"] == pytest.approx(4 * batch * numbers / MIB, rel=0.005)


def test_the_reuse_distances_of_figure_6_fit_its_times():
    """Between the end of a layer forward and its own backward all later layers run forward and back."""
    bars = list(load_figure("fig6").bars["VGG-16 (64)"].values())
    for i, bar in enumerate(bars):
        later = sum(row["forward"] + row["backward"] for row in bars[i + 1 :])
        assert bar["reuse distance"] >= later - 10
        assert bar["reuse distance"] <= later + 160  # pools and activations are not in the figure


# ---- values


def test_figure_11_is_average_maximum_and_what_is_saved_of_base():
    values = bar_values("fig11", "VGG-16 (64)", "all(m)", Fakes(), ("average", "maximum", "saved"))
    assert values == {"average": 0.1 * BASE_MIB, "maximum": 0.2 * BASE_MIB, "saved": pytest.approx(90)}
    assert bar_values("fig11", "VGG-16 (64)", "all(m)", Fakes(missing="base(p)"), ("average", "saved")) == {
        "average": 0.1 * BASE_MIB
    }


def test_speed_is_against_base_if_that_fits_and_else_against_the_oracle():
    network, bar = "VGG-16 (256)", "all(m)"
    assert speed(network, bar, Fakes()) == 0.5
    changed = {(network, "base(p)"): {"fits": False, "feature_ms": 500.0}}
    assert speed(network, bar, Fakes(changed)) == 0.5
    changed[network, "oracle"] = {"feature_ms": STEP_MS / 2}
    assert speed(network, bar, Fakes(changed)) == 0.25
    # measured without a limit there is no oracle, and base did run
    assert speed(network, bar, Fakes(changed, missing="oracle")) == 2.5


def test_layers_have_the_names_of_the_paper():
    names = {name: row.name for name, row in layer_runs(run_of(case_of("VGG-16 (64)", "base(p)"))).items()}
    assert names == {**{f"CONV{i:02}": f"conv{i}" for i in range(1, 17)}, **{f"FC{i}": f"fc{i}" for i in (1, 2, 3)}}


def test_values_of_a_layer():
    fakes, name = Fakes(), "VGG-16 (256)"
    assert bar_values("fig5", name, "CONV02", fakes, ("x and y", "workspace", "weights")) == {
        "x and y": 8,
        "workspace": 7,
        "weights": 2,
    }
    assert bar_values("fig6", name, "CONV02", fakes, ("forward", "backward", "reuse distance")) == {
        "forward": 4,
        "backward": 2,
        "reuse distance": 70,
    }
    moved = bar_values("fig13", name, "CONV01", fakes, ("forward", "backward"))
    assert moved["forward"] == pytest.approx(10 * MIB / 1e-3 / 1e9)  # x, w and y in 1 ms
    assert moved["backward"] == pytest.approx(20 * MIB / 2e-3 / 1e9)


def test_values_of_the_other_figures():
    fakes = Fakes()
    assert bar_values("fig1", "AlexNet (128)", "base(p)", fakes, ("allocation", "used by one layer")) == {
        "allocation": BASE_MIB,
        "used by one layer": pytest.approx(20),
    }
    parts = bar_values("fig4", "AlexNet (128)", "base(p)", fakes, ("feature maps", "total", "feature share"))
    assert parts == {"feature maps": 600, "total": 1000, "feature share": pytest.approx(60)}
    assert bar_values("fig12", "AlexNet (128)", "conv(m)", fakes, ("offloaded",)) == {"offloaded": 0.5 * BASE_MIB}
    deep = bar_values("fig15", "VGG-416 (32)", "dyn", fakes, ("GPU side", "host side", "speed"))
    assert deep == {"GPU side": 0.5 * BASE_MIB, "host side": 0, "speed": 1}


def test_headline_numbers_are_means_and_extremes_over_the_networks_they_speak_of():
    changed = {("AlexNet (128)", "all(m)"): {"feature_ms": 10 * STEP_MS}}
    found = bar_values("headline", "Six networks", "all(m)", Fakes(changed), ("slowdown", "largest slowdown"))
    assert found == {"slowdown": pytest.approx((90 + 5 * 50) / 6), "largest slowdown": pytest.approx(90)}
    assert bar_values("headline", "DRAM", "copies", Fakes(), ("bandwidth taken",)) == {"bandwidth taken": 4}
    assert bar_values("headline", "Six networks", "base(p)", Fakes(), ("least unused",)) == {"least unused": 80}


@pytest.mark.parametrize("key", FIGURES)
def test_every_number_of_the_paper_has_ours_beside_it(key):
    for row in table_of(key).rows:
        assert SIMULATED in row.values, row


# ---- tables


def test_ratios_and_the_gain_of_not_joining():
    free = Fakes({("AlexNet (128)", "all(m)"): {"feature_ms": STEP_MS}})
    table = table_of("fig14", simulated=Fakes(), unjoined=free)
    row = table.rows[0]
    assert (row.network, row.bar, row.paper) == ("AlexNet (128)", "all(m)", 0.36)
    assert row.values == {SIMULATED: 0.5, UNJOINED: 1.0}
    assert table.ratio(row, SIMULATED) == pytest.approx(0.5 / 0.36)
    assert table.gain(row) == 2
    assert table.gain(table.rows[1]) == 1
    assert table_of("fig12").gain(table_of("fig12").rows[0]) is None


def test_figure_13_has_no_ratio_for_it_is_not_the_same_quantity():
    table = table_of("fig13")
    assert all(table.ratio(row, SIMULATED) is None for row in table.rows)
    assert table.remarks == ()
    assert "ours / paper" not in markdown(table)
    assert "without a ratio" in table.about


def test_bars_that_do_not_fit_and_known_exceptions_are_explained_in_their_rows():
    rows = {(row.network, row.bar): row.note for row in table_of("fig11").rows if row.quantity == "average"}
    assert "does not fit in 12 GB" in rows["VGG-16 (256)", "all(p)"]
    assert "11,761 MiB" in rows["VGG-16 (128)", "base(m)"]
    assert "588 MiB" in rows["GoogLeNet (128)", "base(p)"]
    assert rows["AlexNet (128)", "all(m)"] == ""


def test_what_dyn_took_is_told_beside_what_the_papers_took():
    took = Fakes(
        {("VGG-16 (128)", "dyn"): {"choice": "dyn took 'conv' with the fastest algorithms; did not fit: none"}}
    )
    notes = {(row.network, row.bar): row.note for row in table_of("fig14", simulated=took).rows}
    assert notes["VGG-16 (128)", "dyn"] == (
        "dyn took 'conv' with the fastest algorithms; the paper's dyn, by its equal bars in figure 11: conv(p)"
    )
    assert notes["VGG-16 (128)", "all(m)"] == ""


def test_some_networks_only():
    figure, sources = load_figure("fig12"), Sources({SIMULATED: Fakes()}, HEADINGS)
    rows = make_table(figure, sources, ("VGG-16 (64)",)).rows
    assert {row.network for row in rows} == {"VGG-16 (64)"}
    assert choose_networks("alexnet, vgg19@64") == ("AlexNet (128)", "VGG-16 (64)")
    assert choose_networks("vgg19") == ("VGG-16 (64)", "VGG-16 (128)", "VGG-16 (256)")
    with pytest.raises(ConfigError, match=r"no network 'alexnett'.*did you mean 'alexnet'"):
        choose_networks("alexnett")


def test_remarks_tell_the_error_of_speeds_and_their_order():
    good = [
        Number("A", "all(m)", "speed", 0.40, 0.42),
        Number("A", "dyn", "speed", 1.0, 0.97),
        Number("A", "base(m)", "speed", 0.42, 0.30),
    ]
    assert inversions(good) == []  # 0.40 and 0.42 have no order
    assert [f"{error:.2f}" for error, _ in speed_errors(good)] == ["0.02", "-0.03", "-0.12"]
    said = " ".join(remarks(load_figure("fig14"), good))
    assert "mean absolute error 0.057 over 3 bars" in said
    assert "worst -0.12 (A base(m))" in said
    assert "in the paper's order" in said
    assert inversions([*good, Number("A", "conv(p)", "speed", 0.9, 0.98)]) == ["A: dyn and conv(p)"]
    assert inversions([*good, Number("B", "conv(p)", "speed", 0.9, 0.98)]) == []
    assert speed_errors([Number("VGG-16 (64)", "base(m)", "speed", 0.47, 0.9)]) == []  # calibrated on it


def test_remarks_count_what_is_near_and_name_the_farthest():
    figure = load_figure("fig12")
    near = [Number("B", "all(m)", "offloaded", 1000, 1029), Number("C", "all(m)", "offloaded", 100, 119)]
    assert remarks(figure, near)[0].startswith("Simulated: all 2 numbers within 3%")  # C was read to 20 MiB only
    far = [Number("A", "all(m)", "offloaded", 1000, 900, "why"), Number("D", "dyn", "offloaded", 100, 121)]
    (said,) = remarks(figure, near + far)
    assert "2 of 4 numbers within 3%" in said
    assert "others without a note: 1" in said
    assert "Farthest: D dyn offloaded, 1.21 times" in said
    assert "each of the others has a note" in remarks(figure, near + far[:1])[0]
