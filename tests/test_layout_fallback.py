"""Layouts of layers: what auto is in every help text, and what stands in for layouts that do not fit."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from test_layout_auto import Measuring

from vdnn.cli.main import main
from vdnn.cli.train import main as train_main
from vdnn.errors import BudgetError
from vdnn.memory.policy import Budget
from vdnn.networks import build
from vdnn.runtime.config import AUTO_LAYOUT, load_config
from vdnn.runtime.layouts import plan_layouts
from vdnn.runtime.prepare import backend_costs, make_recipe


def test_what_auto_is_is_said_in_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    """In the help of both commands and in the packaged configuration."""

    def words(text: str) -> str:
        return " ".join(text.replace("#", " ").split()).replace("- ", "-")

    told = f"auto: {AUTO_LAYOUT}"
    assert told == ("auto: as shortest on cuda, nchw on cpu, on simulated nchw in fp32 and nhwc in tf32, bf16, fp16")
    with pytest.raises(SystemExit):
        main(["layouts", "explain", "--help"])
    assert words(capsys.readouterr().out).count(told) == 2
    with pytest.raises(SystemExit):
        train_main(["--help"])
    assert told in words(capsys.readouterr().out)
    assert told in words((files("vdnn.configs") / "lenet.yaml").read_text())


# ---- a layout that does not fit


def refusing(monkeypatch: pytest.MonkeyPatch, *fitting: str) -> list[str]:
    """Plans fit in these layouts only; the layouts that were tried, in turn."""
    tried: list[str] = []

    def plans(graph: Any, keys: Any, costs_of: Any, policy: str, budget: Budget, recipe: Any, *rest: Any) -> Any:
        layouts = {choice.layout for choice in recipe.layouts.values()} or {recipe.layout}
        tried.append("+".join(sorted(layouts)))
        if rest[-1] is None and not layouts <= set(fitting):
            raise BudgetError("made up", layer="conv1", needed_bytes=2, budget_bytes=1, smallest_bytes=None)
        return tried[-1]

    monkeypatch.setattr("vdnn.runtime.layouts.build_plans", plans)
    return tried


@pytest.mark.parametrize("layout", ["auto", "shortest"])
def test_single_layouts_stand_in_where_the_quickest_do_not_fit(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Each is tried, with the quickest first."""
    backend: Any = Measuring({"conv": "CHWN", "pool": "NHWC"})
    config = load_config("lenet", ["device=cuda", "data.source=synthetic", f"memory.layout={layout}"])
    said: list[str] = []

    def planned(instead: Any = None) -> Any:
        arguments = (build("lenet"), [("train", 64)], lambda p: backend_costs(backend, p), make_recipe(config))
        return plan_layouts(config, *arguments, backend, Budget(1), None, instead, said.append)

    tried = refusing(monkeypatch, "NCHW")
    assert planned() == "NCHW"
    assert tried[0] == "CHWN+NHWC"
    assert tried[-1] == "NCHW"
    assert said[-1] == "layouts: the quickest do not fit in 1 B; NCHW for all layers does and is taken"
    tried = refusing(monkeypatch)
    with pytest.raises(BudgetError):
        planned()
    assert sorted(tried[1:]) == ["CHWN", "NCHW", "NHWC"]
    assert planned(lambda *given: None) == "CHWN+NHWC", "for looking at: the smallest plan of what was chosen"
