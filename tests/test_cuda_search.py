"""The table of measured algorithms: what a low limit leaves out is measured again under a higher one."""

from __future__ import annotations

from vdnn.memory.costs import Candidate
from vdnn.runtime.backends.cuda import search
from vdnn.runtime.backends.cuda.search import Measured, Search

KEY = {"gpu": "made up", "cudnn": 91900}


def open_search(limit_bytes: int) -> Search:
    return Search(None, KEY, limit_bytes, None)  # type: ignore[arg-type]


def test_a_table_serves_every_limit_if_nothing_was_left_out():
    assert Measured((), None).serves(2**40)
    assert Measured((), 100).serves(100)
    assert not Measured((), 100).serves(101)


def test_the_table_is_kept_between_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = open_search(2**30)
    first.known["some convolution"] = Measured((Candidate("GEMM", 1.5, 4096, False),), 2**30)
    first._save()
    again = open_search(2**30)
    assert again.known == first.known
    assert Search(None, {**KEY, "cudnn": 92000}, 2**30, None).known == {}  # type: ignore[arg-type]


def test_a_damaged_or_older_table_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = open_search(1).path
    path.parent.mkdir(parents=True)
    for text in ("{", '{"problems": {"some convolution": [{"algorithm": "GEMM"}]}}', '{"problems": []}'):
        path.write_text(text)
        assert open_search(1).known == {}
    assert search.cache_folder().is_dir()


def test_measuring_again_replaces_what_a_low_limit_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    low, high = open_search(10), open_search(1000)
    small, large = Candidate("SMALL", 2.0, 0), Candidate("LARGE", 1.0, 500)
    monkeypatch.setattr(search, "conv_problem", lambda op, arrays: Problem())
    monkeypatch.setattr(search, "replace", lambda problem, **changes: problem)
    low._measure = lambda problem: Measured((small,), 10)  # type: ignore[method-assign]
    high._measure = lambda problem: Measured((large, small), None)  # type: ignore[method-assign]
    assert low.candidates(None, {}) == (small,)  # type: ignore[arg-type]
    high._load()
    assert high.candidates(None, {}) == (large, small)  # type: ignore[arg-type]
    low._load()
    assert low.candidates(None, {}) == (large, small)  # type: ignore[arg-type]


class Problem:
    """Stands for a convolution."""

    def __str__(self) -> str:
        return "some convolution"
