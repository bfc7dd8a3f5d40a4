"""The study of fitted recipes: random choices of equal bytes, one training, what its page says of made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from matplotlib.figure import Figure

from narrowgauge import recipes
from narrowgauge.recipes._choices import Kept
from narrowgauge.recipes._fit._choose import Candidates
from narrowgauge.recipes._fit._replay import Cost
from studies.fit import forecast_page, page, rows, training
from studies.fit.forecasts import Forecasts, totals

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
    runs.append({
        "model": "micro", "lr": 1e-3, "beta2": 0.999, "row": "fit", "seed": 0, "chosen": {}, "parameters": 10,
        "forecast": {
            "D": [0.0, 0.0], "stochastic + log8": [0.035, 0.005], DRAWN: [-0.002, 0.001], FITTED: [0.0, None],
        },
        "loss": {"stochastic + log8": 0.04, DRAWN: 0.0015, FITTED: None}, "replay_steps": 5,
    })  # fmt: skip
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
    ("fitted", "drawn", "verdict", "answers"),
    [
        ([0.0002, 0.0001], [0.03, 0.05], "below", ("Yes", "Yes", "Yes")),
        ([0.0405, 0.0495], [0.0405, 0.0495], "alike", ("No", "Yes", "No")),
        ([0.1, 0.2], [0.0, 0.0], "above", ("No", "No", "No")),
    ],
)
def test_the_page_answers(fitted: list[float], drawn: list[float], verdict: str, answers: tuple[str, ...]) -> None:
    found = page.facts(results(fitted, drawn))
    for name in ("same", "limit", "random"):  # below 7 bytes no uniform recipe has fp32 quality here
        assert found[f"{name}_compared"] == found[f"{name}_{verdict}"] == found[f"{name}_near_{verdict}"] == "1"
    assert tuple(found[f"answer_{goal}"] for goal in ("bytes", "same", "limit")) == answers
    assert found["saved"] == ("+0.55" if verdict == "below" else "no")


def test_longer_steps_are_lower_and_farther() -> None:
    found = page.facts(results([-0.06, -0.06], [0.0, 0.0]))
    assert (found["same_below"], found["same_near_above"], found["quality"]) == ("1", "1", "0")
    assert (found["lower"], found["lower_forecast"]) == ("0", "0")  # what was not forecast is left out


def test_forecasts_beside_what_was_measured() -> None:
    made = results([0.0, 0.0], [0.01, 0.01])
    lost, lucky = sorted(forecast_page.forecasts(made), key=lambda f: -f.total)
    assert (lost.name, lost.total, lost.measured) == ("stochastic + log8", 0.04, pytest.approx(0.045))
    assert (lost.right, lucky.right) == (True, False)
    found = page.facts(made)
    assert (found["forecast_rows"], found["forecast_right"], found["within"], found["within_kept"]) == (
        "2", "1", "1", "0"
    )  # fmt: skip
    # 0.25 × 0.045/0.04
    assert "| micro, 0.001 | 2 |  | 50 % | 0.28 |  |" in forecast_page.right(made).splitlines()
    assert "| stochastic + log8 | +0.0400 / +0.0450 |" in forecast_page.beside(made)
    assert isinstance(forecast_page.picture(made), Figure)


def test_a_forecast_adds_weights_and_moments_and_plays_what_was_not_measured() -> None:
    class Slot:
        name = "m"

    class FakeReplay:
        exact, slots = "master", (Slot,)
        played: ClassVar[list[Any]] = []

        def costs(self, weights: str, states: Any) -> tuple[dict[str, Cost], None]:
            self.played.append((weights, states))
            return dict.fromkeys("ab", Cost(0.0, 0.5, 0.0)), None

    class FakeMeasured:
        ways = (("plain", {"m": "fp32"}), ("master", {"m": "log8"}))
        groups = [Candidates((name,), 10, WAYS) for name in "ab"]  # noqa: RUF012
        costs = {  # noqa: RUF012
            "a": [Cost(0.0, 0.01, 0.001), Cost(0.0, -0.02, 0.002)], "b": [Cost(0.0, 0.1, 0.0), Cost(0.0, 0.2, 0.0)],
        }  # fmt: skip

    forecasts: Any = Forecasts(FakeMeasured(), FakeReplay())  # type: ignore[arg-type]
    parts, loss = totals(forecasts.uniform("plain", "log8"))
    assert (parts, loss) == (pytest.approx([0.29, 0.003]), pytest.approx(0.01 + 0.003 + 0.3))
    assert totals(forecasts.uniform("master", "fp32")) == ([0.0, 0.0], 0.0)
    assert FakeReplay.played == []
    for _ in range(2):  # the second time it is known
        assert totals(forecasts.uniform("kahan", {"m": "log8"}))[0] == pytest.approx([1.18, 0.002])
    assert FakeReplay.played == [("kahan", "fp32")]


def test_a_picture_and_tables_of_made_up_runs() -> None:
    found = results([0.0002, 0.0004], [0.03, 0.05])
    assert isinstance(page.bytes_against_loss(found), Figure)
    assert "| fitted, 6.5 bytes | 6.45 | +0.0003 (+0.0002 … +0.0004) |" in page.losses(found)
    (line,) = page.goals(found).splitlines()[2:]
    assert (
        "`adamw8bit-split8`, 7.00 | fitted, 6.5 bytes, 6.45 | +0.55 | 6.5: fitted, 6.5 bytes +0.0003, `stoch"
        in line
    )


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
