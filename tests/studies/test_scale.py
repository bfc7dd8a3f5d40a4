"""The calculation of scale: its page, figures that can be had in another way, and what must grow or fall."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scale

from narrowgauge import recipes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def test_the_page_is_what_the_script_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert scale.rendered(text) == text
    for made in scale.TABLES.values():
        assert made() in text


def test_models_have_the_parameters_that_they_are_called_after() -> None:
    counts = {model.name: model.parameters for model in scale.MODELS.values()}
    # Those of LLaMA 7B, and of Llama 3 70B and 405B.
    assert counts == {"7B": 6_738_415_616, "70B": 70_553_706_496, "405B": 405_853_388_800}


@pytest.mark.parametrize("gpus", scale.GPUS)
def test_shards(gpus: int) -> None:
    model = scale.MODELS[gpus]
    for shape in set(model.shapes()):
        rows = [len(range(shape[0])[rank * math.ceil(shape[0] / gpus) :][: math.ceil(shape[0] / gpus)])
                for rank in range(gpus)]  # fmt: skip
        assert sum(rows) == shape[0]
        assert scale.fullest(shape, gpus) == max(rows) * math.prod(shape[1:])
    for recipe in scale.RECIPES:
        even, most = scale.sharded_bytes(model, gpus, recipe)
        assert even <= most
        assert even * gpus == pytest.approx(model.parameters * recipes.get(recipe).bytes_per_parameter())


def test_more_failures_ask_for_more_checkpoints() -> None:
    found = [scale.best_interval(gpus, 30.0) for gpus in scale.GPUS]
    assert sorted(found, key=lambda one: -one[0]) == found
    assert sorted(found, key=lambda one: one[1]) == found
    interval, lost = found[-1]
    between = 1 / (scale.FAILURES * scale.GPUS[-1])
    assert between == pytest.approx(54 * 24 * 3600 / 419)
    for other in (interval / 1.1, interval * 1.1):  # none is better
        assert 30.0 / other + other / 2 / between > lost


def test_a_page_with_a_table_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="nothing"):
        scale.rendered("<!-- scale nothing -->\n<!-- end -->")
