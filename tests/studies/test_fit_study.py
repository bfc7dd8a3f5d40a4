"""The study of fitted recipes: random choices of equal bytes, one training, what its page says of made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from narrowgauge import recipes
from narrowgauge.recipes._choices import Kept
from narrowgauge.recipes._fit._choose import Candidates
from studies.fit import page, rows, training

BYTES = {"D": 16.0, "split": 14.0, "adamw8bit-split8": 7.0, "stochastic + log8": 6.0}


def kept(weights: str, state: str, each: float) -> Kept:
    return Kept(weights, {"m": state, "v": state}, each, 0.1, 0.003)


NARROW, WIDE = kept("stochastic", "log4", 5.03), kept("split8", "log8", 7.03)
WAYS = (NARROW, kept("stochastic", "log8", 6.03), WIDE)
GROUPS = [Candidates((f"p{i}",), 1000 * (i + 1), WAYS) for i in range(8)]


FITTED, DRAWN = rows.by_bytes(6.5), rows.drawn(6.5, 1)


def results(fitted: list[float], drawn: list[float]) -> dict[str, Any]:
    """Results of one setting and two seeds: losses of a fitted and a random row, over D's."""
    losses = {
        "D": [0.0, 0.0], "split": [0.0002, -0.0004], "adamw8bit-split8": [0.0005, 0.0003],
        "stochastic + log8": [0.05, 0.04], FITTED: fitted, DRAWN: drawn,
    }  # fmt: skip
    runs = [
        {
            "model": "micro", "lr": 1e-3, "beta2": 0.999, "row": row, "seed": seed, "diverged": False,
            "validation_loss": 3.0 + seed + loss, "bytes": {"total": BYTES.get(row, 6.45)},
        }
        for row, found in losses.items()
        for seed, loss in enumerate(found)
    ]  # fmt: skip
    named = [{"name": row, "title": row, "uniform": row in BYTES} for row in losses]
    return {"runs": runs, "rows": named, "training": {"seeds": 2, "steps": 10}, "unfinished": []}


@pytest.mark.parametrize("each", rows.DRAWN)
def test_random_choices_have_the_bytes_and_differ(each: float) -> None:
    choices = [rows.draw_choice(GROUPS, each, seed) for seed in range(4)]
    elements = sum(one.elements for one in GROUPS)
    for choice in choices:
        assert choice is not None
        taken = sum(one.elements * one.frontier[choice[one.name]].bytes for one in GROUPS)
        assert taken / elements == pytest.approx(each, abs=rows.WITHIN)
    assert len({str(choice) for choice in choices}) > 1
    assert rows.draw_choice(GROUPS, 9.0, 0) is None


def test_a_choice_in_a_file_is_the_recipe_that_was_chosen() -> None:
    groups = rows.plain_groups(GROUPS, [one.names for one in GROUPS])
    recipe = rows.recipe_of(groups, [0] * 7 + [2], "made")
    assert [choice.chosen for choice in recipe.choices] == [NARROW] * 7 + [WIDE]
    assert [choice.parameters for choice in recipe.choices] == [one.names for one in GROUPS]


def test_uniform_rows_name_themselves() -> None:
    assert {rows.REFERENCE, rows.CONTROL} < set(rows.uniform())
    assert rows.uniform()["stochastic + log4/log8"].bytes_per_parameter() == pytest.approx(5.53, abs=0.01)


@pytest.mark.parametrize(
    ("fitted", "drawn", "verdict", "random"),
    [
        ([0.0002, 0.0001], [0.03, 0.05], "below", "random_below"),
        ([0.0405, 0.0495], [0.0405, 0.0495], "alike", "random_alike"),
        ([0.1, 0.2], [0.0, 0.0], "above", "random_above"),
    ],
)
def test_the_page_says_which_is_lower(fitted: list[float], drawn: list[float], verdict: str, random: str) -> None:
    found = page.facts(results(fitted, drawn))
    assert (found["compared"], found["random_compared"]) == ("1", "1")
    assert (found[verdict], found[random]) == ("1", "1")
    assert (found[f"near_{verdict}"], found[random.replace("_", "_near_")]) == ("1", "1")
    saved = verdict == "below"
    assert found["saved"] == ("+0.55 to +0.55" if saved else "no setting with both")
    # Below 7 bytes no uniform recipe has fp32 quality here.
    assert (found["limits"], found["limits_won"]) == ("1", "1" if saved else "0")
    assert found["verdict"].startswith(
        {"below": "Fitted", "alike": "The uniform", "above": "Some uniform"}[verdict]
    )


def test_a_picture_and_tables_of_made_up_runs() -> None:
    found = results([0.0002, 0.0004], [0.03, 0.05])
    assert isinstance(page.bytes_against_loss(found), Figure)
    assert "| fitted, 6.5 bytes | 6.45 | +0.0003 (+0.0002 … +0.0004) |" in page.losses(found)
    (line,) = page.goals(found).splitlines()[2:]
    assert "`adamw8bit-split8`, 7.00 | fitted, 6.5 bytes, 6.45 | +0.55 | 6.45: fitted, 6.5 bytes, 6.45" in line


@pytest.mark.parametrize("model", ["bert-micro", "clip-micro"])
def test_a_training_starts_and_ends_alike_for_all_recipes(model: str, text: Path, squares: Path) -> None:
    setting = training.Setting(text, squares, 256, 24, steps=4, batch=4, warmup=1, windows=8)
    task = training.Task(model, 1e-3, 0.999, "split", 1)
    one, other = (training.train(task, setting, recipes.get(name)) for name in ("D", "split"))
    # Biases of keys have no gradient but rounding, of which Adam makes whole steps.
    assert one["validation_loss"] == pytest.approx(other["validation_loss"], abs=0.03)
    assert (one["bytes"]["total"], other["bytes"]["total"]) == pytest.approx((16, 14), abs=0.02)
    halves = [training.work(model, setting, 0, half).draw() for half in (0, 1)]
    assert any((a != b).any() for a, b in zip(*(half.values() for half in halves), strict=True))
