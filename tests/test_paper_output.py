"""What `vdnn tables` prints and writes: text, pictures, the page, run files, two machines, and answers to bad input."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser

import pytest
from paper_fakes import BASE_MIB, MIB, STEP_MS, Fakes, run_of, table_of

from vdnn.bench.paper_compare import compare
from vdnn.bench.paper_figures import FIGURES, choose_figures, load_figure
from vdnn.bench.paper_files import TABLES_FILE, read_runs, read_tables, write_run, write_tables
from vdnn.bench.paper_page import page
from vdnn.bench.paper_pictures import picture_of
from vdnn.bench.paper_runs import NETWORKS
from vdnn.bench.paper_sources import KeptRuns, case_of
from vdnn.bench.paper_tables import BEST, MEASURED, SHOWN, SIMULATED
from vdnn.bench.paper_tasks import tasks
from vdnn.bench.paper_text import csv_text, markdown, number
from vdnn.bench.paper_values import GROUPS, MissingRun
from vdnn.cli.main import main
from vdnn.errors import DataError
from vdnn.runtime.paper_plots import draw_picture, make_figure

# ---- text, pictures, page


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14493.2, "MiB", "14,493"),
        (0.21, "MiB", "0.2"),
        (0.0, "MiB", "0"),
        (0.8249, "of base", "0.82"),
        (11.68, "ms", "11.7"),
    ],
)
def test_numbers_as_people_read_them(value, unit, text):
    assert number(value, unit) == text


def test_markdown_and_csv_hold_every_row_and_name_what_is_simulated():
    table = table_of("fig11")
    text = markdown(table)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(table.rows)
    assert len({line.count(" | ") for line in lines}) == 1
    assert "simulated, test" in lines[0]
    assert "measured here" in lines[0]
    rows = list(csv.DictReader(csv_text(table).splitlines()))
    assert len(rows) == len(table.rows)
    first = rows[0]
    assert (first["network"], first["paper"], first["simulated"]) == ("AlexNet (128)", "117", "100")
    assert float(first["simulated/paper"]) == pytest.approx(100 / 117, rel=1e-5)
    assert first["measured"] == first["measured/paper"] == ""


def test_a_picture_has_the_papers_bars_first_and_ours_beside_them():
    picture = picture_of(table_of("fig4"))
    (panel,) = picture.panels
    assert panel.labels == tuple(load_figure("fig4").bars)
    assert [series.source for series in panel.bars] == ["the paper", "simulated, test"]
    assert [part.name for part in panel.bars[0].parts] == ["weights", "feature maps", "gradient maps", "workspace"]
    assert panel.bars[0].parts[1].values[3] == 4029
    assert panel.bars[1].parts[1].values[3] == 600
    assert [panel.title for panel in picture_of(table_of("fig14")).panels] == list(load_figure("fig14").bars)
    assert picture_of(table_of("fig1")).panels[0].points[0].parts[0].values[0] == 48


@pytest.mark.parametrize("key", FIGURES)
def test_every_figure_can_be_drawn(key, tmp_path):
    picture = picture_of(table_of(key, simulated=Fakes(), measured=Fakes(missing="conv(m)")))
    path = tmp_path / f"{key}.png"
    draw_picture(picture, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_heights_of_bars_are_the_numbers():
    axes = make_figure(picture_of(table_of("fig12"))).axes[0]
    heights = [patch.get_height() for patch in axes.patches]
    paper = [bars["all(m)"]["offloaded"] for bars in load_figure("fig12").bars.values()]
    assert heights == [*paper, *[0.8 * BASE_MIB] * 6]


def test_a_source_looks_the_same_in_every_figure():
    looks = {}
    for key in FIGURES:
        table = table_of(key, **{column: Fakes() for column in SHOWN["fig14"]})
        figure = make_figure(picture_of(table))
        for handle in figure.legends[0].get_patches():
            if handle.get_label() in table.columns.values():
                hatch = handle.get_hatch()
                assert looks.setdefault(handle.get_label(), hatch) == hatch, f"{handle.get_label()} in {key}"
                assert hatch in [bar.get_hatch() for bar in figure.axes[0].patches]
    assert len(looks) == 4
    assert len(set(looks.values())) == 4


class Tags(HTMLParser):
    """Checks that tags are closed in order, and gathers where a page points."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids, self.cells = [], [], set(), 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.ids.add(found.get("id"))
        self.cells += tag == "td"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone():
    tables = [table_of(key) for key in ("fig12", "headline")]
    text = page(tables, {"fig12": b"\x89PNG"}, {"simulated": "a <machine> & more"})
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    local = {"fig12.csv", "fig12.md", "headline.csv", "headline.md", TABLES_FILE}
    for link in tags.links:
        assert link in local or link.startswith("data:image/png;base64,") or link.removeprefix("#") in tags.ids
    assert "http" not in text
    assert "<script" not in text
    assert "a &lt;machine&gt; &amp; more" in text
    assert "Power is left out" in text
    for table in tables:
        assert table.about.splitlines()[0][:40] in text


# ---- files and measured runs


def measured_folder(path, machine="GPU One", bars=("base(p)", "dyn", "all(m)"), **changes):
    """A folder with kept runs of VGG-16 (64)."""
    (path / "runs").mkdir(parents=True)
    for bar in bars:
        write_run(path, run_of(case_of("VGG-16 (64)", bar), **changes), False, {"machine": machine})
    write_run(path, run_of(case_of("VGG-16 (64)", "dyn", "reuse"), feature_ms=80.0), True, {"machine": machine})
    return path


def test_kept_runs_read_back_and_fill_their_columns(tmp_path):
    kept = read_runs(measured_folder(tmp_path / "one"))
    assert kept.machine == "GPU One"
    assert kept.runs[case_of("VGG-16 (64)", "all(m)")] == run_of(case_of("VGG-16 (64)", "all(m)"))
    assert kept.has(case_of("VGG-16 (64)", "dyn"), False)
    assert not kept.has(case_of("VGG-16 (64)", "conv(m)"), False)
    best = KeptRuns(kept.runs, best=kept.best)
    with pytest.raises(MissingRun):
        best.run("VGG-16 (64)", "all(m)")
    table = table_of("fig14", simulated=Fakes(), measured=KeptRuns(kept.runs), best=best)
    rows = {(row.network, row.bar): row.values for row in table.rows}
    assert rows["VGG-16 (64)", "all(m)"][MEASURED] == 0.5
    assert rows["VGG-16 (64)", "dyn"][BEST] == STEP_MS / 80
    assert MEASURED not in rows["VGG-16 (64)", "conv(m)"]
    assert MEASURED not in rows["AlexNet (128)", "dyn"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
        (lambda text: text.replace("vdnn-paper-run-1", "other"), "got format other"),
        (lambda text: text.replace('"peak_bytes"', '"peek_bytes"'), "damaged .field 'peak_bytes' is missing"),
        (lambda text: text.replace('"peak_bytes"', '"extra": 1, "peak_bytes"'), "damaged .unknown field 'extra'"),
        (
            lambda text: re.sub(r'"policy": "[a-z]+"', '"policy": null', text),
            "damaged .policy: expected text, got null",
        ),
        (lambda text: re.sub(r'"weights": [\d.]+', '"weights": "x"', text), "damaged .weights: expected a number"),
        (lambda text: re.sub(r'"peak_bytes": \d+', '"peak_bytes": "many"', text), "damaged"),
        (lambda text: re.sub(r'"feature_ms": [\d.]+', '"feature_ms": NaN', text), "damaged"),
        (lambda text: "[]", "got format list"),
        (lambda text: text.replace("GPU One", "GPU Two"), "another machine"),
    ],
)
def test_a_damaged_run_file_is_named_and_ends_with_2(tmp_path, capsys, damage, words):
    folder = measured_folder(tmp_path / "out")
    path = sorted((folder / "runs").glob("*.json"))[1]
    path.write_text(damage(path.read_text("utf-8")), "utf-8")
    with pytest.raises(DataError, match=words):
        read_runs(folder)
    assert main(["tables", "fig12", "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error


def test_two_machines_side_by_side(tmp_path, capsys):
    facts = {SIMULATED: "profile test", MEASURED: "GPU One"}
    for name, runs in {
        "one": {SIMULATED: Fakes()},
        "two": {SIMULATED: Fakes(), MEASURED: Fakes({("AlexNet (128)", "all(m)"): {"offloaded_bytes": 400 * MIB}})},
    }.items():
        (tmp_path / name).mkdir()
        write_tables(tmp_path / name / TABLES_FILE, [table_of("fig12", **runs)], facts)
    text = compare(read_tables(str(tmp_path / "one")), read_tables(str(tmp_path / "two" / TABLES_FILE)))
    assert "first: profile test" in text
    assert "second: GPU One" in text
    assert "| fig12 | AlexNet (128) | all(m) | offloaded, MiB | 351 | 800 | 400 | 0.50 |" in text
    assert main(["tables", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    (tmp_path / "two" / TABLES_FILE).write_text("{}", "utf-8")
    assert main(["tables", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "tables.json" in capsys.readouterr().err


def damaged_row(**changes):
    def damage(data):
        data["tables"][0]["rows"][3].update(changes)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged_row(unit="x"), "unit: expected one of MiB, ms, %,"),
        (damaged_row(unit=None), "unit: expected text, got null"),
        (damaged_row(unit=["MiB"]), 'unit: expected text, got ["MiB"]'),
        (damaged_row(paper=None), "paper: expected a number, got null"),
        (damaged_row(paper="12"), 'paper: expected a number, got "12"'),
        (damaged_row(simulated=float("nan")), "simulated: expected a number, got NaN"),
        (damaged_row(simulated=10**400), "simulated: expected a number, got 1000"),
        (damaged_row(bar=7), "bar: expected text, got 7"),
        (lambda data: data["tables"][0].pop("rows"), "field 'rows' is missing"),
        (lambda data: data["tables"][0]["rows"].insert(0, None), "expected an object with a field 'unit', got null"),
        (lambda data: data.update(tables=3), "tables: expected a list, got 3"),
        (lambda data: data.update(facts=[]), "facts: expected an object, got []"),
        (lambda data: data["facts"].pop(SIMULATED), "field 'simulated' is missing"),
    ],
)
def test_a_damaged_tables_file_is_one_line_and_2(tmp_path, capsys, damage, words):
    path = tmp_path / TABLES_FILE
    write_tables(path, [table_of("fig12", simulated=Fakes())], {SIMULATED: "profile test"})
    data = json.loads(path.read_text("utf-8"))
    damage(data)
    path.write_text(json.dumps(data), "utf-8")
    assert main(["tables", "compare", str(tmp_path), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"tables file '{path}' is damaged ({words}" in error
    assert "Error" not in error


def test_what_is_measured_begins_with_what_every_ratio_needs():
    wanted = tasks(FIGURES, None)
    cases = [(task.case.network, task.case.batch) for task in wanted]
    assert len(wanted) == 6 * 8 + 3  # seven bars and our best of six networks; VGG-416 with and without limit, and best
    assert set(cases) == {*(NETWORKS[name] for name in GROUPS["Six networks"]), ("vgg416", 32)}
    for i, task in enumerate(wanted):
        if i == 0 or cases[i] != cases[i - 1]:
            assert (task.case.policy, task.best) == ("base", False)
    assert len({(task.case, task.best) for task in wanted}) == len(wanted)
    few = tasks(("fig12",), ("VGG-16 (64)",))
    assert [task.case.policy for task in few] == ["base", "conv", "all"]
    assert not any(task.best for task in few)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["fig111"], ["unknown figure 'fig111'", "did you mean 'fig11'"]),
        (["--device", "cuda"], ["--out DIR"]),
        (["--device", "gpu"], ["--device", "'gpu'", "cuda"]),
        (["--profile", "titan-x"], ["unknown profile 'titan-x'", "titan-x-maxwell"]),
        (["--networks", "resnet50"], ["no network 'resnet50'", "vgg19@64"]),
        (["--steps", "0"], ["--steps", "'0'"]),
        (["--time-budget", "soon"], ["--time-budget", "'soon'"]),
        (["compare", "only"], ["compare RUN1 RUN2"]),
        (["compare", "nowhere", "nowhere"], ["nowhere", "does not exist"]),
        (["fig12", "--out", "file"], ["'file'", "cannot be written", "choose another"]),
        (["fig12", "--out", "file/inner"], ["'file/inner'", "cannot be written"]),
        (["fig12", "--frobnicate"], ["--frobnicate", "--help"]),
    ],
)
def test_bad_input_is_one_line_and_2(capsys, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder", "utf-8")
    try:
        code = main(["tables", *arguments])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_figures_come_in_their_own_order_and_all_of_them_if_none_is_named():
    assert choose_figures(()) == choose_figures(("fig4", "all")) == FIGURES
    assert choose_figures(("headline", "fig11")) == ("fig11", "headline")


def test_the_command_writes_what_it_promises(tmp_path, capsys):
    out = tmp_path / "a" / "b"
    assert main(["tables", "fig12", "--networks", "alexnet", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    names = {path.name for path in out.iterdir()}
    assert names == {"fig12.md", "fig12.csv", "fig12.png", "tables.json", "index.html"}
    assert (out / "fig12.md").read_text("utf-8") in captured.out
    assert "simulated, not measured" in captured.out
    assert "modelled by profile titan-x-maxwell" in captured.out
    assert "index.html" in captured.err
    data = json.loads((out / "tables.json").read_text("utf-8"))
    (row,) = [row for row in data["tables"][0]["rows"] if row["bar"] == "all(m)"]
    # images, and the inputs of four convolutions and three pools, by their shapes
    maps = 3 * 224**2 + 2 * 64 * 55**2 // 2 + 64 * 27**2 + 192 * 27**2 + (192 + 384 + 256 + 256) * 13**2
    assert row["simulated"] == pytest.approx(4 * 128 * maps / MIB, rel=1e-3)


def rows_in(folder):
    data = json.loads((folder / TABLES_FILE).read_text("utf-8"))
    return {table["figure"]: table["rows"] for table in data["tables"]}


def test_what_the_folder_holds_of_other_figures_and_networks_stays(tmp_path, capsys):
    write_tables(tmp_path / TABLES_FILE, [table_of("fig1"), table_of("fig12")], machines_of(tmp_path, capsys))
    before = rows_in(tmp_path)
    assert main(["tables", "fig1", "--networks", "alexnet", "--out", str(tmp_path)]) == 0
    assert "kept what was there of fig1, fig12" in capsys.readouterr().err
    after = rows_in(tmp_path)
    assert after["fig12"] == before["fig12"]
    assert [row["network"] for row in after["fig1"]] == [row["network"] for row in before["fig1"]]
    for old, new in zip(before["fig1"], after["fig1"], strict=True):
        assert (old == new) == (new["network"] != "AlexNet (128)")
    text = (tmp_path / "index.html").read_text("utf-8")
    assert 'id="fig1"' in text
    assert 'id="fig12"' in text
    assert len((tmp_path / "fig12.csv").read_text("utf-8").splitlines()) == 1 + len(before["fig12"])
    assert "| GoogLeNet (128) |" in (tmp_path / "fig1.md").read_text("utf-8")


def machines_of(tmp_path, capsys):
    """What `vdnn tables` says that its columns are of."""
    assert main(["tables", "fig1", "--networks", "alexnet", "--out", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    return json.loads((tmp_path / "other" / TABLES_FILE).read_text("utf-8"))["facts"]


def test_measured_numbers_stay_with_what_they_are_of(tmp_path, capsys):
    facts = {**machines_of(tmp_path, capsys), MEASURED: "GPU One"}
    write_tables(tmp_path / TABLES_FILE, [table_of("fig12", simulated=Fakes(), measured=Fakes())], facts)
    assert main(["tables", "fig1", "--networks", "alexnet", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / TABLES_FILE).read_text("utf-8"))["facts"][MEASURED] == "GPU One"
    assert "measured here</b>: GPU One" in (tmp_path / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("titan-x-maxwell", "other"), "another machine: simulated, not measured"),
        (lambda text: text.replace('"figure": "fig12"', '"figure": "fig99"'), "damaged (figure: expected one of fig1,"),
        (lambda text: text[:100], "cannot be read as JSON"),
    ],
)
def test_a_folder_whose_tables_cannot_stay_is_left_as_it_is(tmp_path, capsys, change, words):
    path = tmp_path / TABLES_FILE
    write_tables(path, [table_of("fig12")], machines_of(tmp_path, capsys))
    path.write_text(change(path.read_text("utf-8")), "utf-8")
    before = path.read_bytes()
    assert main(["tables", "fig1", "--networks", "alexnet", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert words in said.err
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", TABLES_FILE]


def test_measured_runs_in_the_folder_are_shown_without_measuring(tmp_path, capsys):
    folder = measured_folder(tmp_path / "out")
    assert main(["tables", "fig14", "--networks", "vgg19@64", "--out", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "measured here: GPU One" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| VGG-16 (64) | all(m)")]
    assert "| 0.50 | 1.14 |" in line
    assert "our best, measured here" in text
