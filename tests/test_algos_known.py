"""Studies of algorithms of which not everything is known or wanted: sentences, curves and cells claim no more."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO

import pytest
from test_algos import MIB, NOWHERE, ONE, RECIPE, TWO, study_of, table_of, two_convs

from vdnn.memory.costs import Candidate
from vdnn.runtime import algo_plots
from vdnn.runtime.algo_sources import restrict, table_source
from vdnn.runtime.algos import ConvCosts, Study, make_study, purchases, study_json, totals_csv


def test_the_largest_gain_is_named_however_small():
    small = [
        ConvCosts(f"s{i}", "forward", 8, (Candidate("A", 1.0, MIB), Candidate("B", 1.001 + i / 1e4))) for i in (0, 1)
    ]
    (sentence,) = purchases(study_of(*small), [0, None])
    assert sentence == "0 B → no limit: 0.00210 ms less in all; 0.00110 ms less with 1.0 MiB more in s1 forward"


def test_what_micro_batches_alone_gain_is_said_where_nothing_is_gained():
    whole = (Candidate("FFT", 1.0, 64 * MIB), Candidate("GEMM", 3.0, 0))
    conv = ConvCosts("a", "forward", 8, whole, {8: whole, 4: (Candidate("FFT", 0.75, 32 * MIB),)})
    assert purchases(study_of(conv), [0, 32 * MIB, 33 * MIB]) == [
        "0 B → 32.0 MiB: nothing gained; with micro-batches 1.50 ms less",
        "32.0 MiB → 33.0 MiB: nothing gained",
    ]


def known(*sizes: int) -> ConvCosts:
    """A convolution over 8 images with slices of some sizes known."""
    return ConvCosts("a", "forward", 8, ONE.candidates, dict.fromkeys((8, *sizes), ONE.candidates))


@pytest.mark.parametrize(
    ("sizes", "convs", "words"),
    [
        (None, [known(), known(4)], ""),
        ((), [known(), known()], "a batch of one image has no slices"),
        ((4, 2), [known(4, 2), known(4, 2)], ""),
        ((4, 2, 1), [known(), known()], "the table knows no slices of 4, 2 or 1 images"),
        ((4, 2), [known(4), known(4)], "slices of 4 known for 2 of 2 convolutions"),
        ((4, 2), [known(), known(4, 2), known()], "slices of 4 and 2 known for 1 of 3 convolutions; the others whole"),
        (
            (4, 2),
            [known(4, 2), known(4), known(4), known()],
            "slices of 4 and 2 known for 1, of 4 known for 2 of 4 convolutions; the others whole",
        ),
    ],
)
def test_micro_batches_claim_no_more_than_is_known(sizes, convs, words):
    study = Study("made up", 8, replace(NOWHERE, name="the table"), tuple(convs), notes=("a",), sizes=sizes)
    assert study.slice_words() == words
    assert study_json(study, [0])["notes"] == (["a", words] if words else ["a"])


def test_the_picture_says_of_how_many_convolutions_micro_batches_are(tmp_path):
    whole, some = study_of(known(4), known(4)), study_of(known(4), known(), known())
    assert algo_plots.micro_label(whole) == "with micro-batching"
    assert algo_plots.micro_label(some) == "with micro-batching of 1 of 3 convolutions"
    algo_plots.draw_study(some, [0], str(tmp_path / "some.svg"))
    assert "deterministic algorithms only" in algo_plots.title(
        replace(some, source=replace(NOWHERE, only="deterministic"))
    )


def test_what_a_configuration_refuses_is_no_candidate():
    every = (
        Candidate("FFT", 1.0, 8, True),
        Candidate("graph:eng1", 2.0, 0, True),
        Candidate("fused:eng2", 3.0, 0, False),
        Candidate("ALGO_0", 4.0, 0, False),
    )
    source = replace(NOWHERE, find=lambda op, program: every if op == "known" else None)

    def left(**options):
        return "".join(c.algorithm[0] for c in restrict(source, **options).find("known", None))

    assert [left(), left(deterministic=True), left(named=True)] == ["FgfA", "Fg", "FA"]
    both = restrict(source, deterministic=True, named=True)
    assert (both.find("known", None), both.find("other", None), both.only) == (
        every[:1],
        None,
        "deterministic and named",
    )
    assert "fp32, deterministic and named algorithms only: times made up" in Study("n", 8, both, ()).heading()
    shown = Study("n", 8, both, (), asked="bf16, NHWC").heading()
    assert "shown instead: fp32, NCHW, deterministic and named algorithms only, times made up" in shown


def test_slices_of_which_nothing_is_left_are_not_known():
    table = table_of(two_convs(), (8, 4))
    for key, found in table.problems.items():
        if "x (4," in key:
            table.problems[key] = replace(found, candidates=found.candidates[1:])  # none is deterministic
    study = make_study(two_convs(), RECIPE, 8, restrict(table_source(table), deterministic=True))
    assert study.slice_words() == "the table knows no slices of 4, 2 or 1 images"
    assert study.total(None).divided_ms is None


def test_the_curve_has_a_point_for_each_change_and_no_other():
    beaten = Candidate("SLOW", 9.0, 5 * MIB)
    half = (Candidate("FFT", 0.75, 32 * MIB), replace(beaten, workspace_bytes=6 * MIB), Candidate("GEMM", 1.6, 0))
    conv = ConvCosts("a", "forward", 8, (*ONE.candidates, beaten), {8: ONE.candidates, 4: half})
    assert [total.limit_bytes for total in study_of(conv).curve()] == [0, 32 * MIB, 64 * MIB]
    # a slice that is no faster than the whole changes nothing
    slow = (Candidate("FFT", 1.7, 16 * MIB), Candidate("GEMM", 1.8, 0))
    same = ConvCosts("a", "forward", 8, ONE.candidates, {8: ONE.candidates, 4: slow})
    assert [total.limit_bytes for total in study_of(same).curve()] == [0, 64 * MIB]


def test_micro_batches_are_an_empty_cell_unless_known_of_all():
    rows = [
        list(csv.DictReader(StringIO(totals_csv(study_of(*convs).curve())))) for convs in ([known(4)], [known(4), TWO])
    ]
    assert all(row["micro_batched_ms"] for row in rows[0])
    assert not any(row["micro_batched_ms"] for row in rows[1])
